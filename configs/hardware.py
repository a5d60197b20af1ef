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
from collections.abc import Iterator
from typing import NamedTuple

_PCI = pathlib.Path('/sys/bus/pci/devices')
_GOOGLE, _NVIDIA = '0x1ae0', '0x10de'
_DISPLAY = '0x03'  # class of graphics cards, and of those for products alone
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
  rows, failure = _nvidia()
  if rows:
    return _of_nvidia(rows)
  devices = list(_devices(pci))
  chips = [_TPUS[d] for v, d, _ in devices if v == _GOOGLE and d in _TPUS]
  if chips:
    return Found(tuple(f'TPU {chip}' for chip in chips), ('tpu',))
  cards = [d for v, d, c in devices if v == _NVIDIA and c.startswith(_DISPLAY)]
  lines = tuple(f'NVIDIA card {card}' for card in cards)
  return Found(lines, (), failure * bool(cards))


def _nvidia() -> tuple[list[list[str]], str]:
  """Returns name, memory, driver and capability of each card that jax may use.

  Without any, why there are none.
  """
  fields = 'name,memory.total,driver_version,compute_cap'
  command = ['nvidia-smi', f'--query-gpu={fields}', '--format=csv,noheader']
  try:
    result = subprocess.run(
      command, capture_output=True, text=True, timeout=60, check=True
    )
  except subprocess.CalledProcessError as error:
    failure = ' '.join((error.stderr or error.stdout).split())
    return [], f'its driver does not answer ({failure})'
  except (OSError, subprocess.SubprocessError) as error:
    return [], f'its driver does not answer ({error})'
  rows = [line.split(', ') for line in result.stdout.splitlines()]
  rows = [row for row in rows if len(row) == 4]
  visible = os.environ.get('CUDA_VISIBLE_DEVICES')
  if rows and visible is not None:
    rows = _visible(rows, visible.split(','))
    return rows, f'CUDA_VISIBLE_DEVICES={visible} shows no card'
  return rows, 'its driver names no card'


def _visible(rows: list[list[str]], places: list[str]) -> list[list[str]]:
  """Returns the cards that CUDA shows: those before the first bad place."""
  chosen = []
  for place in places:
    if place.isdecimal() and int(place) < len(rows):
      chosen.append(rows[int(place)])
    elif place.startswith(('GPU-', 'MIG-')) and len(chosen) < len(rows):
      # Which one is not asked: cards of a machine are mostly alike.
      chosen.append(rows[len(chosen)])
    else:
      break
  return chosen


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
  cure = 'renew the driver'
  if _number(driver) >= oldest:
    cure = 'hide that card by CUDA_DEVICE_ORDER=PCI_BUS_ID and, for example, '
    cure += 'CUDA_VISIBLE_DEVICES=0,1'
  return Found(
    lines,
    (),
    f'jax needs a driver from {oldest} on and compute capability {least}, not '
    f'{driver} and {capability}: {cure}',
  )


def _number(text: str) -> float:
  """The first two numbers of a version, 0 for none."""
  try:
    return float('.'.join(text.split('.')[:2]))
  except ValueError:
    return 0.0


def _devices(pci: pathlib.Path) -> Iterator[tuple[str, str, str]]:
  """Yields vendor, device and class of what is on the PCI bus."""
  for folder in sorted(pci.glob('*')):
    try:
      vendor, device, kind = (
        (folder / name).read_text().strip()
        for name in ('vendor', 'device', 'class')
      )
    except OSError:
      continue
    yield vendor, device, kind


if __name__ == '__main__':
  found = look()
  if found.reason:
    print(f'{found.lines[0]} stays unused: {found.reason}.', file=sys.stderr)
  print(*found.extras, sep=',')
