"""The rollout engine: sessions in, sampled tokens with their routes out.

  Consumes: SampleRequests, as many as there are; those beyond the slots wait.
  Moved by: `step()`, which dispatches one chunk of context or a few decode
    steps and reads what the dispatch before it found.
  Between steps: `swap()` may change the weights; every token carries the
    version that sampled it. What costs time, `place()`, may be called by
    another thread while this one steps; `switch()` then changes a reference.
  Produces: Completions and Failures, in no particular order.

A dispatch returns at once; its report is on its way to the host while the next
one runs, and is read after that. Whatever the host must know to go on (who is
done, what was sampled) is read before it decides. Everything runs in the order
of its dispatch, since each takes over the cache of the one before: pages given
to another session are written only behind what their last owner had under way.

A session's tokens, log-probabilities and routes depend on its own requests and
on the weights alone, bit for bit: not on its slot, on its neighbours, on how
steps were scheduled or on whether its prompt was found cached. That holds with
one number of `prefill_rows`, where the model's rows are independent of each
other, and for a session whose pages were never taken back; with
`numerics='batch_invariant'` it holds always.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from composer_jax.core import records, trees
from composer_jax.models import config as config_lib
from composer_jax.models import decoder
from composer_jax.rollout import forward, placing, sessions, steps
from composer_jax.rollout import options as options_lib
from composer_jax.rollout import slots as slots_lib

EngineOptions = options_lib.EngineOptions

# An extend costs the same however few of its rows carry context, so a step
# decodes instead while fewer wait. Context that was put off for so many
# dispatches goes before any decode, and before context that was put off less.
_MAX_PUT_OFF = 2

# Pages that one call copies or clears.
_PAGES_A_CALL = 16


class Unread(NamedTuple):
  """A dispatch whose report, still on the device, the host has not seen."""

  rows: list[slots_lib.Row]
  chunks: list[tuple[int, int]] | None  # (start, end) in an extend
  report: Any
  version: int


class Engine:
  """Continuous batching of one model over a fixed number of slots.

  One thread calls it (`rollout.server` is for many), but any may `place`.
  """

  def __init__(
    self,
    config: config_lib.ModelConfig,
    variables: Any,
    version: int,
    options: EngineOptions,
    *,
    mesh: jax.sharding.Mesh | None = None,
  ):
    """Compiles nothing yet; copies the weights.

    The model is shared out over the mesh. None makes one of `options.devices`,
    or of one device serves on the first that holds the variables. A ValueError
    says that these are not that model's, or that the mesh does not suit.
    """
    self.config, self.options = config, options
    self._shapes = _shapes(variables)
    expected = _shapes(decoder.abstract(config)[0])
    _compare(self._shapes, expected, version, dtypes=False)
    mesh = placing.mesh_of(options.devices) if mesh is None else mesh
    if mesh is None:
      self._place = placing.on_device_of(variables)
    else:
      self._place = placing.on_mesh(config, mesh)
    self._served = self.place(variables, version)
    self._slots = slots_lib.Slots(
      options,
      version,
      (config.num_moe_layers, config.moe.num_active),
      share_sampled=config.numerics == 'batch_invariant',
    )
    self._programs = steps.build(config, options, self._place)
    self._cache = jax.jit(
      lambda: forward.empty_cache(config, options.pages, options.page_size),
      out_shardings=self._place.pools,
    )()
    self._unread: Unread | None = None
    # Whose rows decode works on, and what the device knows of them.
    self._composition: list[slots_lib.Row] = []
    self._rows_BW: Any = None
    self._state: Any = None

  @property
  def version(self) -> int:
    return self._served.version

  @property
  def traces(self) -> dict[str, int]:
    """Times each program was traced, over all engines that share it."""
    return dict(self._programs.traces)

  @property
  def num_unfinished(self) -> int:
    """Requests submitted whose outcome `step` has not returned."""
    return self._slots.num_unfinished

  def stats(self) -> slots_lib.Stats:
    table = self._slots
    return dataclasses.replace(
      table.stats,
      sessions=len(table.sessions),
      running=len(table.running),
      waiting=len(table.queue),
      pages=self.options.pages,
      pages_free=table.holdings.pages.num_free,
      pages_cached=len(table.holdings.prefixes.held),
    )

  def warm(self) -> None:
    """Compiles every program now rather than when it is first needed."""
    self._read()
    no_page = self.options.pages
    self._clear([no_page])
    self._copy([(0, no_page, 0)])
    for num_rows in self.options.extend_rows:
      self._run_extend([], num_rows)
    for truncate in (False, True):
      self._compose([])
      self._run_decode(truncate)

  def submit(
    self,
    request: records.SampleRequest,
    on_tokens: sessions.OnTokens | None = None,
  ) -> None:
    """Queues a request of a session that is new, or has no other under way.

    `on_tokens` is called with the tokens of each dispatch, from within whatever
    reads its report; it must neither raise nor call the engine.

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
      # Of any size, so not numpy's.
      ('stop_tokens', np.array(request.stop_tokens, object)),
    ):
      if len(tokens_T) and not (tokens_T.min() >= 0 and tokens_T.max() < limit):
        raise ValueError(
          f'{name} holds tokens from {tokens_T.min()} to {tokens_T.max()}; '
          f'the vocabulary is 0..{limit - 1}.'
        )
    self._slots.submit(request, on_tokens)

  def close(self, session: str) -> None:
    """Ends a session if it is open, and forgets the outcome of its request."""
    table = self._slots
    held = table.sessions.get(session)
    if held and held.work:
      # Its pages may still be written, and it may be found to have failed.
      self._read()
    if self.is_open(session):
      table.close(session)
    table.finished = [f for f in table.finished if f.session != session]

  def is_open(self, session: str) -> bool:
    return session in self._slots.sessions

  def place(self, variables: Any, version: int) -> placing.PlacedWeights:
    """Copies weights to where they are served from; from any thread.

    Raises:
      ValueError: an array is missing, unknown or unlike that served.
    """
    _compare(_shapes(variables), self._shapes, version, dtypes=True)
    weights = placing.put_weights(variables, self.config, self._place)
    weights = jax.block_until_ready(weights)
    return placing.PlacedWeights(weights=weights, version=version)

  def swap(self, variables: Any, version: int) -> None:
    """`place` and `switch`; where one raises, what was served is served on."""
    self.switch(self.place(variables, version))

  def switch(self, placed: placing.PlacedWeights) -> placing.PlacedWeights:
    """Serves weights that this engine placed from the next step on.

    Returns what was served; freeing it takes longer than the switch.

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
    # Those that are refreshed lost the pages that the device knows of.
    self._composition = []
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
    return table.take_finished()

  def _put(self, inputs: Any) -> Any:
    # Committed like everything else: else the first call compiles once more.
    return jax.device_put(inputs, self._place.whole)

  def _clear(self, pages: Sequence[int]) -> None:
    for pages_N in self._batches(pages):
      self._cache = forward.zero_pages(self._cache, self._put(pages_N))

  def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
    parts = [self._batches(part) for part in zip(*copies, strict=True)]
    for inputs in zip(*parts, strict=True):
      self._cache = forward.copy_pages(self._cache, *self._put(inputs))

  def _batches(self, pages: Sequence[int]) -> np.ndarray:
    """Splits a list into arrays of fixed length, past the end no page."""
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
    """Decodes on where the device left off, or begins anew with other rows."""
    rows = [(session, session.at_work) for session in decoding]
    if rows and rows == self._composition:
      is_sampling = self._unread and self._unread.chunks is None
      coming = self.options.decode_steps if is_sampling else 0
      if any(work.remaining > coming for _, work in rows):
        self._sample()
      else:  # What is under way samples all that its rows may sample.
        self._read()
      return
    self._read()
    # Some may have ended by what was read.
    if decoding := self._slots.decoding():
      self._compose(decoding)
      self._sample()

  def _compose(self, decoding: list[sessions.Session]) -> None:
    """Gives the rows of decode to these sessions; nothing may be unread."""
    assert not self._unread
    width = sum(steps.decode_widths(self.options))
    num_rows = self.options.num_slots
    rows_BW = np.zeros((num_rows, width), np.int32)
    state_3B = np.zeros((3, num_rows), np.int32)
    for row, session in enumerate(decoding):
      work = session.at_work
      if work.row_W is None:
        work.row_W = steps.pack_decode(self.options, session)
      rows_BW[row] = work.row_W
      counts = (session.last_token, session.consumed, work.remaining)
      state_3B[:, row] = counts
    self._composition = [(session, session.at_work) for session in decoding]
    inputs = (rows_BW, steps.State(*state_3B))
    self._rows_BW, self._state = self._put(inputs)

  def _sample(self) -> None:
    truncate = any(work.request.truncates for _, work in self._composition)
    self._add(self._composition, None, self._run_decode(truncate))

  def _run_decode(self, truncate: bool) -> Any:
    self._cache, self._state, report = self._programs.decode(
      self._served.weights, self._cache, self._rows_BW, self._state, truncate
    )
    return report

  def _add(self, rows: list[slots_lib.Row], chunks: Any, report: Any) -> None:
    """Begins to fetch a report, and reads the one before it."""
    self._slots.stats.dispatches += 1
    for array in jax.tree.leaves(report):
      array.copy_to_host_async()
    self._read(Unread(rows, chunks, report, self.version))

  def _read(self, following: Unread | None = None) -> None:
    """Takes the report before `following`; waits for what it says."""
    unread, self._unread = self._unread, following
    if unread is None:
      return
    report = jax.tree.map(np.asarray, unread.report)
    if unread.chunks is None:
      report = report.replace(version=unread.version)
      self._slots.sampled(unread.rows, report)
    else:
      self._read_extend(unread, unread.chunks, *report)

  def _read_extend(self, unread, chunks, finite_B, routes_MBTA) -> None:
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
      self._slots.extended(session, start, end - start, routes_TMA)


def _shapes(variables: Any) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
  return {
    name: (tuple(leaf.shape), np.dtype(leaf.dtype))
    for name, leaf in trees.flatten_names(variables).items()
  }


def _compare(have, want, version: int, *, dtypes: bool) -> None:
  """Raises a ValueError that names what differs from what is served."""
  for names, says in (
    (sorted(want.keys() - have.keys()), 'lacks'),
    (sorted(have.keys() - want.keys()), 'has the unknown'),
  ):
    if names:
      more = f' and {len(names) - 1} more' if len(names) > 1 else ''
      raise ValueError(f'Version {version} {says} {names[0]}{more}.')
  for name, (shape, dtype) in have.items():
    if shape != want[name][0] or (dtypes and dtype != want[name][1]):
      raise ValueError(
        f'{name} of version {version} is {dtype}{list(shape)}; the engine '
        f'serves {want[name][1]}{list(want[name][0])}.'
      )
