"""The feed-forward of experts whose weights and activations have few bits.

Weights come rounded (`formats.rounded`, once a step). Each product rounds its
activations, every row by itself, so that a row's result depends on that row
alone, and sampler and trainer multiply the same numbers.

Rounding is straight-through: its gradient is 1. A gradient is a product with
the rounded operands of the forward pass ('dequantised'), with those from before
the rounding ('bf16'; the weights are a second entry, 'exact'), or with operands
that are rounded to MXFP8 along the axis which that product contracts ('mxfp8'):
for the gradient of a weight the rows of its expert that one round of the
exchange brought. The gradient of a gate is always that of the forward pass.

An entry 'draws' has a number for each row, the same wherever a copy of a token
is computed. Random numbers of gradients depend on it and on the column alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ad_checkpoint

from composer_jax.core import rounding
from composer_jax.kernels import linear, rows, swiglu
from composer_jax.kernels.grouped import blocked, coded, matmul, schedule
from composer_jax.numerics import formats


class Formats(NamedTuple):
  """Formats of products.

  Attributes:
    forward: one of `formats.NAMES`; any other name rounds nothing.
    backward: 'dequantised', 'bf16' or 'mxfp8'.
    stochastic: true if 'mxfp8' rounds gradients by chance.
    hadamard: true if it mixes rows before it rounds them for a weight.
    codes: true if the forward pass multiplies codes of 'fp8' by a kernel.
  """

  forward: str
  backward: str
  stochastic: bool = False
  hadamard: bool = False
  codes: bool = False


# Products of operands as they are; weights may have adapters.
PLAIN = Formats('bf16', 'dequantised')
# Weights that have a gradient.
_TRAINED = ('gate_up', 'down')
_BLOCK = formats.BLOCKS['mxfp8']


def mlp_kept(
  config: Formats,
  weights: dict[str, Any],
  rows_YD: jax.Array,
  group_sizes_E: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the outputs of rows sorted by expert, and their gates and ups."""
  gate_up_EDX, down_EFD = _joined(weights['gate_up'], 2), weights['down']
  both_YX = _product(config, rows_YD, gate_up_EDX, group_sizes_E)
  both_YX = ad_checkpoint.checkpoint_name(both_YX, blocked.HIDDEN)
  hidden_YF = swiglu.swiglu(both_YX)
  return _product(config, hidden_YF, down_EFD, group_sizes_E), both_YX


def _product(config, x_YD, weight_EDF, group_sizes_E):
  """Returns a grouped product of the forward pass, of rounded numbers."""
  if not config.codes:
    x_YD = _rounded(config, x_YD)
    return matmul.grouped_matmul(x_YD, weight_EDF, group_sizes_E)
  coded.check()
  # Weights are rounded already: their codes are exact.
  codes = lambda x, *axes: formats.quantise(x, 'fp8', formats.Axes(axes, ()))
  return coded.multiply(
    codes(x_YD, 1)[:2],
    codes(weight_EDF, 1, 2)[:2],
    group_sizes_E,
    dtype=x_YD.dtype,
  )


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
  flat = {name: w for name, w in weights.items() if name != 'exact'}
  flat['gate_up'] = _joined(weights['gate_up'], 2)
  if exact := weights.get('exact'):
    flat['exact'] = exact | {'gate_up': _joined(exact['gate_up'], 2)}
  d_rows_YD, _, sums = mlp_gradient(
    config, flat, (rows_YD, d_out_YD, None), group_sizes_E, None, both_YX
  )
  d_weights = {
    name: sums[name].reshape(w.shape).astype(w.dtype)
    if name in _TRAINED
    else None
    for name, w in weights.items()
  }
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
  before = {name: sums and sums[name] for name in _TRAINED}
  if both_YX is None:
    both_YX = _product(config, rows_YD, weights['gate_up'], group_sizes_E)
  plain_YF = hidden_YF = swiglu.swiglu(both_YX)

  def multiply(role, *arrays):
    if config.backward != 'mxfp8':
      return matmul.gradient(*arrays)
    return _multiply_mxfp8(config, weights.get('draws'), role, *arrays)

  used = weights
  if config.backward == 'bf16':
    used = weights['exact']
  else:
    rows_YD, hidden_YF = (_rounded(config, x) for x in (rows_YD, hidden_YF))

  def gated(x):
    if gates_Y is None or is_gated:
      return x
    return rounding.rounded(gates_Y[:, None] * x, x.dtype)

  is_gated, given_YD = False, d_out_YD
  if config.backward != 'dequantised':
    # Operands are those of one device, where `combine` applies the gates.
    d_out_YD, is_gated = gated(d_out_YD), True

  arrays = gated(hidden_YF), used['down'], d_out_YD, group_sizes_E
  d_hidden_YF, down = multiply(0, *arrays, before['down'])
  d_gates_Y = None
  if gates_Y is not None:
    left, right = hidden_YF, d_hidden_YF  # It needs no output.
    if is_gated:  # And d_hidden has other operands than the forward pass.
      left = _product(config, plain_YF, weights['down'], group_sizes_E)
      right = given_YD
    d_gates_Y = jnp.sum(left * right, axis=-1, dtype=jnp.float32)
  d_both_YX = swiglu.gradient(both_YX, gated(d_hidden_YF))
  arrays = rows_YD, used['gate_up'], d_both_YX, group_sizes_E
  d_rows_YD, gate_up = multiply(2, *arrays, before['gate_up'])
  others = dict.fromkeys(weights.keys() - {*_TRAINED, 'draws'})
  return d_rows_YD, d_gates_Y, {'gate_up': gate_up, 'down': down, **others}


