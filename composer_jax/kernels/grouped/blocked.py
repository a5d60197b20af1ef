"""Grouped matmul in plain JAX: loops over pieces of groups. CPU and reference.

Trip counts depend on the data, so work follows the rows that exist and a step
reads only the matrices of groups that have rows. Arrays that a loop writes are
never an operand of a conditional (XLA would copy them whole), which is why each
size of piece has a loop of its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from composer_jax.kernels import linear
from composer_jax.kernels.grouped import schedule

# Contracted axes of rows times matrix [D, F], and of rows times its transpose.
_BY_ROWS = (((1,), (0,)), ((), ()))
_BY_COLUMNS = (((1,), (1,)), ((), ()))


def multiply(
  lhs_YD: jax.Array,
  rhs_EDF: jax.Array,
  group_sizes_E: jax.Array,
  block: int | None = None,
  *,
  transposed: bool = False,
) -> jax.Array:
  """Returns rows times the matrix of their group, zero past the groups.

  Args:
    lhs_YD: rows sorted by group.
    rhs_EDF: one matrix per group.
    group_sizes_E: rows of each group.
    block: as of `kernels.grouped.schedule.sizes`.
    transposed: whether rows are of F and the result of D. The matrix is then
      contracted where it lies; a transposed copy would be of all groups.
  """
  num_rows = lhs_YD.shape[0]
  width = rhs_EDF.shape[1 if transposed else 2]
  out_YF = jnp.zeros((num_rows, width), lhs_YD.dtype)
  if not num_rows:
    return out_YF
  dims = _BY_COLUMNS if transposed else _BY_ROWS

  def body(pieces, i, out_YF):
    group, start, inside_b = locate(pieces, i, num_rows)
    weight_DF = matrix(rhs_EDF, group)
    rows_bD = lax.dynamic_slice_in_dim(lhs_YD, start, pieces.rows)
    product_bF = lax.dot_general(
      rows_bD, weight_DF, dims, preferred_element_type=jnp.float32
    )
    return put_rows(out_YF, product_bF, start, inside_b)

  chosen = schedule.sizes(num_rows, len(rhs_EDF), block)
  loops = schedule.schedule(group_sizes_E, num_rows, chosen)
  return run(body, loops, out_YF)


def multiply_groups(
  lhs_YD: jax.Array,
  d_out_YF: jax.Array,
  group_sizes_E: jax.Array,
  block: int | None = None,
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
  """Returns lhs^T d_out of each group, zero of groups of no rows."""
  num_rows, num_groups = lhs_YD.shape[0], group_sizes_E.shape[0]
  shape = (num_groups, lhs_YD.shape[1], d_out_YF.shape[1])
  d_rhs_EDF = jnp.zeros(shape, jnp.float32)
  if not num_rows:
    return d_rhs_EDF.astype(dtype)

  def body(pieces, i, d_rhs_EDF):
    group, start, inside_b = locate(pieces, i, num_rows)
    rows_bD = lax.dynamic_slice_in_dim(lhs_YD, start, pieces.rows)
    d_bF = lax.dynamic_slice_in_dim(d_out_YF, start, pieces.rows)
    product_DF = linear.weight_gradient(*only(inside_b, rows_bD, d_bF))
    return add_group(d_rhs_EDF, product_DF, group, pieces.is_first)

  chosen = schedule.sizes(num_rows, num_groups, block)
  loops = schedule.schedule(group_sizes_E, num_rows, chosen)
  # Pieces of a group are added in float32.
  return run(body, loops, d_rhs_EDF).astype(dtype)


def run(body: Callable[..., Any], loops: Any, carry: Any) -> Any:
  """Runs body(pieces, i, carry) for each piece of each loop."""
  for pieces in loops:
    step = lambda i, carry, pieces=pieces: body(pieces, i, carry)
    carry = lax.fori_loop(pieces.first, pieces.last, step, carry)
  return carry


def locate(pieces: schedule.Pieces, i: jax.Array, num_rows: int):
  """Returns a piece's group, where to slice, and which sliced rows are its own.

  A slice that would reach past the last row begins earlier.
  """
  group, start = pieces.group_P[i], pieces.start_P[i]
  if pieces.is_full:
    return group, start, None
  at = jnp.minimum(start, num_rows - pieces.rows)
  row_b = at + jnp.arange(pieces.rows)
  return group, at, (row_b >= start) & (row_b < pieces.stop_P[i])


def matrix(rhs_EDF: jax.Array, group: jax.Array) -> jax.Array:
  return lax.dynamic_index_in_dim(rhs_EDF, group, keepdims=False)


def put_rows(out_YF, product_bF, start, inside_b):
  """Returns out with the rows that are the piece's own written."""
  product_bF = product_bF.astype(out_YF.dtype)
  if inside_b is not None:
    there_bF = lax.dynamic_slice_in_dim(out_YF, start, product_bF.shape[0])
    product_bF = jnp.where(inside_b[:, None], product_bF, there_bF)
  return lax.dynamic_update_slice_in_dim(out_YF, product_bF, start, 0)


def only(inside_b, rows_bD, d_bF):
  """Returns both with the rows of others zero, lest NaN times zero be NaN."""
  if inside_b is None:
    return rows_bD, d_bF
  inside_b1 = inside_b[:, None]
  return jnp.where(inside_b1, rows_bD, 0), jnp.where(inside_b1, d_bF, 0)


def add_group(sum_EDF, product_DF, group, is_first: bool):
  """Returns the sum with a piece's product added, or written by the first."""
  if not is_first:
    product_DF = matrix(sum_EDF, group) + product_DF
  return lax.dynamic_update_index_in_dim(sum_EDF, product_DF, group, 0)


def map_blocks(
  fn: Callable[[Any, jax.Array], jax.Array],
  weights_E: Any,
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
  *,
  block: int,
) -> jax.Array:
  """Returns fn(weights of its group, row) of each row, in blocks of one shape.

  The bits of a row depend on the row and its group alone.

  Args:
    fn: (weights, rows_bD) -> rows_bD, row by row.
    weights_E: tree of arrays with a leading group axis.
    rows_YD: rows sorted by group; those past the groups become zero.
    group_sizes_E: int32 rows of each group, in order.
    block: rows per call.
  """
  num_rows = rows_YD.shape[0]
  group_P, start_P, _, total = schedule.blocks(group_sizes_E, num_rows, block)
  padded_YD = jnp.pad(rows_YD, ((0, block), (0, 0)))

  def body(i, out_YD):
    weights = jax.tree.map(
      lambda w: matrix(w, group_P[i]),
      weights_E,
    )
    rows_bD = lax.dynamic_slice_in_dim(padded_YD, start_P[i], block)
    # Barriers: the body must be the same program whatever surrounds it.
    result_bD = lax.optimization_barrier(
      fn(*lax.optimization_barrier((weights, rows_bD)))
    )
    return lax.dynamic_update_slice_in_dim(out_YD, result_bD, start_P[i], 0)

  out_YD = lax.fori_loop(0, total, body, jnp.zeros_like(padded_YD))
  inside_Y = jnp.arange(num_rows) < group_sizes_E.sum()
  return jnp.where(inside_Y[:, None], out_YD[:num_rows], 0)
