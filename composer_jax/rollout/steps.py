"""The compiled programs of the engine: extend (prefill) and decode.

Their shapes are static and they donate the cache, so each is compiled once for
each number of rows. What a session sees of them depends on the session alone:
a context token's column in its chunk is its absolute position modulo the chunk,
every token is sampled by `decode`, and no arithmetic mixes rows.

The host sends one int32 array a dispatch (`DecodeRow`, `ExtendRow`): many small
ones would cost more than a small model's step.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import records
from composer_jax.models import config as config_lib
from composer_jax.models import head
from composer_jax.rollout import forward, placing, sampling, sessions
from composer_jax.rollout import options as options_lib

EngineOptions = options_lib.EngineOptions

# Pages that one call copies or clears.
PAGES_A_CALL = 16


class DecodeRow:
  """Where the parts of a decode row lie in int32 words."""

  def __init__(self, options: EngineOptions):
    self.table = slice(0, options.table_len)
    stop = options.table_len + options.max_stop_tokens
    self.stop_tokens = slice(options.table_len, stop)
    self.key = slice(stop, stop + 2)
    self.floats = slice(stop + 2, stop + 5)
    self.top_k, self.used = stop + 5, stop + 6
    self.width = stop + 7

  def pack(
    self, pages: list[int], request: records.SampleRequest
  ) -> np.ndarray:
    row_W = np.zeros(self.width, np.int32)
    _fill_table(row_W[self.table], pages)
    row_W[self.stop_tokens] = -1
    start = self.stop_tokens.start
    stop_tokens = request.stop_tokens
    row_W[start : start + len(stop_tokens)] = stop_tokens
    row_W[self.key] = sampling.key_of(request.seed).view(np.int32)
    floats = (request.temperature, request.top_p, request.min_p)
    row_W[self.floats] = np.array(floats, np.float32).view(np.int32)
    row_W[self.top_k] = min(request.top_k, np.iinfo(np.int32).max)
    row_W[self.used] = 1
    return row_W

  def settings(self, rows_BW: jax.Array) -> sampling.Settings:
    floats = rows_BW[:, self.floats]
    floats_B3 = jax.lax.bitcast_convert_type(floats, jnp.float32)
    return sampling.Settings(
      keys_B2=jax.lax.bitcast_convert_type(rows_BW[:, self.key], jnp.uint32),
      temperatures_B=floats_B3[:, 0],
      top_ps_B=floats_B3[:, 1],
      top_ks_B=rows_BW[:, self.top_k],
      min_ps_B=floats_B3[:, 2],
    )


class ExtendRow:
  """Where the parts of an extend row lie in int32 words.

  Attributes:
    table: pages of the session.
    start: position of the first column, a multiple of the chunk.
    first, end: columns in use.
    tokens: one per column.
  """

  def __init__(self, options: EngineOptions):
    self._chunk = options.prefill_chunk
    self.table = slice(0, options.table_len)
    self.start = options.table_len
    self.first, self.end = self.start + 1, self.start + 2
    self.tokens = slice(self.start + 3, self.start + 3 + self._chunk)
    self.width = self.tokens.stop

  def fill(
    self, row_W: np.ndarray, pages: list[int], start: int, tokens_T: np.ndarray
  ) -> None:
    """Writes a chunk that begins at position `start` into a row of zeros."""
    column = start % self._chunk
    _fill_table(row_W[self.table], pages)
    row_W[self.start] = start - column
    row_W[self.first], row_W[self.end] = column, column + len(tokens_T)
    first = self.tokens.start + column
    row_W[first : first + len(tokens_T)] = tokens_T


def _fill_table(table_P: np.ndarray, pages: list[int]) -> None:
  """Writes a session's pages, and its last one wherever it has none.

  Attention goes as far as the longest row and masks what a shorter one must not
  see. It may see no page of another session all the same: what is not finite
  there would be so here, masked or not.
  """
  table_P[: len(pages)] = pages
  table_P[len(pages) :] = pages[-1]


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


class Report(flax.struct.PyTreeNode, kw_only=True):
  """What decode reports to the host; fields as `sessions.Sampled` has them."""

  tokens_TB: jax.Array
  logprobs_TB: jax.Array
  raw_logprobs_TB: jax.Array
  top_ids_TBX: jax.Array
  top_logprobs_TBX: jax.Array
  expert_ids_TMBA: jax.Array | None


class Steps:
  """The compiled programs of one (config, options).

  Attributes:
    traces: times each program was traced, by name and rows.
  """

  def __init__(
    self,
    config: config_lib.ModelConfig,
    options: EngineOptions,
    place: placing.Place,
  ):
    self.traces: collections.Counter[str] = collections.Counter()
    self._config = config
    self._options = options
    self._place = place
    self._compiled: dict[str, Callable[..., Any]] = {}

  def extend(self, num_rows: int) -> Callable[..., Any]:
    """(weights, cache, rows_BW) -> (cache, (finite_B, routes_MBTA | None))."""
    return self._program(f'extend {num_rows}', _extend, 2)

  def decode(self, num_rows: int, truncate: bool) -> Callable[..., Any]:
    """(weights, cache, rows_BW, State) -> (cache, State, Report)."""
    name = f'decode {num_rows}' + ' truncating' * truncate
    decode = functools.partial(_decode, truncate=truncate)
    return self._program(name, decode, 3)

  def _program(
    self, name: str, function: Callable[..., Any], num_results: int
  ) -> Any:
    if name in self._compiled:
      return self._compiled[name]

    place = self._place
    run = functools.partial(
      forward.forward, config=self._config, plan=place.plan
    )

    def traced(weights, cache, *inputs):
      self.traces[name] += 1
      return function(run, self._config, self._options, weights, cache, *inputs)

    self._compiled[name] = jax.jit(
      traced,
      donate_argnums=(1,),
      out_shardings=(place.pools, *[place.whole] * (num_results - 1)),
    )
    return self._compiled[name]


def build(
  config: config_lib.ModelConfig, options: EngineOptions, place: placing.Place
) -> Steps:
  """Returns the programs, shared by every engine of the same shapes."""
  # What the host decides changes no program.
  return _build(config, dataclasses.replace(options, **_HOST_OPTIONS), place)


_HOST_OPTIONS: Any = {'share_prefixes': True, 'on_swap': options_lib.KEEP}


@functools.lru_cache(maxsize=8)
def _build(
  config: config_lib.ModelConfig, options: EngineOptions, place: placing.Place
) -> Steps:
  return Steps(config, options, place)


def _extend(run, config, options, weights, cache, rows_BW):
  """Consumes a chunk of context."""
  del config
  row = ExtendRow(options)
  columns_T = jnp.arange(options.prefill_chunk, dtype=jnp.int32)
  first_B1, end_B1 = rows_BW[:, row.first, None], rows_BW[:, row.end, None]
  valid_BT = (columns_T >= first_B1) & (columns_T < end_B1)
  hidden_BTD, ids_MBTA, cache = run(
    weights,
    cache,
    rows_BW[:, row.tokens],
    valid_BT,
    rows_BW[:, row.start, None] + columns_T,
    rows_BW[:, row.table],
  )
  # One bad token spoils its whole chunk: masked or not, zero times it is NaN.
  finite_B = (jnp.isfinite(hidden_BTD).all(-1) | ~valid_BT).all(-1)
  return cache, (finite_B, ids_MBTA if options.record_routes else None)


def _empty_report(config, options, num_rows: int) -> Report:
  shape_TB = (options.decode_steps, num_rows)
  shape_TBX = (*shape_TB, options.num_top)
  shape_MBA = (config.num_moe_layers, num_rows, config.moe.num_active)
  routes_TMBA = jnp.zeros((options.decode_steps, *shape_MBA), jnp.uint16)
  return Report(
    tokens_TB=jnp.full(shape_TB, sessions.NOT_SAMPLED, jnp.int32),
    logprobs_TB=jnp.zeros(shape_TB, jnp.float32),
    raw_logprobs_TB=jnp.zeros(shape_TB, jnp.float32),
    top_ids_TBX=jnp.zeros(shape_TBX, jnp.int32),
    top_logprobs_TBX=jnp.zeros(shape_TBX, jnp.float32),
    expert_ids_TMBA=routes_TMBA if options.record_routes else None,
  )


def _decode(
  run, config, options, weights, cache, rows_BW, state: State, *, truncate: bool
):
  """Samples up to `decode_steps` tokens per row without the host."""
  row = DecodeRow(options)
  settings = row.settings(rows_BW)
  token_logprobs = functools.partial(_token_logprobs, config.numerics)
  table_BP = rows_BW[:, row.table]
  # Rows that are done idle until the host looks: a quarter may.
  least = jnp.maximum(rows_BW[:, row.used].sum() * 3 // 4, 1)

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
      table_BP,
    )
    logits_BV = forward.logits(weights, hidden_BTD, config)[:, 0]
    drawn = sampling.draw(
      settings,
      state.positions_B + 1,
      logits_BV,
      token_logprobs,
      truncate=truncate,
      numerics=config.numerics,
    )
    finite_B = jnp.isfinite(drawn.raw_logprobs_B)
    told_B = jnp.where(finite_B, drawn.tokens_B, sessions.NOT_FINITE)
    top_logprobs_BX, top_ids_BX = _top(logits_BV, options.num_top)
    sampled = Report(
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
    stop_tokens = rows_BW[:, row.stop_tokens]
    stopped_B = (drawn.tokens_B[:, None] == stop_tokens).any(-1) | ~finite_B
    state = State(
      tokens_B=jnp.where(active_B, drawn.tokens_B, state.tokens_B),
      positions_B=state.positions_B + active_B,
      remaining_B=jnp.where(
        stopped_B, 0, jnp.maximum(state.remaining_B - 1, 0)
      ),
    )
    return step + 1, cache, state, report

  report = _empty_report(config, options, rows_BW.shape[0])
  _, cache, state, report = jax.lax.while_loop(
    going_on, one_token, (jnp.int32(0), cache, state, report)
  )
  return cache, state, report


def _token_logprobs(numerics, logits_BV, tokens_B, temperatures_B):
  logprobs_BT, _ = head.token_logprobs(
    logits_BV[:, None],
    tokens_B[:, None],
    temperatures_B[:, None],
    numerics=numerics,
  )
  return logprobs_BT[:, 0]


def _top(logits_BV, count):
  """Returns the log-probabilities and ids of the likeliest tokens."""
  if not count:
    shape = (logits_BV.shape[0], 0)
    return jnp.zeros(shape), jnp.zeros(shape, jnp.int32)
  return jax.lax.top_k(jax.nn.log_softmax(logits_BV, axis=-1), count)
