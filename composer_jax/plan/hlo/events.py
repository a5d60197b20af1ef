"""Turns a program into the ordered events of one device.

Loops stay loops, and called computations are inlined. An asynchronous
collective begins and ends at two places; in a schedule, the events between them
run while it is in flight. Compilers write it in three ways:
- `all-gather-start` and `-done`, likewise for the other kinds;
- `async-start`, or `call-start` on the TPU's sparse cores, around a computation
  that holds the collective;
- on a TPU, a fusion that ends in 'AsyncCollectiveStart', fusions that repeat
  the collective beside products that run under it, and a fusion that ends in
  'AsyncCollectiveDone'.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from composer_jax.plan.hlo import products, text

KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'ragged-all-to-all',
  'collective-permute',
  'collective-broadcast',
)


class Collective(NamedTuple):
  """One collective operation of the program.

  Attributes:
    kind: one of KINDS.
    dtype: HLO's dtype of the first result; XLA:CPU widens bf16 to f32.
    bytes: bytes that one execution brings into one device from others; for a
      ragged-all-to-all, with data-dependent sizes, those of full buffers (the
      smaller of the two).
    result_bytes: bytes of the result of one execution.
    count: number of executions, the trips of the loops around it.
    loops: names of these loops, outermost first.
    groups: sets of the device ids that join.
    is_async: true if printed as a start and a done.
    hidden: operations of products between start and done of one execution.
    scope: named scopes that it was traced under.
  """

  kind: str
  dtype: str
  bytes: int
  result_bytes: int
  count: float
  loops: tuple[str, ...]
  groups: frozenset[frozenset[int]]
  is_async: bool
  hidden: float
  scope: str


class Multiply(NamedTuple):
  """A product; None stands for unknown flops, '' for no kernel.

  `sizes` are those of all dimensions of a kernel's operands.
  """

  flops: float | None
  kernel: str
  sizes: frozenset[int] = frozenset()


class Begin(NamedTuple):
  """Begin of a collective, without its `loops` and `hidden`."""

  key: str
  collective: Collective


class End(NamedTuple):
  key: str


class Repeat(NamedTuple):
  name: str
  trips: float
  events: 'Events'


Events = tuple[Multiply | Begin | End | Repeat, ...]
Of = Callable[[list[int], list[int], list[int]], bool]
Trips = float | Callable[[str], float | None] | None


@dataclasses.dataclass
class ProgramReader:
  """Reads the events of a module; `overlap.events` explains the fields."""

  module: text.Module
  dynamic_trips: Trips
  of: Of

  def __post_init__(self):
    # A computation may be called many times.
    self.walk = functools.cache(self._walk)
    self.find = functools.cache(self._find)

  def events(self) -> Events:
    return self.walk(self.module.entry)

  def _walk(self, name: str) -> Events:
    """Returns the events of a computation in the order of its text."""
    computation = self.module.computations[name]
    events: list[Multiply | Begin | End | Repeat] = []
    in_flight: set[str] = set()
    for instruction in computation.values():
      role = self._role(instruction)
      if instruction.operation.endswith('-done'):
        start = _start_of(instruction, computation)
        if start in in_flight:
          events.append(End(f'{name}/{start}'))
      elif role == 'done':
        start = self._fused_start(instruction, computation)
        events.append(End(f'{name}/{start}'))
      elif collective := self._collective(instruction, computation):
        key = f'{name}/{instruction.name}'
        events.append(Begin(key, collective))
        if not collective.is_async:
          events.append(End(key))
        elif role != 'start':
          in_flight.add(instruction.name)
      else:
        events.extend(self._inside(instruction, computation))
    return tuple(events)

  def _role(self, instruction: text.Instruction) -> str:
    """Returns 'start' or 'done' for a TPU's fused collective, else ''."""
    if instruction.operation != 'fusion':
      return ''
    called = self.module.computations[instruction.attribute('calls')]
    target = text.root(called).target()
    roles = {'AsyncCollectiveStart': 'start', 'AsyncCollectiveDone': 'done'}
    return roles.get(target, '')

  def _fused_start(
    self, done: text.Instruction, computation: text.Computation
  ) -> str:
    """Returns the name of the start, through the fusions before `done`."""
    instruction = done
    while self._role(instruction) != 'start':
      instruction = computation[instruction.operands[0]]
    return instruction.name

  def _products_under(self, name: str) -> Events:
    """Returns the products of a fusion that repeats a collective, else ()."""
    called = self.module.computations[name]
    others = [i for i in called.values() if i.operation not in KINDS]
    if len(others) == len(called):
      return ()
    events = tuple(e for i in others for e in self._inside(i, called))
    return events if any(isinstance(e, Multiply) for e in events) else ()

  def _inside(
    self, instruction: text.Instruction, computation: text.Computation
  ) -> Events:
    """Returns the events of one instruction that is no collective."""
    operation = instruction.operation
    if operation == 'while':
      return self._loop(instruction, computation)
    if operation == 'conditional':
      branches = [self.walk(name) for name in instruction.branches()]
      return max(branches, key=_size)
    product = products.product(instruction, computation)
    if product is not None:
      counts = self.of(product.lhs, product.rhs, product.out)
      flops = product.flops if counts else 0.0
      return (Multiply(flops, product.kernel, product.sizes),)
    called = instruction.called()
    if not called:
      return ()
    is_fusion = operation == 'fusion'
    return (is_fusion and self._products_under(called)) or self.walk(called)

  def _loop(
    self, instruction: text.Instruction, computation: text.Computation
  ) -> Events:
    events = self.walk(instruction.attribute('body'))
    if not events:
      return ()
    trips = text.trips(instruction, computation, self.module)
    if trips is None:
      trips = self.dynamic_trips
      if callable(trips):
        trips = trips(instruction.scope())
    if trips is None:
      raise ValueError(
        f'The trips of the loop {instruction.name} ({instruction.scope()}) '
        'depend on the data; give dynamic_trips, the number to count.'
      )
    return (Repeat(instruction.name, trips, events),) if trips else ()

  def _collective(
    self, instruction: text.Instruction, computation: text.Computation
  ) -> Collective | None:
    """Returns the collective that an instruction is or starts; None if none."""
    is_fused = self._role(instruction) == 'start'
    is_async = is_fused or instruction.operation.endswith('-start')
    described, kind = _described(instruction, self.module) or (None, '')
    shape = instruction.shape
    if described is None and (is_async or is_fused):
      called = instruction.called()
      described, kind = (self.find(called) if called else None) or (None, '')
    if described is None:
      return None
    if is_fused:
      shape = described.shape
    elif is_async:
      shape = _result_of_start(instruction, computation)
    result = sum(array.bytes for array in text.arrays(shape))
    groups = _groups_of(described, self.module.num_devices)
    width = max(map(len, groups), default=1)
    moved = result
    if kind == 'ragged-all-to-all' and instruction.operands:
      operand = computation[instruction.operands[0]].shape
      moved = min([moved, *(a.bytes for a in text.arrays(operand)[:1])])
    return Collective(
      kind=kind,
      dtype=text.arrays(shape)[0].dtype,
      bytes=_bytes_in(kind, moved, width),
      result_bytes=result,
      count=1.0,
      loops=(),
      groups=groups,
      is_async=is_async,
      hidden=0.0,
      scope=instruction.scope() or described.scope(),
    )

  def _find(self, name: str) -> tuple[text.Instruction, str] | None:
    """Returns the collective in an asynchronous computation, and its kind."""
    for instruction in self.module.computations[name].values():
      described = _described(instruction, self.module)
      called = instruction.called()
      if described is None and called:
        described = self.find(called)
      if described is not None:
        return described
    return None


