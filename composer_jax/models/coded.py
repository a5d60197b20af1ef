"""Experts held in codes of few bits: by engines, and in bundles.

A leaf 'gate_up' or 'down' is then a dictionary of the arrays of `formats.pack`,
stacked over the layers that have the format, with those of the other layers in
'precise'. Codes are a function of the policy's values, so that two policies
have equal codes where their values are equal, and products with them are those
with the values: each expert is dequantised in the loop that multiplies by it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.kernels import rows
from composer_jax.kernels.grouped import blocked
from composer_jax.models import config as model_config
from composer_jax.models import experts
from composer_jax.numerics import formats

_PRECISE = 'precise'


def is_coded(leaf: Any) -> bool:
  """Returns whether a node of a tree holds the codes of an array."""
  return isinstance(leaf, dict) and 'codes' in leaf


def of_variables(variables: Any) -> bool:
  """Returns whether a decoder's variables hold codes."""
  moe = variables.get('params', {}).get('moe_layers', {}).get('moe', {})
  return is_coded(moe.get('down'))


def abstract(variables: Any, config: model_config.ModelConfig) -> Any:
  """Returns the shapes of `encode`, of those of a decoder's variables."""
  return jax.eval_shape(functools.partial(encode, config=config), variables)


def held(
  variables: Any,
  stored: model_config.ModelConfig,
  served: model_config.ModelConfig,
  has_codes: bool,
) -> Any:
  """Returns variables of a model as an engine holds them."""
  if of_variables(variables):
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
    axes = experts.axes_of(name, c.experts)
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
    axes = experts.axes_of(name, c.experts)
    values = formats.unpack(parts, c.experts, axes)
    if _PRECISE not in parts:
      return values
    first, last = jnp.split(parts[_PRECISE], [c.first])
    return jnp.concatenate([first, values, last])

  return _with_experts(variables, decoded)


def _with_experts(variables, change):
  stack = variables['params']['moe_layers']
  changed = {name: change(name, stack['moe'][name]) for name in experts.WEIGHTS}
  stack = {**stack, 'moe': {**stack['moe'], **changed}}
  params = {**variables['params'], 'moe_layers': stack}
  return {**variables, 'params': params}


def layer_of(stack: Any, index: int, config: model_config.ModelConfig) -> Any:
  """Returns one layer's variables, of which some may be codes."""
  c, end = config.precision, config.num_moe_layers

  def taken(leaf):
    if not is_coded(leaf):
      return leaf[index]
    if config.is_precise(index):
      skipped = end - c.first - c.last if index >= c.first else 0
      return leaf[_PRECISE][index - skipped]
    parts = {k: v for k, v in leaf.items() if k != _PRECISE}
    return {k: v[index - c.first] for k, v in parts.items()}

  return jax.tree.map(taken, stack, is_leaf=is_coded)


def forms(
  config: model_config.PrecisionConfig, weights: dict[str, Any]
) -> experts.Forms:
  """Returns `experts.forms` of values, or of codes, which have no gradient."""
  plain = experts.forms(config)
  each = weights['down']
  if not is_coded(each[0] if isinstance(each, tuple) else each):
    return plain

  def single(weights, rows_BD):
    values = {
      name: formats.unpack(
        parts, config.experts, experts.axes_of(name, config.experts).without(2)
      ).astype(rows_BD.dtype)
      for name, parts in weights.items()
    }
    # The product is then the same program as that of stored values.
    return plain.single(*jax.lax.optimization_barrier((values, rows_BD)))

  tiled = functools.partial(_in_tiles, single)
  return experts.Forms(plain.sorted._replace(forward=tiled), tiled, single)


def _in_tiles(single, weights, rows_YD, group_sizes_E):
  return blocked.map_blocks(
    single, weights, rows_YD, group_sizes_E, block=rows.TILE
  )
