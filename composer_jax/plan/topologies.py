"""Names of machines to plan for, such as 'v5p:8x8x8' for 512 TPU v5p.

The machines need not exist. This module imports jax only inside functions,
since `prepare` has to run before jax is imported.
"""

import importlib.util
import math
import os
import pathlib
import re
import sys
from typing import Any, NamedTuple


class Machine(NamedTuple):
  """Devices of one kind; `optim.muon.cost` holds their speeds.

  Attributes:
    dimensions: number of sizes in a topology's name; a TPU slice is a torus.
    platform: jax's name of the platform.
    hbm: bytes of memory of one device; None if it uses the host's memory.
    kind: jax's `device_kind` of a TPU; '' for others.
    devices: number of jax devices on one chip.
  """

  dimensions: int
  platform: str
  hbm: int | None
  kind: str = ''
  devices: int = 1


_GIB = 1 << 30

# Memory from Google Cloud's documentation (GiB a chip: v5e 16, v5p 95, v6e 32,
# TPU7x 192, shared by two devices) and from NVIDIA's data sheets (GB).
MACHINES = {
  'cpu': Machine(1, 'cpu', None),
  'v5e': Machine(2, 'tpu', 16 * _GIB, 'TPU v5 lite'),
  'v5p': Machine(3, 'tpu', 95 * _GIB, 'TPU v5'),
  'v6e': Machine(2, 'tpu', 32 * _GIB, 'TPU v6 lite'),
  'tpu7x': Machine(3, 'tpu', 96 * _GIB, 'TPU7x', devices=2),
  'h100': Machine(1, 'gpu', 80 * 10**9),
  'h200': Machine(1, 'gpu', 141 * 10**9),
}

FORMS = tuple(
  f'{name}:{"N" if m.dimensions == 1 else "x".join("ABC"[: m.dimensions])}'
  for name, m in MACHINES.items()
)

# The compilers are large, so this package does not require them.
LIBTPU = 'pip install --target=FOLDER --no-deps libtpu==0.0.42.1'
_CUDA = 'pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt'


def num_devices(topology: str) -> int:
  return MACHINES[machine(topology)].devices * math.prod(sizes(topology))


def sizes(topology: str) -> tuple[int, ...]:
  """Returns the sides of a slice, in chips; of others the number of devices."""
  return tuple(
    map(int, topology.removeprefix(f'{machine(topology)}:').split('x'))
  )


def rings(sides: tuple[int, ...]) -> tuple[bool, ...]:
  """Returns which sides of a TPU slice are closed to rings.

  From Google Cloud's pages: those of whole cubes of 4 x 4 x 4, and in two
  dimensions those as long as a pod. Twisted tori are not modelled.
  """
  if len(sides) == 3:
    return (all(n % 4 == 0 for n in sides),) * 3
  return tuple(n == 16 for n in sides)


def machine(topology: str) -> str:
  """Returns a topology's key of MACHINES; a ValueError if it is no FORM."""
  name, _, sizes = topology.partition(':')
  number = MACHINES[name].dimensions if name in MACHINES else 0
  if not number or not re.fullmatch('x'.join(['[1-9][0-9]*'] * number), sizes):
    raise ValueError(
      f'topology {topology!r} is not known; write one of {", ".join(FORMS)}, '
      'with numbers of at least 1.'
    )
  return name


def prepare(topology: str = '', libtpu: str = '') -> None:
  """Keeps jax off accelerators; call it before jax is imported.

  Args:
    topology: machines whose compiler will be used; '' for no compiler.
    libtpu: folder with the package libtpu; '' uses the installed one.

  Raises:
    ValueError: the compiler is missing; the message says how to install it.
  """
  os.environ['JAX_PLATFORMS'] = 'cpu'
  if not topology:
    return
  # Shows the compiler's warnings, which `plan.aot` reads.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
  name = machine(topology)
  platform = MACHINES[name].platform
  if platform == 'cpu':
    flag = f'--xla_force_host_platform_device_count={num_devices(topology)}'
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}'
  elif platform == 'tpu':
    if libtpu:
      _check_libtpu(libtpu)
      sys.path.append(libtpu)
    _require('libtpu', f'{LIBTPU}, then --libtpu=FOLDER')
    # There is no TPU to ask for its kind, and none to lock.
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


def _check_libtpu(folder: str) -> None:
  # Python imports any folder of this name as a package, with which jax would
  # fail later by an attribute error.
  library = pathlib.Path(folder, 'libtpu', 'libtpu.so')
  if not library.is_file():
    raise ValueError(
      f'--libtpu={folder} must name the folder that pip installed libtpu into, '
      f'and {library} is not there. Install it with: '
      f'{LIBTPU.replace("FOLDER", folder)}.'
    )


def _require(module: str, cure: str) -> None:
  try:
    is_installed = importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:
    is_installed = False
  if not is_installed:
    raise ValueError(
      f'The compiler of these machines, {module}, is not installed. Install it '
      f'with: {cure}.'
    )


def devices(topology: str) -> list[Any]:
  """Returns devices to compile for, after `prepare`; refuses unknown GPUs."""
  import jax
  from jax.experimental import topologies

  name = machine(topology)
  count = num_devices(topology)
  platform = MACHINES[name].platform
  if platform == 'cpu':
    return jax.devices('cpu')[:count]
  if platform == 'tpu':
    # By default the compiler knows whole hosts, of several chips.
    is_chip = count == MACHINES[name].devices
    bounds = {'chips_per_host_bounds': (1, 1, 1)} if is_chip else {}
    return topologies.get_topology_desc(
      platform='tpu', topology_name=topology, **bounds
    ).devices
  return topologies.get_topology_desc(
    platform='cuda',
    topology_name='',
    target_config=_target_config(name),
    # Slices x nodes of a slice x devices of a node.
    topology=f'1x{max(count // 8, 1)}x{min(count, 8)}',
  ).devices


def _target_config(name: str) -> str:
  """Returns the text protobuf that describes a GPU to the CUDA compiler."""
  path = pathlib.Path(__file__).parent / f'{name}_target_config.txtpb'
  if not path.exists():
    known = sorted(p.name for p in path.parent.glob('*_target_config.txtpb'))
    raise ValueError(
      f'There is no {path.name}, which compiling for {name} needs; there are '
      f'{known}.'
    )
  return path.read_text()


def default_mesh(count: int) -> tuple[int, int, int]:
  """Returns the sizes (replica, fsdp, context); (2, 2, 2) for 8 devices."""
  return (2, count // 4, 2) if count % 4 == 0 else (1, count, 1)
