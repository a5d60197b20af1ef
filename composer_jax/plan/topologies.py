"""Machines that a plan is made for, by name: 'v5p:8x8x8' is 512 TPU v5p.

None of them need exist: a plan takes the shape of a mesh, not its devices.
Never imports jax, which has to come after `prepare`.
"""

import importlib.util
import math
import os
import pathlib
import re
import sys
from typing import Any, NamedTuple


class Machine(NamedTuple):
  """Devices of one kind; their speeds are `optim.muon.cost`'s.

  Attributes:
    dimensions: numbers that say how many: a TPU slice is a torus.
    platform: as jax calls it.
    hbm: bytes of memory of a device; None where it is the host's.
    devices: as jax counts them, on one chip.
  """

  dimensions: int
  platform: str
  hbm: int | None
  devices: int = 1


_GIB = 1 << 30

# Memory: the tables of Google Cloud's documentation of each TPU (GiB of a chip:
# v5e 16, v5p 95, v6e 32, TPU7x 192, which two devices share) and NVIDIA's data
# sheets (GB).
MACHINES = {
  'cpu': Machine(1, 'cpu', None),
  'v5e': Machine(2, 'tpu', 16 * _GIB),
  'v5p': Machine(3, 'tpu', 95 * _GIB),
  'v6e': Machine(2, 'tpu', 32 * _GIB),
  'tpu7x': Machine(3, 'tpu', 96 * _GIB, devices=2),
  'h100': Machine(1, 'gpu', 80 * 10**9),
  'h200': Machine(1, 'gpu', 141 * 10**9),
}

FORMS = tuple(
  f'{name}:{"N" if m.dimensions == 1 else "x".join("ABC"[: m.dimensions])}'
  for name, m in MACHINES.items()
)

# Neither is a requirement of this package: both are large.
LIBTPU = 'pip install --target=FOLDER --no-deps libtpu==0.0.42.1'
_CUDA = 'pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt'


def num_devices(topology: str) -> int:
  """Reads the number of devices from the name; raises as `machine`."""
  name = machine(topology)
  sizes = topology.removeprefix(f'{name}:')
  return MACHINES[name].devices * math.prod(map(int, sizes.split('x')))


def machine(topology: str) -> str:
  """Returns what the devices are; `optim.muon.cost` knows the same names.

  Raises:
    ValueError: lists the names that exist.
  """
  name, _, sizes = topology.partition(':')
  number = MACHINES[name].dimensions if name in MACHINES else 0
  if not number or not re.fullmatch('x'.join(['[1-9][0-9]*'] * number), sizes):
    raise ValueError(
      f'topology {topology!r} is not known; there are {", ".join(FORMS)}, '
      'with numbers of at least 1.'
    )
  return name


def prepare(topology: str = '', libtpu: str = '') -> None:
  """Keeps jax, which is not imported yet, from taking an accelerator.

  Args:
    topology: whose compiler is wanted; '' for none.
    libtpu: folder that has libtpu, if it is not installed.

  Raises:
    ValueError: the compiler is not there; says how to install it.
  """
  os.environ['JAX_PLATFORMS'] = 'cpu'
  if not topology:
    return
  # Warnings are to be seen.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
  name = machine(topology)
  platform = MACHINES[name].platform
  if platform == 'cpu':
    flag = f'--xla_force_host_platform_device_count={num_devices(topology)}'
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}'
  elif platform == 'tpu':
    if libtpu:
      sys.path.append(libtpu)
    _require('libtpu', f'{LIBTPU}, then --libtpu=FOLDER')
    # No TPU is asked for what it is; the lock is for those that have one.
    os.environ['TPU_SKIP_MDS_QUERY'] = '1'
    os.environ['TPU_WORKER_HOSTNAMES'] = 'localhost'
    os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
    os.environ.setdefault('TPU_STDERR_LOG_LEVEL', '1')
  else:
    _target_config(name)
    _require(
      'jax_plugins.xla_cuda13',
      f'{_CUDA}, VERSION that of jax, in an environment of its own',
    )
    os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'] = '1'


def _require(module: str, cure: str) -> None:
  try:
    found = importlib.util.find_spec(module)
  except ModuleNotFoundError:
    found = None
  if found is None:
    raise ValueError(
      f'The compiler of these machines, {module}, is not installed: {cure}.'
    )


def devices(topology: str) -> list[Any]:
  """Returns devices to compile for, which nobody has; after `prepare`.

  Raises:
    ValueError: of a GPU of which no description is at hand.
  """
  import jax
  from jax.experimental import topologies

  name = machine(topology)
  count = num_devices(topology)
  platform = MACHINES[name].platform
  if platform == 'cpu':
    return jax.devices('cpu')[:count]
  if platform == 'tpu':
    return topologies.get_topology_desc(
      platform='tpu', topology_name=topology
    ).devices
  return topologies.get_topology_desc(
    platform='cuda',
    topology_name='',
    target_config=_target_config(name),
    # Slices, nodes of one, devices of a node.
    topology=f'1x{max(count // 8, 1)}x{min(count, 8)}',
  ).devices


def _target_config(name: str) -> str:
  """Returns what the CUDA compiler wants to know of a device, as text."""
  path = pathlib.Path(__file__).parent / f'{name}_target_config.txtpb'
  if not path.exists():
    known = sorted(p.name for p in path.parent.glob('*_target_config.txtpb'))
    raise ValueError(
      f'There is no {path.name} to compile for {name}; there are {known}.'
    )
  return path.read_text()


def default_mesh(count: int) -> tuple[int, int, int]:
  """Returns (replica, fsdp, context) for a number of devices.

  8 devices are (2, 2, 2), the smallest mesh with experts wider than a replica.
  """
  return (2, count // 4, 2) if count % 4 == 0 else (1, count, 1)
