"""Which accelerator this machine has, and the jax that fits it.

  python configs/hardware.py

Prints the extras of setup.py that a job needs here beside its own ('gpu', 'tpu'
or nothing), and on stderr why an accelerator is left unused. Needs no package,
since run.sh asks before anything is installed. JAX_PLATFORMS=cpu hides all.
"""

import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

_PCI = pathlib.Path('/sys/bus/pci/devices')
_GOOGLE = '0x1ae0'
# As jax/_src/hardware_utils.py has them.
_TPUS = {
  '0x0027': 'v3 or older',
  '0x0056': 'v4i',
  '0x005e': 'v4',
  '0x0062': 'v5p',
  '0x0063': 'v5e',
  '0x006f': 'v6e',
  '0x0076': 'v7x',
}
# What jax's wheels need: extra, oldest driver, oldest compute capability.
_WHEELS = (('gpu', 580, 7.5), ('gpu_cuda12', 525, 5.2))


class Found(NamedTuple):
  """What one look has found.

  Attributes:
    lines: an accelerator each, to read.
    extras: of setup.py, for these; () without any that jax can use.
    reason: why jax cannot use what is there; '' if it can.
  """

  lines: tuple[str, ...]
  extras: tuple[str, ...]
  reason: str = ''


def look(pci: pathlib.Path = _PCI) -> Found:
  """Asks the NVIDIA driver, then the PCI bus for TPUs."""
  platforms = os.environ.get('JAX_PLATFORMS', '')
  if platforms and not {'cuda', 'gpu', 'tpu'} & set(platforms.split(',')):
    return Found((), ())
  rows = _nvidia()
  if rows:
    return _of_nvidia(rows)
  chips = _tpus(pci)
  if not chips:
    return Found((), ())
  return Found(tuple(f'TPU {chip}' for chip in chips), ('tpu',))


def _nvidia() -> list[list[str]]:
  """Returns name, memory, driver and capability of each NVIDIA card."""
  fields = 'name,memory.total,driver_version,compute_cap'
  command = ['nvidia-smi', f'--query-gpu={fields}', '--format=csv,noheader']
  try:
    result = subprocess.run(
      command, capture_output=True, text=True, timeout=60, check=True
    )
  except (OSError, subprocess.SubprocessError):
    return []
  rows = [line.split(', ') for line in result.stdout.splitlines()]
  return [row for row in rows if len(row) == 4]


def _of_nvidia(rows: list[list[str]]) -> Found:
  lines = tuple(
    f'{name}, {memory}, driver {driver}' for name, memory, driver, _ in rows
  )
  _, _, driver, capability = min(rows, key=lambda row: _number(row[3]))
  if sys.platform != 'linux':
    return Found(lines, (), 'jax has wheels for NVIDIA cards on Linux alone')
  for extra, oldest, least in _WHEELS:
    if _number(driver) >= oldest and _number(capability) >= least:
      return Found(lines, (extra, 'kernels'))
  _, oldest, least = _WHEELS[-1]
  return Found(
    lines,
    (),
    f'jax needs a driver from {oldest} on and compute capability {least}, not '
    f'{driver} and {capability}: renew the driver',
  )


def _number(text: str) -> float:
  """The first two numbers of a version, 0 for none."""
  try:
    return float('.'.join(text.split('.')[:2]))
  except ValueError:
    return 0.0


def _tpus(pci: pathlib.Path) -> list[str]:
  chips = []
  for device in sorted(pci.glob('*')):
    try:
      vendor = (device / 'vendor').read_text().strip()
      kind = (device / 'device').read_text().strip()
    except OSError:
      continue
    if vendor == _GOOGLE and kind in _TPUS:
      chips.append(_TPUS[kind])
  return chips


if __name__ == '__main__':
  found = look()
  if found.reason:
    print(f'{found.lines[0]} stays unused: {found.reason}.', file=sys.stderr)
  print(*found.extras, sep=',')
