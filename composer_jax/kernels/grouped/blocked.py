"""Grouped products in plain JAX, by pieces of groups: for CPU and as reference.

Trip counts depend on the data, so only matrices of groups with rows are read.
Each size of piece has a loop of its own: a conditional inside one loop would
make XLA copy whole the arrays that the loop writes.

In `grouped_mlp` a piece of an expert's rows passes through both products of
SwiGLU, and through all four of the gradient, while it is in cache. The only
array of hidden width holds the gates and ups, which the gradient needs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import ad_checkpoint, lax

from composer_jax.kernels import linear, swiglu
from composer_jax.kernels.grouped import schedule

# Name of the gates and ups in a policy of remat.
HIDDEN = 'expert_hidden'


def multiply(
  lhs_YD: jax.Array,
  rhs_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  transposed: bool = False,
) -> jax.Array:
  """Returns rows times the matrix of their group, zero past the groups.

  With `transposed`, rows have width F and the result has width D.
  """
  num_rows = len(lhs_YD)

  def body(pieces, i, out_YF):
    group, start, inside_b = _locate(pieces, i, num_rows)
    rows_bD = lax.dynamic_slice_in_dim(lhs_YD, start, pieces.rows)
    product_bF = _dot(rows_bD, _matrix(rhs_EDF, group), transposed)
    return _put_rows(out_YF, product_bF, start, inside_b)

  width = rhs_EDF.shape[1 if transposed else 2]
  out_YF = jnp.zeros((num_rows, width), lhs_YD.dtype)
  return run(body, schedule.schedule(group_sizes_E, num_rows), out_YF)


def multiply_groups(
  lhs_YD: jax.Array,
  d_out_YF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  dtype: jax.typing.DTypeLike,
  sums: jax.Array | None = None,
) -> jax.Array:
  """Returns lhs^T d_out of each group, added to `sums`."""
  num_rows, starts = len(lhs_YD), sums is None

  def body(pieces, i, d_rhs_EDF):
    group, start, inside_b = _locate(pieces, i, num_rows)
    rows_bD = lax.dynamic_slice_in_dim(lhs_YD, start, pieces.rows)
    d_bF = lax.dynamic_slice_in_dim(d_out_YF, start, pieces.rows)
    product_DF = linear.weight_gradient(*_only(inside_b, rows_bD, d_bF))
    is_first = starts and pieces.is_first
    return _add_group(d_rhs_EDF, product_DF, group, is_first)

  if sums is None:
    shape = (len(group_sizes_E), lhs_YD.shape[1], d_out_YF.shape[1])
    # Float32, since the products of a group's pieces are added.
    sums = jnp.zeros(shape, jnp.float32)
  loops = schedule.schedule(group_sizes_E, num_rows)
  return run(body, loops, sums).astype(dtype)


@jax.custom_vjp
def grouped_mlp(
  gate_up_EDX: jax.Array,
  down_EFD: jax.Array,
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
) -> jax.Array:
  """Returns down(swiglu(gate_up(rows))) of each row's group; X is twice F.

  Rows are sorted by group; those past the groups give zeros.
  """
  return mlp_kept(gate_up_EDX, down_EFD, rows_YD, group_sizes_E)[0]


def mlp_kept(
  gate_up_EDX: jax.Array,
  down_EFD: jax.Array,
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns `grouped_mlp`, and the gates and ups of its rows."""
  num_rows, dtype = len(rows_YD), rows_YD.dtype

  def body(pieces, i, carry):
    out_YD, both_YX = carry
    group, start, inside_b = _locate(pieces, i, num_rows)
    rows_bD = lax.dynamic_slice_in_dim(rows_YD, start, pieces.rows)
    both_bX = _dot(rows_bD, _matrix(gate_up_EDX, group)).astype(dtype)
    out_bD = _dot(swiglu.swiglu(both_bX), _matrix(down_EFD, group))
    return (
      _put_rows(out_YD, out_bD, start, inside_b),
      _put_rows(both_YX, both_bX, start, inside_b),
    )

  both_YX = jnp.zeros((num_rows, gate_up_EDX.shape[2]), dtype)
  carry = jnp.zeros_like(rows_YD), both_YX
  loops = schedule.schedule(group_sizes_E, num_rows)
  out_YD, both_YX = run(body, loops, carry)
  return out_YD, ad_checkpoint.checkpoint_name(both_YX, HIDDEN)


