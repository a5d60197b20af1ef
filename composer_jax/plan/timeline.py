"""Models the duration of a schedule and which transfers products hide.

A model, not a measurement. Products run at peak speed, one after another.
Transfers take their incoming bytes over the network's speed plus a latency,
also one after another, and run beside the products issued between their begin
and end. All other work takes no time, so a transfer beside a norm, a softmax or
a copy counts as not hidden. A loop's own transfers do not delay a transfer that
is in flight around the loop.
"""

import dataclasses
from collections.abc import Iterator

from composer_jax.optim.muon import cost
from composer_jax.plan.hlo import events as hlo_events


@dataclasses.dataclass(frozen=True)
class Transfer:
  """All executions of one collective.

  Attributes:
    collective: the operation; its `count` covers the whole program.
    seconds: time that its transfers take.
    waited: time in which products wait for it.
    beside: time of the products between its begin and its end.
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
    """Reason why products do not hide all of it; '' if they do."""
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
  """Modelled times of a schedule; `busy` is the time of its products."""

  seconds: float
  busy: float
  transfers: tuple[Transfer, ...]

  @property
  def wire(self) -> float:
    return sum(t.seconds for t in self.transfers)

  @property
  def hidden_share(self) -> float:
    """Share of the transfers' time in which products run."""
    hidden = sum(t.hidden for t in self.transfers)
    return hidden / self.wire if self.wire else 1.0


def transfer_seconds(
  collective: hlo_events.Collective, rates: cost.Rates
) -> float:
  """Returns the time of one execution, latency included."""
  if not collective.bytes:
    return 0.0
  span = max(max(group) - min(group) + 1 for group in collective.groups)
  return rates.wire_seconds(collective.bytes, span) + rates.latency


def run(events: hlo_events.Events, rates: cost.Rates) -> Timeline:
  clock = busy = wire = 0.0
  transfers: list[Transfer] = []
  # By key: index in `transfers`, time of arrival, and `busy` at the begin.
  in_flight: dict[str, tuple[int, float, float]] = {}
  for event in events:
    if isinstance(event, hlo_events.Begin):
      seconds = transfer_seconds(event.collective, rates)
      wire = max(wire, clock) + seconds
      in_flight[event.key] = (len(transfers), wire, busy)
      transfers.append(Transfer(event.collective, seconds, 0.0, 0.0))
    elif isinstance(event, hlo_events.End):
      index, arrival, busy_before = in_flight.pop(event.key)
      waited = max(0.0, arrival - clock)
      transfers[index] = dataclasses.replace(
        transfers[index], waited=waited, beside=busy - busy_before
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
