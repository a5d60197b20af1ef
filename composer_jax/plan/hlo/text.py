"""Parses the text of an HLO module into computations and instructions.

Parses only what `plan.hlo` needs: names, shapes, operations, operands, trip
counts and replica groups. Other attributes stay text.
"""

import dataclasses
import math
import re
from typing import NamedTuple

import numpy as np

# Bits of dtypes whose names do not state them.
_BITS = {'pred': 8, 'bf16': 16, 'token': 0, 'opaque': 0}


def search(pattern: str, text: str) -> re.Match:
  """Returns the first match of a pattern that HLO must contain."""
  match = re.search(pattern, text)
  if match is None:
    raise ValueError(
      f'HLO text lacks {pattern!r}: {text[:120]!r}. This reader knows the text '
      'of jaxlib 0.10.'
    )
  return match


class Array(NamedTuple):
  dtype: str
  dims: tuple[int, ...]

  @property
  def bytes(self) -> int:
    return math.ceil(math.prod(self.dims) * _bits(self.dtype) / 8)


def _bits(dtype: str) -> int:
  """Returns the bits of `f32`, `s4`, `f8e4m3fn`, ..."""
  if dtype in _BITS:
    return _BITS[dtype]
  return int(search(r'^[a-z]+(\d+)', dtype).group(1))


def arrays(shape: str) -> list[Array]:
  """Returns the arrays of a shape; a tuple has several."""
  return [
    Array(dtype, tuple(int(n) for n in dims.split(',') if n))
    for dtype, dims in re.findall(r'\b([a-z]\w*)\[([\d,<=]*)\]', shape)
  ]


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
  """One line of a computation.

  Attributes:
    name: name without the percent sign.
    shape: shape of the result as text.
    rest: text of the attributes.
    literal: value of a constant or number of a parameter; '' otherwise.
    is_root: true if the result is that of the computation.
  """

  name: str
  shape: str
  operation: str
  operands: tuple[str, ...]
  rest: str
  literal: str
  is_root: bool

  def attribute(self, name: str) -> str:
    """Returns the name of the computation in an attribute."""
    return search(rf'\b{name}=%?([\w.-]+)', self.rest).group(1)

  def called(self) -> str | None:
    """Returns the name of the computation that this calls or fuses."""
    return self._stated(r'\b(?:calls|to_apply)=%?([\w.-]+)') or None

  def target(self) -> str:
    """Returns the target of a custom call; '' for other instructions."""
    return self._stated(r'custom_call_target="([^"]*)"')

  def branches(self) -> list[str]:
    names = re.findall(
      r'[\w.-]+', self._stated(r'branch_computations=\{([^}]*)')
    )
    sides = ('true_computation', 'false_computation')
    return names or [self.attribute(side) for side in sides]

  def scope(self) -> str:
    return self._stated(r'op_name="([^"]*)"')

  def _stated(self, pattern: str) -> str:
    match = re.search(pattern, self.rest)
    return match.group(1) if match else ''


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
  """A program on `num_devices`; `entry` names the computation to begin with."""

  computations: dict[str, Computation]
  entry: str
  num_devices: int


_HEAD = re.compile(r'^(ENTRY )?%?([\w.-]+)( .*)?\{$')
_LINE = re.compile(r'^\s*(ROOT )?%?([\w.-]+) = ')


def parse(text: str) -> Module:
  """Parses a module, optimised or not."""
  computations: dict[str, Computation] = {}
  entry, body = '', {}
  for line in text.splitlines():
    match = _LINE.match(line)
    if match:
      instruction = _instruction(line, match)
      body[instruction.name] = instruction
    elif head := _HEAD.match(line):
      body = computations[head.group(2)] = {}
      entry = head.group(2) if head.group(1) else entry
  if not entry:
    raise ValueError(f'The text is no HLO module: no ENTRY in {text[:80]!r}.')
  header = text.split('\n', 1)[0]
  sizes = re.findall(r'(?:num_partitions|replica_count)=(\d+)', header)
  return Module(
    computations=computations,
    entry=entry,
    num_devices=math.prod(map(int, sizes)),
  )


def _instruction(line: str, match: re.Match) -> Instruction:
  start = match.end()
  if line[start] == '(':
    end = _closing(line, start) + 1
  else:
    end = line.index(' ', start)
  opening = line.index('(', end)
  closing = _closing(line, opening)
  inner = line[opening + 1 : closing]
  operation = line[end:opening].strip()
  names = () if operation in ('constant', 'parameter') else _names(inner)
  return Instruction(
    name=match.group(2),
    shape=line[start:end],
    operation=operation,
    operands=names,
    rest=line[closing + 1 :],
    literal=inner if operation in ('constant', 'parameter') else '',
    is_root=bool(match.group(1)),
  )


def _closing(line: str, opening: int) -> int:
  depth = 0
  for match in re.compile(r'[()]').finditer(line, opening):
    depth += 1 if match.group() == '(' else -1
    if not depth:
      return match.start()
  raise ValueError(f'Unbalanced parentheses in {line[:120]!r}.')


