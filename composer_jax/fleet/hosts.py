"""Which hosts a trainer runs on, and which of them this one is.

local:NxD   N processes on this machine, each with D emulated CPU devices
env         one process for each task of a scheduler, on the devices there
ray:NxD     N hosts of a Ray cluster (`ray_hosts`)
"""

import dataclasses
import os
import re
import socket
from collections.abc import Mapping

# Variables with the number of this host, and with the number of hosts or their
# names: ours, then those of schedulers.
VARIABLES = (
  ('COMPOSER_JAX_HOST', 'COMPOSER_JAX_HOSTS'),
  ('SLURM_PROCID', 'SLURM_NTASKS'),
  # Kubernetes numbers the pods of an indexed Job, but does not count them.
  ('JOB_COMPLETION_INDEX', 'COMPOSER_JAX_HOSTS'),
  ('TPU_WORKER_ID', 'TPU_WORKER_HOSTNAMES'),
)
# CPU devices to emulate under env, for tests.
DEVICES = 'COMPOSER_JAX_DEVICES'
_COUNTED = re.compile(r'(local|ray):([1-9]\d*)(?:x([1-9]\d*))?')
_SLICE = re.compile(r'ray:(\d+(?:x\d+)+)@(v\w+)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
  """Place of this supervisor among those of a trainer.

  Attributes:
    index: number of this host; 0 leads.
    count: number of hosts; 0 for those of `slice`.
    processes: number of trainer processes on each.
    devices: CPU devices that each process emulates, or GPUs of a Ray cluster
      that has some; None for what is there.
    is_ray: true if Ray is asked for these hosts.
    slice: topology and version of a TPU slice of Ray, '4x4' and 'v6e'.
  """

  index: int = 0
  count: int = 1
  processes: int = 1
  devices: int | None = None
  is_ray: bool = False
  slice: tuple[str, str] | None = None

  @property
  def total(self) -> int:
    """Number of processes of the trainer."""
    return self.count * self.processes


def parse(text: str, environment: Mapping[str, str] = os.environ) -> Hosts:
  """Reads the flag --launch.

  Raises:
    ValueError: it has no such form, or no variable tells this host's number.
  """
  if text == 'env':
    return _from_variables(environment)
  if match := _SLICE.fullmatch(text):
    return Hosts(count=0, is_ray=True, slice=(match[1], match[2]))
  if (match := _COUNTED.fullmatch(text)) is None:
    raise ValueError(
      '--launch must be local:PROCESSESxDEVICES (local:2x4), env, ray:HOSTS, '
      f'ray:HOSTSxDEVICES, or ray:TOPOLOGY@TPU (ray:4x4@v6e), not {text!r}.'
    )
  count, devices = int(match[2]), int(match[3]) if match[3] else None
  if match[1] == 'ray':
    return Hosts(count=count, devices=devices, is_ray=True)
  return Hosts(processes=count, devices=devices)


def _from_variables(environment: Mapping[str, str]) -> Hosts:
  for number, hosts in VARIABLES:
    if number in environment and hosts in environment:
      index, count = environment[number], environment[hosts]
      if hosts.endswith('HOSTNAMES'):
        count = str(len(count.split(',')))
      is_right = index.isdigit() and count.isdigit()
      if not is_right or int(index) >= int(count):
        raise ValueError(
          f'{number} must be one of 0 to {hosts} - 1; they are {index!r} and '
          f'{environment[hosts]!r}.'
        )
      devices = int(environment.get(DEVICES, 0)) or None
      return Hosts(index=int(index), count=int(count), devices=devices)
  pairs = ', or '.join(f'{a} and {b}' for a, b in VARIABLES)
  raise ValueError(
    f'--launch=env finds no number of this host: set {pairs}. On one machine '
    'use --launch=local:2x4.'
  )


def address() -> str:
  """Returns this host's address and a free port, as other hosts reach it."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outgoing:
    try:
      # Sends nothing: a route is looked up, to an address nobody has.
      outgoing.connect(('192.0.2.1', 9))
      host = outgoing.getsockname()[0]
    except OSError:
      host = '127.0.0.1'
  with socket.socket() as listener:
    listener.bind(('', 0))
    return f'{host}:{listener.getsockname()[1]}'
