"""Turns a program into what one device does, in order: `hlo` counts it.

Loops stay loops, and all that is called is put where it is called from. An
asynchronous collective begins and ends at two places of the order. Where the
text is a schedule, what lies between them runs while it is in flight; each
compiler spells that in its own way:
- `all-gather-start` and `-done`, of any kind;
- `async-start`, or `call-start` of the TPU's sparse cores, around a computation
  that holds the collective;
- on a TPU a fusion that ends in 'AsyncCollectiveStart', fusions that hold the
  same collective again beside the products that it flies under, and one that
  ends in 'AsyncCollectiveDone'.
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
    kind: of KINDS.
    dtype: of the first result, as HLO spells it; XLA:CPU widens bf16 to f32.
    bytes: that one execution brings into one device from others. Of a
      ragged-all-to-all, whose sizes the data decide, if every device sends and
      receives as much as the smaller of its two buffers holds.
    result_bytes: of one execution.
    count: how often it runs: the trips of the loops around it.
    loops: names of these loops, outermost first.
    groups: device ids that join.
    is_async: printed as a start and a done.
    hidden: operations of products between start and done, one execution.
    scope: the named scopes it was traced under.
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
  """A product.

  Attributes:
    flops: None in a kernel that nobody can look into.
    kernel: its name; '' if it is none.
  """

  flops: float | None
  kernel: str


class Begin(NamedTuple):
  """A collective begins; its `count`, `loops` and `hidden` are not filled."""

  key: str
  collective: Collective


class End(NamedTuple):
  """The collective of this key has to have arrived."""

  key: str


class Repeat(NamedTuple):
  """A loop."""

  name: str
  trips: float
  events: 'Events'


Events = tuple[Multiply | Begin | End | Repeat, ...]
Of = Callable[[list[int], list[int], list[int]], bool]
Trips = float | Callable[[str], float | None] | None


@dataclasses.dataclass
class ProgramReader:
  """Reads a module; see `hlo.read` for the meaning of its arguments."""

  module: text.Module
  dynamic_trips: Trips
  of: Of

  def __post_init__(self):
    # A computation may be called from many places.
    self.walk = functools.cache(self._walk)
    self.find = functools.cache(self._find)

  def events(self) -> Events:
    return self.walk(self.module.entry)

  def _walk(self, name: str) -> Events:
    """Goes through a computation in its order, which may be a schedule."""
    computation = self.module.computations[name]
    found: list[Multiply | Begin | End | Repeat] = []
    in_flight: set[str] = set()
    for instruction in computation.values():
      if instruction.operation.endswith('-done'):
        key = _start_of(instruction, computation)
        if key in in_flight:
          found.append(End(f'{name}/{key}'))
        continue
      role = self._role(instruction)
      if role == 'done':
        found.append(
          End(f'{name}/{self._fused_start(instruction, computation)}')
        )
        continue
      collective = self._collective(instruction, computation)
      if collective is not None:
        key = f'{name}/{instruction.name}'
        found.append(Begin(key, collective))
        if not collective.is_async:
          found.append(End(key))
        elif role != 'start':
          in_flight.add(instruction.name)
        continue
      found.extend(self._inside(instruction, computation))
    return tuple(found)

  def _role(self, instruction: text.Instruction) -> str:
    """Returns 'start' or 'done' of a TPU's fused collective, or ''."""
    if instruction.operation != 'fusion':
      return ''
    called = self.module.computations[instruction.attribute('calls')]
    target = text.root(called).target()
    roles = {'AsyncCollectiveStart': 'start', 'AsyncCollectiveDone': 'done'}
    return roles.get(target, '')

  def _fused_start(
    self, done: text.Instruction, computation: text.Computation
  ) -> str:
    """Follows what flies from fusion to fusion back to the start."""
    instruction = done
    while self._role(instruction) != 'start':
      instruction = computation[instruction.operands[0]]
    return instruction.name

  def _products_under(self, name: str) -> Events:
    """Returns what a fusion multiplies under a collective in it, if it does."""
    called = self.module.computations[name]
    others = [i for i in called.values() if i.operation not in KINDS]
    if len(others) == len(called):
      return ()
    events = tuple(e for i in others for e in self._inside(i, called))
    return events if any(isinstance(e, Multiply) for e in events) else ()

  def _inside(
    self, instruction: text.Instruction, computation: text.Computation
  ) -> Events:
    """Returns what one instruction runs."""
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
      return (Multiply(flops, product.kernel),)
    called = instruction.called()
    if not called:
      return ()
    if instruction.operation == 'fusion':
      events = self._products_under(called)
      if events:
        return events
    return self.walk(called)

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
        f'The loop {instruction.name} ({instruction.scope()}) runs as long as '
        'the data decide; give dynamic_trips, the trips to count for it.'
      )
    return (Repeat(instruction.name, trips, events),)

  def _collective(
    self, instruction: text.Instruction, computation: text.Computation
  ) -> Collective | None:
    """Reads a collective, plain, as a start, or wrapped in one."""
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
    if kind == 'ragged-all-to-all':
      moved = min(moved, _operand_bytes(instruction, computation, result))
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
    """Returns the collective that an asynchronous computation holds."""
    for instruction in self.module.computations[name].values():
      found = _described(instruction, self.module)
      called = instruction.called()
      if found is None and called:
        found = self.find(called)
      if found is not None:
        return found
    return None


def _size(events: Events) -> tuple[float, float]:
  """Returns the operations and the bytes of a branch."""
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
  """Returns the instruction that has a collective's groups, and the kind."""
  if instruction.operation == 'fusion':
    called = module.computations[instruction.attribute('calls')]
    reduction = text.scattered(called)
    return (reduction, 'reduce-scatter') if reduction else None
  kind = instruction.operation.removesuffix('-start')
  return (instruction, kind) if kind in KINDS else None


def _start_of(done: text.Instruction, computation: text.Computation) -> str:
  """Follows a done through its updates to the start."""
  instruction = computation[done.operands[0]]
  while instruction.operation.endswith('-update'):
    instruction = computation[instruction.operands[0]]
  return instruction.name


def _result_of_start(
  start: text.Instruction, computation: text.Computation
) -> str:
  """Returns the shape that the done hands on.

  The start's own shape lists operands too, in a form that differs between
  kinds and backends.
  """
  for instruction in computation.values():
    is_done = instruction.operation.endswith('-done')
    if is_done and _start_of(instruction, computation) == start.name:
      return instruction.shape
  raise ValueError(
    f'{start.name} starts but no done follows in its computation.'
  )


def _operand_bytes(
  instruction: text.Instruction, computation: text.Computation, default: int
) -> int:
  if not instruction.operands:
    return default
  arrays = text.arrays(computation[instruction.operands[0]].shape)
  return arrays[0].bytes if arrays else default


def _bytes_in(kind: str, result: int, width: int) -> int:
  """Returns the bytes into one device of a group of `width`."""
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
