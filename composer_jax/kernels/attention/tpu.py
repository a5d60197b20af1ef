"""Attention in blocks of keys on TPU: `blocked` as Pallas kernels.

The grid is the list of pairs of a tile of queries and a block of keys that
somebody in the tile sees; its length depends on the data, so what nobody sees
costs nothing, not even an empty step. Scores lie with keys along sublanes and
queries along lanes: what belongs to a query, its range of keys, the largest
score and the logarithm of the sum, is then one row, and every reduction is over
sublanes. Products that would need a transpose get an operand that XLA has
transposed outside.

The backward pass visits the pairs twice: tile by tile for the queries, block by
block for keys and values.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from composer_jax.kernels.attention import blocks

# Queries of a tile, and keys of a block, at most.
BLOCK = 512
_LANES = 128
_MASKED = -1e30
# Plain and with the right side transposed.
_NN = (((1,), (0,)), ((), ()))
_NT = (((1,), (1,)), ((), ()))


class _Sizes(NamedTuple):
  """What a call's kernels know of it."""

  queries: int
  keys: int
  groups: int
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
    is_interpreted: computes without a TPU, slowly.
  """
  results, _ = _attend_forward(q_BTNH, k_BSKH, v_BSKH, visible, is_interpreted)
  return results


def block_size(length: int) -> int:
  """Returns the queries of a tile, or keys of a block, for a length."""
  return min(BLOCK, -(-length // _LANES) * _LANES)


def _prepare(arrays, visible, is_interpreted):
  """Returns sizes, arrays by head padded to whole blocks, and a table."""
  q_BTNH, k_BSKH, v_BSKH = arrays
  sizes = _Sizes(
    block_size(q_BTNH.shape[1]),
    block_size(k_BSKH.shape[1]),
    q_BTNH.shape[2] // k_BSKH.shape[2],
    is_interpreted,
  )
  arrays = (
    _by_head(q_BTNH, sizes.queries),
    _by_head(k_BSKH, sizes.keys),
    _by_head(v_BSKH, sizes.keys),
  )
  visible = blocks.pad(visible, arrays[0].shape[2])
  num_blocks = arrays[1].shape[2] // sizes.keys
  visited_BXX = blocks.visited(visible, sizes.queries, sizes.keys, num_blocks)
  seen = tuple(x[:, None] for x in visible)
  return sizes, arrays, seen, visited_BXX


def _by_head(x_BTNH, multiple):
  missing = -x_BTNH.shape[1] % multiple
  x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, missing), (0, 0), (0, 0)))
  return x_BTNH.swapaxes(1, 2)


def _from_heads(x_BNTH, length):
  return x_BNTH.swapaxes(1, 2)[:, :length]


def _turned(x_BNTH):
  return x_BNTH.swapaxes(2, 3)


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _dot(left, right, dims):
  # Six passes of bfloat16 for float32, whose products are otherwise of one.
  precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
  return lax.dot_general(
    left, right, dims, precision=precision, preferred_element_type=jnp.float32
  )


def _scores(q_ref, k_ref, start_ref, end_ref, block):
  """Returns scores [keys, queries], masked."""
  scores_SX = _dot(k_ref[0, 0], q_ref[0, 0], _NT)
  key_SX = block * scores_SX.shape[0] + lax.broadcasted_iota(
    jnp.int32, scores_SX.shape, 0
  )
  sees_SX = (key_SX >= start_ref[0]) & (key_SX < end_ref[0])
  return jnp.where(sees_SX, scores_SX, _MASKED)


def _forward_kernel(
  pairs, start, end, q, k, v_turned, out, top, log, sums, top_now, total
):
  """Meets one block of keys; sums [W, queries], the rest [1, queries]."""
  step = pl.program_id(1)

  @pl.when(pairs.is_first[step] == 1)
  def _():
    sums[...] = jnp.zeros_like(sums)
    top_now[...] = jnp.full_like(top_now, _MASKED)
    total[...] = jnp.zeros_like(total)

  scores_SX = _scores(q, k, start, end, pairs.inner[step])
  before, now = top_now[...], scores_SX.max(0, keepdims=True)
  now = jnp.maximum(before, now)
  weights_SX = jnp.exp(scores_SX - now)
  shrink = jnp.exp(before - now)
  new = _dot(v_turned[0, 0], weights_SX.astype(v_turned.dtype), _NN)
  sums[...] = sums[...] * shrink + new
  total[...] = total[...] * shrink + weights_SX.sum(0, keepdims=True)
  top_now[...] = now

  @pl.when(pairs.is_last[step] == 1)
  def _():
    # See `kernels.attention.blocked` on those that see nothing.
    sees = top_now[...] > _MASKED
    factor = jnp.where(sees, 1 / total[...], 0)
    out[0, 0] = (sums[...] * factor).astype(out.dtype)
    top[0, 0] = top_now[...]
    log[0, 0] = jnp.where(sees, top_now[...] + jnp.log(total[...]), 0)


def _weights(refs, block):
  """Returns weights and the scores' gradient, [keys, queries] each."""
  start, end, q, k, v, d_out, log, mean = refs
  scores_SX = _scores(q, k, start, end, block)
  weights_SX = jnp.exp(scores_SX - log[0, 0])
  d_weights_SX = _dot(v[0, 0], d_out[0, 0], _NT)
  d_scores_SX = weights_SX * (d_weights_SX - mean[0, 0])
  return weights_SX.astype(q.dtype), d_scores_SX.astype(q.dtype)


