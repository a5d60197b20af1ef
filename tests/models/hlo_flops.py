"""Counts the operations of matrix products in unoptimised HLO."""

import math
import re
from collections.abc import Callable

# name = shape operation(operands), attributes
_INSTRUCTION = re.compile(
  r'^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$'
)
_Instruction = tuple[str, ...]
_Dot = tuple[list[int], list[int], list[int]]


def _computations(text: str) -> dict[str, list[_Instruction]]:
  found: dict[str, list[_Instruction]] = {}
  for line in text.splitlines():
    head = re.match(r'^(ENTRY )?%?([\w.-]+)( .*)?\{$', line)
    if head and ' = ' not in line:
      body = found.setdefault('ENTRY' if head.group(1) else head.group(2), [])
    elif match := _INSTRUCTION.match(line):
      body.append(match.groups())
  return found


def _dims(shape: str) -> list[int]:
  inner = re.search(r'\[([\d,]*)\]', shape).group(1)
  return [int(n) for n in inner.split(',') if n]


def _dot(shape: str, rest: str, known: dict[str, list[int]]) -> _Dot:
  lhs, rhs = re.match(r'%?([\w.-]+), %?([\w.-]+)', rest).groups()
  return known[lhs], known[rhs], _dims(shape)


def _operations(dot: _Dot, rest: str) -> float:
  lhs, _, out = dot
  contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', rest).group(1)
  sizes = [lhs[int(n)] for n in contracted.split(',') if n]
  return 2.0 * math.prod(out) * math.prod(sizes)


def count(
  text: str,
  dynamic_trips: float,
  *,
  of: Callable[..., bool] = lambda lhs, rhs, out: True,
) -> float:
  """Returns the operations of the program, two per multiply and add.

  Args:
    text: unoptimised HLO.
    dynamic_trips: of loops whose end the data decide; others count to a
      constant, which is read from their condition.
    of: which products count, by the dimensions of both sides and the result.
  """
  computations = _computations(text)

  def walk(name: str) -> float:
    total, dims = 0.0, {}
    for instruction, shape, operation, rest in computations[name]:
      if not shape.startswith('('):
        dims[instruction] = _dims(shape)
      if operation == 'dot':
        dot = _dot(shape, rest, dims)
        total += _operations(dot, rest) if of(*dot) else 0.0
      elif operation == 'while':
        names = re.search(r'condition=%?([\w.-]+), body=%?([\w.-]+)', rest)
        total += trips(names.group(1)) * walk(names.group(2))
      elif called := re.search(r'to_apply=%?([\w.-]+)', rest):
        total += walk(called.group(1))
    return total

  def trips(condition: str) -> float:
    ends = [
      int(rest.split(')')[0])
      for _, _, operation, rest in computations[condition]
      if operation == 'constant'
    ]
    return ends[0] if ends else dynamic_trips

  return walk('ENTRY')
