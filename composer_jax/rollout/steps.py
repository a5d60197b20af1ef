"""The compiled programs of the engine: extend (prefill) and decode.

They donate the cache, and compile once per number of rows. A session's results
depend on the session alone: a context token's column in its chunk is its
absolute position modulo the chunk, every token is sampled by `decode`, and no
arithmetic mixes rows.

The host sends the rows of a dispatch as a single array of int32 words: many
small arrays would cost more than a small model's step.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models import config as config_lib
from composer_jax.rollout import forward, placing, sampling, sessions
from composer_jax.rollout import options as options_lib


def decode_widths(options: options_lib.EngineOptions) -> tuple[int, ...]:
  """Words of each part of `pack_decode`; a row of zeros is unused."""
  return (options.table_len, options.max_stop_tokens, 2, 3, 1, 1)


def pack_decode(
  options: options_lib.EngineOptions, session: sessions.Session
) -> np.ndarray:
  """Returns a row: pages, stop tokens, key, three floats, top_k, and a one."""
  request = session.at_work.request
  floats = (request.temperature, request.top_p, request.min_p)
  unused = [-1] * (options.max_stop_tokens - len(request.stop_tokens))
  return np.concatenate(
    [
      _table(options, session.pages),
      np.array([*request.stop_tokens, *unused], np.int32),
      sampling.key_of(request.seed).view(np.int32),
      np.array(floats, np.float32).view(np.int32),
      np.array([min(request.top_k, np.iinfo(np.int32).max), 1], np.int32),
    ]
  )


def extend_widths(options: options_lib.EngineOptions) -> tuple[int, ...]:
  """Words of each part of `pack_extend`; a row of zeros is unused."""
  return (options.table_len, 1, 1, 1, options.prefill_chunk)


def pack_extend(
  options: options_lib.EngineOptions, session: sessions.Session
) -> np.ndarray:
  """Returns a row: pages, three numbers, and the tokens of the next chunk.

  The numbers are the first column's position, and the token columns' range.
  """
  start, end = session.chunk(options.prefill_chunk)
  first = start % options.prefill_chunk
  numbers = np.array([start - first, first, first + end - start], np.int32)
  columns_T = np.zeros(options.prefill_chunk, np.int32)
  columns_T[first : numbers[2]] = session.tokens_T[start:end]
  return np.concatenate([_table(options, session.pages), numbers, columns_T])


def _table(options: options_lib.EngineOptions, pages: list[int]) -> np.ndarray:
  """Returns a session's pages, its last one repeated to the table's length.

  Attention reads as many pages as the longest row has, and masks the excess of
  shorter rows. Pages of another session would not do: values there that are not
  finite would spread despite the mask.
  """
  missing = options.table_len - len(pages)
  return np.array(pages + pages[-1:] * missing, np.int32)


def _split(rows_BW: jax.Array, widths: tuple[int, ...]) -> list[jax.Array]:
  return jnp.split(rows_BW, np.cumsum(widths)[:-1], axis=1)


class State(NamedTuple):
  """Per-row state of decode, kept on the device between dispatches."""

  tokens_B: Any  # int32 tokens sampled last, not yet consumed
  positions_B: Any  # int32 absolute positions of these tokens
  remaining_B: Any  # int32 number of tokens to sample; 0 leaves a row alone


class Programs(NamedTuple):
  """Compiled programs of one (config, options), for each number of rows."""

  # (weights, cache, rows_BW) -> (cache, (finite_B, routes_MBTA | None))
  extend: Callable[..., Any]
  # (weights, cache, rows_BW, State, bias_BV | None, truncate) ->
  # (cache, State, Sampled)
  decode: Callable[..., Any]
  # Number of traces of each program, by name and rows.
  traces: collections.Counter[str]


def build(
  config: config_lib.ModelConfig,
  options: options_lib.EngineOptions,
  place: placing.EnginePlace,
) -> Programs:
  """Returns the programs, shared by every engine of the same shapes."""
  # Options that only the host reads change no program.
  on_host = {'devices': 1, 'share_prefixes': True, 'on_swap': options_lib.KEEP}
  return _build(config, dataclasses.replace(options, **on_host), place)


@functools.lru_cache(maxsize=8)
def _build(config, options, place) -> Programs:
  traces: collections.Counter[str] = collections.Counter()
  run = functools.partial(forward.forward, config=config, plan=place.plan)

  def extend(weights, cache, rows_BW):
    """Consumes a chunk of context."""
    traces[f'extend {len(rows_BW)}'] += 1
    parts = _split(rows_BW, extend_widths(options))
    table_BP, position_B1, first_B1, end_B1, tokens_BT = parts
    columns_T = jnp.arange(options.prefill_chunk, dtype=jnp.int32)
    valid_BT = (columns_T >= first_B1) & (columns_T < end_B1)
    hidden_BTD, ids_MBTA, cache = run(
      weights, cache, tokens_BT, valid_BT, position_B1 + columns_T, table_BP
    )
    # One NaN spoils its whole chunk, masked or not: zero times NaN is NaN.
    finite_B = (jnp.isfinite(hidden_BTD).all(-1) | ~valid_BT).all(-1)
    return cache, (finite_B, ids_MBTA if options.record_routes else None)

  def decode(weights, cache, rows_BW, state, bias_BV, truncate):
    words = ' truncating' * truncate + ' guided' * (bias_BV is not None)
    traces[f'decode {len(rows_BW)}{words}'] += 1
    inputs = (weights, cache, rows_BW, state, bias_BV, truncate)
    return _decode(run, config, options, *inputs)

  pools, whole = place.pools, place.whole
  jit = functools.partial(jax.jit, donate_argnums=1)
  return Programs(
    extend=jit(extend, out_shardings=(pools, whole)),
    decode=jit(decode, out_shardings=(pools, whole, whole), static_argnums=5),
    traces=traces,
  )


def _empty_report(config, options, num_rows: int) -> sessions.Sampled:
  def zeros(dtype, *shape):
    return jnp.zeros((options.decode_steps, *shape), dtype)

  shape_MBA = (config.num_moe_layers, num_rows, config.moe.num_active)
  routes_TMBA = zeros(jnp.uint16, *shape_MBA) if options.record_routes else None
  return sessions.Sampled(
    tokens_TB=zeros(jnp.int32, num_rows) + sessions.NOT_SAMPLED,
    logprobs_TB=zeros(jnp.float32, num_rows),
    raw_logprobs_TB=zeros(jnp.float32, num_rows),
    top_ids_TBX=zeros(jnp.int32, num_rows, options.num_top),
    top_logprobs_TBX=zeros(jnp.float32, num_rows, options.num_top),
    expert_ids_TMBA=routes_TMBA,
  )


def _decode(
  run, config, options, weights, cache, rows_BW, state, bias_BV, truncate
):
  """Samples up to `decode_steps` tokens per row without the host.

  With a bias, which depends on the token before, it is a single token.
  """
  parts = _split(rows_BW, decode_widths(options))
  table_BP, stop_tokens_BX, keys_B2, floats_B3, top_ks_B1, used_B1 = parts
  floats_B3 = jax.lax.bitcast_convert_type(floats_B3, jnp.float32)
  settings = sampling.Settings(
    keys_B2=jax.lax.bitcast_convert_type(keys_B2, jnp.uint32),
    temperatures_B=floats_B3[:, 0],
    top_ps_B=floats_B3[:, 1],
    top_ks_B=top_ks_B1[:, 0],
    min_ps_B=floats_B3[:, 2],
  )
  # Finished rows idle until the host reads the report: at most a quarter may.
  min_active = jnp.maximum(used_B1.sum() * 3 // 4, 1)
  most = options.decode_steps if bias_BV is None else 1

  def goes_on(carry):
    step, _, state, _ = carry
    is_busy = (state.remaining_B > 0).sum() >= min_active
    return (step < most) & is_busy

  def one_token(carry):
    step, cache, state, report = carry
    active_B = state.remaining_B > 0
    hidden_BTD, ids_MBTA, cache = run(
      weights,
      cache,
      state.tokens_B[:, None],
      active_B[:, None],
      jnp.where(active_B, state.positions_B, 0)[:, None],
      table_BP,
    )
    logits_BV = forward.logits(weights, hidden_BTD, config)[:, 0]
    drawn = sampling.draw(
      settings,
      state.positions_B + 1,
      logits_BV,
      bias_BV,
      truncate=truncate,
      numerics=config.numerics,
    )
    finite_B = jnp.isfinite(drawn.raw_logprobs_B)
    tokens_B = jnp.where(finite_B, drawn.tokens_B, sessions.NOT_FINITE)
    top_logprobs_BX, top_ids_BX = _top(logits_BV, options.num_top)
    sampled = sessions.Sampled(
      tokens_TB=jnp.where(active_B, tokens_B, sessions.NOT_SAMPLED),
      logprobs_TB=drawn.logprobs_B,
      raw_logprobs_TB=drawn.raw_logprobs_B,
      top_ids_TBX=top_ids_BX,
      top_logprobs_TBX=top_logprobs_BX,
      expert_ids_TMBA=ids_MBTA[:, :, 0] if options.record_routes else None,
    )
    report = jax.tree.map(
      lambda whole, part: jax.lax.dynamic_update_index_in_dim(
        whole, part.astype(whole.dtype), step, axis=0
      ),
      report,
      sampled,
    )
    stopped_B = (drawn.tokens_B[:, None] == stop_tokens_BX).any(-1)
    state = State(
      tokens_B=jnp.where(active_B, drawn.tokens_B, state.tokens_B),
      positions_B=state.positions_B + active_B,
      remaining_B=jnp.where(
        stopped_B | ~finite_B, 0, jnp.maximum(state.remaining_B - 1, 0)
      ),
    )
    return step + 1, cache, state, report

  report = _empty_report(config, options, len(rows_BW))
  carry = (jnp.int32(0), cache, state, report)
  return jax.lax.while_loop(goes_on, one_token, carry)[1:]


def _top(logits_BV, count):
  """Returns the log-probabilities and ids of the likeliest tokens."""
  if not count:
    shape = (logits_BV.shape[0], 0)
    return jnp.zeros(shape), jnp.zeros(shape, jnp.int32)
  return jax.lax.top_k(jax.nn.log_softmax(logits_BV, axis=-1), count)
