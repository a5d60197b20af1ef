"""Attention in blocks of keys on GPU: `blocked` as Pallas kernels.

They go through Triton, whose loops may end where the data say: a program of the
grid is a tile of queries with one head, and visits the key blocks that somebody
in the tile sees; in the backward pass another is a block of keys with one key
head, and visits the tiles from the first to the last that see it.

Heads whose width is no power of two are computed as if they were wider, since
Triton has no other blocks; nothing of that reaches memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from composer_jax.core import rounding
from composer_jax.kernels.attention import blocks

QUERIES = 64
KEYS = 64
_LEAST = 16  # rows or columns of a product
_MASKED = -1e30


class _Sizes(NamedTuple):
  """What a call's kernels know of it."""

  queries: int
  keys: int
  groups: int
  head_dim: int
  width: int
  is_interpreted: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  visible: blocks.Visible,
  is_interpreted: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns what `kernels.attention.blocked.attend` does.

  Args:
    q_BTNH: scaled.
    k_BSKH: keys.
    v_BSKH: values, whose width may be another.
    visible: what each query sees.
    is_interpreted: computes without a GPU, slowly.
  """
  results, _ = _attend_forward(q_BTNH, k_BSKH, v_BSKH, visible, is_interpreted)
  return results


def sizes(num_queries: int, num_keys: int) -> tuple[int, int]:
  """Returns the queries of a tile and the keys of a block, of a row's."""

  def least(most, length):
    return min(most, max(_LEAST, pl.next_power_of_2(length)))

  return least(QUERIES, num_queries), least(KEYS, num_keys)


def _padded(x_BT, multiple):
  missing = -x_BT.shape[1] % multiple
  return jnp.pad(x_BT, ((0, 0), (0, missing)) + ((0, 0),) * (x_BT.ndim - 2))


def _prepare(arrays, visible, is_interpreted):
  """Returns sizes, arrays of whole blocks, and the blocks of each tile."""
  q_BTNH, k_BSKH, v_BSKH = arrays
  queries, keys = sizes(q_BTNH.shape[1], k_BSKH.shape[1])
  known = _Sizes(
    queries=queries,
    keys=keys,
    groups=q_BTNH.shape[2] // k_BSKH.shape[2],
    head_dim=q_BTNH.shape[3],
    width=v_BSKH.shape[3],
    is_interpreted=is_interpreted,
  )
  arrays = (
    _padded(q_BTNH, queries),
    *(_padded(x, keys) for x in (k_BSKH, v_BSKH)),
  )
  visible = blocks.pad(visible, arrays[0].shape[1])
  ranges = blocks.ranges(visible, queries, keys)
  return known, arrays, visible, ranges


def _tiles_of(visible, known, num_blocks):
  """Returns the tiles from the first to behind the last that see a block."""
  visited_BXS = blocks.visited(visible, known.queries, known.keys, num_blocks)
  tile_X1 = jnp.arange(visited_BXS.shape[1])[:, None]
  last_BS = jnp.where(visited_BXS, tile_X1 + 1, 0).max(1)
  first_BS = jnp.where(visited_BXS, tile_X1, last_BS[:, None]).min(1)
  return first_BS, last_BS


def _load(ref, width):
  """Returns [rows, width up to a power of two], zero beyond."""
  padded = pl.next_power_of_2(width)
  if padded == width:
    return pltriton.load(ref)
  return pltriton.load(ref, mask=_inside(width), other=0)


def _store(ref, value, width):
  value = value.astype(ref.dtype)
  if value.shape[-1] == width:
    pltriton.store(ref, value)
  else:
    pltriton.store(ref, value, mask=_inside(width))


def _inside(width):
  return (jnp.arange(pl.next_power_of_2(width)) < width)[None, :]


def _scores(q_XH, k_SH, seen, block):
  """Returns scores [queries, keys], masked."""
  start_X, end_X = seen
  scores_XS = pltriton.dot(q_XH, k_SH.T)
  key_S = block * k_SH.shape[0] + jnp.arange(k_SH.shape[0])
  sees_XS = (key_S[None] >= start_X[:, None]) & (key_S[None] < end_X[:, None])
  return jnp.where(sees_XS, scores_XS, _MASKED)