def _queries_kernel(pairs, *refs):
  """Adds one block's part to a tile's gradient [H, queries]."""
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
  """Adds the part of one tile and one of its heads to a block's gradients."""
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
  """Which blocks of arrays a step has.

  Attributes:
    sizes: of the call.
    by_block: steps are (key head, pair, head of its group), and the outer one
      of a pair is a block; else they are (query head, pair), and it is a tile.
  """

  sizes: _Sizes
  by_block: bool

  def _at(self, *step):
    pairs = blocks.Pairs(*step[-len(blocks.Pairs._fields) :])
    row, outer, inner = (x[step[1]] for x in pairs[:3])
    if self.by_block:
      return row, step[0] * self.sizes.groups + step[2], step[0], inner, outer
    return row, step[0], lax.div(step[0], self.sizes.groups), outer, inner

  def _spec(self, shape, place):
    return pl.BlockSpec(shape, lambda *step: place(*self._at(*step)))

  def seen(self):
    shape = (1, 1, self.sizes.queries)
    return self._spec(shape, lambda row, n, k, tile, block: (row, 0, tile))

  def query(self, width):
    shape = (1, 1, self.sizes.queries, width)
    return self._spec(shape, lambda row, n, k, tile, block: (row, n, tile, 0))

  def query_turned(self, width=1):
    shape = (1, 1, width, self.sizes.queries)
    return self._spec(shape, lambda row, n, k, tile, block: (row, n, 0, tile))

  def key(self, width):
    shape = (1, 1, self.sizes.keys, width)
    return self._spec(shape, lambda row, n, k, tile, block: (row, k, block, 0))

  def key_turned(self, width):
    shape = (1, 1, width, self.sizes.keys)
    return self._spec(shape, lambda row, n, k, tile, block: (row, k, 0, block))

  def call(self, kernel, visited_BXX, inputs, outputs, scratch, widths):
    """Runs a kernel.

    Args:
      kernel: (pairs, *input references, *output references, *scratch).
      visited_BXX: pairs, by row, tile and block.
      inputs: (array, spec) each.
      outputs: (shape and dtype, spec) each.
      scratch: shapes of float32.
      widths: of its products, all together.
    """
    # After what is seen come queries and keys.
    (q, _), (k, _) = inputs[2:4]
    heads = (k if self.by_block else q).shape[1]
    if self.by_block:
      visited_BXX = visited_BXX.swapaxes(1, 2)
    pairs, count = blocks.pairs(visited_BXX)
    grid = (heads, count) + ((self.sizes.groups,) if self.by_block else ())
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)

    def body(*refs):
      num = len(blocks.Pairs._fields)
      kernel(blocks.Pairs(*refs[:num]), *refs[num:])

    # A head is independent of others, and of one the steps are in order.
    order = ('parallel',) + ('arbitrary',) * (len(grid) - 1)
    return pl.pallas_call(
      body,
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(blocks.Pairs._fields),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
      ),
      out_shape=shapes,
      compiler_params=pltpu.CompilerParams(dimension_semantics=order),
      interpret=self.sizes.is_interpreted,
      name=kernel.__name__.strip('_'),
      cost_estimate=blocks.cost(
        (*q.shape[:3], k.shape[2]), widths, (arrays, shapes)
      ),
    )(*pairs, *arrays)


