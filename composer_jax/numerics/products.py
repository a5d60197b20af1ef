"""The feed-forward of experts whose weights and activations have few bits.

Weights come rounded (`formats.rounded`, once a step). Each product rounds its
activations, every row by itself, so that a row's result depends on that row
alone, and sampler and trainer multiply the same numbers.

Rounding is straight-through: its gradient is 1. A gradient is a product with
the rounded operands of the forward pass ('dequantised'), or with operands that
are rounded to MXFP8 along the axis which that product contracts ('mxfp8'): for
the gradient of a weight the rows of its expert that one round of the exchange
brought.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.core import rounding
from composer_jax.kernels import linear, rows, swiglu
from composer_jax.kernels.grouped import blocked, matmul
from composer_jax.numerics import formats, grids


class Formats(NamedTuple):
  """Formats of products.

  Attributes:
    forward: one of `formats.NAMES`; any other name rounds nothing.
    backward: 'dequantised' or 'mxfp8'.
  """

  forward: str
  backward: str


# Products of operands as they are; weights may have adapters.
PLAIN = Formats('bf16', 'dequantised')


def mlp_kept(
  config: Formats,
  weights: dict[str, Any],
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the outputs of rows sorted by expert, and their gates and ups."""
  gate_up_EDX, down_EFD = _joined(weights['gate_up'], 2), weights['down']
  both_YX = matmul.grouped_matmul(
    _rounded(config, rows_YD), gate_up_EDX, group_sizes_E
  )
  both_YX = ad_checkpoint.checkpoint_name(both_YX, blocked.HIDDEN)
  hidden_YF = _rounded(config, swiglu.swiglu(both_YX))
  return matmul.grouped_matmul(hidden_YF, down_EFD, group_sizes_E), both_YX


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mlp(
  config: Formats,
  weights: dict[str, jax.Array],
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
) -> jax.Array:
  """Returns the outputs of rows sorted by expert."""
  return mlp_kept(config, weights, rows_YD, group_sizes_E)[0]


def _rounded(config, x):
  """Rounds activations along their last axis."""
  if config.forward not in formats.ACTIVATIONS:
    return x
  return formats.rounded(x, config.forward, formats.last(x))


def _mlp_forward(config, *arrays):
  out_YD, both_YX = mlp_kept(config, *arrays)
  return out_YD, (*arrays, both_YX)


def _mlp_backward(config, residuals, d_out_YD):
  weights, rows_YD, group_sizes_E, both_YX = residuals
  d_rows_YD, _, sums = mlp_gradient(
    config,
    {**weights, 'gate_up': _joined(weights['gate_up'], 2)},
    (rows_YD, d_out_YD, None),
    group_sizes_E,
    None,
    both_YX,
  )
  d_weights = jax.tree.map(
    lambda d, w: d.reshape(w.shape).astype(w.dtype), sums, dict(weights)
  )
  return d_weights, d_rows_YD, None


mlp.defvjp(_mlp_forward, _mlp_backward)


def mlp_gradient(
  config: Formats,
  weights: dict[str, Any],
  arrays_Y: tuple[jax.Array, jax.Array, jax.Array | None],
  group_sizes_E: jax.Array,
  sums: dict[str, Any] | None,
  both_YX: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, dict[str, Any]]:
  """Returns what `dispatch.Experts.gradient` says; gates may be None."""
  rows_YD, d_out_YD, gates_Y = arrays_Y
  gate_up_EDX, down_EFD = weights['gate_up'], weights['down']
  before = tuple(sums and sums[name] for name in ('gate_up', 'down'))
  multiply = _multiply_mxfp8 if config.backward == 'mxfp8' else matmul.gradient
  rows_YD = _rounded(config, rows_YD)
  if both_YX is None:
    both_YX = matmul.grouped_matmul(rows_YD, gate_up_EDX, group_sizes_E)
  hidden_YF = _rounded(config, swiglu.swiglu(both_YX))

  def gated(x):
    if gates_Y is None:
      return x
    return rounding.rounded(gates_Y[:, None] * x, x.dtype)

  d_hidden_YF, down = multiply(
    gated(hidden_YF), down_EFD, d_out_YD, group_sizes_E, before[1]
  )
  d_gates_Y = None
  if gates_Y is not None:
    # The gradient of a gate needs no output.
    d_gates_Y = jnp.sum(hidden_YF * d_hidden_YF, axis=-1, dtype=jnp.float32)
  d_both_YX = swiglu.gradient(both_YX, gated(d_hidden_YF))
  d_rows_YD, gate_up = multiply(
    rows_YD, gate_up_EDX, d_both_YX, group_sizes_E, before[0]
  )
  return d_rows_YD, d_gates_Y, {'gate_up': gate_up, 'down': down}


