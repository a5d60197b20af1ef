"""Reads a compiled program's text: products, collectives and their overlap.

`compiled.cost_analysis()` counts the body of a loop once; here loops count
their trips. What a collective moves is counted in bytes that come into one
device. Where the text is a schedule, the products issued between the start
and the end of an asynchronous collective are those that hide it.

It reads what XLA prints for CPU, TPU and GPU, optimised or not. It does not
look into kernels (Pallas, Triton as custom calls): their products are missing.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from composer_jax.plan import hlo_text

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
    bytes: that one execution brings into one device from others.
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


@dataclasses.dataclass(frozen=True)
class Program:
  """What one device runs.

  Attributes:
    flops: operations of matrix products, two per multiply and add.
    overlapped: those of them issued while a collective is in flight.
    collectives: in the order of the program.
  """

  flops: float
  overlapped: float
  collectives: tuple[Collective, ...]

  @property
  def wire_bytes(self) -> float:
    return sum(c.bytes * c.count for c in self.collectives)

  @property
  def overlap(self) -> float:
    """Share of the products issued while a collective is in flight."""
    return self.overlapped / self.flops if self.flops else 0.0

  def of_kind(self, kind: str) -> tuple[Collective, ...]:
    if kind not in KINDS:
      raise ValueError(f'kind {kind!r} is not one of {KINDS}.')
    return tuple(c for c in self.collectives if c.kind == kind)


_Of = Callable[[list[int], list[int], list[int]], bool]


def read(
  text: str,
  *,
  dynamic_trips: float | None = None,
  of: _Of = lambda lhs, rhs, out: True,
) -> Program:
  """Reads a program as `compiled.as_text()` prints it.

  Args:
    text: HLO. Loops count the trips that the text states: as a known trip
      count, or by a condition that compares a counter with a constant. Of a
      conditional the branch with the most products counts.
    dynamic_trips: of loops whose end the data decide; None makes such a loop
      an error.
    of: which products count, by the dimensions of both sides and the result.
  """
  return _Reader(hlo_text.parse(text), dynamic_trips, of).program()


@dataclasses.dataclass
class _Reader:
  module: hlo_text.Module
  dynamic_trips: float | None
  of: _Of

  def __post_init__(self):
    # A computation may be called from many places.
    self.walk = functools.cache(self._walk)

  def program(self) -> Program:
    return self.walk(self.module.entry)

  def _walk(self, name: str) -> Program:
    """Goes through a computation in its order, which may be a schedule."""
    computation = self.module.computations[name]
    flops = overlapped = 0.0
    found: list[Collective] = []
    in_flight: dict[str, int] = {}  # of a start, to its place in `found`
    for instruction in computation.values():
      if instruction.operation.endswith('-done'):
        in_flight.pop(_start_of(instruction, computation), None)
        continue
      collective = self._collective(instruction, computation)
      if collective is not None:
        if collective.is_async:
          in_flight[instruction.name] = len(found)
        found.append(collective)
        continue
      inner = self._inside(instruction, computation)
      if inner is None:
        continue
      flops += inner.flops
      overlapped += inner.flops if in_flight else inner.overlapped
      for place in in_flight.values():
        hidden = found[place].hidden + inner.flops
        found[place] = found[place]._replace(hidden=hidden)
      found.extend(inner.collectives)
    return Program(flops, overlapped, tuple(found))

  def _inside(
    self, instruction: hlo_text.Instruction, computation: hlo_text.Computation
  ) -> Program | None:
    """Returns what one instruction runs; None if nothing that counts."""
    operation = instruction.operation
    if operation == 'while':
      return self._loop(instruction, computation)
    if operation == 'conditional':
      branches = [self.walk(name) for name in instruction.branches()]
      return max(branches, key=lambda b: (b.flops, b.wire_bytes))
    if operation in ('dot', 'convolution', 'custom-call'):
      shapes = [computation[n].shape for n in instruction.operands]
      product = _product(instruction, shapes)
      if product is None:
        return None
      *dims, flops = product
      return Program(flops if self.of(*dims) else 0.0, 0.0, ())
    called = instruction.called()
    return self.walk(called) if called else None

  def _loop(
    self, instruction: hlo_text.Instruction, computation: hlo_text.Computation
  ) -> Program:
    body = self.walk(instruction.attribute('body'))
    if not body.flops and not body.collectives:
      return body
    trips = hlo_text.trips(instruction, computation, self.module)
    if trips is None:
      trips = self.dynamic_trips
    if trips is None:
      raise ValueError(
        f'The loop {instruction.name} ({instruction.scope()}) runs as long as '
        'the data decide; give dynamic_trips, the trips to count for it.'
      )
    return Program(
      body.flops * trips,
      body.overlapped * trips,
      tuple(
        c._replace(count=c.count * trips, loops=(instruction.name, *c.loops))
        for c in body.collectives
      ),
    )

  def _collective(
    self, instruction: hlo_text.Instruction, computation: hlo_text.Computation
  ) -> Collective | None:
    """Reads a collective, plain, as a start, or wrapped in an async-start."""
    is_async = instruction.operation.endswith('-start')
    inner = [instruction]
    if instruction.operation == 'async-start':
      inner = self.module.computations[instruction.attribute('calls')].values()
    found = filter(None, map(self._described, inner))
    described, kind = next(found, (None, ''))
    if described is None:
      return None
    shape = instruction.shape
    if is_async:
      shape = _result_of_start(instruction, computation)
    result = sum(array.bytes for array in hlo_text.arrays(shape))
    groups = _groups_of(described, self.module.num_devices)
    width = max(map(len, groups), default=1)
    return Collective(
      kind=kind,
      dtype=hlo_text.arrays(shape)[0].dtype,
      bytes=_bytes_in(kind, result, width),
      result_bytes=result,
      count=1.0,
      loops=(),
      groups=groups,
      is_async=is_async,
      hidden=0.0,
      scope=instruction.scope() or described.scope(),
    )

  def _described(
    self, instruction: hlo_text.Instruction
  ) -> tuple[hlo_text.Instruction, str] | None:
    """Returns the instruction that has a collective's groups, and the kind."""
    if instruction.operation == 'fusion':
      called = self.module.computations[instruction.attribute('calls')]
      reduction = hlo_text.scattered(called)
      return (reduction, 'reduce-scatter') if reduction else None
    kind = instruction.operation.removesuffix('-start')
    return (instruction, kind) if kind in KINDS else None


