"""The experts' SwiGLU, piece by piece of their rows, for CPU.

`kernels.grouped.blocked` one product after another writes and reads the hidden
rows and their gradients in memory. Here a piece of an expert's rows goes
through both products, and back through all four of the gradient, while it is in
cache: the only array of hidden width is what the gradient needs of the forward
pass, the gates and ups.
"""

import jax
import jax.numpy as jnp
from jax import ad_checkpoint, lax

from composer_jax.kernels import linear, swiglu
from composer_jax.kernels.grouped import blocked, schedule

# Of the forward's result that the gradient reads; for a policy of remat.
HIDDEN = 'expert_hidden'


@jax.custom_vjp
def grouped_mlp(
  gate_up_EDX: jax.Array,
  down_EFD: jax.Array,
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
) -> jax.Array:
  """Returns down(swiglu(gate_up(rows))) of each row's group.

  Args:
    gate_up_EDX: gate and up of each group; X is two times F.
    down_EFD: of each group.
    rows_YD: sorted by group; rows past the groups give zeros.
    group_sizes_E: int32 rows of each group.
  """
  return _forward(gate_up_EDX, down_EFD, rows_YD, group_sizes_E)[0]


def _forward(gate_up_EDX, down_EFD, rows_YD, group_sizes_E):
  num_rows, dtype = len(rows_YD), rows_YD.dtype

  def body(pieces, i, carry):
    out_YD, both_YX = carry
    group, start, inside_b = blocked.locate(pieces, i, num_rows)
    rows_bD = lax.dynamic_slice_in_dim(rows_YD, start, pieces.rows)
    both_bX = _dot(rows_bD, blocked.matrix(gate_up_EDX, group)).astype(dtype)
    out_bD = _dot(swiglu.swiglu(both_bX), blocked.matrix(down_EFD, group))
    return (
      blocked.put_rows(out_YD, out_bD, start, inside_b),
      blocked.put_rows(both_YX, both_bX, start, inside_b),
    )

  both_YX = jnp.zeros((num_rows, gate_up_EDX.shape[2]), dtype)
  carry = jnp.zeros_like(rows_YD), both_YX
  loops = _loops(group_sizes_E, num_rows)
  out_YD, both_YX = blocked.run(body, loops, carry)
  both_YX = ad_checkpoint.checkpoint_name(both_YX, HIDDEN)
  return out_YD, (gate_up_EDX, down_EFD, rows_YD, group_sizes_E, both_YX)


def _backward(residuals, d_out_YD):
  gate_up_EDX, down_EFD, rows_YD, group_sizes_E, both_YX = residuals
  num_rows, dtype = len(rows_YD), rows_YD.dtype

  def body(pieces, i, carry):
    d_rows_YD, d_gate_up_EDX, d_down_EFD = carry
    group, start, inside_b = blocked.locate(pieces, i, num_rows)
    rows_bD, d_out_bD, both_bX = (
      lax.dynamic_slice_in_dim(x, start, pieces.rows)
      for x in (rows_YD, d_out_YD, both_YX)
    )
    d_hidden_bF = _dot_transposed(
      d_out_bD, blocked.matrix(down_EFD, group)
    ).astype(dtype)
    hidden_bF, d_both_bX = lax.optimization_barrier(
      (swiglu.swiglu(both_bX), swiglu.gradient(both_bX, d_hidden_bF))
    )
    d_rows_bD = _dot_transposed(d_both_bX, blocked.matrix(gate_up_EDX, group))
    # Not `linear.weight_gradient`: XLA would make hidden in the order of the
    # transposed copy, which takes longer than the product.
    hidden_bF, d_out_bD = blocked.only(inside_b, hidden_bF, d_out_bD)
    d_down_FD = jnp.dot(
      hidden_bF.T, d_out_bD, preferred_element_type=jnp.float32
    )
    d_gate_up_DX = linear.weight_gradient(
      *blocked.only(inside_b, rows_bD, d_both_bX)
    )
    add = lambda x, y: blocked.add_group(x, y, group, pieces.is_first)
    return (
      blocked.put_rows(d_rows_YD, d_rows_bD, start, inside_b),
      add(d_gate_up_EDX, d_gate_up_DX),
      add(d_down_EFD, d_down_FD),
    )

  carry = (
    jnp.zeros_like(rows_YD),
    jnp.zeros(gate_up_EDX.shape, jnp.float32),
    jnp.zeros(down_EFD.shape, jnp.float32),
  )
  loops = _loops(group_sizes_E, num_rows)
  d_rows_YD, d_gate_up_EDX, d_down_EFD = blocked.run(body, loops, carry)
  return (
    d_gate_up_EDX.astype(gate_up_EDX.dtype),
    d_down_EFD.astype(down_EFD.dtype),
    d_rows_YD,
    None,
  )


grouped_mlp.defvjp(_forward, _backward)


def _loops(group_sizes_E, num_rows):
  if not num_rows:
    return ()
  chosen = schedule.sizes(num_rows, len(group_sizes_E))
  return schedule.schedule(group_sizes_E, num_rows, chosen)


def _dot(rows_bD, weight_DF):
  return jnp.dot(rows_bD, weight_DF, preferred_element_type=jnp.float32)


def _dot_transposed(rows_bF, weight_DF):
  return lax.dot_general(
    rows_bF,
    weight_DF,
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
