"""The rollout engine: sessions in, sampled tokens with their routes out.

  Consumes: SampleRequests, as many as there are; those beyond the slots wait.
  Moved by: `step()`, which dispatches one prefill chunk or a few decode steps.
  Between steps: `swap()` may change the weights; KV caches are kept, and every
    token carries the version that sampled it.
  Produces: Completions, in no particular order.

A session's tokens, log-probabilities and routes depend on its own requests and
on the weights alone, bit for bit: not on its slot, on its neighbours or on how
steps were scheduled (where the model's rows are independent of each other, as
they are with fixed tiles).
"""

from typing import Any

import jax
import numpy as np

from composer_jax.core import records, trees
from composer_jax.models import config as config_lib
from composer_jax.rollout import forward, steps
from composer_jax.rollout import slots as slots_lib

EngineOptions = steps.EngineOptions

# An extend costs the same however few of its rows carry context, so a step
# decodes instead while fewer wait. Context that was put off for so many
# dispatches goes before any decode, and before context that was put off less.
_MAX_PUT_OFF = 2


class Engine:
  """Continuous batching of one model over a fixed number of slots.

  Not thread-safe: one thread calls it (`rollout.server` is for many).
  """

  def __init__(
    self,
    config: config_lib.ModelConfig,
    variables: Any,
    version: int,
    options: EngineOptions,
  ):
    self.config = config
    self.options = options
    self.version = version
    self._steps = steps.build(config, options)
    self._weights = forward.unstack(variables, config)
    self._cache = self._steps.empty_cache()
    self._slots = slots_lib.Slots(options.num_slots, options.max_len)

  @property
  def num_slots(self) -> int:
    """Sessions that can be open without any of them waiting."""
    return self.options.num_slots

  @property
  def traces(self) -> dict[str, int]:
    """Times each program was traced, over all engines that share it."""
    return dict(self._steps.traces)

  @property
  def num_unfinished(self) -> int:
    """Requests submitted and not yet completed."""
    return self._slots.num_unfinished

  def submit(self, request: records.SampleRequest) -> None:
    """Queues a request.

    Raises:
      ValueError: the session's tokens would not fit max_len, a token is
        outside the vocabulary, there are too many stop tokens, or the session
        has a request under way.
    """
    vocab_size = self.config.vocab_size
    if len(request.stop_tokens) > self.options.max_stop_tokens:
      raise ValueError(
        f'{len(request.stop_tokens)} stop tokens exceed max_stop_tokens '
        f'({self.options.max_stop_tokens}); raise it in EngineOptions.'
      )
    context_T = request.context_T
    if len(context_T) and not (
      context_T.min() >= 0 and context_T.max() < vocab_size
    ):
      raise ValueError(
        f'context_T holds tokens from {context_T.min()} to '
        f'{context_T.max()}; the vocabulary is 0..{vocab_size - 1}.'
      )
    self._slots.submit(request)

  def close(self, session: str) -> None:
    """Ends a session, so that its slot can serve another."""
    self._slots.close(session)

  def is_open(self, session: str) -> bool:
    """Whether the session has a slot or waits for one."""
    return self._slots.is_open(session)

  def swap(self, variables: Any, version: int) -> None:
    """Serves other weights from the next step on; KV caches stay.

    Raises:
      ValueError: the version goes back, or an array differs in shape.
    """
    if version < self.version:
      raise ValueError(
        f'Cannot swap version {self.version} for the older {version}: '
        'versions never decrease within a session.'
      )
    weights = forward.unstack(variables, self.config)
    have = trees.flatten_names(self._weights)
    want = trees.flatten_names(weights)
    if have.keys() != want.keys():
      raise ValueError(
        f'Version {version} has other arrays than {self.version}: '
        f'{sorted(have.keys() ^ want.keys())[:4]}.'
      )
    for name, array in want.items():
      if (array.shape, array.dtype) != (have[name].shape, have[name].dtype):
        raise ValueError(
          f'{name} of version {version} is {array.dtype}{array.shape}; the '
          f'engine serves {have[name].dtype}{have[name].shape}.'
        )
    self._weights, self.version = weights, version

  def step(self) -> list[records.Completion]:
    """Dispatches one program and returns the requests that it finished."""
    pending = self._slots.with_context()
    decoding = self._slots.sampling()
    if not pending and not decoding:
      return []
    if pending and (
      not decoding
      or len(pending) >= self.options.num_rows
      or pending[0].waiting >= _MAX_PUT_OFF
    ):
      served = pending[: self.options.num_rows]
      self._extend(served)
    else:
      served = []
      self._decode(decoding)
    for session in pending[len(served) :]:
      session.waiting += 1
    return self._slots.take_finished()

  def _extend(self, sessions: list[slots_lib.Session]) -> None:
    num_rows, chunk = self.options.num_rows, self.options.prefill_chunk
    starts_B = np.zeros(num_rows, np.int32)
    counts_B = np.zeros(num_rows, np.int32)
    tokens_BT = np.zeros((num_rows, chunk), np.int32)
    for row, session in enumerate(sessions):
      work = session.at_work
      part_T = work.pending_T[work.offset :][:chunk]
      starts_B[row] = session.consumed
      counts_B[row] = len(part_T)
      tokens_BT[row, : len(part_T)] = part_T
    taken = [s.slot for s in sessions]
    others = sorted(set(range(self.options.num_slots)) - set(taken))
    inputs = steps.ExtendInputs(
      slots_B=np.array((taken + others)[:num_rows], np.int32),
      starts_B=starts_B,
      counts_B=counts_B,
      tokens_BT=tokens_BT,
      draw=_draw(sessions, range(len(sessions)), num_rows),
    )
    self._cache, report = self._steps.extend(self._weights, self._cache, inputs)
    report = jax.device_get(report)
    routes_BTMA = np.moveaxis(report.expert_ids_MBTA, 0, 2).astype(np.uint16)
    for row, session in enumerate(sessions):
      work, count = session.at_work, int(counts_B[row])
      work.offset += count
      work.routes.append(routes_BTMA[row, :count])
      session.consumed += count
      session.waiting = 0
      if not work.needs_context:
        session.last_token = int(report.tokens_TB[0, row])
        work.record(
          session.last_token,
          float(report.logprobs_TB[0, row]),
          self.version,
        )

  def _decode(self, sessions: list[slots_lib.Session]) -> None:
    num_slots = self.options.num_slots
    tokens_B = np.zeros(num_slots, np.int32)
    positions_B = np.zeros(num_slots, np.int32)
    remaining_B = np.zeros(num_slots, np.int32)
    stop_tokens_BK = np.full(
      (num_slots, self.options.max_stop_tokens), -1, np.int32
    )
    for session in sessions:
      slot, stop_tokens = session.slot, session.at_work.request.stop_tokens
      assert session.last_token is not None
      tokens_B[slot] = session.last_token
      positions_B[slot] = session.consumed
      remaining_B[slot] = session.at_work.remaining
      stop_tokens_BK[slot, : len(stop_tokens)] = stop_tokens
    inputs = steps.DecodeInputs(
      tokens_B=tokens_B,
      positions_B=positions_B,
      remaining_B=remaining_B,
      stop_tokens_BK=stop_tokens_BK,
      draw=_draw(sessions, [s.slot for s in sessions], num_slots),
      # Finished slots idle until the host looks: a quarter may.
      min_active=np.int32(max(1, len(sessions) * 3 // 4)),
    )
    self._cache, report = self._steps.decode(self._weights, self._cache, inputs)
    report = jax.device_get(report)
    counts_B = report.active_TB.sum(0)
    routes_BTMA = report.expert_ids_MBTA[:, :, :, 0].transpose(2, 0, 1, 3)
    for session in sessions:
      slot, work = session.slot, session.at_work
      count = int(counts_B[slot])
      tokens = report.tokens_TB[:count, slot].tolist()
      logprobs = report.logprobs_TB[:count, slot].tolist()
      for token, logprob in zip(tokens, logprobs, strict=True):
        work.record(token, logprob, self.version)
      work.routes.append(routes_BTMA[slot, :count])
      session.consumed += count
      session.last_token = tokens[-1]


def _draw(sessions, rows, num_rows: int) -> steps.Draw:
  keys_B2 = np.zeros((num_rows, 2), np.uint32)
  temperatures_B = np.ones(num_rows, np.float32)
  for session, row in zip(sessions, rows, strict=True):
    keys_B2[row] = session.key_2
    temperatures_B[row] = session.temperature
  return steps.Draw(keys_B2=keys_B2, temperatures_B=temperatures_B)
