"""Counts the operations of matrix products in unoptimised HLO."""

import math
import re

# name = shape operation(operands), attributes
_INSTRUCTION = re.compile(
  r'^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$'
)
_Instruction = tuple[str, ...]


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


def _dot(shape: str, rest: str, lhs_dims: dict[str, list[int]]) -> float:
  lhs = re.match(r'%?([\w.-]+)', rest).group(1)
  contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', rest).group(1)
  sizes = [lhs_dims[lhs][int(n)] for n in contracted.split(',') if n]
  return 2.0 * math.prod(_dims(shape)) * math.prod(sizes)


def count(text: str, dynamic_trips: float) -> float:
  """Returns the operations of the program, two per multiply and add.

  Args:
    text: unoptimised HLO.
    dynamic_trips: of loops whose end the data decide; others count to a
      constant, which is read from their condition.
  """
  computations = _computations(text)

  def walk(name: str) -> float:
    total, dims = 0.0, {}
    for instruction, shape, operation, rest in computations[name]:
      if not shape.startswith('('):
        dims[instruction] = _dims(shape)
      if operation == 'dot':
        total += _dot(shape, rest, dims)
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
