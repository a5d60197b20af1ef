"""Attention in blocks of keys on TPU: `blocked` as Pallas kernels.

The grid is the list of pairs of a tile of queries and a key block that it sees,
so invisible blocks cost no step. Scores have keys along sublanes and queries
along lanes: an array by query (range of keys, largest score, logarithm of the
sum) is one row, and every reduction is over sublanes. XLA transposes operands
outside the kernels where a product needs it.

The backward pass visits the pairs twice: tile by tile for queries, block by
block for keys and values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from composer_jax.core import platforms
from composer_jax.kernels.attention import blocks

# Largest number of queries of a tile and of keys of a block.
BLOCK = 512
_LANES = 128
# Dimension numbers of a product, plain and with the right side transposed.
_NN = (((1,), (0,)), ((), ()))
_NT = (((1,), (1,)), ((), ()))


def _prepare(arrays, visible):
  """Returns the grid, padded arrays by head, and the visible ranges."""
  q_BTNH, k_BSKH, v_BSKH = arrays
  size = lambda x: min(BLOCK, -(-x.shape[1] // _LANES) * _LANES)
  groups = q_BTNH.shape[2] // k_BSKH.shape[2]
  queries, keys = size(q_BTNH), size(k_BSKH)
  q = _by_head(q_BTNH, queries)
  k, v = (_by_head(x, keys) for x in (k_BSKH, v_BSKH))
  visible = blocks.pad(visible, queries)
  visited_BXX = blocks.visited(visible, queries, keys, k.shape[2] // keys)
  grid = _Grid(visited_BXX, queries, keys, groups)
  return grid, (q, k, v), tuple(x[:, None] for x in visible)


def _by_head(x_BTNH, multiple):
  return blocks.pad(x_BTNH, multiple).swapaxes(1, 2)


def _turned(x_BNTH):
  return x_BNTH.swapaxes(2, 3)


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _dot(left, right, dims):
  # By default a float32 product would be one pass of bfloat16; this is six.
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  return lax.dot_general(
    left, right, dims, precision=precision, preferred_element_type=jnp.float32
  )


def _scores(q_ref, k_ref, start_ref, end_ref, block):
  """Returns scores [keys, queries] and a mask of the visible ones."""
  scores_SX = _dot(k_ref[0, 0], q_ref[0, 0], _NT)
  key_SX = block * scores_SX.shape[0] + lax.broadcasted_iota(
    jnp.int32, scores_SX.shape, 0
  )
  return scores_SX, (key_SX >= start_ref[0]) & (key_SX < end_ref[0])


def _forward_kernel(
  pairs, start, end, q, k, v_turned, out, top, log, sums, top_now, total
):
  """Adds one block of keys; sums are [W, queries], the rest [1, queries]."""
  step = pl.program_id(1)

  @pl.when(pairs.is_first[step] == 1)
  def _():
    sums[...] = jnp.zeros_like(sums)
    top_now[...] = jnp.full_like(top_now, blocks.MASKED)
    total[...] = jnp.zeros_like(total)

  sums[...], top_now[...], total[...] = blocks.meet(
    (sums[...], top_now[...], total[...]),
    *_scores(q, k, start, end, pairs.inner[step]),
    lambda weights_SX: _dot(
      v_turned[0, 0], weights_SX.astype(v_turned.dtype), _NN
    ),
    axis=0,
  )

  @pl.when(pairs.is_last[step] == 1)
  def _():
    state = sums[...], top_now[...], total[...]
    out_WX, top[0, 0], log[0, 0] = blocks.finish(state)
    out[0, 0] = out_WX.astype(out.dtype)


def _weights(refs, block):
  """Returns the weights and the scores' gradient, both [keys, queries]."""
  start, end, q, k, v, d_out, log, mean = refs
  weights_SX, d_scores_SX = blocks.weights_and_gradient(
    *_scores(q, k, start, end, block),
    _dot(v[0, 0], d_out[0, 0], _NT),
    log[0, 0],
    mean[0, 0],
  )
  return weights_SX.astype(q.dtype), d_scores_SX.astype(q.dtype)


def _queries_kernel(pairs, *refs):
  """Adds one block's part to a tile's d_q [H, queries]."""
  *refs, k_turned, d_q, sums = refs
  step = pl.program_id(1)

  @pl.when(pairs.is_first[step] == 1)
  def _():
    sums[...] = jnp.zeros_like(sums)

  _, d_scores_SX = _weights(refs, pairs.inner[step])
  sums[...] += _dot(k_turned[0, 0], d_scores_SX, _NN)

  @pl.when(pairs.is_last[step] == 1)
  def _():
    d_q[0, 0] = sums[...].astype(d_q.dtype)


def _keys_kernel(pairs, *refs):
  """Adds the part of one tile and one query head to a block's d_k and d_v."""
  *refs, d_k, d_v, k_sums, v_sums = refs
  step, head = pl.program_id(1), pl.program_id(2)

  @pl.when((pairs.is_first[step] == 1) & (head == 0))
  def _():
    k_sums[...] = jnp.zeros_like(k_sums)
    v_sums[...] = jnp.zeros_like(v_sums)

  weights_SX, d_scores_SX = _weights(refs, pairs.outer[step])
  k_sums[...] += _dot(d_scores_SX, refs[2][0, 0], _NN)
  v_sums[...] += _dot(weights_SX, refs[5][0, 0], _NN)

  @pl.when((pairs.is_last[step] == 1) & (head == pl.num_programs(2) - 1))
  def _():
    d_k[0, 0] = k_sums[...].astype(d_k.dtype)
    d_v[0, 0] = v_sums[...].astype(d_v.dtype)


