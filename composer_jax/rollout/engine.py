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
from composer_jax.rollout import dispatch, placing, sessions
from composer_jax.rollout import options as options_lib
from composer_jax.rollout import slots as slots_lib

EngineOptions = options_lib.EngineOptions

# An extend costs the same however few of its rows carry context, so a step
# decodes instead while fewer wait. Context that was put off for so many
# dispatches goes before any decode, and before context that was put off less.
_MAX_PUT_OFF = 2


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
      mesh: to share the model out over; None makes one of `options.devices`, or
        of one device serves on the first that holds the variables.

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
      mesh = placing.mesh_of(options.devices)
    if mesh is None:
      self._place = placing.on_device_of(variables)
    else:
      self._place = placing.on_mesh(config, mesh)
    self._slots = slots_lib.Slots(
      options,
      version,
      (config.num_moe_layers, config.moe.num_active),
      share_sampled=config.numerics == 'batch_invariant',
    )
    self._dispatcher = dispatch.Dispatcher(
      config, options, self._place, self.place(variables, version), self._slots
    )

  @property
  def version(self) -> int:
    return self._dispatcher.served.version

  @property
  def num_slots(self) -> int:
    """Requests that can be worked on without any of them waiting."""
    return self.options.num_slots

  @property
  def traces(self) -> dict[str, int]:
    """Times each program was traced, over all engines that share it."""
    return dict(self._dispatcher.programs.traces)

  @property
  def num_unfinished(self) -> int:
    """Requests submitted whose outcome `step` has not returned."""
    return self._slots.num_unfinished

  def stats(self) -> slots_lib.Stats:
    """Returns counters; costs nothing."""
    table = self._slots
    return dataclasses.replace(
      table.stats,
      sessions=len(table.sessions),
      running=len(table.running),
      waiting=len(table.queue),
      pages=self.options.pages,
      pages_free=table.holdings.pages.num_free,
      pages_cached=len(table.holdings.prefixes),
    )

  def warm(self) -> None:
    """Compiles every program now rather than when it is first needed."""
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
    """Ends a session if it is open, and forgets the outcome of its request."""
    table = self._slots
    if table.is_working(session):
      # Its pages may still be written, and it may be found to have failed.
      self._dispatcher.read()
    if self.is_open(session):
      table.close(session)
    table.finished = [f for f in table.finished if f.session != session]

  def is_open(self, session: str) -> bool:
    """Whether the session holds its tokens or has a request under way."""
    return session in self._slots.sessions

  def place(self, variables: Any, version: int) -> placing.PlacedWeights:
    """Copies weights to where they are served from; from any thread.

    Raises:
      ValueError: an array is missing, unknown or differs in shape or dtype from
        those served.
    """
    _compare(_shapes(variables), self._shapes, version, dtypes=True)
    weights = placing.put_weights(variables, self.config, self._place)
    weights = jax.block_until_ready(weights)
    return placing.PlacedWeights(weights=weights, version=version)

  def swap(self, variables: Any, version: int) -> None:
    """Places other weights and serves them from the next step on.

    Raises:
      ValueError: as `place` and `switch` do; what was served is served on.
    """
    self.switch(self.place(variables, version))

  def switch(self, placed: placing.PlacedWeights) -> placing.PlacedWeights:
    """Serves weights that this engine placed from the next step on.

    Returns:
      What was served; freeing it takes longer than the switch.

    Raises:
      ValueError: the version goes back while sessions are open.
    """
    table, version = self._slots, self.version
    if placed.version < version and table.sessions:
      raise ValueError(
        f'Cannot swap version {version} for the older {placed.version} while '
        f'{len(table.sessions)} sessions are open: versions never decrease '
        'within a session. Close them first.'
      )
    self._dispatcher.read()
    began, before = time.perf_counter(), self._dispatcher.served
    self._dispatcher.serve(placed)
    refresh = self.options.on_swap == options_lib.REFRESH
    table.swap(placed.version, refresh=refresh)
    table.stats.swap_s = time.perf_counter() - began
    return before

  def step(self) -> list[records.Completion | records.Failure]:
    """Dispatches one program and returns the outcomes known by now."""
    table, dispatcher = self._slots, self._dispatcher
    table.admit()
    holdings = table.holdings
    dispatcher.clear(holdings.pages.to_clear)
    dispatcher.copy(holdings.to_copy)
    holdings.pages.to_clear, holdings.to_copy = [], []
    pending, decoding = table.prefilling(), table.decoding()
    most = self.options.extend_rows[-1]
    if pending and (
      not decoding
      or len(pending) >= most
      or pending[0].at_work.waiting >= _MAX_PUT_OFF
    ):
      dispatcher.extend(pending[:most])
      pending = pending[most:]
      dispatcher.read(keep=1)
    else:
      dispatcher.decode()
    for session in pending:
      if session.work is not None:
        session.work.waiting += 1
    return table.take_finished()


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
