"""Parses the text of an HLO module into computations and instructions.

Only what `hlo` needs to count: names, shapes, operations, operands and the
rest of the line as text, trip counts and the spellings of replica groups.
"""

import dataclasses
import math
import re
from typing import NamedTuple

import numpy as np

# Bits: the narrow ones are packed.
_BITS = {'pred': 8, 'bf16': 16, 'token': 0, 'opaque': 0}


def search(pattern: str, text: str) -> re.Match:
  """Returns the first match of what the text of a program must have."""
  found = re.search(pattern, text)
  if found is None:
    raise ValueError(
      f'HLO without {pattern!r}: {text[:120]!r}; this reader knows the text of '
      'XLA as of jaxlib 0.10.'
    )
  return found


class Array(NamedTuple):
  """Type and dimensions of an array."""

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
  """Returns the arrays of a shape, those of a tuple one after another."""
  return [
    Array(dtype, tuple(int(n) for n in dims.split(',') if n))
    for dtype, dims in re.findall(r'\b([a-z]\w*)\[([\d,<=]*)\]', shape)
  ]


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
  """One line.

  Attributes:
    name: without its percent sign.
    shape: of the result, as text.
    operation: as 'dot'.
    operands: names.
    rest: the attributes.
    literal: between the parentheses: of a constant its value, of a parameter
      its number.
    is_root: its result is the computation's.
  """

  name: str
  shape: str
  operation: str
  operands: tuple[str, ...]
  rest: str
  literal: str
  is_root: bool

  def attribute(self, name: str) -> str:
    """Returns the computation that an attribute names."""
    return search(rf'\b{name}=%?([\w.-]+)', self.rest).group(1)

  def called(self) -> str | None:
    """Returns the computation of a call or a fusion."""
    return self._stated(r'\b(?:calls|to_apply)=%?([\w.-]+)') or None

  def target(self) -> str:
    """Returns what a custom call calls."""
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
    found = re.search(pattern, self.rest)
    return found.group(1) if found else ''


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
  """A program.

  Attributes:
    computations: by name; instructions in their order.
    entry: name of the first computation to run.
    num_devices: that run it.
  """

  computations: dict[str, Computation]
  entry: str
  num_devices: int


_HEAD = re.compile(r'^(ENTRY )?%?([\w.-]+)( .*)?\{$')
_LINE = re.compile(r'^\s*(ROOT )?%?([\w.-]+) = ')


def parse(text: str) -> Module:
  """Parses a module, optimised or not.

  Raises:
    ValueError: if it has no entry.
  """
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
    raise ValueError(f'No HLO module: no ENTRY in {text[:80]!r}.')
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
  """Returns the operands' names; some printers put their types before them."""
  if '%' in operands:
    return tuple(re.findall(r'%([\w.-]+)', operands))
  return tuple(re.findall(r'([\w.-]+)(?:, |$)', operands))


def trips(
  loop: Instruction, computation: Computation, module: Module
) -> int | None:
  """Returns how often a loop runs; None if the data decide."""
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
  if known:
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
  """Reads `carry[index] < end`; None for any other condition."""
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
  """Returns what an instruction always is, seen through copies."""
  instruction = _unwrapped(computation[name], computation)
  if instruction.operation != 'constant':
    return None
  return int(instruction.literal)


def _step(index: int, body: Computation) -> int | None:
  """Returns what a loop adds to its counter each time."""
  carry = root(body)
  if carry.operation != 'tuple':
    return None
  add = _unwrapped(body[carry.operands[index]], body)
  if add.operation != 'add':
    return None
  steps = [_constant(name, body) for name in add.operands]
  return next((step for step in steps if step), None)


def scattered(computation: Computation) -> Instruction | None:
  """Returns the all-reduce of which a computation keeps a slice, if it does.

  So the TPU compiler spells its own reduce-scatter, and sends no more than one.
  """
  kept = _unwrapped(root(computation), computation)
  if kept.operation != 'dynamic-slice':
    return None
  reduced = _unwrapped(computation[kept.operands[0]], computation)
  return reduced if reduced.operation == 'all-reduce' else None


def _unwrapped(
  instruction: Instruction, computation: Computation
) -> Instruction:
  """Sees through what changes no value."""
  while instruction.operation in ('copy', 'bitcast', 'convert'):
    instruction = computation[instruction.operands[0]]
  return instruction


def groups(text: str) -> frozenset[frozenset[int]]:
  """Parses replica groups: device ids that join; empty means all of them.

  Three spellings: lists `{{0,1},{2,3}}`; an iota
  `[groups,width]<=[dims]T(order)`; axes of a mesh
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
  """Parses `[dims]T(order)`: counted, reshaped, transposed."""
  dims = _numbers(text.split(']')[0])
  devices = np.arange(math.prod(dims)).reshape(dims)
  order = re.search(r'T\(([\d,]*)\)', text)
  if order:
    devices = devices.transpose(_numbers(order.group(1)))
  return devices.reshape(-1)


def _numbers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r'\d+', text)]