def _names(operands: str) -> tuple[str, ...]:
  """Returns the names of operands, which may follow their types."""
  if '%' in operands:
    return tuple(re.findall(r'%([\w.-]+)', operands))
  return tuple(re.findall(r'([\w.-]+)(?:, |$)', operands))


def trips(
  loop: Instruction, computation: Computation, module: Module
) -> int | None:
  """Returns the trips of a loop; None if they depend on the data."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
    return int(known.group(1))
  compare = _compare(module.computations[loop.attribute('condition')])
  carry = computation[loop.operands[0]]
  if compare is None or carry.operation != 'tuple':
    return None
  index, end = compare
  start = _constant(carry.operands[index], computation)
  step = _step(index, module.computations[loop.attribute('body')])
  if start is None or step is None:
    return None
  return max(0, -((start - end) // step))


def root(computation: Computation) -> Instruction:
  """Returns the instruction whose result is the computation's."""
  return next(i for i in computation.values() if i.is_root)


def _compare(condition: Computation) -> tuple[int, int] | None:
  """Returns (index, end) of `carry[index] < end`; None for other conditions."""
  compare = root(condition)
  direction = re.search(r'direction=(LT|LE)', compare.rest)
  if compare.operation != 'compare' or not direction:
    return None
  counter, limit = (condition[name] for name in compare.operands)
  end = _constant(limit.name, condition)
  if counter.operation != 'get-tuple-element' or end is None:
    return None
  return _index(counter), end + (direction.group(1) == 'LE')


def _index(element: Instruction) -> int:
  return int(search(r'index=(\d+)', element.rest).group(1))


def _constant(name: str, computation: Computation) -> int | None:
  """Returns the value of a constant, also through copies; None for others."""
  instruction = _unwrapped(computation[name], computation)
  if instruction.operation != 'constant':
    return None
  return int(instruction.literal)


def _step(index: int, body: Computation) -> int | None:
  """Returns the constant that a loop adds to its counter on each trip."""
  carry = root(body)
  if carry.operation != 'tuple':
    return None
  add = _unwrapped(body[carry.operands[index]], body)
  if add.operation != 'add':
    return None
  steps = [_constant(name, body) for name in add.operands]
  return next((step for step in steps if step), None)


def scattered(computation: Computation) -> Instruction | None:
  """Returns the all-reduce of which a slice is kept: TPUs' reduce-scatter."""
  result = _unwrapped(root(computation), computation)
  if result.operation != 'dynamic-slice':
    return None
  source = _unwrapped(computation[result.operands[0]], computation)
  return source if source.operation == 'all-reduce' else None


def _unwrapped(
  instruction: Instruction, computation: Computation
) -> Instruction:
  """Returns the operand behind copies, bitcasts and conversions."""
  while instruction.operation in ('copy', 'bitcast', 'convert'):
    instruction = computation[instruction.operands[0]]
  return instruction


def groups(text: str) -> frozenset[frozenset[int]]:
  """Returns the replica groups as sets of device ids; empty means one of all.

  HLO writes them as lists `{{0,1},{2,3}}`, as an iota
  `[groups,width]<=[dims]T(order)` or as axes of a mesh
  `mesh['a'=4,'b'=2], device_ids=([dims]T(order)) {'a'}`.
  """
  if text.startswith('{}'):
    return frozenset()
  if text.startswith('{{'):
    lists = text[1:].split('}}')[0].split('},')
    rows = [_numbers(row) for row in lists]
  elif text.startswith('['):
    shape, devices = text.split(' ')[0].split('<=')
    rows = _iota(devices).reshape(_numbers(shape))
  else:
    rows = _mesh(text)
  return frozenset(frozenset(map(int, row)) for row in rows)


def _mesh(text: str) -> np.ndarray:
  sizes = dict(re.findall(r"'(\w+)'=(\d+)", text.split(']')[0]))
  order = re.search(r'device_ids=\(([^ ]*)\) ', text)
  axes = re.findall(r"'(\w+)'", search(r"\{('.*?)\}", text).group(1))
  shape = [int(size) for size in sizes.values()]
  iota = order.group(1) if order else f'[{math.prod(shape)}]'
  joined = [list(sizes).index(axis) for axis in axes]
  width = math.prod(shape[axis] for axis in joined)
  devices = np.moveaxis(
    _iota(iota).reshape(shape), joined, range(-len(joined), 0)
  )
  return devices.reshape(-1, width)


def _iota(text: str) -> np.ndarray:
  """Returns the numbers of `[dims]T(order)`: a reshaped, transposed iota."""
  dims = _numbers(text.split(']')[0])
  devices = np.arange(math.prod(dims)).reshape(dims)
  order = re.search(r'T\(([\d,]*)\)', text)
  if order:
    devices = devices.transpose(_numbers(order.group(1)))
  return devices.reshape(-1)


def _numbers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r'\d+', text)]
