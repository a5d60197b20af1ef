"""Placement of an engine's arrays: on one device, or over a mesh.

On a mesh weights are sharded by `layouts.DECODE` and pools of grouped-query
attention by key head; everything else, latents included, is replicated. A step
thus exchanges partial sums, and never weights or pages.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from composer_jax.models import config as config_lib
from composer_jax.models import placement
from composer_jax.parallel import exchange, layouts, topology
from composer_jax.rollout import forward


@dataclasses.dataclass(frozen=True)
class EnginePlace:
  """Shardings of an engine's arrays."""

  whole: Sharding  # inputs, reports and state, replicated
  pools: Sharding  # each pool of the KV cache
  plan: exchange.ExchangePlan | None = None  # experts; None on one device


class PlacedWeights(NamedTuple):
  """A copy of weights, placed for one engine."""

  weights: forward.Weights
  version: int


def mesh_of(num_devices: int) -> Mesh | None:
  """Returns a mesh of the first devices; None for one device."""
  if num_devices == 1:
    return None
  devices = jax.local_devices()
  if not 1 <= num_devices <= len(devices):
    raise ValueError(
      f'rollout.devices must be from 1 to {len(devices)}, the number of '
      f'{devices[0].platform} devices, not {num_devices}.'
    )
  return topology.make_mesh(fsdp=num_devices, devices=devices[:num_devices])


def on_device_of(variables: Any) -> EnginePlace:
  """Places on the first device that holds the variables, or the very first."""
  leaf = jax.tree.leaves(variables)[0]
  here = jax.local_devices()[:1]
  devices = leaf.devices() if isinstance(leaf, jax.Array) else here
  return _on_device(min(devices, key=lambda device: device.id))


def _on_device(device: jax.Device) -> EnginePlace:
  whole = jax.sharding.SingleDeviceSharding(device)
  return EnginePlace(whole, whole)


def on_mesh(config: config_lib.ModelConfig, mesh: Mesh) -> EnginePlace:
  """Shards a model over all devices of the mesh.

  A ValueError names numerics that need one device, or experts that do not
  divide over the mesh.
  """
  if mesh.size == 1:
    return _on_device(mesh.devices.item())
  plan = placement.exchange_plan(config, layout=layouts.DECODE, mesh=mesh)
  pools = P()
  if isinstance(config.attention, config_lib.GQAConfig):
    key = _variables(config, mesh)['params']['moe_layers']['attention']['key']
    pools = P(None, key.spec[2])
  return EnginePlace(NamedSharding(mesh, P()), NamedSharding(mesh, pools), plan)


def put(
  variables: Any, config: config_lib.ModelConfig, place: EnginePlace
) -> Any:
  """Returns a decoder's variables where the engine computes."""
  shardings: Any = place.whole
  if place.plan is not None:
    shardings = _variables(config, place.plan.mesh)
    shardings = {name: shardings[name] for name in variables}
  return jax.device_put(variables, shardings)


def _variables(config, mesh) -> Any:
  return placement.variable_shardings(config, layout=layouts.DECODE, mesh=mesh)