def _multiply_mxfp8(lhs_YD, rhs_EDF, d_out_YF, group_sizes_E, sums_EDF):
  """Returns what `matmul.gradient` does, of operands rounded to MXFP8."""
  # Each call computes one product: that of the other is not used.
  d_lhs_YD, _ = matmul.gradient(
    lhs_YD,
    formats.rounded(rhs_EDF, 'mxfp8', formats.last(rhs_EDF)),
    formats.rounded(d_out_YF, 'mxfp8', formats.last(d_out_YF)),
    group_sizes_E,
    None,
  )
  _, d_rhs_EDF = matmul.gradient(
    by_rows(lhs_YD, group_sizes_E),
    rhs_EDF,
    by_rows(d_out_YF, group_sizes_E),
    group_sizes_E,
    sums_EDF,
  )
  return d_lhs_YD, d_rhs_EDF


def by_rows(x_YD: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
  """Rounds to MXFP8 in blocks of 32 rows of an expert, each column by itself.

  Blocks begin with an expert's first row, so that the other experts of a
  batch change nothing. Rows past the groups become zero.
  """
  num_rows, size = len(x_YD), formats.BLOCKS['mxfp8']
  ends_E = jnp.cumsum(group_sizes_E)
  row_Y = jnp.arange(num_rows)
  group_Y = jnp.searchsorted(ends_E, row_Y, side='right', method='scan')
  starts_E = jnp.append(ends_E - group_sizes_E, ends_E[-1])
  # Blocks of the groups before, each rounded up.
  blocks_E = -(-group_sizes_E // size)
  first_E = jnp.append(0, jnp.cumsum(blocks_E))
  block_Y = first_E[group_Y] + (row_Y - starts_E[group_Y]) // size
  # Those past the groups, whose last row may be anywhere, are not used.
  most = num_rows // size + len(group_sizes_E) + 1
  block_Y = jnp.minimum(block_Y, most - 1)
  x_YD = jnp.where((group_Y < len(group_sizes_E))[:, None], x_YD, 0)
  wide_YD = x_YD.astype(jnp.float32)
  # As integers, in which NaN is largest (`grids.largest`).
  top_ND = jax.ops.segment_max(
    jax.lax.bitcast_convert_type(jnp.abs(wide_YD), jnp.int32),
    block_Y,
    num_segments=most,
    indices_are_sorted=True,
  )
  top_ND = jax.lax.bitcast_convert_type(jnp.maximum(top_ND, 0), jnp.float32)
  scale_YD = grids.scale_up(top_ND, grids.E4M3_MAX)[block_Y]
  rounded_YD = grids.e4m3(wide_YD / scale_YD) * scale_YD
  return rounding.rounded(rounded_YD, x_YD.dtype)


def single(
  config: Formats, weights: dict[str, Any], x_BTD: jax.Array
) -> jax.Array:
  """Returns the outputs of one expert."""
  both_BTX = linear.linear(
    _rounded(config, x_BTD), _joined(weights['gate_up'], 1)
  )
  hidden_BTF = _rounded(config, swiglu.swiglu(both_BTX))
  return linear.linear(hidden_BTF, weights['down'])


def in_tiles(
  config: Formats,
  weights: dict[str, jax.Array],
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
) -> jax.Array:
  """Returns `mlp`, where bits of a row depend on it and its expert only.

  Each block of rows is one product of fixed shape, as in `kernels.rows`.
  """
  return blocked.map_blocks(
    functools.partial(single, config),
    weights,
    rows_YD,
    group_sizes_E,
    block=rows.TILE,
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tiled(
  config: Formats,
  weights: dict[str, jax.Array],
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
) -> jax.Array:
  """Returns `in_tiles` with the gradient of `mlp`."""
  return in_tiles(config, weights, rows_YD, group_sizes_E)


def _tiled_backward(config, arrays, d_out_YD):
  _, pull = jax.vjp(functools.partial(mlp, config), *arrays)
  return pull(d_out_YD)


tiled.defvjp(
  lambda config, *arrays: (tiled(config, *arrays), arrays),
  _tiled_backward,
)


def _joined(weight, num_kept):
  """Joins the axes of gate and up, behind the first ones."""
  return jax.tree.map(lambda w: w.reshape(*w.shape[:num_kept], -1), weight)
