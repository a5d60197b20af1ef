"""Machines that a plan is made for, by name: 'v5p:8x8x8' is 512 TPU v5p.

None of them need exist: a plan takes the shape of a mesh, not its devices.
Never imports jax, which has to come after `prepare`.
"""

import math
import os
import re

# How many numbers say the size of each: a TPU slice is a torus.
_DIMENSIONS = {'cpu': 1, 'v5e': 2, 'v5p': 3, 'v6e': 2, 'h100': 1, 'h200': 1}

FORMS = tuple(
  f'{name}:{"N" if number == 1 else "x".join("ABC"[:number])}'
  for name, number in _DIMENSIONS.items()
)


def num_devices(topology: str) -> int:
  """Reads the number of devices from the name.

  Raises:
    ValueError: lists the names that exist.
  """
  sizes = topology.removeprefix(f'{machine(topology)}:')
  return math.prod(map(int, sizes.split('x')))


def machine(topology: str) -> str:
  """Returns what the devices are; `optim.muon_cost` knows the same names.

  Raises:
    ValueError: lists the names that exist.
  """
  name, _, sizes = topology.partition(':')
  number = _DIMENSIONS.get(name, 0)
  if not number or not re.fullmatch('x'.join(['[1-9][0-9]*'] * number), sizes):
    raise ValueError(
      f'topology {topology!r} is not known; there are {", ".join(FORMS)}, '
      'with numbers of at least 1.'
    )
  return name


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
