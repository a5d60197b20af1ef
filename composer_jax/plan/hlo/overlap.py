"""Counts the products and collectives of a program's text, and their overlap.

`compiled.cost_analysis()` counts the body of a loop once; here loops count
their trips. Bytes of a collective are those that come into one device. In a
schedule, the products issued between the start and the end of an asynchronous
collective hide it. The text may be XLA's for CPU, TPU or GPU, optimised or not.
"""

import dataclasses

from composer_jax.plan.hlo import events as hlo_events
from composer_jax.plan.hlo import text as hlo_text

KINDS = hlo_events.KINDS
Collective = hlo_events.Collective


@dataclasses.dataclass(frozen=True)
class Program:
  """Counts of the program of one device.

  Attributes:
    flops: operations of matrix products, two per multiply and add.
    overlapped: operations issued while a collective is in flight.
    collectives: collectives in the order of their beginning.
    kernels: operations of kernels by name; part of `flops`.
    unknown: runs of kernels with unknown operations by name; not in `flops`.
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
    text: HLO. A loop counts the trips that it states as a known trip count or
      by comparing a counter with a constant; a conditional counts its branch
      with the most products.
    dynamic_trips: trips of loops with a data-dependent end, for all loops or as
      a function of a loop's scope; None makes such a loop an error.
    of: true for the dimensions (lhs, rhs, out) of products to count; a kernel
      has no lhs and rhs.
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
  flops = overlapped = 0.0
  collectives: list[Collective] = []
  kernels: dict[str, float] = {}
  unknown: dict[str, float] = {}
  in_flight: dict[str, int] = {}  # Index in `collectives` by key.
  for event in events:
    if isinstance(event, hlo_events.Begin):
      in_flight[event.key] = len(collectives)
      collectives.append(event.collective)
      continue
    if isinstance(event, hlo_events.End):
      in_flight.pop(event.key, None)
      continue
    inner = _counted(event)
    flops += inner.flops
    overlapped += inner.flops if in_flight else inner.overlapped
    for i in in_flight.values():
      hidden = collectives[i].hidden + inner.flops
      collectives[i] = collectives[i]._replace(hidden=hidden)
    collectives.extend(inner.collectives)
    for total, part in ((kernels, inner.kernels), (unknown, inner.unknown)):
      for name, number in part.items():
        total[name] = total.get(name, 0.0) + number
  return Program(flops, overlapped, tuple(collectives), kernels, unknown)


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
