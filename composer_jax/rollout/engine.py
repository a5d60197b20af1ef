"""The rollout engine: samples tokens for sessions, and records their routes.

  Consumes: SampleRequests; those beyond the slots wait.
  Moved by: `step()`, which dispatches one chunk of context or a few decode
    steps and reads the report of the dispatch before.
  Between steps: `swap()` may change the weights; every token carries the
    version that sampled it. `place()`, its slow part, may run in another thread
    meanwhile; `switch()` then changes a reference.
  Produces: Completions and Failures, in no particular order.

A dispatch returns at once; its report travels to the host while the next one
runs, and is read then. A decision that depends on a report (who is done, what
was sampled) waits for it. Dispatches run in order, since each takes over the
cache of the one before: a page's next owner writes after its last owner.

A session's tokens, log-probabilities and routes depend only on its requests and
the weights, bit for bit: not on its slot, its neighbours, the schedule, or
whether its prompt was cached. This requires a single number of `prefill_rows`,
a model whose rows are independent, and pages that were never taken back; with
`numerics='batch_invariant'` it always holds.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from composer_jax.core import records, trees
from composer_jax.models import config as config_lib
from composer_jax.models import decoder, experts
from composer_jax.rollout import (
  controller,
  drafts,
  forward,
  placing,
  sessions,
  steps,
)
from composer_jax.rollout import options as options_lib
from composer_jax.rollout import slots as slots_lib

EngineOptions = options_lib.EngineOptions

# An extend costs the same with few rows, so a step decodes instead while few
# sessions have context to consume. This is the number of dispatches after which
# the context of a session goes before any decode.
_MAX_PUT_OFF = 2

# Number of pages that one call copies or clears.
_PAGES_A_CALL = 16

# Dispatches after which the device has n-grams of what ended since.
_RENEWED_EVERY = 32


class Unread(NamedTuple):
  """A dispatch whose report the host has not read yet."""

  rows: list[slots_lib.Row]
  chunks: list[tuple[int, int]] | None  # (start, end) of rows; None for decode
  report: Any
  version: int


class Engine:
  """Continuous batching of one model over a fixed number of slots.

  Only one thread may call it (`rollout.server` serves many), except `place`.

  Attributes:
    controller: chooses how many tokens each pass drafts; another one may be
      set, such as that of a single depth.
  """

  def __init__(
    self,
    config: config_lib.ModelConfig,
    variables: Any,
    version: int,
    options: EngineOptions,
    *,
    mesh: jax.sharding.Mesh | None = None,
    shares_base: bool = False,
    draft: steps.Draft = drafts.by_ngrams,
  ):
    """Copies the weights; compiles nothing yet.

    The model is sharded over the mesh; None uses the first `options.devices`
    devices, or if that is 1 the device of the variables. With `shares_base`,
    on one device, frozen parameters are served from the caller's arrays, which
    must live as long. `draft` takes the place of n-grams in a test. A
    ValueError tells that the variables do not fit the model, or the model the
    mesh.
    """
    self._shapes, self._model = _shapes(variables), config
    expected = decoder.abstract(config)[0]
    if experts.are_coded(variables):
      expected = experts.abstract_codes(expected, config)
    _compare(self._shapes, _shapes(expected), version, dtypes=False)
    config = options_lib.served(config, options)
    self.config, self.options = config, options
    mesh = placing.mesh_of(options.devices) if mesh is None else mesh
    if mesh is None:
      self._place = placing.on_device_of(variables)
    else:
      self._place = placing.on_mesh(config, mesh)
    self.controller = controller.Controller(options.speculation.depths)
    self._num_heads = options.heads_of(config)
    self._grams: drafts.NGrams | None = None
    if options.speculation.drafter == 'ngrams':
      self._grams = drafts.NGrams()
    self._table: Any = None
    self._renewed_at = 0
    self._base = forward.shared(variables, config) if shares_base else None
    self._served = self.place(variables, version)
    if decoder.trained(variables) == 'adapters' and not shares_base:
      self._base = self._served.weights
    self._slots = slots_lib.Slots(
      options,
      version,
      (config.num_moe_layers, config.moe.num_active),
      share_sampled=config.numerics == 'batch_invariant',
    )
    self._programs = steps.build(config, options, self._place, draft)
    self._cache = jax.jit(
      lambda: forward.empty_cache(
        config,
        options.pages,
        options.page_size,
        options.cache_dtype,
        self._num_heads,
      ),
      out_shardings=self._place.pools,
    )()
    self._unread: Unread | None = None
    # Rows of the decode program, and their inputs and state on the device.
    self._composition: list[slots_lib.Row] = []
    self._depth = 0  # drafts of a pass of the next dispatch
    self._rows_BW: Any = None
    self._state: Any = None
    # When the last report came, and the programs that were compiled by then.
    self._last: tuple[float, int] | None = None
    self._renew()

  @property
  def version(self) -> int:
    return self._served.version

  @property
  def traces(self) -> dict[str, int]:
    """Number of traces of each program, over all engines that share it."""
    return dict(self._programs.traces)

  @property
  def num_unfinished(self) -> int:
    """Requests submitted whose outcome `step` has not returned."""
    return self._slots.num_unfinished

  def stats(self) -> slots_lib.Stats:
    table, kept_X = self._slots, self.controller.kept_X
    return dataclasses.replace(
      table.stats,
      draft_passes=int(kept_X.sum()),
      draft_tokens=int(kept_X @ np.arange(len(kept_X))),
      sessions=len(table.sessions),
      running=len(table.running),
      waiting=len(table.queue),
      pages=self.options.pages,
      pages_free=table.holdings.pages.num_free,
      pages_cached=len(table.holdings.prefixes.held),
    )

  def room(self, expected: int) -> int | None:
    """Returns how many further sessions have pages for their whole length.

    None means all that have slots. Sessions that are open count with the pages
    that they have, and the others of `expected` with those of a whole one.
    """
    pages, whole = self.options.pages, self.options.table_len
    if pages >= self.options.num_slots * whole:
      return None
    held = [s.pages for s in self._slots.sessions.values() if s.pages]
    free = pages - len(set(itertools.chain(*held)))
    return max(0, free // whole - max(0, expected - len(held)))

  def warm(self, *, guided: bool = False) -> None:
    """Compiles every program now rather than when it is first needed.

    With `guided`, those of guided requests, too.
    """
    self._read()
    no_page = self.options.pages
    self._clear([no_page])
    self._copy([(0, no_page, 0)])
    for num_rows in self.options.extend_rows:
      self._run_extend([], num_rows)
    biases = [None, self._bias()] if guided else [None]
    for depth in self.options.speculation.depths:
      self._depth = depth
      for truncate, bias_BV in itertools.product((False, True), biases):
        if bias_BV is None or not depth:
          self._compose([])
          self._run_decode(truncate, bias_BV)

  def submit(
    self,
    request: records.SampleRequest,
    on_tokens: sessions.OnTokens | None = None,
    guide: sessions.Guide | None = None,
    is_first: bool = False,
  ) -> None:
    """Queues a request of a new session, or of one without another request.

    `on_tokens` is called with the tokens of each dispatch when its report is
    read; it must neither raise nor call the engine. While a request with a
    guide decodes, a dispatch samples one token for every row, without drafts,
    and the next one waits for its report. While a request that `is_first`
    waits, no other one gets a slot.

    Raises:
      ValueError: the session's tokens would not fit max_len, a token is
        outside the vocabulary, there are too many stop tokens, or the session
        has a request under way.
    """
    if len(request.stop_tokens) > self.options.max_stop_tokens:
      raise ValueError(
        f'{len(request.stop_tokens)} stop tokens exceed max_stop_tokens '
        f'({self.options.max_stop_tokens}); raise it in EngineOptions.'
      )
    limit = self.config.vocab_size
    for name, tokens_T in (
      ('context_T', request.context_T),
      # Python integers: a request's may overflow those of numpy.
      ('stop_tokens', np.array(request.stop_tokens, object)),
    ):
      if len(tokens_T) and not (tokens_T.min() >= 0 and tokens_T.max() < limit):
        raise ValueError(
          f'{name} holds tokens from {tokens_T.min()} to {tokens_T.max()}; '
          f'the vocabulary is 0..{limit - 1}.'
        )
    self._slots.submit(request, on_tokens, guide, is_first)

  def close(self, session: str) -> None:
    """Ends a session if it is open, and drops the outcome of its request."""
    table = self._slots
    open_session = table.sessions.get(session)
    if open_session and open_session.work:
      # A dispatch may still write its pages, or its report tell of a failure.
      self._read()
    if self.is_open(session):
      table.close(session)
    table.finished = [f for f in table.finished if f.session != session]

  def is_open(self, session: str) -> bool:
    return session in self._slots.sessions

  @property
  def is_refreshing(self) -> bool:
    """True from when a refresh began until its sessions have sampled."""
    return self._slots.is_refreshing

  def place(self, variables: Any, version: int) -> placing.PlacedWeights:
    """Copies weights to the engine's devices; thread-safe.

    Frozen parameters are those of the first weights and are not copied.

    Raises:
      ValueError: an array is missing, unknown, or has another shape or dtype.
    """
    expected, base = self._shapes, self._base
    if base is not None:
      variables = decoder.without_base(variables)
      is_own = lambda name: not name.startswith('params/')
      expected = {name: expected[name] for name in filter(is_own, expected)}
    _compare(_shapes(variables), expected, version, dtypes=True)
    if not self._num_heads:
      variables = {k: tree for k, tree in variables.items() if k != 'mtp'}
    variables = placing.put(variables, self.config, self._place)
    variables = experts.held(
      variables, self._model, self.config, bool(self.options.experts)
    )
    is_sharded = self._place.plan is not None
    weights = forward.unstack(
      variables, self.config, is_sharded=is_sharded, base=base
    )
    weights = jax.block_until_ready(weights)
    return placing.PlacedWeights(weights=weights, version=version)

  def swap(self, variables: Any, version: int) -> None:
    """Places and switches to weights; after an error the old ones stay."""
    self.switch(self.place(variables, version))

  def switch(self, placed: placing.PlacedWeights) -> placing.PlacedWeights:
    """Serves weights of `place` from the next step on; returns the old ones.

    Freeing these takes longer than the switch, so the caller chooses when.

    Raises:
      ValueError: the version goes back while sessions are open.
    """
    table, before = self._slots, self._served
    if placed.version < before.version and table.sessions:
      raise ValueError(
        f'Cannot swap version {before.version} for the older {placed.version} '
        f'while {len(table.sessions)} sessions are open: versions never '
        'decrease within a session. Close them first.'
      )
    self._read()
    began = time.perf_counter()
    self._served = placed
    refresh = self.options.on_swap == options_lib.REFRESH
    table.swap(placed.version, refresh=refresh)
    # Refreshed sessions lost the pages of which the device has tables.
    self._composition = []
    self._renew()
    table.stats.swap_s = time.perf_counter() - began
    return before

  def step(self) -> list[records.Completion | records.Failure]:
    """Dispatches one program and returns the outcomes known by now."""
    table = self._slots
    table.admit()
    holdings = table.holdings
    self._clear(holdings.pages.to_clear)
    self._copy(holdings.to_copy)
    holdings.pages.to_clear, holdings.to_copy = [], []
    pending, decoding = table.prefilling(), table.decoding()
    most = self.options.extend_rows[-1]
    if pending and (
      not decoding
      or len(pending) >= most
      or pending[0].at_work.waiting >= _MAX_PUT_OFF
    ):
      self._extend(pending[:most])
      pending = pending[most:]
    else:
      self._decode(decoding)
    for session in pending:
      if session.work is not None:
        session.work.waiting += 1
    finished = table.take_finished()
    if not table.running:
      self._last = None
    if self._grams is not None:
      self._learn(self._grams, finished)
    return finished

  def _learn(self, grams: drafts.NGrams, finished: Sequence[Any]) -> None:
    """Remembers what sessions hold, as drafts of others."""
    for outcome in finished:
      session = self._slots.sessions.get(outcome.session)
      if session is not None and isinstance(outcome, records.Completion):
        start = session.length - len(outcome.tokens_T)
        grams.add(session.tokens_T[: session.length], start)
        if self._slots.stats.dispatches >= self._renewed_at + _RENEWED_EVERY:
          self._renew()

  def _renew(self) -> None:
    """Gives the device the n-grams that were learnt so far."""
    if self._grams is not None:
      self._table = self._put(self._grams.arrays())
      self._renewed_at = self._slots.stats.dispatches

  def _put(self, inputs: Any) -> Any:
    # Committed like all arrays; otherwise the first call compiles once more.
    return jax.device_put(inputs, self._place.whole)

  def _clear(self, pages: Sequence[int]) -> None:
    for pages_N in self._batches(pages):
      self._cache = forward.zero_pages(self._cache, self._put(pages_N))

  def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
    parts = [self._batches(part) for part in zip(*copies, strict=True)]
    for inputs in zip(*parts, strict=True):
      self._cache = forward.copy_pages(self._cache, *self._put(inputs))

  def _batches(self, pages: Sequence[int]) -> np.ndarray:
    """Splits a list into rows of fixed length, padded with no page."""
    no_page = [self.options.pages] * (-len(pages) % _PAGES_A_CALL)
    return np.array([*pages, *no_page], np.int32).reshape(-1, _PAGES_A_CALL)

  def _extend(self, served: list[sessions.Session]) -> None:
    chunks = [session.chunk(self.options.prefill_chunk) for session in served]
    num_rows = min(r for r in self.options.extend_rows if r >= len(served))
    report = self._run_extend(served, num_rows)
    for session, (start, end) in zip(served, chunks, strict=True):
      self._slots.extend(session, end - start)
    self._add([(s, s.at_work) for s in served], chunks, report)

  def _run_extend(self, served: list[sessions.Session], num_rows: int) -> Any:
    width = sum(steps.extend_widths(self.options))
    rows_BW = np.zeros((num_rows, width), np.int32)
    for row, session in enumerate(served):
      rows_BW[row] = steps.pack_extend(self.options, session)
    self._cache, report = self._programs.extend(
      self._served.weights, self._cache, self._put(rows_BW)
    )
    return report

  def _decode(self, decoding: list[sessions.Session]) -> None:
    """Goes on with the state on the device, or uploads it for other rows."""
    rows = [(session, session.at_work) for session in decoding]
    truncate, is_guided = _kind(rows)
    depth = 0
    if rows and not is_guided:
      depth = self.controller.choose(len(rows), truncate)
    is_composed = rows == self._composition and (depth > 0) == (self._depth > 0)
    self._depth = depth
    if rows and is_composed and not is_guided:
      # At least a token a pass comes.
      is_sampling = self._unread and self._unread.chunks is None
      num_coming = self.options.decode_steps if is_sampling else 0
      if any(work.remaining > num_coming for _, work in rows):
        self._sample()
      else:  # The dispatch under way reaches the limit of every row.
        self._read()
      return
    self._read()
    # The report may have ended some sessions.
    if decoding := self._slots.decoding():
      self._compose(decoding)
      self._sample()

  def _compose(self, decoding: list[sessions.Session]) -> None:
    """Assigns the rows of decode to sessions; no report may be unread.

    Without drafts their state stays away, so that plain decoding costs no more.
    """
    assert not self._unread
    width = sum(steps.decode_widths(self.options))
    num_rows = self.options.num_slots
    rows_BW = np.zeros((num_rows, width), np.int32)
    state_3B = np.zeros((3, num_rows), np.int32)
    drafts_BK = history_BS = None
    if self._depth and self._num_heads:
      shape = (num_rows, self.options.speculation.depth)
      drafts_BK = np.full(shape, sessions.NOT_SAMPLED, np.int32)
    elif self._depth:
      history_BS = np.zeros((num_rows, self.options.max_len), np.int32)
    for row, session in enumerate(decoding):
      work = session.at_work
      if work.row_W is None:
        work.row_W = steps.pack_decode(self.options, session)
      rows_BW[row] = work.row_W
      counts = (session.last_token, session.consumed, work.remaining)
      state_3B[:, row] = counts
      if drafts_BK is not None and work.drafts_K is not None:
        drafts_BK[row] = work.drafts_K
      if history_BS is not None:
        session.settle()
        history_BS[row, : session.length] = session.tokens_T[: session.length]
    self._composition = [(session, session.at_work) for session in decoding]
    state = steps.State(*state_3B)
    state = state._replace(drafts_BK=drafts_BK, history_BS=history_BS)
    inputs = (rows_BW, state)
    self._rows_BW, self._state = self._put(inputs)

  def _sample(self) -> None:
    truncate, is_guided = _kind(self._composition)
    bias_BV = self._bias() if is_guided else None
    self._add(self._composition, None, self._run_decode(truncate, bias_BV))

  def _bias(self) -> np.ndarray:
    """Returns what the guides of the composition add to the next logits."""
    shape = (self.options.num_slots, self.config.vocab_size)
    bias_BV = np.zeros(shape, np.float32)
    for row, (_, work) in enumerate(self._composition):
      if work.guide is not None:
        bias_BV[row] = work.guide.bias()
    return bias_BV

  def _run_decode(self, truncate: bool, bias_BV: np.ndarray | None) -> Any:
    inputs = (self._cache, self._rows_BW, self._state)
    bias_BV = None if bias_BV is None else self._put(bias_BV)
    table = self._table if self._depth else None
    self._cache, self._state, report = self._programs.decode(
      self._served.weights, *inputs, bias_BV, table, truncate, self._depth
    )
    return report

  def _add(self, rows: list[slots_lib.Row], chunks: Any, report: Any) -> None:
    """Begins to fetch a report, and reads the one before it."""
    self._slots.stats.dispatches += 1
    for array in jax.tree.leaves(report):
      array.copy_to_host_async()
    self._read(Unread(rows, chunks, report, self.version))

  def _read(self, following: Unread | None = None) -> None:
    """Waits for the unread report and takes it; `following` is then unread."""
    unread, self._unread = self._unread, following
    if unread is None:
      return
    report = jax.tree.map(np.asarray, unread.report)
    last = (time.perf_counter(), self._programs.traces.total())
    before, self._last = self._last, last
    if unread.chunks is not None:
      self._read_extend(unread, unread.chunks, *report)
      return
    report = report.replace(version=unread.version)
    # Unknown after a pause, or where a program was compiled meanwhile. With a
    # guide there is nothing to choose.
    (truncate, is_guided), seconds = _kind(unread.rows), None
    if before is not None and before[1] == last[1] and not is_guided:
      seconds = last[0] - before[0]
    count = int((report.tokens_TB >= 0).sum())
    self.controller.take(
      report.counts_X, len(unread.rows), count, seconds, truncate
    )
    self._slots.sampled(unread.rows, report)

  def _read_extend(
    self, unread, chunks, finite_B, routes_MBTA, drafts_BK
  ) -> None:
    for row, (session, work) in enumerate(unread.rows):
      start, end = chunks[row]
      if session.work is not work:
        continue
      if not finite_B[row]:
        self._slots.fail(session, start, end - start, unread.version)
        continue
      routes_TMA = None
      if routes_MBTA is not None:
        first = start % self.options.prefill_chunk
        routes_MTA = routes_MBTA[:, row, first : first + end - start]
        routes_TMA = routes_MTA.swapaxes(0, 1)
      if drafts_BK is not None:
        work.drafts_K = drafts_BK[row]
      self._slots.extended(session, start, end - start, routes_TMA)


def _kind(rows: list[slots_lib.Row]) -> tuple[bool, bool]:
  """Returns whether a dispatch of the rows truncates, and is guided."""
  truncates = any(work.request.truncates for _, work in rows)
  return truncates, any(work.guide for _, work in rows)


def _shapes(variables: Any) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
  return {
    name: (tuple(leaf.shape), np.dtype(leaf.dtype))
    for name, leaf in trees.flatten_names(variables).items()
  }


def _compare(shapes, expected, version: int, *, dtypes: bool) -> None:
  """Raises a ValueError that names a difference from the served arrays."""
  words = lambda array: f'{array[1]}{list(array[0])}' if array else 'missing'
  for name in sorted(shapes | expected):
    have, due = shapes.get(name), expected.get(name)
    is_alike = have and due and have[0] == due[0] and not dtypes
    if have != due and not is_alike:
      raise ValueError(
        f'{name} of version {version} is {words(have)}; of the policy that the '
        f'engine serves it is {words(due)}.'
      )
