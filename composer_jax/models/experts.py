"""Feed-forward layers: one dense MLP, and a mixture of routed ones.

The routed ones may have a format of few bits (`numerics.products`); `in_format`
rounds their weights, for sampler and trainer alike.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.core import rounding
from composer_jax.kernels import linear, rows, swiglu
from composer_jax.kernels.grouped import blocked, matmul
from composer_jax.models import config as model_config
from composer_jax.numerics import formats, products
from composer_jax.parallel import dispatch

# Axes of [M, E, D, 2, F] and [M, E, F, D]: those of square blocks in 'fp8',
# and of an outer scale, which gate and up share.
_WEIGHTS = {
  'gate_up': formats.Axes((2, 4), (2, 3)),
  'down': formats.Axes((2, 3), (2,)),
}


def expert_mlp(
  weights: dict[str, jax.Array], rows_YD: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
  """SwiGLU of rows sorted by expert: two grouped matmuls."""
  gate_up_EDX, down_EFD = _joined(weights['gate_up'], 2), weights['down']
  is_frozen = isinstance(gate_up_EDX, linear.Adapted)
  if matmul.chosen() == 'blocked' and not is_frozen:
    return blocked.grouped_mlp(gate_up_EDX, down_EFD, rows_YD, group_sizes_E)
  return expert_mlp_kept(weights, rows_YD, group_sizes_E)[0]


def expert_mlp_kept(
  weights: dict[str, jax.Array], rows_YD: jax.Array, group_sizes_E: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns `expert_mlp`, and the gates and ups of its rows."""
  gate_up_EDX, down_EFD = _joined(weights['gate_up'], 2), weights['down']
  is_frozen = isinstance(gate_up_EDX, linear.Adapted)
  if matmul.chosen() == 'blocked' and not is_frozen:
    return blocked.mlp_kept(gate_up_EDX, down_EFD, rows_YD, group_sizes_E)
  both_YX = matmul.grouped_matmul(rows_YD, gate_up_EDX, group_sizes_E)
  both_YX = ad_checkpoint.checkpoint_name(both_YX, blocked.HIDDEN)
  hidden_YF = swiglu.swiglu(both_YX)
  return matmul.grouped_matmul(hidden_YF, down_EFD, group_sizes_E), both_YX


def expert_mlp_gradient(
  weights: dict[str, Any],
  arrays_Y: tuple[jax.Array, jax.Array, jax.Array],
  group_sizes_E: jax.Array,
  sums: dict[str, Any] | None,
  both_YX: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
  """Returns gradients of `expert_mlp` times gates; see `dispatch.Experts`."""
  gate_up_EDX, down_EFD = weights['gate_up'], weights['down']
  is_frozen = isinstance(gate_up_EDX, linear.Adapted)
  before = tuple(sums and sums[name] for name in ('gate_up', 'down'))
  if matmul.chosen() == 'blocked' and not is_frozen:
    d_rows_YD, d_gates_Y, (gate_up, down) = blocked.mlp_gradient(
      (gate_up_EDX, down_EFD),
      arrays_Y,
      group_sizes_E,
      before if sums else None,
      both_YX,
    )
    return d_rows_YD, d_gates_Y, {'gate_up': gate_up, 'down': down}
  rows_YD, d_out_YD, gates_Y = arrays_Y
  if both_YX is None:
    both_YX = matmul.grouped_matmul(rows_YD, gate_up_EDX, group_sizes_E)
  hidden_YF = swiglu.swiglu(both_YX)
  gated = lambda x: rounding.rounded(gates_Y[:, None] * x, x.dtype)
  d_hidden_YF, down = matmul.gradient(
    gated(hidden_YF), down_EFD, d_out_YD, group_sizes_E, before[1]
  )
  # The gradient of a gate needs no output.
  d_gates_Y = jnp.sum(hidden_YF * d_hidden_YF, axis=-1, dtype=jnp.float32)
  d_both_YX = swiglu.gradient(both_YX, gated(d_hidden_YF))
  d_rows_YD, gate_up = matmul.gradient(
    rows_YD, gate_up_EDX, d_both_YX, group_sizes_E, before[0]
  )
  return d_rows_YD, d_gates_Y, {'gate_up': gate_up, 'down': down}


def _zeros(weights: dict[str, Any]) -> dict[str, Any]:
  def sums(weight):
    if isinstance(weight, linear.Adapted):
      return linear.Adapted(None, sums(weight.a), sums(weight.b))
    return jnp.zeros(weight.shape, jnp.float32)

  return {name: sums(weight) for name, weight in weights.items()}


MLP = dispatch.Experts(expert_mlp, expert_mlp_kept, expert_mlp_gradient, _zeros)


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


class Forms(NamedTuple):
  """The feed-forward of experts.

  Attributes:
    sorted: of rows sorted by expert.
    tiled: the same, whose bits depend on a row and its expert only.
    single: of one expert's rows.
  """

  sorted: dispatch.Experts
  tiled: dispatch.ExpertFunction
  single: Callable[[Any, jax.Array], jax.Array]


@functools.cache
def forms(config: model_config.PrecisionConfig) -> Forms:
  """Returns the feed-forward of experts in the formats of a config."""
  if not config.enabled:
    return Forms(MLP, expert_mlp_in_tiles, dense_mlp)
  pair = products.Formats(config.experts, config.backward)
  bind = lambda fn: functools.partial(fn, pair)
  mlp = dispatch.Experts(
    bind(products.mlp),
    bind(products.mlp_kept),
    bind(products.mlp_gradient),
    _zeros,
  )
  return Forms(mlp, bind(products.tiled), bind(products.single))


def in_format(params: Any, config: model_config.ModelConfig) -> Any:
  """Returns parameters with the experts' weights rounded to their format."""
  name = config.precision.experts
  if not config.precision.enabled:
    return params
  stack = params['moe_layers']
  moe = dict(stack['moe'])
  layers = range(config.num_moe_layers)
  is_precise_M = jnp.array([config.is_precise(layer) for layer in layers])
  for leaf, axes in _WEIGHTS.items():
    if name != 'fp8':
      axes = axes._replace(blocks=axes.blocks[:1])
    rounded = formats.rounded(moe[leaf], name, axes)
    kept = jnp.expand_dims(is_precise_M, range(1, moe[leaf].ndim))
    moe[leaf] = jnp.where(kept, moe[leaf], rounded)
  return {**params, 'moe_layers': {**stack, 'moe': moe}}


def _joined(weight: Any, num_kept: int) -> Any:
  """Joins the axes of gate and up, behind the first ones."""
  return jax.tree.map(lambda w: w.reshape(*w.shape[:num_kept], -1), weight)