class _Grid(NamedTuple):
  """The grid of a kernel and the specs of its arrays.

  Attributes:
    visited_BXX: true for pairs (row, tile, block) to visit.
    groups: query heads of a key head.
    by_block: true for steps (key head, pair, head of its group) with a block as
      the outer index of a pair; false for steps (query head, pair) with a tile.
  """

  visited_BXX: jax.Array
  queries: int
  keys: int
  groups: int
  by_block: bool = False

  def _at(self, *step):
    """Returns a step's row, (query head, tile) and (key head, block)."""
    pairs = blocks.Pairs(*step[-len(blocks.Pairs._fields) :])
    row, outer, inner = (x[step[1]] for x in pairs[:3])
    if self.by_block:
      query_head = step[0] * self.groups + step[2]
      return row, (query_head, inner), (step[0], outer)
    return row, (step[0], outer), (lax.div(step[0], self.groups), inner)

  def seen(self, array):
    """Returns (array, spec) of a tile of an array [row, 1, query]."""

    def place(*step):
      row, (_, tile), _ = self._at(*step)
      return row, 0, tile

    return array, pl.BlockSpec((1, 1, self.queries), place)

  def part(self, array, *, is_key=False, is_turned=False):
    """Returns (array, spec) of a head's tile of queries or block of keys.

    The array is [row, head, query or key, width], or [row, head, width, query
    or key] if `is_turned`.
    """
    width = array.shape[2 if is_turned else 3]
    length = self.keys if is_key else self.queries
    shape = (1, 1, width, length) if is_turned else (1, 1, length, width)

    def place(*step):
      row, query, key = self._at(*step)
      head, part = key if is_key else query
      return (row, head, 0, part) if is_turned else (row, head, part, 0)

    return array, pl.BlockSpec(shape, place)

  def call(self, kernel, inputs, outputs, scratch, widths):
    """Runs a kernel of references (pairs, *inputs, *outputs, *scratch).

    Inputs and outputs are (array, spec); inputs begin with both ends of the
    visible ranges, q and k. Scratch is shapes of float32 memory.
    """
    (q, _), (k, _) = inputs[2:4]
    if self.by_block:
      pairs, count = blocks.pairs(self.visited_BXX.swapaxes(1, 2))
      grid = k.shape[1], count, self.groups
    else:
      pairs, count = blocks.pairs(self.visited_BXX)
      grid = q.shape[1], count
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)

    def body(*refs):
      kernel(blocks.Pairs(*refs[: len(pairs)]), *refs[len(pairs) :])

    # Heads are independent; the steps of one head run in order.
    order = ('parallel',) + ('arbitrary',) * (len(grid) - 1)
    return pl.pallas_call(
      body,
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(pairs),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
      ),
      out_shape=shapes,
      compiler_params=pltpu.CompilerParams(dimension_semantics=order),
      interpret=platforms.current() != 'tpu',
      name=kernel.__name__.strip('_'),
      cost_estimate=blocks.cost(
        (*q.shape[:3], k.shape[2]), widths, (arrays, shapes)
      ),
    )(*pairs, *arrays)


def forward(arrays: blocks.Arrays, visible: blocks.Visible) -> blocks.Arrays:
  """Returns the results of `kernels.attention.blocked.forward`.

  The logarithms are padded and [row, head, 1, query], for `backward`.
  """
  grid, (q, k, v), seen = _prepare(arrays, visible)
  batch, heads, padded, head_dim = q.shape
  length, width = arrays[0].shape[1], v.shape[-1]
  number = jax.ShapeDtypeStruct((batch, heads, 1, padded), jnp.float32)
  out = jax.ShapeDtypeStruct((batch, heads, width, padded), v.dtype)
  out, tops, logs = grid.call(
    _forward_kernel,
    [
      *map(grid.seen, seen),
      grid.part(q),
      grid.part(k, is_key=True),
      grid.part(_turned(v), is_key=True, is_turned=True),
    ],
    [grid.part(x, is_turned=True) for x in (out, number, number)],
    [(width, grid.queries), (1, grid.queries), (1, grid.queries)],
    head_dim + width,
  )
  out_BTNH = _turned(out).swapaxes(1, 2)[:, :length]
  return out_BTNH, tops[:, :, 0].swapaxes(1, 2)[:, :length], logs


def backward(
  arrays: blocks.Arrays, visible: blocks.Visible, by_query: blocks.Arrays
) -> blocks.Arrays:
  """Returns the results of `kernels.attention.blocked.backward`."""
  grid, (q, k, v), seen = _prepare(arrays, visible)
  d_out_BTNH, logs, means_BTN = by_query
  # Padding needs no care: padded queries see no key.
  d_out = _by_head(d_out_BTNH, grid.queries)
  means = _turned(_by_head(means_BTN[..., None], grid.queries))
  head_dim, width = q.shape[-1], v.shape[-1]

  def inputs(grid):
    return [
      *map(grid.seen, seen),
      grid.part(q),
      *(grid.part(x, is_key=True) for x in (k, v)),
      grid.part(d_out),
      *(grid.part(x, is_turned=True) for x in (logs, means)),
    ]

  (d_q,) = grid.call(
    _queries_kernel,
    [*inputs(grid), grid.part(_turned(k), is_key=True, is_turned=True)],
    [grid.part(_like(_turned(q)), is_turned=True)],
    [(head_dim, grid.queries)],
    2 * head_dim + width,
  )
  grid = grid._replace(by_block=True)
  d_k, d_v = grid.call(
    _keys_kernel,
    inputs(grid),
    [grid.part(_like(x), is_key=True) for x in (k, v)],
    [(grid.keys, head_dim), (grid.keys, width)],
    2 * head_dim + 2 * width,
  )
  d_q, d_k, d_v = (x.swapaxes(1, 2) for x in (_turned(d_q), d_k, d_v))
  return d_q, d_k, d_v
