"""The compiled programs of the engine: extend (prefill) and decode.

They donate the cache, and compile once per number of rows. A session's results
depend on the session alone: a context token's column in its chunk is its
absolute position modulo the chunk, every token is sampled by `decode`, and no
arithmetic mixes rows.

With speculation a pass of `decode` consumes a row's last token and up to
`depth` drafts, and draws a token behind each. A draw depends on its position
and the tokens before it alone, so what is kept, the draws up to the first that
its draft did not foresee, is what passes over single tokens draw, whoever
drafts. Rejected drafts stay in the pages, behind the row's position, where the
next pass writes.

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
from composer_jax.rollout import drafts, forward, placing, sampling, sessions
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
  return (options.table_len, 1, 1, 1, options.prefill_chunk + 1)


def pack_extend(
  options: options_lib.EngineOptions, session: sessions.Session
) -> np.ndarray:
  """Returns a row: pages, three numbers, and the tokens of the next chunk.

  The numbers are the first column's position, and the token columns' range. The
  token that follows the chunk stands behind it, for heads.
  """
  start, end = session.chunk(options.prefill_chunk)
  first = start % options.prefill_chunk
  numbers = np.array([start - first, first, first + end - start], np.int32)
  columns_T = np.zeros(options.prefill_chunk + 1, np.int32)
  columns_T[first : numbers[2] + 1] = session.tokens_T[start : end + 1]
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
  # Drafts of heads, which follow the token sampled last; None without.
  drafts_BK: Any = None
  # Tokens up to the one sampled last, for drafts by n-grams; None without.
  history_BS: Any = None


# (table, history_BS, positions_B, depth) -> drafts_BK, as `drafts.by_ngrams`.
Draft = Callable[..., Any]


class Programs(NamedTuple):
  """Compiled programs of one (config, options), for each number of rows."""

  # (weights, cache, rows_BW) ->
  # (cache, (finite_B, routes_MBTA | None, drafts_BK | None))
  extend: Callable[..., Any]
  # (weights, cache, rows_BW, State, bias_BV | None, table | None, truncate,
  # depth) -> (cache, State, Sampled)
  decode: Callable[..., Any]
  # Number of traces of each program, by name and rows.
  traces: collections.Counter[str]


def build(
  config: config_lib.ModelConfig,
  options: options_lib.EngineOptions,
  place: placing.EnginePlace,
  draft: Draft = drafts.by_ngrams,
) -> Programs:
  """Returns the programs, shared by every engine of the same shapes."""
  # Options that only the host reads change no program.
  on_host: dict[str, Any] = {'devices': 1, 'share_prefixes': True}
  on_host['on_swap'] = options_lib.KEEP
  if options.speculation.drafter != 'heads':
    on_host['speculation'] = options_lib.Speculation()
  return _build(config, dataclasses.replace(options, **on_host), place, draft)


@functools.lru_cache(maxsize=8)
def _build(config, options, place, draft) -> Programs:
  traces: collections.Counter[str] = collections.Counter()
  run = functools.partial(forward.forward, config=config, plan=place.plan)
  by_heads = _by_heads(config, options, place)

  def extend(weights, cache, rows_BW):
    """Consumes a chunk of context."""
    traces[f'extend {len(rows_BW)}'] += 1
    parts = _split(rows_BW, extend_widths(options))
    table_BP, position_B1, first_B1, end_B1, tokens_BT = parts
    columns_T = jnp.arange(options.prefill_chunk, dtype=jnp.int32)
    valid_BT = (columns_T >= first_B1) & (columns_T < end_B1)
    positions_BT = position_B1 + columns_T
    following_BT = jnp.roll(tokens_BT, -1, axis=1)[:, : len(columns_T)]
    tokens_BT = tokens_BT[:, : len(columns_T)]
    hidden_BTD, ids_MBTA, cache = run(
      weights, cache, tokens_BT, valid_BT, positions_BT, table_BP
    )
    drafts_BK = None
    if by_heads is not None:
      arrays = (hidden_BTD, following_BT, valid_BT, positions_BT, table_BP)
      drafts_BK, cache = by_heads(weights, cache, *arrays, None)
    # One NaN spoils its whole chunk, masked or not: zero times NaN is NaN.
    finite_B = (jnp.isfinite(hidden_BTD).all(-1) | ~valid_BT).all(-1)
    routes_MBTA = ids_MBTA if options.record_routes else None
    return cache, (finite_B, routes_MBTA, drafts_BK)

  def decode(weights, cache, rows_BW, state, bias_BV, table, truncate, depth):
    words = ' truncating' * truncate + ' guided' * (bias_BV is not None)
    words += f' drafting {depth}' * (depth > 0)
    traces[f'decode {len(rows_BW)}{words}'] += 1
    drafters = (functools.partial(draft, table), by_heads)
    inputs = (weights, cache, rows_BW, state, bias_BV, truncate)
    return _decode(run, config, options, (depth, *drafters), *inputs)

  pools, whole = place.pools, place.whole
  jit = functools.partial(jax.jit, donate_argnums=1)
  return Programs(
    extend=jit(extend, out_shardings=(pools, whole)),
    decode=jit(
      decode, out_shardings=(pools, whole, whole), static_argnums=(6, 7)
    ),
    traces=traces,
  )


def _by_heads(config, options, place):
  """Returns (weights, cache, arrays of a chunk) -> (drafts_BK, cache)."""
  if options.speculation.drafter != 'heads':
    return None
  how = {'config': config.precise(), 'plan': place.plan}
  how['depth'] = options.speculation.depth

  def by_heads(weights, cache, *arrays):
    own, pools = cache[: config.num_layers], cache[config.num_layers :]
    drafts_BK, pools = drafts.by_heads(weights, pools, *arrays, **how)
    return drafts_BK, (*own, *pools)

  return by_heads


def _settings(keys_B2, floats_B3, top_ks_B1) -> sampling.Settings:
  floats_B3 = jax.lax.bitcast_convert_type(floats_B3, jnp.float32)
  return sampling.Settings(
    keys_B2=jax.lax.bitcast_convert_type(keys_B2, jnp.uint32),
    temperatures_B=floats_B3[:, 0],
    top_ps_B=floats_B3[:, 1],
    top_ks_B=top_ks_B1[:, 0],
    min_ps_B=floats_B3[:, 2],
  )


def _empty_report(config, options, num_rows: int, width: int):
  def zeros(dtype, *shape):
    return jnp.zeros((options.decode_steps * width, *shape), dtype)

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
  run, config, options, ahead, weights, cache, rows_BW, state, bias_BV, truncate
):
  """Makes up to `decode_steps` passes over the rows without the host.

  With a bias, which depends on the token before, it is a single one. `ahead` is
  the depth, and functions that draft; those of heads if the state has drafts.
  """
  depth, by_ngrams, by_heads = ahead
  table_BP, stop_tokens_BX, *packed, used_B1 = _split(
    rows_BW, decode_widths(options)
  )
  settings = _settings(*packed)
  # Finished rows idle until the host reads the report: at most a quarter may.
  min_active = jnp.maximum(used_B1.sum() * 3 // 4, 1)
  most = options.decode_steps if bias_BV is None else 1
  width = depth + 1
  columns_T = jnp.arange(width, dtype=jnp.int32)
  repeat = functools.partial(jnp.repeat, repeats=width, axis=0)
  of_columns = jax.tree.map(repeat, settings) if depth else settings

  def by_column(x_Z):
    return x_Z.reshape(len(rows_BW), width, *x_Z.shape[1:])

  def goes_on(carry):
    step, _, state, _, _ = carry
    is_busy = (state.remaining_B > 0).sum() >= min_active
    return (step < most) & is_busy

  def one_pass(carry):
    step, cache, state, report, counts_T = carry
    drafts_BK = jnp.zeros((len(rows_BW), 0), jnp.int32)
    # A draft that would be consumed beyond the last token has no page.
    valid_BT = columns_T < state.remaining_B[:, None]
    if depth:
      drafts_BK = state.drafts_BK
      if drafts_BK is None:
        drafts_BK = by_ngrams(state.history_BS, state.positions_B, depth)
      drafts_BK = drafts_BK[:, :depth]
      is_draft_BK = jnp.cumprod(drafts_BK >= 0, axis=1).astype(bool)
      valid_BT = valid_BT.at[:, 1:].set(valid_BT[:, 1:] & is_draft_BK)
    tokens_BT = jnp.append(state.tokens_B[:, None], drafts_BK, axis=1)
    positions_BT = state.positions_B[:, None] + columns_T
    where = (jnp.where(valid_BT, positions_BT, 0), table_BP)
    hidden_BTD, ids_MBTA, cache = run(
      weights,
      cache,
      jnp.maximum(tokens_BT, 0),
      valid_BT,
      *where,
      apart=depth > 0,
    )
    logits_BTV = forward.logits(weights, hidden_BTD, config)
    logits_ZV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
    drawn = sampling.draw(
      of_columns,
      positions_BT.reshape(-1) + 1,
      logits_ZV,
      bias_BV,
      truncate=truncate,
      numerics=config.numerics,
    )
    drawn = jax.tree.map(by_column, drawn)
    finite_BT = jnp.isfinite(drawn.raw_logprobs_B)
    drawn_BT = drawn.tokens_B
    stopped_BT = (drawn_BT[..., None] == stop_tokens_BX[:, None]).any(-1)
    ends_BT = stopped_BT | ~finite_BT
    # The first draw is kept, and another if the one before it was its draft.
    follows_BK = (drawn_BT[:, :depth] == drafts_BK) & ~ends_BT[:, :depth]
    kept_BT = valid_BT.at[:, 1:].set(valid_BT[:, 1:] & follows_BK)
    kept_BT = jnp.cumprod(kept_BT, axis=1).astype(bool)
    count_B = kept_BT.sum(1, dtype=jnp.int32)
    top_logprobs_ZX, top_ids_ZX = _top(logits_ZV, options.num_top)
    words_BT = jnp.where(finite_BT, drawn_BT, sessions.NOT_FINITE)
    swapped = lambda x_BT: jnp.swapaxes(x_BT, 0, 1)
    routes_TMBA = jnp.moveaxis(ids_MBTA, 2, 0)
    sampled = sessions.Sampled(
      tokens_TB=swapped(jnp.where(kept_BT, words_BT, sessions.NOT_SAMPLED)),
      logprobs_TB=swapped(drawn.logprobs_B),
      raw_logprobs_TB=swapped(drawn.raw_logprobs_B),
      top_ids_TBX=swapped(by_column(top_ids_ZX)),
      top_logprobs_TBX=swapped(by_column(top_logprobs_ZX)),
      expert_ids_TMBA=routes_TMBA if options.record_routes else None,
    )
    report = jax.tree.map(
      lambda whole, part: jax.lax.dynamic_update_slice_in_dim(
        whole, part.astype(whole.dtype), step * width, axis=0
      ),
      report,
      sampled,
    )
    last_B1 = jnp.maximum(count_B - 1, 0)[:, None]
    at_last = lambda x_BT: jnp.take_along_axis(x_BT, last_B1, axis=1)[:, 0]
    left_B = jnp.maximum(state.remaining_B - count_B, 0)
    after = State(
      tokens_B=jnp.where(count_B > 0, at_last(drawn_BT), state.tokens_B),
      positions_B=state.positions_B + count_B,
      remaining_B=jnp.where(at_last(ends_BT), 0, left_B),
    )
    if state.drafts_BK is not None and depth:
      arrays = (hidden_BTD, drawn_BT, kept_BT, *where, settings)
      drafts_BK, cache = by_heads(weights, cache, *arrays)
      after = after._replace(drafts_BK=drafts_BK)
    if state.history_BS is not None:
      at_BT = jnp.where(kept_BT, positions_BT + 1, options.max_len)
      set_row = lambda row_S, at_T, new_T: row_S.at[at_T].set(
        new_T, mode='drop'
      )
      history_BS = jax.vmap(set_row)(state.history_BS, at_BT, drawn_BT)
      after = after._replace(history_BS=history_BS)
    # Of rows that had a draft.
    of_drafts_B1 = valid_BT[:, min(depth, 1), None]
    is_count_BT = of_drafts_B1 & (count_B[:, None] == columns_T + 1)
    counts_T += is_count_BT.sum(0, dtype=jnp.int32)
    return step + 1, cache, after, report, counts_T

  report = _empty_report(config, options, len(rows_BW), width)
  carry = (jnp.int32(0), cache, state, report, jnp.zeros(width, jnp.int32))
  carry = jax.lax.while_loop(goes_on, one_pass, carry)
  _, cache, state, report, counts_T = carry
  if depth:
    report = _joined(report).replace(
      counts_X=counts_T, drafts_BK=state.drafts_BK
    )
  return cache, state, report


def _joined(report: sessions.Sampled) -> sessions.Sampled:
  """Moves the tokens of each row together, in their order, to the front."""
  is_gap_TB = report.tokens_TB == sessions.NOT_SAMPLED
  order_TB = jnp.argsort(is_gap_TB, axis=0, stable=True)

  def moved(x):
    shape = [1] * x.ndim
    shape[0], row_axis = len(order_TB), 2 if x.ndim == 4 else 1
    shape[row_axis] = order_TB.shape[1]
    return jnp.take_along_axis(x, order_TB.reshape(shape), axis=0)

  return jax.tree.map(moved, report)


def _top(logits_BV, count):
  """Returns the log-probabilities and ids of the likeliest tokens."""
  if not count:
    shape = (logits_BV.shape[0], 0)
    return jnp.zeros(shape), jnp.zeros(shape, jnp.int32)
  return jax.lax.top_k(jax.nn.log_softmax(logits_BV, axis=-1), count)
