"""Attention in blocks of keys on GPU: `blocked` as Pallas kernels for Triton.

A program of the grid has one tile of queries and one head, and loops over the
key blocks that the tile sees. The gradient of keys and values has a second
grid, whose programs have one block of keys and one key head, and loop over the
tiles from the first to the last that see the block.

Triton's blocks are powers of two, so heads of other widths are padded in
registers, but not in memory.
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
_LEAST = 16  # Rows or columns of a product.


class _TritonSizes(NamedTuple):
  queries: int
  keys: int
  groups: int
  head_dim: int
  width: int


def _prepare(arrays, visible):
  """Returns the sizes, and (q, k, v, visible) padded to whole blocks."""
  q_BTNH, k_BSKH, v_BSKH = arrays
  least = lambda most, size: min(most, max(_LEAST, pl.next_power_of_2(size)))
  known = _TritonSizes(
    queries=least(QUERIES, q_BTNH.shape[1]),
    keys=least(KEYS, k_BSKH.shape[1]),
    groups=q_BTNH.shape[2] // k_BSKH.shape[2],
    head_dim=q_BTNH.shape[3],
    width=v_BSKH.shape[3],
  )
  q, visible = blocks.pad((q_BTNH, visible), known.queries)
  k, v = blocks.pad((k_BSKH, v_BSKH), known.keys)
  return known, (q, k, v, visible)


def _tiles_of(visible, known, num_blocks):
  """Returns the first and the end of the tiles that see each block."""
  visited_BXS = blocks.visited(visible, known.queries, known.keys, num_blocks)
  tile_X1 = jnp.arange(visited_BXS.shape[1])[:, None]
  last_BS = jnp.where(visited_BXS, tile_X1 + 1, 0).max(1)
  first_BS = jnp.where(visited_BXS, tile_X1, last_BS[:, None]).min(1)
  return first_BS, last_BS


def _load(ref, width):
  """Returns [rows, width] padded with zeros to a power of two."""
  mask = _inside(width)
  return pltriton.load(ref, mask=mask, other=None if mask is None else 0)


def _store(ref, value, width):
  pltriton.store(ref, value.astype(ref.dtype), mask=_inside(width))


def _inside(width):
  """Returns a mask of the columns that exist; None if none are padded."""
  padded = pl.next_power_of_2(width)
  return None if padded == width else (jnp.arange(padded) < width)[None, :]


def _scores(q_XH, k_SH, seen, block):
  """Returns scores [queries, keys] and a mask of the visible ones."""
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

  state = blocks.met_none((known.queries, pl.next_power_of_2(known.width)))
  state = lax.fori_loop(first[0], last[0], visit, state)
  out_XH, top[...], log[...] = blocks.finish(state)
  _store(out, out_XH, known.width)


def _gradients(q_XH, k_SH, v_SH, d_out_XH, seen, rows, block):
  """Returns the weights and the scores' gradient [queries, keys]."""
  weights_XS, d_scores_XS = blocks.weights_and_gradient(
    *_scores(q_XH, k_SH, seen, block),
    pltriton.dot(d_out_XH, v_SH.T),
    *(row_X[:, None] for row_X in rows),
  )
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


def _call(kernel, known, inputs, outputs, widths, by_query=(), by_block=False):
  """Runs a kernel of (first, last, start, end, q, k, v, *by_query, *outputs).

  References first and last bound a program's loop. The grid is (tile, row,
  head), or (block, row, key head) with `by_block`.
  """
  q, k, v, seen = inputs
  (batch, length, heads, _), (_, num_keys, kv_heads, _) = q.shape, k.shape
  part = lambda size: lambda x: _spec(x, size, None, lambda i, n: (i, n))
  if by_block:
    num_blocks = num_keys // known.keys
    grid = num_blocks, batch, kv_heads
    ranges = _tiles_of(seen, known, num_blocks)
    of_output = of_key = part(known.keys)
    # All query heads of the key head.
    of_query = lambda x: _spec(x, length, known.groups, lambda _, n: (0, n))
  else:
    grid = length // known.queries, batch, heads
    ranges = blocks.ranges(seen, known.queries, known.keys)
    of_output = of_query = part(known.queries)
    of_key = lambda x: _spec(
      x, num_keys, None, lambda _, n: (0, n // known.groups)
    )
  arrays = *ranges, *seen, q, k, v, *by_query
  return pl.pallas_call(
    functools.partial(kernel, known=known),
    grid=grid,
    in_specs=[
      *map(part(1), ranges),
      *map(of_query, (*seen, q)),
      *map(of_key, (k, v)),
      *map(of_query, by_query),
    ],
    out_specs=[*map(of_output, outputs)],
    out_shape=outputs,
    compiler_params=pltriton.CompilerParams(
      num_warps=4 if known.head_dim <= 64 else 8, num_stages=2
    ),
    interpret=platforms.current() != 'gpu',
    name=kernel.__name__.strip('_'),
    cost_estimate=blocks.cost(
      (batch, heads, length, num_keys), widths, (arrays, outputs)
    ),
  )(*arrays)


def _spec(array, length, heads, place):
  """Returns the spec of a block of an array [row, place(, head(, width))].

  A block has `length` places and `heads` heads (None: one, without its axis);
  `place` maps a program's (tile or block, head) to the array's.
  """
  wide = pl.next_power_of_2(array.shape[3]) if array.ndim == 4 else None
  shape = (None, length, heads, wide)[: array.ndim]

  def index(i, b, n):
    part, head = place(i, n)
    return (b, part, head, 0)[: array.ndim]

  return pl.BlockSpec(shape, index)


def forward(arrays: blocks.Arrays, visible: blocks.Visible) -> blocks.Arrays:
  """Returns the results of `kernels.attention.blocked.forward`."""
  known, inputs = _prepare(arrays, visible)
  q, _, v, _ = inputs
  out = jax.ShapeDtypeStruct((*q.shape[:3], known.width), v.dtype)
  number = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
  outputs, widths = [out, number, number], known.head_dim + known.width
  results = _call(_forward_kernel, known, inputs, outputs, widths)
  length = arrays[0].shape[1]
  out_BTNH, tops_BTN, logs_BTN = (x[:, :length] for x in results)
  return out_BTNH, tops_BTN, logs_BTN


def backward(
  arrays: blocks.Arrays, visible: blocks.Visible, by_query: blocks.Arrays
) -> blocks.Arrays:
  """Returns the results of `kernels.attention.blocked.backward`."""
  known, inputs = _prepare(arrays, visible)
  by_query = blocks.pad(by_query, known.queries)
  q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:3])
  widths = 2 * known.head_dim + known.width
  (d_q,) = _call(_queries_kernel, known, inputs, [q], widths, by_query)
  widths += known.width
  d_k, d_v = _call(
    _keys_kernel, known, inputs, [k, v], widths, by_query, by_block=True
  )
  return d_q, d_k, d_v