def _forward_kernel(first, last, start, end, q, k, v, out, top, log, *, known):
  q_XH, seen = _load(q, known.head_dim), (start[...], end[...])

  def visit(block, state):
    sums_XH, top_X, total_X = state
    at = pl.ds(block * known.keys, known.keys)
    k_SH = _load(k.at[at], known.head_dim)
    v_SH = _load(v.at[at], known.width)
    scores_XS = _scores(q_XH, k_SH, seen, block)
    now_X = jnp.maximum(top_X, scores_XS.max(1))
    weights_XS = jnp.exp(scores_XS - now_X[:, None])
    shrink_X = jnp.exp(top_X - now_X)
    new_XH = pltriton.dot(weights_XS.astype(v_SH.dtype), v_SH)
    return (
      sums_XH * shrink_X[:, None] + new_XH,
      now_X,
      total_X * shrink_X + weights_XS.sum(1),
    )

  state = (
    jnp.zeros((known.queries, pl.next_power_of_2(known.width)), jnp.float32),
    jnp.full((known.queries,), _MASKED, jnp.float32),
    jnp.zeros((known.queries,), jnp.float32),
  )
  state = lax.fori_loop(first[0], last[0], visit, state)
  sums_XH, top_X, total_X = state
  # See `kernels.attention.blocked` on those that see nothing.
  sees_X = top_X > _MASKED
  factor_X = jnp.where(sees_X, 1 / total_X, 0)
  _store(out, sums_XH * factor_X[:, None], known.width)
  top[...] = top_X
  log[...] = jnp.where(sees_X, top_X + jnp.log(total_X), 0)


def _gradients(q_XH, k_SH, v_SH, d_out_XH, seen, rows, block):
  """Returns the weights and the scores' gradient [queries, keys]."""
  log_X, mean_X = rows
  scores_XS = _scores(q_XH, k_SH, seen, block)
  weights_XS = jnp.exp(scores_XS - log_X[:, None])
  d_weights_XS = pltriton.dot(d_out_XH, v_SH.T)
  d_scores_XS = weights_XS * (d_weights_XS - mean_X[:, None])
  return weights_XS.astype(q_XH.dtype), d_scores_XS.astype(q_XH.dtype)


def _queries_kernel(
  first, last, start, end, q, k, v, d_out, log, mean, d_q, *, known
):
  q_XH, d_out_XH = _load(q, known.head_dim), _load(d_out, known.width)
  seen, rows = (start[...], end[...]), (log[...], mean[...])

  def visit(block, d_q_XH):
    at = pl.ds(block * known.keys, known.keys)
    k_SH = _load(k.at[at], known.head_dim)
    v_SH = _load(v.at[at], known.width)
    _, d_scores_XS = _gradients(q_XH, k_SH, v_SH, d_out_XH, seen, rows, block)
    return d_q_XH + pltriton.dot(d_scores_XS, k_SH)

  zeros_XH = jnp.zeros(q_XH.shape, jnp.float32)
  d_q_XH = lax.fori_loop(first[0], last[0], visit, zeros_XH)
  _store(d_q, d_q_XH, known.head_dim)


def _keys_kernel(
  first, last, start, end, q, k, v, d_out, log, mean, d_k, d_v, *, known
):
  k_SH, v_SH = _load(k, known.head_dim), _load(v, known.width)
  block = pl.program_id(0)

  def visit(index, state):
    d_k_SH, d_v_SH = state
    tile = first[0] + lax.div(index, known.groups)
    head = lax.rem(index, known.groups)
    at = pl.ds(tile * known.queries, known.queries)
    q_XH = _load(q.at[at, head], known.head_dim)
    d_out_XH = _load(d_out.at[at, head], known.width)
    seen, rows = (start[at], end[at]), (log[at, head], mean[at, head])
    weights_XS, d_scores_XS = _gradients(
      q_XH, k_SH, v_SH, d_out_XH, seen, rows, block
    )
    return (
      d_k_SH + pltriton.dot(d_scores_XS.T, q_XH),
      d_v_SH + pltriton.dot(weights_XS.T, d_out_XH),
    )

  state = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k_SH, v_SH))
  count = (last[0] - first[0]) * known.groups
  d_k_SH, d_v_SH = lax.fori_loop(0, count, visit, state)
  _store(d_k, d_k_SH, known.head_dim)
  _store(d_v, d_v_SH, known.width)


def _call(kernel, known, grid, inputs, outputs, widths):
  """Runs a kernel on (array, block shape, place of a program) each.

  Its products are of rows of `widths` together.
  """
  arrays, specs = [], []
  for array, shape, place in inputs:
    arrays.append(array)
    specs.append(pl.BlockSpec(shape, place))
  # After two ranges and what is seen come queries and keys.
  q, k = arrays[4:6]
  return pl.pallas_call(
    functools.partial(kernel, known=known),
    grid=grid,
    in_specs=specs,
    out_specs=[pl.BlockSpec(shape, place) for _, shape, place in outputs],
    out_shape=[like for like, _, _ in outputs],
    compiler_params=pltriton.CompilerParams(
      num_warps=4 if known.head_dim <= 64 else 8, num_stages=2
    ),
    interpret=known.is_interpreted,
    name=kernel.__name__.strip('_'),
    cost_estimate=blocks.cost(
      (q.shape[0], q.shape[2], q.shape[1], k.shape[1]),
      widths,
      (arrays, [like for like, _, _ in outputs]),
    ),
  )(*arrays)