def _size(events: Events) -> tuple[float, float]:
  """Returns the operations and the bytes of a conditional's branch."""
  flops = moved = 0.0
  for event in events:
    if isinstance(event, Multiply):
      flops += event.flops or 0.0
    elif isinstance(event, Begin):
      moved += event.collective.bytes
    elif isinstance(event, Repeat):
      inner = _size(event.events)
      flops, moved = flops + event.trips * inner[0], moved + inner[1]
  return flops, moved


def _described(
  instruction: text.Instruction, module: text.Module
) -> tuple[text.Instruction, str] | None:
  """Returns the instruction that states a collective's groups, and its kind."""
  if instruction.operation == 'fusion':
    called = module.computations[instruction.attribute('calls')]
    reduction = text.scattered(called)
    return (reduction, 'reduce-scatter') if reduction else None
  kind = instruction.operation.removesuffix('-start')
  return (instruction, kind) if kind in KINDS else None


def _start_of(done: text.Instruction, computation: text.Computation) -> str:
  """Returns the name of the start, through the updates before `done`."""
  instruction = computation[done.operands[0]]
  while instruction.operation.endswith('-update'):
    instruction = computation[instruction.operands[0]]
  return instruction.name


def _result_of_start(
  start: text.Instruction, computation: text.Computation
) -> str:
  """Returns the shape of the done: that of the start lists operands too."""
  for instruction in computation.values():
    is_done = instruction.operation.endswith('-done')
    if is_done and _start_of(instruction, computation) == start.name:
      return instruction.shape
  raise ValueError(f'{start.name} has no -done in its computation.')


def _bytes_in(kind: str, result: int, width: int) -> int:
  """Returns the bytes that come into one device of a group of `width`."""
  if kind == 'all-reduce':  # a reduce-scatter, then an all-gather
    return 2 * result * (width - 1) // width
  if kind == 'reduce-scatter':
    return result * (width - 1)
  if kind in ('collective-permute', 'collective-broadcast'):
    return result if width > 1 else 0
  return result * (width - 1) // width


def _groups_of(
  instruction: text.Instruction, num_devices: int
) -> frozenset[frozenset[int]]:
  if instruction.operation.startswith('collective-permute'):
    pairs = instruction.rest.split('source_target_pairs=')[1].split('}}')[0]
    numbers = re.findall(r'(\d+),(\d+)', pairs)
    return frozenset(frozenset((int(a), int(b))) for a, b in numbers)
  groups = text.groups(instruction.rest.split('replica_groups=')[1])
  return groups or frozenset((frozenset(range(num_devices)),))