def _attend_forward(q_BTNH, k_BSKH, v_BSKH, visible, is_interpreted):
  arrays = q_BTNH, k_BSKH, v_BSKH
  sizes, (q, k, v), seen, visited_BXX = _prepare(
    arrays, visible, is_interpreted
  )
  grid = _Grid(sizes, by_block=False)
  batch, heads, length, head_dim = q.shape
  width = v.shape[-1]
  row = jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32)
  out, tops, logs = grid.call(
    _forward_kernel,
    visited_BXX,
    [
      *((x, grid.seen()) for x in seen),
      (q, grid.query(head_dim)),
      (k, grid.key(head_dim)),
      (_turned(v), grid.key_turned(width)),
    ],
    [
      (
        jax.ShapeDtypeStruct((batch, heads, width, length), v.dtype),
        grid.query_turned(width),
      ),
      (row, grid.query_turned()),
      (row, grid.query_turned()),
    ],
    [(width, sizes.queries), (1, sizes.queries), (1, sizes.queries)],
    head_dim + width,
  )
  length = q_BTNH.shape[1]
  out_BTNH = _from_heads(_turned(out), length)
  out_BTNH, logs = (
    ad_checkpoint.checkpoint_name(x, 'attention_out') for x in (out_BTNH, logs)
  )
  tops_BTN = tops[:, :, 0].swapaxes(1, 2)[:, :length]
  return (out_BTNH, tops_BTN), (arrays, visible, out_BTNH, logs)


def _attend_backward(is_interpreted, residuals, cotangents):
  arrays, visible, out_BTNH, logs = residuals
  d_out_BTNH, _ = cotangents
  sizes, (q, k, v), seen, visited_BXX = _prepare(
    arrays, visible, is_interpreted
  )
  length, num_keys = arrays[0].shape[1], arrays[1].shape[1]
  # Padded queries see nothing: their rows of scores are masked.
  d_out = _by_head(d_out_BTNH.astype(v.dtype), sizes.queries)
  means_BTN1 = (d_out_BTNH.astype(jnp.float32) * out_BTNH).sum(
    -1, keepdims=True
  )
  means = _turned(_by_head(means_BTN1, sizes.queries))
  head_dim, width = q.shape[-1], v.shape[-1]

  def inputs(grid):
    return [
      *((x, grid.seen()) for x in seen),
      (q, grid.query(head_dim)),
      (k, grid.key(head_dim)),
      (v, grid.key(width)),
      (d_out, grid.query(width)),
      (logs, grid.query_turned()),
      (means, grid.query_turned()),
    ]

  grid = _Grid(sizes, by_block=False)
  (d_q,) = grid.call(
    _queries_kernel,
    visited_BXX,
    [*inputs(grid), (_turned(k), grid.key_turned(head_dim))],
    [(_like(_turned(q)), grid.query_turned(head_dim))],
    [(head_dim, sizes.queries)],
    2 * head_dim + width,
  )
  grid = _Grid(sizes, by_block=True)
  d_k, d_v = grid.call(
    _keys_kernel,
    visited_BXX,
    inputs(grid),
    [(_like(k), grid.key(head_dim)), (_like(v), grid.key(width))],
    [(sizes.keys, head_dim), (sizes.keys, width)],
    2 * head_dim + 2 * width,
  )
  return (
    _from_heads(_turned(d_q), length),
    _from_heads(d_k, num_keys),
    _from_heads(d_v, num_keys),
    None,
  )


attend.defvjp(_attend_forward, _attend_backward)
