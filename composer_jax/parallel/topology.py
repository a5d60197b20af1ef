"""The one mesh of a process group.

Layouts (`parallel.layouts`) shard dimensions over tuples of its axes, so
experts need no axis of their own and may use more devices than the batch.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

AXES = ('replica', 'fsdp', 'context')


def make_mesh(
  replica: int = 1,
  fsdp: int = 1,
  context: int = 1,
  *,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Returns a mesh with axes `AXES`, all of type Auto.

  Replicas hold copies of the dense weights; fsdp shards the batch within a
  replica, and context the sequence. By default the mesh has all devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  shape = (replica, fsdp, context)
  needed, count = math.prod(shape), len(devices)
  if min(shape) < 1 or needed != count:
    fitting = (
      f'{axis}={count * size // needed}'
      for axis, size in zip(AXES, shape, strict=True)
      if min(shape) >= 1 and count * size % needed == 0
    )
    cure = ' or '.join(fitting)
    raise ValueError(
      f'The mesh replica={replica} x fsdp={fsdp} x context={context} needs '
      f'{needed} devices and there are {count}; the product of the axes must '
      'equal the number of devices' + (f': {cure} would fit.' if cure else '.')
    )
  # Axes are Explicit by default in recent jax; models use Auto.
  return Mesh(
    place(shape, devices),
    AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
  )


def place(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
  """Returns devices by their place on a mesh of this shape."""
  # Two axes may have to share a side of a TPU slice, as 2 x 128 x 2 does on
  # 8 x 8 x 8; `jax.make_mesh` refuses that.
  return mesh_utils.create_device_mesh(
    shape, devices, allow_split_physical_axes=True
  )