def _mlp_forward(*arrays):
  out_YD, both_YX = mlp_kept(*arrays)
  return out_YD, (*arrays, both_YX)


def _mlp_backward(residuals, d_out_YD):
  *weights, rows_YD, group_sizes_E, both_YX = residuals
  d_rows_YD, _, sums = mlp_gradient(
    weights, (rows_YD, d_out_YD, None), group_sizes_E, both_YX=both_YX
  )
  d_gate_up_EDX, d_down_EFD = (
    x.astype(w.dtype) for x, w in zip(sums, weights, strict=True)
  )
  return d_gate_up_EDX, d_down_EFD, d_rows_YD, None


def mlp_gradient(
  weights: Any,
  arrays_Y: Any,
  group_sizes_E: jax.Array,
  sums: Any = None,
  both_YX: jax.Array | None = None,
) -> tuple[jax.Array, Any, Any]:
  """Returns the gradients of `grouped_mlp`'s rows, of gates, and of weights.

  Args:
    weights: gate_up_EDX and down_EFD.
    arrays_Y: rows_YD, d_out_YD and gates_Y, which multiply the outputs, or None
      without gates.
    sums: float32 arrays to which the weights' gradients are added; None starts
      from zero.
    both_YX: gates and ups of the forward pass; None computes them again.
  """
  (gate_up_EDX, down_EFD), (rows_YD, d_out_YD, gates_Y) = weights, arrays_Y
  num_rows, dtype = len(rows_YD), rows_YD.dtype
  starts = sums is None

  def body(pieces, i, carry):
    d_rows_YD, d_gates_Y, (d_gate_up_EDX, d_down_EFD) = carry
    group, start, inside_b = _locate(pieces, i, num_rows)
    cut = lambda x: lax.dynamic_slice_in_dim(x, start, pieces.rows)
    rows_bD, d_out_bD = cut(rows_YD), cut(d_out_YD)
    if both_YX is not None:
      both_bX = cut(both_YX)
    else:
      both_bX = _dot(rows_bD, _matrix(gate_up_EDX, group)).astype(dtype)
    d_hidden_bF = _dot(d_out_bD, _matrix(down_EFD, group), True).astype(dtype)
    hidden_bF = swiglu.swiglu(both_bX)
    if gates_Y is not None:
      gates_b1 = cut(gates_Y)[:, None]
      # The gradient of a gate needs no output.
      d_gates_b1 = jnp.sum(
        hidden_bF * d_hidden_bF, axis=-1, dtype=jnp.float32, keepdims=True
      )
      d_gates_Y = _put_rows(d_gates_Y, d_gates_b1, start, inside_b)
      hidden_bF, d_hidden_bF = (
        (gates_b1 * x).astype(dtype) for x in (hidden_bF, d_hidden_bF)
      )
    hidden_bF, d_both_bX = lax.optimization_barrier(
      (hidden_bF, swiglu.gradient(both_bX, d_hidden_bF))
    )
    d_rows_bD = _dot(d_both_bX, _matrix(gate_up_EDX, group), True)
    # Not `linear.weight_gradient`: XLA would make hidden in the order of the
    # transposed copy, which takes longer than the product.
    hidden_bF, d_out_bD = _only(inside_b, hidden_bF, d_out_bD)
    d_down_FD = jnp.dot(
      hidden_bF.T, d_out_bD, preferred_element_type=jnp.float32
    )
    d_gate_up_DX = linear.weight_gradient(*_only(inside_b, rows_bD, d_both_bX))
    is_first = starts and pieces.is_first
    add = lambda x, y: _add_group(x, y, group, is_first)
    sums = add(d_gate_up_EDX, d_gate_up_DX), add(d_down_EFD, d_down_FD)
    d_rows_YD = _put_rows(d_rows_YD, d_rows_bD, start, inside_b)
    return d_rows_YD, d_gates_Y, sums

  if sums is None:
    sums = tuple(jnp.zeros(w.shape, jnp.float32) for w in weights)
  d_gates_Y = None if gates_Y is None else jnp.zeros((num_rows, 1), jnp.float32)
  carry = jnp.zeros_like(rows_YD), d_gates_Y, sums
  loops = schedule.schedule(group_sizes_E, num_rows)
  d_rows_YD, d_gates_Y, sums = run(body, loops, carry)
  return d_rows_YD, None if d_gates_Y is None else d_gates_Y[:, 0], sums


