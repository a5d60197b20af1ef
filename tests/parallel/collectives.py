"""Reads the collectives of a compiled program, with sizes and groups."""

import math
import re
from typing import NamedTuple

from composer_jax.plan.hlo import text as hlo_text

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all')


class Collective(NamedTuple):
  """One operation.

  Attributes:
    kind: one of KINDS.
    sizes: numbers of elements of each result.
    groups: sets of the device ids that join.
    scope: named scopes that it was traced under.
  """

  kind: str
  sizes: tuple[int, ...]
  groups: frozenset[frozenset[int]]
  scope: str


def read(text: str) -> list[Collective]:
  """Returns the collectives of compiled HLO, without permutes."""
  kinds = '|'.join(KINDS)
  operations = []
  for line in text.splitlines():
    match = re.search(rf' = (.*?) ({kinds})(-start)?\(', line)
    if match:
      shapes = re.findall(r'\w\[([\d,]*)\]', match.group(1))
      scope = re.search(r'op_name="([^"]*)"', line)
      operations.append(
        Collective(
          kind=match.group(2),
          sizes=tuple(
            math.prod(int(n) for n in shape.split(',') if n) for shape in shapes
          ),
          groups=hlo_text.groups(line.split('replica_groups=')[1]),
          scope=scope.group(1) if scope else '',
        )
      )
  return operations


def blocks(num_devices: int, width: int) -> frozenset[frozenset[int]]:
  """Returns groups of `width` successive device ids."""
  starts = range(0, num_devices, width)
  return frozenset(frozenset(range(s, s + width)) for s in starts)
