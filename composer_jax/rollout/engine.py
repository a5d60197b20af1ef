"""The rollout engine: sessions in, sampled tokens with their routes out.

  Consumes: SampleRequests, as many as there are; those beyond the slots wait.
  Moved by: `step()`, which dispatches one chunk of context or a few decode
    steps and reads what the dispatch before it found.
  Between steps: `swap()` may change the weights; every token carries the
    version that sampled it. What costs time, `place()`, may be called by
    another thread while this one steps; `switch()` then changes a reference.
  Produces: Completions and Failures, in no particular order.

A session's tokens, log-probabilities and routes depend on its own requests and
on the weights alone, bit for bit: not on its slot, on its neighbours, on how
steps were scheduled or on whether its prompt was found cached. That holds with
one number of rows for each program, where the model's rows are independent of
each other, and for a session whose pages were never taken back; with
`numerics='batch_invariant'` it holds always.
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from composer_jax.core import records, trees
from composer_jax.models import config as config_lib
from composer_jax.models import decoder
from composer_jax.rollout import dispatch, forward, placing, sessions
from composer_jax.rollout import options as options_lib
from composer_jax.rollout import slots as slots_lib

EngineOptions = options_lib.EngineOptions

# An extend costs the same however few of its rows carry context, so a step
# decodes instead while fewer wait. Context that was put off for so many
# dispatches goes before any decode, and before context that was put off less.
_MAX_PUT_OFF = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
  """What an engine has at hand and has done.

  Attributes:
    sessions: open.
    running: requests with a slot.
    waiting: requests without.
    pages: of the cache.
    pages_free: held by nobody.
    pages_cached: held for whoever has the same prefix.
    prefix_hit_tokens: context tokens found cached.
    context_tokens: context tokens consumed by extend.
    sampled_tokens: tokens sampled.
    dispatches: extends and decodes.
    swaps: of weights.
    swap_s: host seconds of the last swap, the weights in place and what was
      dispatched before it awaited.
    failures: requests that failed.
    version: served.
  """

  sessions: int
  running: int
  waiting: int
  pages: int
  pages_free: int
  pages_cached: int
  prefix_hit_tokens: int
  context_tokens: int
  sampled_tokens: int
  dispatches: int
  swaps: int
  swap_s: float
  failures: int
  version: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
  """Weights that lie where the engine that placed them serves them.

  Attributes:
    weights: a copy of its own.
    version: theirs.
  """

  weights: forward.Weights
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

    Args:
      config: of the model.
      variables: of its decoder.
      version: of the weights.
      options: shapes of the programs.
      mesh: to share the model out over; None serves on the first device that
        holds the variables.

    Raises:
      ValueError: the variables are not that model's, or the options or the
        mesh do not suit it.
    """
    options.check(config)
    self.config = config
    self.options = options
    self._shapes = _shapes(variables)
    expected = _shapes(decoder.abstract(config)[0])
    _compare(self._shapes, expected, version, dtypes=False)
    if mesh is None:
      self._place = placing.on_device(_device_of(variables))
    else:
      self._place = placing.on_mesh(config, mesh)
    self._dispatcher = dispatch.Dispatcher(config, options, self._place)
    self._serve(self.place(variables, version))
    self._slots = slots_lib.Slots(
      num_slots=options.num_slots,
      max_len=options.max_len,
      page_size=options.page_size,
      num_pages=options.pages,
      version=version,
      route_shape=(config.num_moe_layers, config.moe.num_active),
      record_routes=options.record_routes,
      share_prefixes=options.share_prefixes,
      share_sampled=config.numerics == 'batch_invariant',
    )
    self._swaps, self._swap_s = 0, 0.0

  def _serve(self, placed: Placed) -> None:
    self._served = placed
    self._dispatcher.weights = placed.weights
    self._dispatcher.version = placed.version

  @property
  def version(self) -> int:
    return self._dispatcher.version

  @property
  def num_slots(self) -> int:
    """Requests that can be worked on without any of them waiting."""
    return self.options.num_slots

  @property
  def traces(self) -> dict[str, int]:
    """Times each program was traced, over all engines that share it."""
    return self._dispatcher.traces

  @property
  def num_unfinished(self) -> int:
    """Requests submitted whose outcome `step` has not returned."""
    return self._slots.num_unfinished

  def stats(self) -> Stats:
    """Returns counters; costs nothing."""
    table = self._slots
    return Stats(
      sessions=len(table.sessions),
      running=table.num_running,
      waiting=table.num_waiting,
      pages=self.options.pages,
      pages_free=table.holdings.pages.num_unowned,
      pages_cached=len(table.holdings.prefixes),
      prefix_hit_tokens=table.prefix_hit_tokens,
      context_tokens=self._dispatcher.context_tokens,
      sampled_tokens=table.sampled_tokens,
      dispatches=self._dispatcher.num_dispatches,
      swaps=self._swaps,
      swap_s=self._swap_s,
      failures=table.failures,
      version=self.version,
    )

  def warm(self) -> None:
    """Compiles every program now rather than when it is first needed."""
    self._dispatcher.read(self._slots)
    self._dispatcher.warm()

  def submit(
    self,
    request: records.SampleRequest,
    on_tokens: sessions.OnTokens | None = None,
  ) -> None:
    """Queues a request.

    Args:
      request: of a session that is new, or has no other under way.
      on_tokens: called with the tokens of each dispatch, from within whatever
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
    """Ends a session and drops what it was still being served.

    Raises:
      ValueError: no such session is open.
    """
    if self._slots.is_working(session):
      # Its pages may still be written, and it may be found to have failed.
      self._dispatcher.read(self._slots)
      if not self._slots.is_open(session):
        return
    self._slots.close(session)

  def cancel(self, session: str) -> None:
    """Closes a session if it is open, and forgets the outcome of its request.

    For a client that went away: whatever its session came to, nothing of it
    stays.
    """
    if self._slots.is_open(session):
      self.close(session)
    self._slots.finished = [
      f for f in self._slots.finished if f.session != session
    ]

  def is_open(self, session: str) -> bool:
    """Whether the session holds its tokens or has a request under way."""
    return self._slots.is_open(session)

  def place(self, variables: Any, version: int) -> Placed:
    """Copies weights to where they are served from; from any thread.

    Args:
      variables: with the names, shapes and dtypes of those served.
      version: theirs.

    Raises:
      ValueError: an array is missing, unknown or differs in shape or dtype.
    """
    _compare(_shapes(variables), self._shapes, version, dtypes=True)
    weights = placing.put_weights(variables, self.config, self._place)
    return Placed(weights=jax.block_until_ready(weights), version=version)

  def swap(
    self, variables: Any, version: int, policy: str | None = None
  ) -> None:
    """Places other weights and serves them from the next step on.

    Raises:
      ValueError: as `place` and `switch` do; what was served is served on.
    """
    self._check_swap(version, policy)
    self.switch(self.place(variables, version), policy)

  def switch(self, placed: Placed, policy: str | None = None) -> Placed:
    """Serves weights that are in their place from the next step on.

    Args:
      placed: by this engine.
      policy: 'keep' or 'refresh', as `EngineOptions.on_swap`; None means that.

    Returns:
      What was served; freeing it takes longer than the switch.

    Raises:
      ValueError: the version goes back while sessions are open.
    """
    self._check_swap(placed.version, policy)
    self._dispatcher.read(self._slots)
    began, before = time.perf_counter(), self._served
    self._serve(placed)
    refresh = (policy or self.options.on_swap) == options_lib.REFRESH
    self._slots.swap(placed.version, refresh=refresh)
    if refresh:
      self._dispatcher.decompose()
    self._swaps += 1
    self._swap_s = time.perf_counter() - began
    return before

  def _check_swap(self, version: int, policy: str | None) -> None:
    if policy not in (None, *options_lib.ON_SWAP):
      raise ValueError(
        f'The policy of a swap must be one of {options_lib.ON_SWAP}, not '
        f'{policy!r}.'
      )
    if version < self.version and self._slots.sessions:
      raise ValueError(
        f'Cannot swap version {self.version} for the older {version} while '
        f'{len(self._slots.sessions)} sessions are open: versions never '
        'decrease within a session. Close them first.'
      )

  def step(self) -> list[records.Completion | records.Failure]:
    """Dispatches one program and returns the outcomes known by now."""
    table, dispatcher = self._slots, self._dispatcher
    self._admit()
    pending, decoding = table.prefilling(), table.decoding()
    most = self.options.extend_rows[-1]
    if pending and (
      not decoding
      or len(pending) >= most
      or pending[0].at_work.waiting >= _MAX_PUT_OFF
    ):
      dispatcher.extend(pending[:most], table)
      pending = pending[most:]
      dispatcher.read(table, keep=1)
    else:
      self._decode(decoding)
    for session in pending:
      if session.work is not None:
        session.work.waiting += 1
    return table.take_finished()

  def _admit(self) -> None:
    holdings = self._slots.holdings
    self._slots.admit()
    if holdings.to_clear:
      self._dispatcher.clear(holdings.to_clear)
      holdings.to_clear = []
    if holdings.to_copy:
      self._dispatcher.copy(holdings.to_copy)
      holdings.to_copy = []

  def _decode(self, decoding: list[sessions.Session]) -> None:
    """Decodes on where the device left off, or begins anew with other rows."""
    table, dispatcher = self._slots, self._dispatcher
    if dispatcher.is_decoding(decoding):
      if dispatcher.lacks_work():
        dispatcher.read(table)
      else:
        dispatcher.decode()
        dispatcher.read(table, keep=1)
      return
    dispatcher.read(table)
    # Some may have ended by what was read.
    decoding = table.decoding()
    if decoding:
      dispatcher.compose(decoding)
      dispatcher.decode()


def _device_of(variables: Any) -> jax.Device:
  leaf = jax.tree.leaves(variables)[0]
  if isinstance(leaf, jax.Array):
    return min(leaf.devices(), key=lambda device: device.id)
  return jax.devices()[0]


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