class _Places(NamedTuple):
  """Block shapes and places of arrays, for programs (tile, row, head)."""

  known: _Sizes

  def range(self, array):
    """One of the numbers [row, tile or block]."""
    return array, (None, 1), lambda i, b, n: (b, i)

  def seen(self, array):
    return array, (None, self.known.queries), lambda i, b, n: (b, i)

  def query(self, array):
    wide = pl.next_power_of_2(array.shape[3])
    shape = (None, self.known.queries, None, wide)
    return array, shape, lambda i, b, n: (b, i, n, 0)

  def number(self, array):
    """One of each query and head."""
    shape = (None, self.known.queries, None)
    return array, shape, lambda i, b, n: (b, i, n)

  def row_of_keys(self, array):
    wide = pl.next_power_of_2(array.shape[3])
    shape = (None, array.shape[1], None, wide)
    return array, shape, lambda i, b, n: (b, 0, n // self.known.groups, 0)

  def key(self, array):
    """A block of them, for programs (block, row, key head)."""
    wide = pl.next_power_of_2(array.shape[3])
    shape = (None, self.known.keys, None, wide)
    return array, shape, lambda j, b, k: (b, j, k, 0)

  def row_of_queries(self, array):
    """With the heads of a key head, or of none."""
    shape = (None, array.shape[1], self.known.groups)[: array.ndim]
    shape += (pl.next_power_of_2(array.shape[3]),) if array.ndim == 4 else ()
    return (
      array,
      shape,
      lambda j, b, k: (b, 0, k, 0)[: array.ndim],
    )


def _like(array: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _attend_forward(q_BTNH, k_BSKH, v_BSKH, visible, is_interpreted):
  arrays = q_BTNH, k_BSKH, v_BSKH
  known, (q, k, v), seen, ranges = _prepare(arrays, visible, is_interpreted)
  batch, length, heads, _ = q.shape
  at = _Places(known)
  out = jax.ShapeDtypeStruct((batch, length, heads, known.width), v.dtype)
  number = jax.ShapeDtypeStruct((batch, length, heads), jnp.float32)
  out, tops, logs = _call(
    _forward_kernel,
    known,
    (length // known.queries, batch, heads),
    [
      *map(at.range, ranges),
      *map(at.seen, seen),
      at.query(q),
      at.row_of_keys(k),
      at.row_of_keys(v),
    ],
    [at.query(out), at.number(number), at.number(number)],
    known.head_dim + known.width,
  )
  length = q_BTNH.shape[1]
  out, logs = (
    ad_checkpoint.checkpoint_name(x[:, :length], 'attention_out')
    for x in (out, logs)
  )
  return (out, tops[:, :length]), (arrays, visible, out, logs)


def _attend_backward(is_interpreted, residuals, cotangents):
  arrays, visible, out, logs = residuals
  d_out, _ = cotangents
  known, (q, k, v), seen, ranges = _prepare(arrays, visible, is_interpreted)
  means = (d_out.astype(jnp.float32) * out).sum(-1)
  d_out = rounding.rounded(d_out, v.dtype)
  d_out, logs, means = (_padded(x, known.queries) for x in (d_out, logs, means))
  batch, length, heads, _ = q.shape
  num_blocks, kv_heads = k.shape[1] // known.keys, k.shape[2]
  at = _Places(known)
  (d_q,) = _call(
    _queries_kernel,
    known,
    (length // known.queries, batch, heads),
    [
      *map(at.range, ranges),
      *map(at.seen, seen),
      at.query(q),
      at.row_of_keys(k),
      at.row_of_keys(v),
      at.query(d_out),
      at.number(logs),
      at.number(means),
    ],
    [at.query(_like(q))],
    2 * known.head_dim + known.width,
  )
  d_k, d_v = _call(
    _keys_kernel,
    known,
    (num_blocks, batch, kv_heads),
    [
      *map(at.range, _tiles_of(seen, known, num_blocks)),
      *map(at.row_of_queries, seen),
      at.row_of_queries(q),
      at.key(k),
      at.key(v),
      *map(at.row_of_queries, (d_out, logs, means)),
    ],
    [at.key(_like(k)), at.key(_like(v))],
    2 * known.head_dim + 2 * known.width,
  )
  num_keys = arrays[1].shape[1]
  return (
    d_q[:, : arrays[0].shape[1]],
    d_k[:, :num_keys],
    d_v[:, :num_keys],
    None,
  )


attend.defvjp(_attend_forward, _attend_backward)
