"""Machines that a plan is made for, by name: 'cpu:8' is 8 devices.

None of them need exist: a plan takes the shape of a mesh, not its devices.
Never imports jax, which has to come after `prepare`.
"""

import os
import re

FORMS = ('cpu:N',)


def num_devices(topology: str) -> int:
  """Reads the number of devices from the name.

  Raises:
    ValueError: lists the names that exist.
  """
  match = re.fullmatch(r'cpu:([1-9][0-9]*)', topology)
  if match is None:
    raise ValueError(
      f'topology {topology!r} is not known; there are {", ".join(FORMS)}, '
      'with N >= 1 devices.'
    )
  return int(match.group(1))


def prepare() -> None:
  """Keeps jax, which is not imported yet, from taking an accelerator."""
  os.environ['JAX_PLATFORMS'] = 'cpu'


def default_mesh(count: int) -> tuple[int, int, int]:
  """Returns (replica, fsdp, context) for a number of devices.

  Two replicas of two context shards, the rest fsdp, where 4 divides; 8 devices
  are (2, 2, 2), the smallest mesh with experts wider than a replica. Otherwise
  all fsdp.
  """
  return (2, count // 4, 2) if count % 4 == 0 else (1, count, 1)
