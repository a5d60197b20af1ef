"""Binds a decoder to a mesh: shardings of its variables, plan of its experts.

The only module of `models` that sees a mesh; layers see the plan.
"""

from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from composer_jax.models import config as model_config
from composer_jax.models import decoder, mla
from composer_jax.parallel import exchange, layouts, shardings


def variable_shardings(
  config: model_config.ModelConfig, *, layout: layouts.Layout, mesh: Mesh
) -> Any:
  """Returns a NamedSharding for each variable of the decoder."""
  shapes, axes = decoder.abstract(config)
  return shardings.shardings(shapes, axes, layout=layout, mesh=mesh)


def exchange_plan(
  config: model_config.ModelConfig, *, layout: layouts.Layout, mesh: Mesh
) -> exchange.ExchangePlan | None:
  """Returns the plan for `decoder.Decoder`; None on a mesh of one device."""
  if mesh.size == 1:
    return None
  shapes, axes = decoder.abstract(config)
  specs = shardings.specs(shapes, axes, layout=layout, mesh=mesh)
  layers = specs['params']['moe_layers']

  # Without the leading layer axis, which the scan consumes.
  def of_a_layer(module, names):
    tree = layers[module]
    return tuple((n, P(*tree[n][1:])) for n in names if n in tree)

  return exchange.ExchangePlan(
    mesh=mesh,
    batch_axes=layout.batch,
    sequence_axes=layout.sequence,
    weight_specs=of_a_layer('moe', ('gate_up', 'down')),
    attention_specs=of_a_layer('attention', mla.PER_SHARD),
  )
