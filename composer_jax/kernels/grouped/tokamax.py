"""Grouped matmul by tokamax's kernels for NVIDIA GPUs (extra 'kernels').

Its Hopper kernel where that takes the arrays, else its Triton kernel; never its
fallback to XLA, which is dense over all groups.
"""

import jax
import jax.numpy as jnp
import tokamax

_IMPLEMENTATIONS = ('mosaic', 'triton')
# lhs^T d_out of each group: rows, which are ragged, are contracted.
_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[],
)


def multiply(
  lhs_YD: jax.Array,
  rhs_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  transposed: bool = False,
) -> jax.Array:
  """Returns rows times the matrix of their group, zero past the groups."""
  dims = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2 if transposed else 1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
  )
  out_YF = tokamax.ragged_dot_general(
    lhs_YD,
    rhs_EDF,
    group_sizes_E,
    dims,
    preferred_element_type=lhs_YD.dtype,
    implementation=_IMPLEMENTATIONS,
  )
  # The kernels leave the rows past the groups unwritten.
  inside_Y = jnp.arange(len(lhs_YD)) < group_sizes_E.sum()
  return jnp.where(inside_Y[:, None], out_YF, 0)


def multiply_groups(
  lhs_YD: jax.Array,
  d_out_YF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
  """Returns lhs^T d_out of each group, zero of groups of no rows."""
  d_rhs_EDF = tokamax.ragged_dot_general(
    lhs_YD,
    d_out_YF,
    group_sizes_E,
    _BY_GROUP,
    preferred_element_type=dtype,
    implementation=_IMPLEMENTATIONS,
  )
  # Of a group of no rows the kernels' last, masked step has no bounds.
  return jnp.where(group_sizes_E[:, None, None] > 0, d_rhs_EDF, 0)
