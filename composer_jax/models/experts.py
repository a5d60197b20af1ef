"""Feed-forward layers: one dense MLP, and a mixture of routed ones."""

from typing import Any

import jax
from jax import ad_checkpoint

from composer_jax.kernels import linear, rows, swiglu
from composer_jax.kernels.grouped import blocked, matmul


def expert_mlp(
  weights: dict[str, jax.Array], rows_YD: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
  """SwiGLU of rows sorted by expert: two grouped matmuls."""
  gate_up_EDX, down_EFD = _joined(weights['gate_up'], 2), weights['down']
  is_frozen = isinstance(gate_up_EDX, linear.Adapted)
  if matmul.chosen() == 'blocked' and not is_frozen:
    return blocked.grouped_mlp(gate_up_EDX, down_EFD, rows_YD, group_sizes_E)
  both_YX = matmul.grouped_matmul(rows_YD, gate_up_EDX, group_sizes_E)
  both_YX = ad_checkpoint.checkpoint_name(both_YX, blocked.HIDDEN)
  hidden_YF = swiglu.swiglu(both_YX)
  return matmul.grouped_matmul(hidden_YF, down_EFD, group_sizes_E)


@jax.custom_vjp
def expert_mlp_in_tiles(
  weights: dict[str, jax.Array], rows_YD: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
  """`expert_mlp` whose bits of a row depend on that row and its expert only.

  Each block of rows is one product of fixed shape, as in `kernels.rows`. The
  gradient is that of `expert_mlp`.
  """

  def block(weights, rows_bD):
    gate_up_D2F, down_FD = weights
    both_bX = linear.linear(rows_bD, _joined(gate_up_D2F, 1))
    return linear.linear(swiglu.swiglu(both_bX), down_FD)

  return blocked.map_blocks(
    block,
    (weights['gate_up'], weights['down']),
    rows_YD,
    group_sizes_E,
    block=rows.TILE,
  )


def _in_tiles_backward(arrays, d_out_YD):
  _, pull = jax.vjp(expert_mlp, *arrays)
  return pull(d_out_YD)


expert_mlp_in_tiles.defvjp(
  lambda *arrays: (expert_mlp_in_tiles(*arrays), arrays), _in_tiles_backward
)


def dense_mlp(params: dict[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
  """SwiGLU (Shazeer 2020): down(silu(gate x) * up x)."""
  both_BTX = linear.linear(x_BTD, _joined(params['gate_up'], 1))
  return linear.linear(swiglu.swiglu(both_BTX), params['down'])


def _joined(weight: Any, num_kept: int) -> Any:
  """Joins the axes of gate and up, behind the first ones."""
  return jax.tree.map(lambda w: w.reshape(*w.shape[:num_kept], -1), weight)
