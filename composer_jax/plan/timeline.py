"""Models how long a schedule takes, and which transfers nothing hides.

A model, not a measurement: products run at the peak, one after the other;
transfers take the bytes that come in over the speed of the network, and a
latency, likewise one after the other, beside the products that were issued
between their beginning and their end. All else is free, so that a transfer
under a norm, a softmax or a copy counts as not hidden. What flies while a loop
runs is taken to fly undisturbed by the loop's own transfers.
"""

import dataclasses
from collections.abc import Iterator

from composer_jax.optim.muon import cost
from composer_jax.plan.hlo import events as hlo_events


@dataclasses.dataclass(frozen=True)
class Transfer:
  """One collective on the line, all its executions together.

  Attributes:
    collective: what is moved; its `count` is of the whole program.
    seconds: that it takes by itself.
    waited: seconds in which no product ran because of it.
    beside: seconds of products between its beginning and its end.
  """

  collective: hlo_events.Collective
  seconds: float
  waited: float
  beside: float

  @property
  def hidden(self) -> float:
    return self.seconds - min(self.seconds, self.waited)

  @property
  def why(self) -> str:
    """Says why not all of it is hidden; '' where it is."""
    if self.waited <= 0.01 * self.seconds:
      return ''
    if not self.collective.is_async:
      return 'synchronous'
    if not self.beside:
      return 'no product before its result is used'
    if self.beside < self.seconds:
      return 'products beside it are shorter'
    return 'behind other transfers'


@dataclasses.dataclass(frozen=True)
class Timeline:
  """A schedule on the clock, and the seconds of its products (`busy`)."""

  seconds: float
  busy: float
  transfers: tuple[Transfer, ...]

  @property
  def wire(self) -> float:
    """Seconds of all transfers."""
    return sum(t.seconds for t in self.transfers)

  @property
  def hidden_share(self) -> float:
    """Share of the transfers' time that products run beside."""
    hidden = sum(t.hidden for t in self.transfers)
    return hidden / self.wire if self.wire else 1.0


def transfer_seconds(
  collective: hlo_events.Collective, rates: cost.Rates
) -> float:
  """Returns the seconds of one execution, latency included."""
  if not collective.bytes:
    return 0.0
  span = max(max(group) - min(group) + 1 for group in collective.groups)
  return rates.wire_seconds(collective.bytes, span) + rates.latency


def run(events: hlo_events.Events, rates: cost.Rates) -> Timeline:
  """Puts what a device does on the clock."""
  clock = busy = wire = 0.0
  transfers: list[Transfer] = []
  # Of a key: its place, when it arrives, and `busy` when it began.
  in_flight: dict[str, tuple[int, float, float]] = {}
  for event in events:
    if isinstance(event, hlo_events.Begin):
      seconds = transfer_seconds(event.collective, rates)
      wire = max(wire, clock) + seconds
      in_flight[event.key] = (len(transfers), wire, busy)
      transfers.append(Transfer(event.collective, seconds, 0.0, 0.0))
    elif isinstance(event, hlo_events.End):
      place, arrival, before = in_flight.pop(event.key)
      waited = max(0.0, arrival - clock)
      transfers[place] = dataclasses.replace(
        transfers[place], waited=waited, beside=busy - before
      )
      clock += waited
    elif isinstance(event, hlo_events.Repeat):
      inner = run(event.events, rates)
      clock += event.trips * inner.seconds
      busy += event.trips * inner.busy
      transfers.extend(_repeated(inner, event))
    else:
      seconds = (event.flops or 0.0) / rates.flops
      clock, busy = clock + seconds, busy + seconds
  return Timeline(clock, busy, tuple(transfers))


def _repeated(inner: Timeline, loop: hlo_events.Repeat) -> Iterator[Transfer]:
  for transfer in inner.transfers:
    c = transfer.collective
    yield Transfer(
      c._replace(count=c.count * loop.trips, loops=(loop.name, *c.loops)),
      transfer.seconds * loop.trips,
      transfer.waited * loop.trips,
      transfer.beside * loop.trips,
    )
