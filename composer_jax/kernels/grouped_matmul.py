"""Rows times the matrix of their group: one function, one VJP, per backend.

`jax.lax.ragged_dot` is a dense product over all groups on CPU and on NVIDIA
(E times the work), so it is used on TPU only, where XLA has a kernel for it.

'blocked' (CPU and reference): a loop over blocks of `block` rows of one group,
with a trip count that depends on the data, so work follows the rows that exist
and a step reads only the matrices of groups that have rows. Blocks start where
their group starts and are computed in order: the rows at the end of a block
that belong to the next group are overwritten by the next group's block. Each
row is computed inside a product of fixed shape, so its bits do not depend on
how many rows its group has or which other groups exist.
'gathered' (GPU): rows padded to blocks, one batched product.
'ragged' (TPU): `jax.lax.ragged_dot`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

BACKENDS = ('blocked', 'gathered', 'ragged')
# Inputs up to this many rows are decode steps: few rows per group, so small
# blocks waste less; larger inputs amortise reading the matrix over more rows.
_DECODE_ROWS = 1024
_PLATFORM_BACKENDS = {'cpu': 'blocked', 'gpu': 'gathered', 'tpu': 'ragged'}


def grouped_matmul(
  lhs_YD: jax.Array,
  rhs_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  backend: str = 'auto',
  block: int | None = None,
) -> jax.Array:
  """Multiplies the rows of group e, which are contiguous, by rhs[e].

  Args:
    lhs_YD: rows sorted by group; rows past sum(group_sizes) belong to none.
    rhs_EDF: one matrix per group.
    group_sizes_E: int32 rows of each group, in order.
    backend: one of BACKENDS, or 'auto' for the default platform's.
    block: rows per block; None picks 16 for decode-size inputs, else 64.

  Returns:
    out_YF of lhs's dtype; rows past the groups are exactly zero, in the output
    and in the gradient.
  """
  if backend == 'auto':
    backend = _PLATFORM_BACKENDS[jax.default_backend()]
  if backend not in BACKENDS:
    raise ValueError(
      f'grouped_matmul backend {backend!r} is not one of {BACKENDS}.'
    )
  if block is None:
    block = 16 if lhs_YD.shape[0] <= _DECODE_ROWS else 64
  return _grouped_matmul(
    lhs_YD, rhs_EDF, group_sizes_E.astype(jnp.int32), backend, block
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_matmul(lhs_YD, rhs_EDF, group_sizes_E, backend, block):
  forward = {
    'blocked': _blocked,
    'gathered': _gathered,
    'ragged': _ragged,
  }[backend]
  return forward(lhs_YD, rhs_EDF, group_sizes_E, block)


def _forward(lhs_YD, rhs_EDF, group_sizes_E, backend, block):
  out_YF = _grouped_matmul(lhs_YD, rhs_EDF, group_sizes_E, backend, block)
  return out_YF, (lhs_YD, rhs_EDF, group_sizes_E)


def _backward(backend, block, residuals, d_out_YF):
  lhs_YD, rhs_EDF, group_sizes_E = residuals
  d_lhs_YD = _grouped_matmul(
    d_out_YF, rhs_EDF.swapaxes(1, 2), group_sizes_E, backend, block
  )
  transposed = {
    'blocked': _blocked_transposed,
    'gathered': _gathered_transposed,
    'ragged': _ragged_transposed,
  }[backend]
  d_rhs_EDF = transposed(lhs_YD, d_out_YF, group_sizes_E, block)
  return d_lhs_YD, d_rhs_EDF.astype(rhs_EDF.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def num_blocks(num_rows: int, num_groups: int, block: int) -> int:
  """Blocks that suffice for any sizes: each group wastes less than one."""
  return num_rows // block + num_groups


def schedule(group_sizes_E, num_rows, block):
  """Returns per block its group, first row and row count, and the total."""
  num_groups = group_sizes_E.shape[0]
  blocks_E = (group_sizes_E + block - 1) // block
  last_E = jnp.cumsum(blocks_E)
  first_row_E = jnp.cumsum(group_sizes_E) - group_sizes_E
  index = jnp.arange(num_blocks(num_rows, num_groups, block))
  group = (index[:, None] >= last_E[None, :]).sum(1)
  group = jnp.minimum(group, num_groups - 1)
  within = (index - (last_E - blocks_E)[group]) * block
  rows = jnp.clip(group_sizes_E[group] - within, 0, block)
  # Blocks past the last keep their start inside the padded array.
  start = jnp.clip(first_row_E[group] + within, 0, num_rows)
  return group, start, rows, last_E[-1]


def _mask_rows(out_YF, group_sizes_E):
  inside_Y = jnp.arange(out_YF.shape[0]) < group_sizes_E.sum()
  return jnp.where(inside_Y[:, None], out_YF, 0)


def _slice_rows(array_YD, start, block):
  return jax.lax.dynamic_slice_in_dim(array_YD, start, block)


def _blocked(lhs_YD, rhs_EDF, group_sizes_E, block):
  num_rows = lhs_YD.shape[0]
  group, start, _, total = schedule(group_sizes_E, num_rows, block)
  padded_YD = jnp.pad(lhs_YD, ((0, block), (0, 0)))

  def body(i, out_YF):
    rows_bD = _slice_rows(padded_YD, start[i], block)
    weight_DF = jax.lax.dynamic_index_in_dim(rhs_EDF, group[i], keepdims=False)
    product_bF = jnp.dot(
      rows_bD, weight_DF, preferred_element_type=jnp.float32
    ).astype(out_YF.dtype)
    return jax.lax.dynamic_update_slice_in_dim(out_YF, product_bF, start[i], 0)

  out_YF = jnp.zeros((num_rows + block, rhs_EDF.shape[2]), lhs_YD.dtype)
  out_YF = jax.lax.fori_loop(0, total, body, out_YF)
  return _mask_rows(out_YF[:num_rows], group_sizes_E)


def map_blocks(
  fn: Callable[[Any, jax.Array], jax.Array],
  weights_E: Any,
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
  *,
  block: int,
) -> jax.Array:
  """Returns fn(weights of its group, row) of each row, in blocks of one shape.

  Where 'blocked' is a loop over one product, this is one over any function of
  rows; the bits of a row depend on the row and its group alone.

  Args:
    fn: (weights, rows_bD) -> rows_bD, row by row.
    weights_E: tree of arrays with a leading group axis.
    rows_YD: rows sorted by group; those past the groups become zero.
    group_sizes_E: int32 rows of each group, in order.
    block: rows per call.
  """
  num_rows = rows_YD.shape[0]
  group, start, _, total = schedule(group_sizes_E, num_rows, block)
  padded_YD = jnp.pad(rows_YD, ((0, block), (0, 0)))

  def body(i, out_YD):
    weights = jax.tree.map(
      lambda w: jax.lax.dynamic_index_in_dim(w, group[i], keepdims=False),
      weights_E,
    )
    inputs = (weights, _slice_rows(padded_YD, start[i], block))
    # Barriers: the body must be the same program whatever surrounds it.
    result_bD = jax.lax.optimization_barrier(
      fn(*jax.lax.optimization_barrier(inputs))
    )
    return jax.lax.dynamic_update_slice_in_dim(out_YD, result_bD, start[i], 0)

  out_YD = jax.lax.fori_loop(0, total, body, jnp.zeros_like(padded_YD))
  return _mask_rows(out_YD[:num_rows], group_sizes_E)


def _blocked_transposed(lhs_YD, d_out_YF, group_sizes_E, block):
  """Returns d_rhs_EDF = lhs^T d_out, group by group, in float32."""
  group, start, rows, total = schedule(group_sizes_E, lhs_YD.shape[0], block)
  pad = ((0, block), (0, 0))
  padded_YD, padded_YF = jnp.pad(lhs_YD, pad), jnp.pad(d_out_YF, pad)

  def body(i, d_rhs_EDF):
    rows_bD = _slice_rows(padded_YD, start[i], block)
    d_bF = _slice_rows(padded_YF, start[i], block)
    d_bF = jnp.where(jnp.arange(block)[:, None] < rows[i], d_bF, 0)
    product_DF = jnp.dot(rows_bD.T, d_bF, preferred_element_type=jnp.float32)
    sum_DF = d_rhs_EDF[group[i]] + product_DF
    return jax.lax.dynamic_update_index_in_dim(d_rhs_EDF, sum_DF, group[i], 0)

  shape = (group_sizes_E.shape[0], lhs_YD.shape[1], d_out_YF.shape[1])
  return jax.lax.fori_loop(0, total, body, jnp.zeros(shape, jnp.float32))


def _to_blocks(array_YD, group_sizes_E, block):
  """Returns rows as [blocks, block, D], zero where a block has none."""
  num_rows = array_YD.shape[0]
  group, start, rows, _ = schedule(group_sizes_E, num_rows, block)
  offset_b = jnp.arange(block)
  index = jnp.minimum(start[:, None] + offset_b, num_rows - 1)
  inside = offset_b < rows[:, None]
  blocks = jnp.where(inside[..., None], array_YD[index], 0)
  return blocks, group, jnp.where(inside, index, num_rows)


def _gathered(lhs_YD, rhs_EDF, group_sizes_E, block):
  blocks, group, index = _to_blocks(lhs_YD, group_sizes_E, block)
  product = jnp.einsum(
    'xbD,xDF->xbF',
    blocks,
    rhs_EDF[group],
    preferred_element_type=jnp.float32,
  ).astype(lhs_YD.dtype)
  out_YF = jnp.zeros((lhs_YD.shape[0], rhs_EDF.shape[2]), lhs_YD.dtype)
  return out_YF.at[index].set(product, mode='drop', unique_indices=False)


def _gathered_transposed(lhs_YD, d_out_YF, group_sizes_E, block):
  lhs, group, _ = _to_blocks(lhs_YD, group_sizes_E, block)
  d_out, _, _ = _to_blocks(d_out_YF, group_sizes_E, block)
  product = jnp.einsum(
    'xbD,xbF->xDF', lhs, d_out, preferred_element_type=jnp.float32
  )
  return jax.ops.segment_sum(product, group, group_sizes_E.shape[0])


def _ragged(lhs_YD, rhs_EDF, group_sizes_E, block):
  del block
  out_YF = jax.lax.ragged_dot(lhs_YD, rhs_EDF, group_sizes_E)
  # Kernels leave the rows past the groups unwritten.
  return _mask_rows(out_YF, group_sizes_E)


def _ragged_transposed(lhs_YD, d_out_YF, group_sizes_E, block):
  del block
  dims = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  return jax.lax.ragged_dot_general(
    lhs_YD,
    d_out_YF,
    group_sizes_E,
    dims,
    preferred_element_type=jnp.float32,
  )
