"""Shardings of a decoder's variables on a mesh, and its exchange plan.

No other module of `models` uses a mesh; layers use the plan.
"""

from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.kernels import linear
from composer_jax.models import config as model_config
from composer_jax.models import decoder, layer
from composer_jax.parallel import exchange, layouts, rounds, shardings


def variable_shardings(
  config: model_config.ModelConfig, *, layout: layouts.Layout, mesh: Mesh
) -> Any:
  """Returns a NamedSharding for each variable of the decoder."""
  shapes, axes = decoder.abstract(config)
  return shardings.shardings(shapes, axes, layout=layout, mesh=mesh)


def exchange_plan(
  config: model_config.ModelConfig,
  *,
  layout: layouts.Layout,
  mesh: Mesh,
  transport: str = 'auto',
  room: float = rounds.ROOM,
  sequence_order: str = 'contiguous',
  wire: str = 'values',
) -> exchange.ExchangePlan | None:
  """Returns the plan for `decoder.Decoder`; None on a mesh of one device.

  Tokens of batches must be in its `sequence_order` (`parallel.sequence`).

  Raises:
    ValueError: the numerics are batch-invariant, rows of experts in a format
      of few bits would be spread over devices, or tokens have no codes.
  """
  if wire == 'codes' and not config.precision.travels:
    raise ValueError(
      "parallel.wire 'codes' sends tokens in the eight bits of their experts' "
      f'format, and would lose bits with {config.precision}. Set '
      "precision.experts to 'mxfp8' or 'fp8' in all layers, with a backward "
      "pass other than 'bf16', or parallel.wire='values'."
    )
  if mesh.size == 1:
    return None
  if config.numerics == 'batch_invariant':
    raise ValueError(
      f"numerics 'batch_invariant' needs one device, not a mesh of {mesh.size} "
      f'({dict(mesh.shape)}): the order of a sum depends on the number of '
      "devices. Use a mesh of one, or numerics 'fast'."
    )
  shapes, axes = decoder.abstract(config)
  specs = shardings.specs(shapes, axes, layout=layout, mesh=mesh)
  _check_whole_rows(config, specs, layout, mesh)
  return exchange.ExchangePlan(
    mesh=mesh,
    batch_axes=layout.batch,
    sequence_axes=layout.sequence,
    weight_specs=tuple(_experts(specs).items()),
    # Those of the backward pass lie as their parameters do.
    specs=tuple(
      trees.flatten_names({**specs, 'backward': specs['params']}).items()
    ),
    transport=transport,
    room=room,
    sequence_order=sequence_order,
    wire=wire,
  )


def _check_whole_rows(config, specs, layout, mesh):
  spec = specs['params']['moe_layers']['moe']['down']
  if config.precision.enabled and not layout.batch and any(spec[2:]):
    count = config.moe.num_experts
    raise ValueError(
      f"precision.experts {config.precision.experts!r} rounds a token's hidden "
      f'units together, and {mesh.size} devices for {count} experts would each '
      'hold a part of them. Decode on a number of devices that divides '
      f"{count}, or set precision.experts='bf16'."
    )


def _experts(specs: Any) -> Any:
  """Returns specs of one layer's arrays of experts."""
  # Without the leading layer axis, which the scan consumes.
  layers = {
    name: jax.tree.map(
      lambda spec: P(*spec[1:]),
      tree.get('moe_layers', {}).get('moe', {}),
      is_leaf=lambda x: isinstance(x, P),
    )
    for name, tree in specs.items()
  }
  pairs = layers.get('adapters', {})
  return {
    name: linear.Adapted(layers['params'][name], **pairs[name])
    if name in pairs
    else layers['params'][name]
    for name in layer.EXPERT_ARRAYS
  }
