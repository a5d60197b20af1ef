"""Machines that a plan is made for, by name: 'cpu:8' is 8 emulated devices.

Imports jax only when asked for devices: `prepare` has to come first.
"""

import os
import re
from typing import Any

FORMS = ('cpu:N',)

_COUNT_FLAG = '--xla_force_host_platform_device_count'


def num_devices(topology: str) -> int:
  """Reads the number of devices from the name.

  Raises:
    ValueError: lists the names that exist.
  """
  match = re.fullmatch(r'cpu:([1-9]\d*)', topology)
  if match is None:
    raise ValueError(
      f'topology {topology!r} is not known; there are {", ".join(FORMS)}, '
      'with N >= 1 emulated devices.'
    )
  return int(match.group(1))


def prepare(topology: str) -> None:
  """Sets what XLA reads from the environment; call before jax is imported."""
  count = num_devices(topology)
  flags = os.environ.get('XLA_FLAGS', '').split()
  others = [flag for flag in flags if not flag.startswith(_COUNT_FLAG)]
  os.environ['XLA_FLAGS'] = ' '.join([*others, f'{_COUNT_FLAG}={count}'])
  os.environ['JAX_PLATFORMS'] = 'cpu'


def devices(topology: str) -> list[Any]:
  """Returns the jax devices of a prepared topology."""
  import jax

  count, found = num_devices(topology), jax.devices('cpu')
  if len(found) < count:
    raise ValueError(
      f'topology {topology!r} needs {count} devices and jax started with '
      f'{len(found)}; call `prepare` before jax is imported.'
    )
  return found[:count]


def default_mesh(count: int) -> tuple[int, int, int]:
  """Returns (replica, fsdp, context) for a number of devices.

  Two replicas of two context shards, the rest fsdp, where 4 divides; 8 devices
  are (2, 2, 2), the smallest mesh with experts wider than a replica. Otherwise
  all fsdp.
  """
  return (2, count // 4, 2) if count % 4 == 0 else (1, count, 1)
