"""Reads a compiled program's text: products, collectives and their overlap.

`compiled.cost_analysis()` counts the body of a loop once; here loops count
their trips. What a collective moves is counted in bytes that come into one
device. Where the text is a schedule, the products issued between the start
and the end of an asynchronous collective are those that hide it.

It reads what XLA prints for CPU, TPU and GPU, optimised or not. Kernels
(Pallas, Triton as custom calls) count as the cost they were traced with; those
without one are named in `Program.unknown`, and missing from the products.
"""

import dataclasses

from composer_jax.plan.hlo import events as hlo_events
from composer_jax.plan.hlo import text as hlo_text

KINDS = hlo_events.KINDS
Collective = hlo_events.Collective


@dataclasses.dataclass(frozen=True)
class Program:
  """What one device runs.

  Attributes:
    flops: operations of matrix products, two per multiply and add.
    overlapped: those of them issued while a collective is in flight.
    kernels: operations in kernels, by name; part of `flops`.
    unknown: kernels whose operations nobody says, by name, how often they run.
  """

  flops: float
  overlapped: float
  collectives: tuple[Collective, ...]
  kernels: dict[str, float] = dataclasses.field(default_factory=dict)
  unknown: dict[str, float] = dataclasses.field(default_factory=dict)

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


def events(
  text: str,
  *,
  dynamic_trips: hlo_events.Trips = None,
  of: hlo_events.Of = lambda lhs, rhs, out: True,
) -> hlo_events.Events:
  """Reads a program as `compiled.as_text()` prints it.

  Args:
    text: HLO. Loops count the trips that the text states: as a known trip
      count, or by a condition that compares a counter with a constant. Of a
      conditional the branch with the most products counts.
    dynamic_trips: of loops whose end the data decide, for all or as a function
      of the scopes a loop was traced under; None makes such a loop an error.
    of: which products count, by the dimensions of both sides and the result;
      the sides of a kernel are empty.
  """
  return hlo_events.ProgramReader(
    hlo_text.parse(text), dynamic_trips, of
  ).events()


def read(
  text: str,
  *,
  dynamic_trips: hlo_events.Trips = None,
  of: hlo_events.Of = lambda lhs, rhs, out: True,
) -> Program:
  """Counts a program; see `events`."""
  return count(events(text, dynamic_trips=dynamic_trips, of=of))


def count(events: hlo_events.Events) -> Program:
  """Counts what the events of a program are."""
  flops = overlapped = 0.0
  found: list[Collective] = []
  kernels: dict[str, float] = {}
  unknown: dict[str, float] = {}
  in_flight: dict[str, int] = {}  # of a key, to its place in `found`
  for event in events:
    if isinstance(event, hlo_events.Begin):
      in_flight[event.key] = len(found)
      found.append(event.collective)
      continue
    if isinstance(event, hlo_events.End):
      in_flight.pop(event.key, None)
      continue
    inner = _counted(event)
    flops += inner.flops
    overlapped += inner.flops if in_flight else inner.overlapped
    for place in in_flight.values():
      hidden = found[place].hidden + inner.flops
      found[place] = found[place]._replace(hidden=hidden)
    found.extend(inner.collectives)
    for mine, its in ((kernels, inner.kernels), (unknown, inner.unknown)):
      for name, number in its.items():
        mine[name] = mine.get(name, 0.0) + number
  return Program(flops, overlapped, tuple(found), kernels, unknown)


def _counted(event: hlo_events.Multiply | hlo_events.Repeat) -> Program:
  if isinstance(event, hlo_events.Multiply):
    if event.flops is None:
      return Program(0.0, 0.0, (), {}, {event.kernel: 1.0})
    named = {event.kernel: event.flops} if event.kernel else {}
    return Program(event.flops, 0.0, (), named)
  body, trips = count(event.events), event.trips
  return Program(
    body.flops * trips,
    body.overlapped * trips,
    tuple(
      c._replace(count=c.count * trips, loops=(event.name, *c.loops))
      for c in body.collectives
    ),
    {name: number * trips for name, number in body.kernels.items()},
    {name: number * trips for name, number in body.unknown.items()},
  )
