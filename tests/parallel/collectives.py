"""Reads the collectives of a compiled program: sizes and who takes part."""

import math
import re
from typing import NamedTuple

import numpy as np

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all')


class Collective(NamedTuple):
  """One operation.

  Attributes:
    kind: of KINDS.
    sizes: elements of each result.
    groups: device ids that join.
    scope: the named scopes it was traced under.
  """

  kind: str
  sizes: tuple[int, ...]
  groups: frozenset[frozenset[int]]
  scope: str


def read(text: str) -> list[Collective]:
  """Returns the collectives of compiled HLO; permutes are left out."""
  kinds = '|'.join(KINDS)
  found = []
  for line in text.splitlines():
    match = re.search(rf' = (.*?) ({kinds})(-start)?\(', line)
    if match:
      shapes = re.findall(r'\w\[([\d,]*)\]', match.group(1))
      scope = re.search(r'op_name="([^"]*)"', line)
      found.append(
        Collective(
          kind=match.group(2),
          sizes=tuple(math.prod(_numbers(shape)) for shape in shapes),
          groups=_groups(line.split('replica_groups=')[1]),
          scope=scope.group(1) if scope else '',
        )
      )
  return found


def _groups(text: str) -> frozenset[frozenset[int]]:
  """Parses the three spellings of replica groups.

  Lists `{{0,1},{2,3}}`; an iota `[groups,width]<=[dims]T(order)`; axes of a
  mesh `mesh['a'=4,'b'=2], device_ids=([dims]T(order)) {'a'}`.
  """
  if text.startswith('{{'):
    lists = text[1:].split('}}')[0].split('},')
    rows = [[int(n) for n in re.findall(r'\d+', row)] for row in lists]
  elif text.startswith('['):
    shape, devices = text.split(' ')[0].split('<=')
    rows = _iota(devices).reshape(_numbers(shape))
  else:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", text.split(']')[0]))
    order = re.search(r'device_ids=\(([^ ]*)\) ', text)
    axes = re.findall(r"'(\w+)'", re.search(r"\{('.*?)\}", text).group(1))
    shape = [int(size) for size in sizes.values()]
    iota = order.group(1) if order else f'[{math.prod(shape)}]'
    joined = [list(sizes).index(axis) for axis in axes]
    width = math.prod(shape[axis] for axis in joined)
    devices = np.moveaxis(
      _iota(iota).reshape(shape), joined, range(-len(joined), 0)
    )
    rows = devices.reshape(-1, width)
  return frozenset(frozenset(map(int, row)) for row in rows)


def _iota(text: str) -> np.ndarray:
  """Parses `[dims]T(order)`: counted, reshaped, transposed."""
  dims = _numbers(text.split(']')[0])
  devices = np.arange(math.prod(dims)).reshape(dims)
  order = re.search(r'T\(([\d,]*)\)', text)
  if order:
    devices = devices.transpose(_numbers(order.group(1)))
  return devices.reshape(-1)


def _numbers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r'\d+', text)]


def blocks(num_devices: int, width: int) -> frozenset[frozenset[int]]:
  """Returns groups of `width` neighbours."""
  starts = range(0, num_devices, width)
  return frozenset(frozenset(range(s, s + width)) for s in starts)