grouped_mlp.defvjp(_mlp_forward, _mlp_backward)


def _dot(rows_bD, weight_DF, transposed=False):
  dims = (((1,), (1 if transposed else 0,)), ((), ()))
  return lax.dot_general(
    rows_bD, weight_DF, dims, preferred_element_type=jnp.float32
  )


def run(body: Callable[..., Any], loops: Any, carry: Any) -> Any:
  for pieces in loops:
    step = lambda i, carry, pieces=pieces: body(pieces, i, carry)
    carry = lax.fori_loop(pieces.first, pieces.last, step, carry)
  return carry


def _locate(pieces: schedule.Pieces, i: jax.Array, num_rows: int):
  """Returns a piece's group, the start of its slice and its rows in the slice.

  A slice that would reach past the last row begins earlier. The mask of its
  rows is None if the whole slice is the piece's.
  """
  group, start = pieces.group_P[i], pieces.start_P[i]
  if pieces.is_full:
    return group, start, None
  at = jnp.minimum(start, num_rows - pieces.rows)
  row_b = at + jnp.arange(pieces.rows)
  return group, at, (row_b >= start) & (row_b < pieces.stop_P[i])


def _matrix(rhs_EDF: jax.Array, group: jax.Array) -> jax.Array:
  return lax.dynamic_index_in_dim(rhs_EDF, group, keepdims=False)


def _put_rows(out_YF, product_bF, start, inside_b):
  product_bF = product_bF.astype(out_YF.dtype)
  if inside_b is not None:
    there_bF = lax.dynamic_slice_in_dim(out_YF, start, product_bF.shape[0])
    product_bF = jnp.where(inside_b[:, None], product_bF, there_bF)
  return lax.dynamic_update_slice_in_dim(out_YF, product_bF, start, 0)


def _only(inside_b, rows_bD, d_bF):
  """Returns both with zeros in rows of other groups, which may hold NaN."""
  if inside_b is None:
    return rows_bD, d_bF
  inside_b1 = inside_b[:, None]
  return jnp.where(inside_b1, rows_bD, 0), jnp.where(inside_b1, d_bF, 0)


def _add_group(sum_EDF, product_DF, group, is_first: bool):
  if not is_first:
    product_DF = _matrix(sum_EDF, group) + product_DF
  return lax.dynamic_update_index_in_dim(sum_EDF, product_DF, group, 0)


def map_blocks(
  fn: Callable[[Any, jax.Array], jax.Array],
  weights_E: Any,
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
  *,
  block: int,
) -> jax.Array:
  """Returns fn(weights of the row's group, row) for each row.

  The bits of a result depend on its row and group alone.

  Args:
    fn: row-wise function (weights, rows_bD) -> rows_bD.
    weights_E: tree of arrays with a leading group axis.
    rows_YD: rows sorted by group; results of rows past the groups are zero.
    group_sizes_E: int32 rows of each group.
  """

  def one(group, rows_bD):
    weights = jax.tree.map(lambda w: _matrix(w, group), weights_E)
    # Barriers make the body the same program, whatever surrounds it.
    return lax.optimization_barrier(
      fn(*lax.optimization_barrier((weights, rows_bD)))
    )

  out_YD = each_block(one, rows_YD, group_sizes_E, block)[: len(rows_YD)]
  inside_Y = jnp.arange(len(rows_YD)) < group_sizes_E.sum()
  return jnp.where(inside_Y[:, None], out_YD, 0)


def each_block(
  fn: Callable[[jax.Array, jax.Array], jax.Array],
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
  block: int,
) -> jax.Array:
  """Returns fn(group, rows_bD) for blocks of one size.

  The result is one block longer than the rows. Rows past the groups hold
  leftovers of the last block.
  """
  group_P, start_P, _, total = schedule.blocks(
    group_sizes_E, len(rows_YD), block
  )
  # A block may reach past the last row.
  padded_YD = jnp.pad(rows_YD, ((0, block), (0, 0)))

  def body(i, out_YD):
    rows_bD = lax.dynamic_slice_in_dim(padded_YD, start_P[i], block)
    result_bD = fn(group_P[i], rows_bD)
    return lax.dynamic_update_slice_in_dim(out_YD, result_bD, start_P[i], 0)

  return lax.fori_loop(0, total, body, jnp.zeros_like(padded_YD))
