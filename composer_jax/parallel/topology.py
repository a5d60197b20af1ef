"""The one mesh of a process group.

Its axes are products: layouts (`parallel.layouts`) name tuples of them, so
experts need no axis of their own and may spread wider than the batch.
"""

from collections.abc import Sequence

import jax
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

  Args:
    replica: copies of the dense weights.
    fsdp: shards of the batch within a replica.
    context: shards of the sequence.
    devices: to use; None means all.

  Raises:
    ValueError: if the product of the axes is not the number of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  shape = (replica, fsdp, context)
  if min(shape) < 1 or replica * fsdp * context != len(devices):
    raise ValueError(
      f'The mesh replica={replica} x fsdp={fsdp} x context={context} needs '
      f'{replica * fsdp * context} devices and there are {len(devices)}; the '
      'product of the axes must equal the number of devices.'
    )
  # make_mesh defaults to Explicit axes in recent jax; models use Auto.
  return jax.make_mesh(
    shape,
    AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
    devices=devices,
  )
