"""Where arrays lie, as far as they tell, and errors where they lie elsewhere.

Under `jit` an array on Explicit axes tells its sharding, and one on Auto axes
only its mesh, so that a transfer of the latter is seen in the compiled program
alone.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import (
  AbstractMesh,
  AxisType,
  NamedSharding,
  PartitionSpec,
  Sharding,
)

from composer_jax.optim.muon import planner


def of(x: Any) -> Sharding | AbstractMesh | None:
  """Returns an array's sharding, or only its mesh; None if unknown."""
  if not isinstance(x, jax.core.Tracer):
    return getattr(x, 'sharding', None)
  sharding = jax.typeof(x).sharding
  if all(kind == AxisType.Explicit for kind in sharding.mesh.axis_types):
    return None if sharding.mesh.empty else sharding
  return sharding.mesh if sharding.mesh.size > 1 else None


def is_local(x: Any) -> bool:
  """Tells whether an array is a device's own, as inside of shard_map."""
  if not isinstance(x, jax.core.Tracer):
    return False
  kinds = jax.typeof(x).sharding.mesh.axis_types
  return bool(kinds) and all(kind == AxisType.Manual for kind in kinds)


def in_words(place: Any, ndim: int) -> str:
  if isinstance(place, AbstractMesh):
    return f'mesh {dict(place.shape)}'
  if place is None or place.num_devices == 1:
    return 'one device'
  if not isinstance(place, NamedSharding):
    return str(place)
  spec = PartitionSpec(*planner.mesh_axes(place, ndim))
  return f'{spec} of mesh {dict(place.mesh.shape)}'


def disagreement(seen: Any, told: Any, ndim: int) -> tuple[str, str] | None:
  """Returns two places in words, or None if an array's may be the told one."""
  words = in_words(seen, ndim), in_words(told, ndim)
  if seen is None or seen is told:
    return None
  if isinstance(seen, AbstractMesh):
    return None if words[1].endswith(words[0]) else words
  meshes = [getattr(place, 'mesh', None) for place in (seen, told)]
  if any(isinstance(mesh, AbstractMesh) for mesh in meshes):
    return None if words[0] == words[1] else words
  if told is not None and seen.is_equivalent_to(told, ndim):
    return None
  if words[0] == words[1]:
    if words[0] == 'one device':
      return None
    # Both are meshes of concrete devices.
    assert told is not None
    more = [
      f' of devices {_ids(place.mesh)} in memory {place.memory_kind}'
      for place in (seen, told)
    ]
    return words[0] + more[0], words[1] + more[1]
  return words


def _ids(mesh: Any) -> list[int]:
  return [device.id for device in mesh.devices.flat]


def check(
  what: str, arrays: Mapping[str, Any], told: Mapping[str, Any], cure: str
) -> None:
  """Raises ValueError if an array is seen to lie elsewhere than its parameter.

  Args:
    what: noun of the arrays, capitalised.
    arrays: arrays by the name of their parameter.
    told: shardings of parameters by name.
    cure: sentence that ends the error.
  """
  for name, place in told.items():
    if name not in arrays:
      continue
    differ = disagreement(of(arrays[name]), place, arrays[name].ndim)
    if differ:
      raise ValueError(
        f'{what} {name} is on {differ[0]}, but its parameter is on '
        f'{differ[1]}. Muon would have to move it in every step. {cure}'
      )
