"""The compiled programs of the engine: extend (prefill) and decode.

Their shapes are static and they donate the cache, so each is compiled once for
each number of rows. What a session sees of them depends on the session alone:
a context token's column in its chunk is its absolute position modulo the chunk,
every token is sampled by `decode`, and no arithmetic mixes rows.

The host sends the rows of a dispatch as one array of int32 words: many small
arrays would cost more than a small model's step.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import records
from composer_jax.models import config as config_lib
from composer_jax.rollout import forward, placing, sampling, sessions
from composer_jax.rollout import options as options_lib

EngineOptions = options_lib.EngineOptions


def decode_row(options: EngineOptions) -> np.dtype:
  """What decode reads of a row; all zero for one that is not used."""
  return np.dtype(
    [
      ('table', np.int32, (options.table_len,)),
      ('stop_tokens', np.int32, (options.max_stop_tokens,)),
      ('key', np.uint32, (2,)),
      ('temperature', np.float32),
      ('top_p', np.float32),
      ('min_p', np.float32),
      ('top_k', np.int32),
      ('used', np.int32),
    ]
  )


def extend_row(options: EngineOptions) -> np.dtype:
  """What extend reads of a row; all zero for one that is not used.

  The position of its first column is a multiple of the chunk; the columns
  first..end - 1 are in use.
  """
  return np.dtype(
    [
      ('table', np.int32, (options.table_len,)),
      *((name, np.int32) for name in ('position', 'first', 'end')),
      ('tokens', np.int32, (options.prefill_chunk,)),
    ]
  )


def pack_decode(
  row: np.ndarray, pages: list[int], request: records.SampleRequest
) -> None:
  """Writes a request into a row of zeros of type `decode_row`."""
  fill_table(row['table'], pages)
  row['stop_tokens'] = -1
  row['stop_tokens'][: len(request.stop_tokens)] = request.stop_tokens
  row['key'] = sampling.key_of(request.seed)
  for name in ('temperature', 'top_p', 'min_p'):
    row[name] = getattr(request, name)
  row['top_k'] = min(request.top_k, np.iinfo(np.int32).max)
  row['used'] = 1


def pack_extend(
  row: np.ndarray, pages: list[int], start: int, tokens_T: np.ndarray
) -> None:
  """Writes a chunk from position `start` on into one of type `extend_row`."""
  first = start % len(row['tokens'])
  end = first + len(tokens_T)
  fill_table(row['table'], pages)
  row['position'], row['first'], row['end'] = start - first, first, end
  row['tokens'][first:end] = tokens_T


def fill_table(table_P: np.ndarray, pages: list[int]) -> None:
  """Writes a session's pages, and its last one wherever it has none.

  Attention goes as far as the longest row and masks what a shorter one must not
  see. It may see no page of another session all the same: what is not finite
  there would be so here, masked or not.
  """
  table_P[: len(pages)] = pages
  table_P[len(pages) :] = pages[-1]


def words(rows: np.ndarray) -> np.ndarray:
  """Returns packed rows as rows_BW of int32 words."""
  return rows.view(np.int32).reshape(len(rows), -1)


def _unpack(rows_BW: jax.Array, row: np.dtype) -> dict[str, jax.Array]:
  fields: Any = row.fields
  parts = {}
  for name, (dtype, offset) in fields.items():
    first, size = offset // 4, dtype.itemsize // 4
    part = rows_BW[:, first : first + size].reshape(-1, *dtype.shape)
    parts[name] = jax.lax.bitcast_convert_type(part, dtype.base)
  return parts


class State(flax.struct.PyTreeNode, kw_only=True):
  """What decode changes of its rows, kept on the device between dispatches.

  Attributes:
    tokens_B: int32 last sampled token, not yet consumed.
    positions_B: int32 its absolute position.
    remaining_B: int32 tokens still to sample; 0 leaves the row alone.
  """

  tokens_B: Any
  positions_B: Any
  remaining_B: Any


class Programs(NamedTuple):
  """What is compiled for one (config, options), for each number of rows.

  Attributes:
    extend: (weights, cache, rows_BW) -> (cache, (finite_B, routes_MBTA | None))
    decode: (weights, cache, rows_BW, State, truncate) -> (cache, State,
      sessions.Sampled)
    traces: times each was traced, by name and rows.
  """

  extend: Callable[..., Any]
  decode: Callable[..., Any]
  traces: collections.Counter[str]


def build(
  config: config_lib.ModelConfig,
  options: EngineOptions,
  place: placing.EnginePlace,
) -> Programs:
  """Returns the programs, shared by every engine of the same shapes."""
  # What the host decides changes no program.
  on_host: Any = {'share_prefixes': True, 'on_swap': options_lib.KEEP}
  options = dataclasses.replace(options, devices=1, **on_host)
  return _build(config, options, place)


@functools.lru_cache(maxsize=8)
def _build(config, options, place) -> Programs:
  traces: collections.Counter[str] = collections.Counter()
  run = functools.partial(forward.forward, config=config, plan=place.plan)

  def extend(weights, cache, rows_BW):
    traces[f'extend {len(rows_BW)}'] += 1
    return _extend(run, options, weights, cache, rows_BW)

  def decode(weights, cache, rows_BW, state, truncate):
    traces[f'decode {len(rows_BW)}' + ' truncating' * truncate] += 1
    inputs = (weights, cache, rows_BW, state, truncate)
    return _decode(run, config, options, *inputs)

  return Programs(
    extend=jax.jit(
      extend, donate_argnums=1, out_shardings=(place.pools, place.whole)
    ),
    decode=jax.jit(
      decode,
      donate_argnums=1,
      static_argnums=4,
      out_shardings=(place.pools, place.whole, place.whole),
    ),
    traces=traces,
  )


def _extend(run, options, weights, cache, rows_BW):
  """Consumes a chunk of context."""
  row = _unpack(rows_BW, extend_row(options))
  columns_T = jnp.arange(options.prefill_chunk, dtype=jnp.int32)
  valid_BT = columns_T >= row['first'][:, None]
  valid_BT &= columns_T < row['end'][:, None]
  positions_BT = row['position'][:, None] + columns_T
  hidden_BTD, ids_MBTA, cache = run(
    weights, cache, row['tokens'], valid_BT, positions_BT, row['table']
  )
  # One bad token spoils its whole chunk: masked or not, zero times it is NaN.
  finite_B = (jnp.isfinite(hidden_BTD).all(-1) | ~valid_BT).all(-1)
  return cache, (finite_B, ids_MBTA if options.record_routes else None)


def _empty_report(config, options, num_rows: int) -> sessions.Sampled:
  shape_TB = (options.decode_steps, num_rows)
  shape_TBX = (*shape_TB, options.num_top)
  shape_MBA = (config.num_moe_layers, num_rows, config.moe.num_active)
  routes_TMBA = jnp.zeros((options.decode_steps, *shape_MBA), jnp.uint16)
  return sessions.Sampled(
    tokens_TB=jnp.full(shape_TB, sessions.NOT_SAMPLED, jnp.int32),
    logprobs_TB=jnp.zeros(shape_TB, jnp.float32),
    raw_logprobs_TB=jnp.zeros(shape_TB, jnp.float32),
    top_ids_TBX=jnp.zeros(shape_TBX, jnp.int32),
    top_logprobs_TBX=jnp.zeros(shape_TBX, jnp.float32),
    expert_ids_TMBA=routes_TMBA if options.record_routes else None,
  )


def _decode(run, config, options, weights, cache, rows_BW, state, truncate):
  """Samples up to `decode_steps` tokens per row without the host."""
  row = _unpack(rows_BW, decode_row(options))
  settings = sampling.Settings(
    keys_B2=row['key'],
    temperatures_B=row['temperature'],
    top_ps_B=row['top_p'],
    top_ks_B=row['top_k'],
    min_ps_B=row['min_p'],
  )
  # Rows that are done idle until the host looks: a quarter may.
  least = jnp.maximum(row['used'].sum() * 3 // 4, 1)

  def going_on(carry):
    step, _, state, _ = carry
    enough = (state.remaining_B > 0).sum() >= least
    return (step < options.decode_steps) & enough

  def one_token(carry):
    step, cache, state, report = carry
    active_B = state.remaining_B > 0
    hidden_BTD, ids_MBTA, cache = run(
      weights,
      cache,
      state.tokens_B[:, None],
      active_B[:, None],
      jnp.where(active_B, state.positions_B, 0)[:, None],
      row['table'],
    )
    logits_BV = forward.logits(weights, hidden_BTD, config)[:, 0]
    drawn = sampling.draw(
      settings,
      state.positions_B + 1,
      logits_BV,
      truncate=truncate,
      numerics=config.numerics,
    )
    finite_B = jnp.isfinite(drawn.raw_logprobs_B)
    told_B = jnp.where(finite_B, drawn.tokens_B, sessions.NOT_FINITE)
    top_logprobs_BX, top_ids_BX = _top(logits_BV, options.num_top)
    sampled = sessions.Sampled(
      tokens_TB=jnp.where(active_B, told_B, sessions.NOT_SAMPLED),
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
    stopped_B = (drawn.tokens_B[:, None] == row['stop_tokens']).any(-1)
    state = State(
      tokens_B=jnp.where(active_B, drawn.tokens_B, state.tokens_B),
      positions_B=state.positions_B + active_B,
      remaining_B=jnp.where(
        stopped_B | ~finite_B, 0, jnp.maximum(state.remaining_B - 1, 0)
      ),
    )
    return step + 1, cache, state, report

  report = _empty_report(config, options, len(rows_BW))
  _, cache, state, report = jax.lax.while_loop(
    going_on, one_token, (jnp.int32(0), cache, state, report)
  )
  return cache, state, report


def _top(logits_BV, count):
  """Returns the log-probabilities and ids of the likeliest tokens."""
  if not count:
    shape = (logits_BV.shape[0], 0)
    return jnp.zeros(shape), jnp.zeros(shape, jnp.int32)
  return jax.lax.top_k(jax.nn.log_softmax(logits_BV, axis=-1), count)