def _multiply_mxfp8(
  config, draws_Y, role, lhs_YD, rhs_EDF, d_out_YF, group_sizes_E, sums_EDF
):
  """Returns what `matmul.gradient` does, of operands rounded to MXFP8."""

  def by_chance(x, draws, role, axis):
    if not config.stochastic:
      return _mxfp8(x, axis)
    uniform = uniforms(draws, role, x.shape[-1])
    axes = formats.Axes((axis % x.ndim,), ())
    return formats.stochastic(x, uniform, axes)

  # Each call computes one product: that of the other is not used.
  d_lhs_YD, _ = matmul.gradient(
    lhs_YD,
    _mxfp8(rhs_EDF),
    by_chance(d_out_YF, draws_Y, role, -1),
    group_sizes_E,
    None,
  )
  # Of one expert's rows, so that the other experts of a batch change none.
  _, place_Nb = schedule.places(group_sizes_E, len(lhs_YD), _BLOCK)
  sizes_E = -(-group_sizes_E // _BLOCK) * _BLOCK
  draws_Nb = None if draws_Y is None else draws_Y.at[place_Nb].get(mode='clip')

  def in_blocks(x_YD):
    x_NbD = x_YD.at[place_Nb].get(mode='fill', fill_value=0)
    if not config.hadamard:
      return x_NbD
    assert draws_Nb is not None
    return mixed(x_NbD, draws_Nb)

  def whole(x_NbD):
    return x_NbD.reshape(-1, x_NbD.shape[-1]).astype(lhs_YD.dtype)

  d_out_NbF = by_chance(in_blocks(d_out_YF), draws_Nb, role + 1, 1)
  _, d_rhs_EDF = matmul.gradient(
    whole(_mxfp8(in_blocks(lhs_YD), 1)),
    rhs_EDF,
    whole(d_out_NbF) / (_BLOCK if config.hadamard else 1),
    sizes_E,
    sums_EDF,
  )
  return d_lhs_YD, d_rhs_EDF


def _mxfp8(x, axis=-1):
  return formats.rounded(x, 'mxfp8', formats.Axes((axis % x.ndim,), ()))


def mixed(x_NbD: jax.Array, draws_Nb: jax.Array) -> jax.Array:
  """Mixes the rows of each block, with signs by their draws, in float32.

  Of two arrays so mixed the products over rows are 32 times those before.
  """
  hadamard_bb = np.ones((1, 1), np.float32)
  while len(hadamard_bb) < _BLOCK:
    hadamard_bb = np.block(
      [[hadamard_bb, hadamard_bb], [hadamard_bb, -hadamard_bb]]
    )
  signs_Nb = jnp.where(draws_Nb & 1, 1.0, -1.0)
  return jnp.einsum(
    'cb,NbD->NcD',
    hadamard_bb,
    signs_Nb[..., None] * x_NbD.astype(jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )


def uniforms(draws: jax.Array, role: int, width: int) -> jax.Array:
  """Returns `width` numbers from [0, 1) for each draw, by counters (Threefry).

  `role` tells the arrays apart that are rounded with the same draws.
  """

  def row(draw):
    data = jnp.stack([draw, jnp.uint32(role)])
    key = jax.random.wrap_key_data(data, impl='threefry2x32')
    return jax.random.uniform(key, (width,))

  return jax.vmap(row)(draws.reshape(-1)).reshape(*draws.shape, width)


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
    {name: weights[name] for name in _TRAINED},
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
