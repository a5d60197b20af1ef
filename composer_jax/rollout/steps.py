"""The two compiled programs of the engine: extend (prefill) and decode.

Both have static shapes and donate the cache, so the engine compiles twice and
never again. What a session sees of them depends on the session alone: context
is consumed in chunks that start at the session's own first unseen token, every
sampled token is consumed by `decode`, and no arithmetic mixes rows.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.models import config as config_lib
from composer_jax.models import head
from composer_jax.rollout import forward, sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
  """Static shapes of the engine.

  Attributes:
    num_slots: sessions held at once; each owns one row of the KV cache.
    max_len: tokens in a session at most, context and sampled together.
    prefill_chunk: context tokens a row consumes in one extend.
    prefill_rows: sessions extended together; capped at num_slots.
    decode_steps: tokens per slot in one dispatch; weights can be swapped
      between dispatches only.
    max_stop_tokens: stop tokens a request may name.
  """

  num_slots: int
  max_len: int
  prefill_chunk: int
  prefill_rows: int = 8
  decode_steps: int = 4
  max_stop_tokens: int = 4

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(
          f'EngineOptions.{field.name} must be a positive integer, not '
          f'{value!r}.'
        )
    if self.max_len < 2:
      raise ValueError(
        f'max_len ({self.max_len}) must hold a context token and a sampled '
        'one; use at least 2.'
      )

  @property
  def num_rows(self) -> int:
    """Rows of the extend program."""
    return min(self.prefill_rows, self.num_slots)


class Draw(flax.struct.PyTreeNode, kw_only=True):
  """How each row samples: uint32 key data and float32 temperature."""

  keys_B2: Any
  temperatures_B: Any


class ExtendInputs(flax.struct.PyTreeNode, kw_only=True):
  """One chunk of context for each of B = num_rows sessions.

  Attributes:
    slots_B: int32 and distinct, also in rows that carry nothing.
    starts_B: int32 absolute position of the row's first token.
    counts_B: int32 tokens of the chunk in use, 0 for a row that carries none.
    tokens_BT: int32, T = prefill_chunk; anything beyond the count.
    draw: for the token after the chunk.
  """

  slots_B: Any
  starts_B: Any
  counts_B: Any
  tokens_BT: Any
  draw: Draw


class DecodeInputs(flax.struct.PyTreeNode, kw_only=True):
  """The sampling state of every slot, B = num_slots.

  Attributes:
    tokens_B: int32 last sampled token, not yet consumed.
    positions_B: int32 its absolute position.
    remaining_B: int32 tokens still to sample; 0 leaves the slot alone.
    stop_tokens_BK: int32, K = max_stop_tokens (no axis of the legend), -1 for
      none.
    draw: as in ExtendInputs.
    min_active: int32 scalar; the dispatch ends early once fewer slots sample.
  """

  tokens_B: Any
  positions_B: Any
  remaining_B: Any
  stop_tokens_BK: Any
  draw: Draw
  min_active: Any


class Sampled(flax.struct.PyTreeNode, kw_only=True):
  """What a program reports to the host, read once per dispatch.

  Attributes:
    tokens_TB: int32 sampled; T = 1 for extend, decode_steps for decode.
    logprobs_TB: float32 of the sampled tokens.
    active_TB: bool, where a token was sampled.
    expert_ids_MBTA: uint16 routes of the tokens consumed. From decode the time
      axis leads instead: [T, M, B, 1, A].
  """

  tokens_TB: jax.Array
  logprobs_TB: jax.Array
  active_TB: jax.Array
  expert_ids_MBTA: jax.Array


class Steps:
  """The compiled programs of one (config, options).

  Attributes:
    traces: times each program was traced, by name; stays at one.
    extend: (weights, cache, ExtendInputs) -> (cache, Sampled).
    decode: (weights, cache, DecodeInputs) -> (cache, Sampled).
    empty_cache: () -> cache.
  """

  def __init__(
    self,
    config: config_lib.ModelConfig,
    options: EngineOptions,
  ):
    self.traces: collections.Counter[str] = collections.Counter()
    run = functools.partial(forward.forward, config=config)
    self.extend = self._compiled('extend', _extend, run, config, options)
    self.decode = self._compiled('decode', _decode, run, config, options)
    self.empty_cache = functools.partial(
      forward.empty_cache, config, options.num_slots, options.max_len
    )

  def _compiled(
    self, name: str, function: Callable[..., Any], *static: Any
  ) -> Callable[..., Any]:
    def traced(weights, cache, inputs):
      self.traces[name] += 1
      return function(*static, weights, cache, inputs)

    return jax.jit(traced, donate_argnums=(1,))


@functools.lru_cache(maxsize=8)
def build(config: config_lib.ModelConfig, options: EngineOptions) -> Steps:
  """Returns the programs, shared by every engine of the same shapes."""
  return Steps(config, options)


def _take_rows(cache, slots_B):
  return jax.tree.map(lambda x: x[slots_B], cache)


def _put_rows(cache, rows, slots_B):
  def put(row, cache):
    def update(whole, part):
      part = jax.lax.dynamic_slice_in_dim(part, row, 1)
      return jax.lax.dynamic_update_slice_in_dim(whole, part, slots_B[row], 0)

    return jax.tree.map(update, cache, rows)

  return jax.lax.fori_loop(0, slots_B.shape[0], put, cache)


def _extend(run, config, options, weights, cache, inputs: ExtendInputs):
  """Consumes a chunk of context and samples the token that follows it."""
  columns_T = jnp.arange(options.prefill_chunk, dtype=jnp.int32)
  positions_BT = inputs.starts_B[:, None] + columns_T
  valid_BT = columns_T < inputs.counts_B[:, None]
  rows = _take_rows(cache, inputs.slots_B)
  hidden_BTD, ids_MBTA, rows = run(
    weights, rows, inputs.tokens_BT, valid_BT, positions_BT
  )
  last_B = jnp.maximum(inputs.counts_B - 1, 0)
  hidden_B1D = jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)
  tokens_B, logprobs_B = sampling.sample(
    inputs.draw.keys_B2,
    inputs.starts_B + inputs.counts_B,
    head.logits(weights.outer, hidden_B1D, config)[:, 0],
    inputs.draw.temperatures_B,
  )
  sampled = Sampled(
    tokens_TB=tokens_B[None],
    logprobs_TB=logprobs_B[None],
    active_TB=inputs.counts_B[None] > 0,
    expert_ids_MBTA=ids_MBTA,
  )
  return _put_rows(cache, rows, inputs.slots_B), sampled


def _decode(run, config, options, weights, cache, inputs: DecodeInputs):
  """Samples up to `decode_steps` tokens per slot without the host."""
  shape_TB = (options.decode_steps, options.num_slots)
  routes = (
    config.num_moe_layers,
    options.num_slots,
    1,
    config.moe.num_active,
  )
  report = Sampled(
    tokens_TB=jnp.zeros(shape_TB, jnp.int32),
    logprobs_TB=jnp.zeros(shape_TB, jnp.float32),
    active_TB=jnp.zeros(shape_TB, bool),
    expert_ids_MBTA=jnp.zeros((options.decode_steps, *routes), jnp.uint16),
  )

  def going_on(state):
    step, _, _, _, remaining_B, _ = state
    enough = (remaining_B > 0).sum() >= inputs.min_active
    return (step < options.decode_steps) & enough

  def one_token(state):
    step, cache, tokens_B, positions_B, remaining_B, report = state
    active_B = remaining_B > 0
    hidden_BTD, ids_MBTA, cache = run(
      weights,
      cache,
      tokens_B[:, None],
      active_B[:, None],
      positions_B[:, None],
    )
    drawn_B, logprobs_B = sampling.sample(
      inputs.draw.keys_B2,
      positions_B + 1,
      head.logits(weights.outer, hidden_BTD, config)[:, 0],
      inputs.draw.temperatures_B,
    )
    sampled = Sampled(
      tokens_TB=drawn_B,
      logprobs_TB=logprobs_B,
      active_TB=active_B,
      expert_ids_MBTA=ids_MBTA,
    )
    report = jax.tree.map(
      lambda whole, part: jax.lax.dynamic_update_index_in_dim(
        whole, part.astype(whole.dtype), step, axis=0
      ),
      report,
      sampled,
    )
    stopped_B = (drawn_B[:, None] == inputs.stop_tokens_BK).any(-1)
    return (
      step + 1,
      cache,
      jnp.where(active_B, drawn_B, tokens_B),
      positions_B + active_B,
      jnp.where(stopped_B, 0, jnp.maximum(remaining_B - 1, 0)),
      report,
    )

  state = (
    jnp.int32(0),
    cache,
    inputs.tokens_B,
    inputs.positions_B,
    inputs.remaining_B,
    report,
  )
  _, cache, _, _, _, report = jax.lax.while_loop(going_on, one_token, state)
  return cache, report