def _start_of(
  done: hlo_text.Instruction, computation: hlo_text.Computation
) -> str:
  """Follows a done through its updates to the start."""
  instruction = computation[done.operands[0]]
  while instruction.operation.endswith('-update'):
    instruction = computation[instruction.operands[0]]
  return instruction.name


def _result_of_start(
  start: hlo_text.Instruction, computation: hlo_text.Computation
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
  instruction: hlo_text.Instruction, num_devices: int
) -> frozenset[frozenset[int]]:
  if instruction.operation.startswith('collective-permute'):
    pairs = instruction.rest.split('source_target_pairs=')[1].split('}}')[0]
    numbers = re.findall(r'(\d+),(\d+)', pairs)
    return frozenset(frozenset((int(a), int(b))) for a, b in numbers)
  groups = hlo_text.groups(instruction.rest.split('replica_groups=')[1])
  return groups or frozenset((frozenset(range(num_devices)),))


def _product(
  instruction: hlo_text.Instruction, shapes: list[str]
) -> tuple[list[int], list[int], list[int], float] | None:
  """Returns the dimensions of both sides and the result, and the operations.

  None for a custom call that is no product.
  """
  if instruction.operation == 'custom-call':
    target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
    if not target or not re.search('gemm|matmul', target.group(1)):
      return None
  lhs, rhs = (list(hlo_text.arrays(shape)[0].dims) for shape in shapes[:2])
  out = list(hlo_text.arrays(instruction.shape)[0].dims)
  if instruction.operation == 'convolution':
    return lhs, rhs, out, 2.0 * _taps(instruction, lhs, rhs, out)
  # A custom call prints the dimensions in its JSON, a dot as attributes.
  contracted = re.search(
    r'"?lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]',
    instruction.rest,
  )
  if contracted is None:
    raise ValueError(f'{instruction.name} states no contracted dimensions.')
  sizes = [lhs[int(n)] for n in re.findall(r'\d+', contracted.group(1))]
  return lhs, rhs, out, 2.0 * math.prod(out) * math.prod(sizes)


def _taps(
  instruction: hlo_text.Instruction,
  lhs: list[int],
  rhs: list[int],
  out: list[int],
) -> float:
  """Counts the multiplications of a convolution, none of them with padding.

  The TPU compiler spells every product as a convolution: a batch as a spatial
  dimension so dilated that each result sees one element.
  """
  labels = hlo_text.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.rest)
  lhs_labels, rhs_labels, out_labels = labels.groups()
  total = float(
    out[out_labels.index('b')]
    * out[out_labels.index('f')]
    * rhs[rhs_labels.index('i')]
  )
  window = dict(_window(instruction.rest))
  for place, label in enumerate(sorted(c for c in lhs_labels if c.isdigit())):
    get = functools.partial(_of_window, window, place)
    total *= _taps_along(
      outputs=out[out_labels.index(label)],
      size=rhs[rhs_labels.index(label)],
      inputs=lhs[lhs_labels.index(label)],
      stride=get('stride', 1),
      low=get('pad', 0),
      dilation=get('lhs_dilate', 1),
      window_dilation=get('rhs_dilate', 1),
    )
  return total


def _window(rest: str) -> Iterator[tuple[str, list[str]]]:
  found = re.search(r'window=\{([^}]*)\}', rest)
  for word in found.group(1).split() if found else ():
    name, _, values = word.partition('=')
    yield name, values.split('x')


def _of_window(
  window: dict[str, list[str]], place: int, name: str, default: int
) -> int:
  if name not in window:
    return default
  return int(window[name][place].split('_')[0])


def _taps_along(
  *,
  outputs: int,
  size: int,
  inputs: int,
  stride: int,
  low: int,
  dilation: int,
  window_dilation: int,
) -> int:
  """Counts pairs of a result and a window place that see an element."""
  at = np.add.outer(
    np.arange(outputs) * stride - low, np.arange(size) * window_dilation
  )
  sees = (at % dilation == 0) & (at >= 0) & (at < inputs * dilation)
  return int(np.count_nonzero(sees))
