"""Feed-forward layers: one dense MLP, and a mixture of routed ones.

The routed ones may have a format of few bits (`numerics.products`); `in_format`
rounds their weights, for sampler and trainer alike, and `encode` makes codes of
the rounded ones, which engines and bundles may hold.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from composer_jax.kernels import linear, rows
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
  weights: dict[str, Any], rows_YD: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
  """SwiGLU of rows sorted by expert: two grouped matmuls."""
  if _is_fused(weights):
    pair = _joined(weights)
    return blocked.grouped_mlp(*pair, rows_YD, group_sizes_E)
  return expert_mlp_kept(weights, rows_YD, group_sizes_E)[0]


def expert_mlp_kept(
  weights: dict[str, Any], rows_YD: jax.Array, group_sizes_E: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns `expert_mlp`, and the gates and ups of its rows."""
  if _is_fused(weights):
    return blocked.mlp_kept(*_joined(weights), rows_YD, group_sizes_E)
  return products.mlp_kept(products.PLAIN, weights, rows_YD, group_sizes_E)


def expert_mlp_gradient(
  weights: dict[str, Any],
  arrays_Y: tuple[jax.Array, jax.Array, jax.Array],
  group_sizes_E: jax.Array,
  sums: dict[str, Any] | None,
  both_YX: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
  """Returns gradients of `expert_mlp` times gates; see `dispatch.Experts`."""
  arrays = (arrays_Y, group_sizes_E)
  if not _is_fused(weights):
    d_rows_YD, d_gates_Y, sums = products.mlp_gradient(
      products.PLAIN, weights, *arrays, sums, both_YX
    )
    assert d_gates_Y is not None
    return d_rows_YD, d_gates_Y, sums
  before = sums and (sums['gate_up'], sums['down'])
  d_rows_YD, d_gates_Y, (gate_up, down) = blocked.mlp_gradient(
    _joined(weights), *arrays, before, both_YX
  )
  return d_rows_YD, d_gates_Y, {'gate_up': gate_up, 'down': down}


def _is_fused(weights):
  is_frozen = isinstance(weights['gate_up'], linear.Adapted)
  return matmul.chosen() == 'blocked' and not is_frozen


def _joined(weights):
  """Returns the arrays of unadapted experts, gate and up joined."""
  gate_up = weights['gate_up']
  return gate_up.reshape(*gate_up.shape[:2], -1), weights['down']


def _zeros(weights: dict[str, Any]) -> dict[str, Any]:
  def zeros(weight):
    if isinstance(weight, linear.Adapted):
      return linear.Adapted(None, zeros(weight.a), zeros(weight.b))
    return jnp.zeros(weight.shape, jnp.float32)

  # What only the backward pass reads has no gradient.
  return {
    name: None if name == 'exact' else zeros(weight)
    for name, weight in weights.items()
  }


MLP = dispatch.Experts(expert_mlp, expert_mlp_kept, expert_mlp_gradient, _zeros)


@jax.custom_vjp
def expert_mlp_in_tiles(
  weights: dict[str, Any], rows_YD: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
  """`expert_mlp` whose bits of a row depend on that row and its expert only.

  The gradient is that of `expert_mlp`.
  """
  return products.in_tiles(products.PLAIN, weights, rows_YD, group_sizes_E)


def _in_tiles_backward(arrays, d_out_YD):
  _, pull = jax.vjp(expert_mlp, *arrays)
  return pull(d_out_YD)


expert_mlp_in_tiles.defvjp(
  lambda *arrays: (expert_mlp_in_tiles(*arrays), arrays), _in_tiles_backward
)


def dense_mlp(params: dict[str, Any], x_BTD: jax.Array) -> jax.Array:
  """SwiGLU (Shazeer 2020): down(silu(gate x) * up x)."""
  return products.single(products.PLAIN, params, x_BTD)


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
  pair = products.Formats(
    config.experts,
    config.backward,
    config.stochastic,
    config.hadamard,
    config.products == 'codes',
  )
  bind = lambda fn: functools.partial(fn, pair)
  mlp = dispatch.Experts(
    bind(products.mlp),
    bind(products.mlp_kept),
    bind(products.mlp_gradient),
    _zeros,
    # Each product rounds its rows again, which changes none.
    _coding(config.experts, formats.Axes((1,), ())) if config.travels else None,
  )
  return Forms(mlp, bind(products.tiled), bind(products.single))


def coding(
  config: model_config.PrecisionConfig, leaf: str, shard: jax.Array, spec: P
) -> dispatch.Coding | None:
  """Returns how a shard of one layer's weights travels in eight bits.

  None where it travels as it is: weights in other formats, layers that are not
  all rounded, and shards that are no whole blocks.
  """
  name = config.experts
  if name not in formats.BYTES or config.first or config.last:
    return None
  # Without the axis of layers.
  blocks = tuple(axis - 1 for axis in _axes_of(leaf, name).blocks)
  cut = [axis for axis in blocks if axis < len(spec) and spec[axis]]
  if any(shard.shape[axis] % formats.BLOCKS[name] for axis in cut):
    return None
  return _coding(name, formats.Axes(blocks, ()))


@functools.cache
def _coding(name, axes):
  as_words = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8)

  def encode(x):
    return [as_words(array) for array in formats.quantise(x, name, axes)[:2]]

  def decode(arrays, dtype):
    codes, scales = map(
      jax.lax.bitcast_convert_type,
      arrays,
      (jnp.float8_e4m3fn, jnp.float8_e8m0fnu),
    )
    array = formats.Quantised(codes, scales, None)
    return formats.dequantise(array, name, axes, dtype)

  return dispatch.Coding(encode, decode)


def _axes_of(leaf, name):
  axes = _WEIGHTS[leaf]
  return axes if name == 'fp8' else axes._replace(blocks=axes.blocks[:1])


def in_format(params: Any, config: model_config.ModelConfig) -> Any:
  """Returns parameters with the experts' weights rounded to their format."""
  name = config.precision.experts
  if not config.precision.enabled:
    return params
  stack = params['moe_layers']
  moe = dict(stack['moe'])
  layers = range(config.num_moe_layers)
  is_precise_M = jnp.array([config.is_precise(layer) for layer in layers])
  for leaf in _WEIGHTS:
    # An INT4 checkpoint keeps its values, whoever chose their scales.
    rounded = formats.rounded(
      moe[leaf], name, _axes_of(leaf, name), name == 'int4'
    )
    kept = jnp.expand_dims(is_precise_M, range(1, moe[leaf].ndim))
    moe[leaf] = jnp.where(kept, moe[leaf], rounded)
  return {**params, 'moe_layers': {**stack, 'moe': moe}}


# An engine and bundles may have codes in place of values: 'gate_up' or 'down'
# is then a dictionary of the arrays of `formats.pack`, stacked over the layers
# that have the format, with those of the others in 'precise'. Codes are a
# function of the values: policies of equal values have equal codes.
_PRECISE = 'precise'


def _is_coded(leaf: Any) -> bool:
  """Returns whether a node of a tree holds the codes of an array."""
  return isinstance(leaf, dict) and 'codes' in leaf


def are_coded(variables: Any) -> bool:
  """Returns whether a decoder's variables hold codes."""
  moe = variables.get('params', {}).get('moe_layers', {}).get('moe', {})
  return _is_coded(moe.get('down'))


def abstract_codes(variables: Any, config: model_config.ModelConfig) -> Any:
  """Returns the shapes of `encode`, of those of a decoder's variables."""
  return jax.eval_shape(functools.partial(encode, config=config), variables)


def held(
  variables: Any,
  stored: model_config.ModelConfig,
  served: model_config.ModelConfig,
  has_codes: bool,
) -> Any:
  """Returns variables of a model as an engine holds them."""
  if are_coded(variables):
    if has_codes and stored.precision.experts == served.precision.experts:
      return variables
    variables = jax.jit(decode, static_argnums=1)(variables, stored)
  if not has_codes:
    return variables
  return jax.jit(encode, static_argnums=1)(variables, served)


def encode(variables: Any, config: model_config.ModelConfig) -> Any:
  """Returns variables whose experts are codes in the format of the config.

  Values of the format are kept; of others the codes are the nearest.
  """
  c, end = config.precision, config.num_moe_layers

  def encoded(name, leaf):
    axes = _axes_of(name, c.experts)
    some = leaf[c.first : end - c.last]
    parts = formats.pack(some, c.experts, axes)
    if c.first or c.last:
      precise = (leaf[: c.first], leaf[end - c.last :])
      parts[_PRECISE] = jnp.concatenate(precise).astype(jnp.bfloat16)
    return parts

  return _with_experts(variables, encoded)


def decode(variables: Any, config: model_config.ModelConfig) -> Any:
  """Returns variables whose experts are bfloat16 values, not codes."""
  c = config.precision

  def decoded(name, parts):
    axes = _axes_of(name, c.experts)
    values = formats.unpack(parts, c.experts, axes)
    if _PRECISE not in parts:
      return values
    first, last = jnp.split(parts[_PRECISE], [c.first])
    return jnp.concatenate([first, values, last])

  return _with_experts(variables, decoded)


def _with_experts(variables, change):
  stack = variables['params']['moe_layers']
  changed = {name: change(name, stack['moe'][name]) for name in _WEIGHTS}
  stack = {**stack, 'moe': {**stack['moe'], **changed}}
  params = {**variables['params'], 'moe_layers': stack}
  return {**variables, 'params': params}


def layer_of(stack: Any, index: int, config: model_config.ModelConfig) -> Any:
  """Returns one layer's variables, of which some may be codes."""
  c, end = config.precision, config.num_moe_layers

  def taken(leaf):
    if not _is_coded(leaf):
      return leaf[index]
    if config.is_precise(index):
      skipped = end - c.first - c.last if index >= c.first else 0
      return leaf[_PRECISE][index - skipped]
    parts = {k: v for k, v in leaf.items() if k != _PRECISE}
    return {k: v[index - c.first] for k, v in parts.items()}

  return jax.tree.map(taken, stack, is_leaf=_is_coded)


def forms_of(
  config: model_config.PrecisionConfig, weights: dict[str, Any]
) -> Forms:
  """Returns the feed-forward of experts: of values, or of codes.

  Codes have no gradient. Each expert is dequantised in the loop that multiplies
  by it.
  """
  plain = forms(config)
  each = weights['down']
  if not _is_coded(each[0] if isinstance(each, tuple) else each):
    return plain

  def single(weights, rows_BD):
    values = {
      name: formats.unpack(
        parts, config.experts, _axes_of(name, config.experts).without(2)
      ).astype(rows_BD.dtype)
      for name, parts in weights.items()
    }
    # The product is then the same program as that of stored values.
    return plain.single(*jax.lax.optimization_barrier((values, rows_BD)))

  tiled = functools.partial(_in_tiles, single)
  return Forms(plain.sorted._replace(forward=tiled), tiled, single)


def _in_tiles(single, weights, rows_YD, group_sizes_E):
  return blocked.map_blocks(
    single, weights, rows_YD, group_sizes_E, block=rows.TILE
  )
