"""Attention in blocks of keys on GPU: `blocked` as Pallas kernels.

They go through Triton, whose loops may end where the data say: a program of the
grid is a tile of queries with one head, and visits the key blocks that somebody
in the tile sees; in the backward pass another is a block of keys with one key
head, and visits the tiles from the first to the last that see it.

Heads whose width is no power of two are computed as if they were wider, since
Triton has no other blocks; nothing of that reaches memory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from composer_jax.core import platforms
from composer_jax.kernels.attention import blocks

QUERIES = 64
KEYS = 64
_LEAST = 16  # rows or columns of a product


class _TritonSizes(NamedTuple):
  """What a call's kernels know of it."""

  queries: int
  keys: int
  groups: int
  head_dim: int
  width: int


def _prepare(q_BTNH, k_BSKH, v_BSKH, visible):
  """Returns sizes, arrays of whole blocks, and what their queries see."""
  least = lambda most, length: min(
    most, max(_LEAST, pl.next_power_of_2(length))
  )
  known = _TritonSizes(
    queries=least(QUERIES, q_BTNH.shape[1]),
    keys=least(KEYS, k_BSKH.shape[1]),
    groups=q_BTNH.shape[2] // k_BSKH.shape[2],
    head_dim=q_BTNH.shape[3],
    width=v_BSKH.shape[3],
  )
  q, visible = blocks.pad((q_BTNH, visible), known.queries)
  k, v = blocks.pad((k_BSKH, v_BSKH), known.keys)
  return known, (q, k, v), visible


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
  """Returns scores [queries, keys], and which of them are seen."""
  start_X, end_X = seen
  scores_XS = pltriton.dot(q_XH, k_SH.T)
  key_S = block * k_SH.shape[0] + jnp.arange(k_SH.shape[0])
  sees_XS = (key_S[None] >= start_X[:, None]) & (key_S[None] < end_X[:, None])
  return scores_XS, sees_XS


def _forward_kernel(first, last, start, end, q, k, v, out, top, log, *, known):
  q_XH, seen = _load(q, known.head_dim), (start[...], end[...])

  def visit(block, state):
    at = pl.ds(block * known.keys, known.keys)
    k_SH = _load(k.at[at], known.head_dim)
    v_SH = _load(v.at[at], known.width)
    return blocks.meet(
      state,
      *_scores(q_XH, k_SH, seen, block),
      lambda weights_XS: pltriton.dot(weights_XS.astype(v_SH.dtype), v_SH),
    )

  width = pl.next_power_of_2(known.width)
  state = blocks.met_none((known.queries, width))
  state = lax.fori_loop(first[0], last[0], visit, state)
  out_XH, top[...], log[...] = blocks.finish(state)
  _store(out, out_XH, known.width)


def _gradients(q_XH, k_SH, v_SH, d_out_XH, seen, rows, block):
  """Returns the weights and the scores' gradient [queries, keys]."""
  both = blocks.weights_and_gradient(
    *_scores(q_XH, k_SH, seen, block),
    pltriton.dot(d_out_XH, v_SH.T),
    *(row_X[:, None] for row_X in rows),
  )
  return tuple(x.astype(q_XH.dtype) for x in both)


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
  """Runs a kernel on (array, spec) each; its products are of `widths`."""
  arrays, in_specs = zip(*inputs, strict=True)
  shapes, out_specs = zip(*outputs, strict=True)
  # After two ranges and what is seen come queries and keys.
  q, k = arrays[4:6]
  return pl.pallas_call(
    functools.partial(kernel, known=known),
    grid=grid,
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=shapes,
    compiler_params=pltriton.CompilerParams(
      num_warps=4 if known.head_dim <= 64 else 8, num_stages=2
    ),
    interpret=platforms.current() != 'gpu',
    name=kernel.__name__.strip('_'),
    cost_estimate=blocks.cost(
      (q.shape[0], q.shape[2], q.shape[1], k.shape[1]),
      widths,
      (arrays, shapes),
    ),
  )(*arrays)


def _spec(array, length, heads, place):
  """Returns (array, spec) of `length` places of a row and `heads` heads.

  Args:
    array: [row, place], with heads or without, with a width or without.
    length: of a block.
    heads: None for one of them.
    place: from a program's (tile or block, row, head) to the block and head.
  """
  wide = pl.next_power_of_2(array.shape[3]) if array.ndim == 4 else None
  shape = (None, length, heads, wide)[: array.ndim]

  def index(i, b, n):
    block, head = place(i, n)
    return (b, block, head, 0)[: array.ndim]

  return array, pl.BlockSpec(shape, index)


def _part(length):
  """Returns what makes specs of a program's own tile or block."""
  return lambda array: _spec(array, length, None, lambda i, n: (i, n))


def _row_of_keys(known):
  place = lambda i, n: (0, n // known.groups)
  return lambda array: _spec(array, array.shape[1], None, place)


def _row_of_queries(known):
  """Of all heads of a key head."""
  place = lambda j, k: (0, k)
  return lambda array: _spec(array, array.shape[1], known.groups, place)


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def forward(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  visible: blocks.Visible,
) -> tuple[jax.Array, ...]:
  """Does what `kernels.attention.blocked.forward` does."""
  known, (q, k, v), seen = _prepare(q_BTNH, k_BSKH, v_BSKH, visible)
  batch, length, heads, _ = q.shape
  tile, row = _part(known.queries), _row_of_keys(known)
  out = jax.ShapeDtypeStruct((batch, length, heads, known.width), v.dtype)
  number = jax.ShapeDtypeStruct((batch, length, heads), jnp.float32)
  results = _call(
    _forward_kernel,
    known,
    (length // known.queries, batch, heads),
    [
      *map(_part(1), blocks.ranges(seen, known.queries, known.keys)),
      *map(tile, (*seen, q)),
      *map(row, (k, v)),
    ],
    [*map(tile, (out, number, number))],
    known.head_dim + known.width,
  )
  return tuple(x[:, : q_BTNH.shape[1]] for x in results)


def backward(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  visible: blocks.Visible,
  by_query: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, ...]:
  """Does what `kernels.attention.blocked.backward` does."""
  known, (q, k, v), seen = _prepare(q_BTNH, k_BSKH, v_BSKH, visible)
  by_query = blocks.pad(by_query, known.queries)
  batch, length, heads, _ = q.shape
  num_blocks, kv_heads = k.shape[1] // known.keys, k.shape[2]
  tile, keys = _part(known.queries), _row_of_keys(known)
  (d_q,) = _call(
    _queries_kernel,
    known,
    (length // known.queries, batch, heads),
    [
      *map(_part(1), blocks.ranges(seen, known.queries, known.keys)),
      *map(tile, (*seen, q)),
      *map(keys, (k, v)),
      *map(tile, by_query),
    ],
    [tile(_like(q))],
    2 * known.head_dim + known.width,
  )
  block, queries = _part(known.keys), _row_of_queries(known)
  d_k, d_v = _call(
    _keys_kernel,
    known,
    (num_blocks, batch, kv_heads),
    [
      *map(_part(1), _tiles_of(seen, known, num_blocks)),
      *map(queries, (*seen, q)),
      *map(block, (k, v)),
      *map(queries, by_query),
    ],
    [block(_like(k)), block(_like(v))],
    2 * known.head_dim + 2 * known.width,
  )
  return d_q, d_k, d_v
