"""Models the duration of a schedule and which transfers products hide.

A model, not a measurement. Products run at peak speed, one after another, which
gives transfers the least time to hide. Transfers occupy wires (`plan.network`)
plus a latency: those of one wire one after another, those of different wires at
once. They run beside the products issued between their begin and end. All other
work takes no time, so a transfer beside a norm, a softmax or a copy counts as
not hidden. A loop's own transfers do not delay a transfer that is in flight
around the loop.
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from composer_jax.optim.muon import cost
from composer_jax.plan import network
from composer_jax.plan.hlo import events as hlo_events


@dataclasses.dataclass(frozen=True)
class Transfer:
  """All executions of one collective.

  Attributes:
    collective: the operation; its `count` covers the whole program.
    seconds: time that its transfers take.
    waited: time in which products stand still while it occupies the wire that
      they wait for, be it for this transfer or for one behind it.
    beside: time of the products between its begin and its end.
  """

  collective: hlo_events.Collective
  seconds: float
  waited: float
  beside: float

  @property
  def hidden(self) -> float:
    return max(0.0, self.seconds - self.waited)

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
    return 'others wait behind it'


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
  """Speeds of devices and wires.

  Attributes:
    rows: rows of the buffers of copies of tokens; 0 if there are none.
    used: share of these rows that kernels meet; they skip the others.
    sent: share of the rows of a ragged exchange that travel. The program states
      whole buffers, as sizes depend on the routing.
  """

  rates: cost.Rates
  wires: network.Nodes | network.Torus
  rows: int = 0
  used: float = 1.0
  sent: float = 1.0

  def product_seconds(self, product: hlo_events.Multiply) -> float:
    share = self.used if self.rows in product.sizes else 1.0
    return share * (product.flops or 0.0) / self.rates.flops

  def wire_seconds(self, collective: hlo_events.Collective) -> network.Seconds:
    """Returns the time that one execution occupies wires, latency included."""
    if not collective.bytes:
      return {}
    is_ragged = collective.kind == 'ragged-all-to-all'
    seconds = self.wires.seconds(
      collective.kind,
      collective.bytes * (self.sent if is_ragged else 1.0),
      collective.groups,
    )
    return {wire: n + self.rates.latency for wire, n in seconds.items()}


class _Turn(NamedTuple):
  """When a transfer occupies a wire; `index` is that of the transfer."""

  begin: float
  end: float
  index: int


def run(events: hlo_events.Events, machine: Speeds) -> Timeline:
  clock = busy = 0.0
  turns: dict[str, list[_Turn]] = collections.defaultdict(list)  # by wire
  transfers: list[Transfer] = []
  # By key: index in `transfers`, wire of the last arrival, `busy` at the begin.
  in_flight: dict[str, tuple[int, str, float]] = {}
  for event in events:
    if isinstance(event, hlo_events.Begin):
      index, last = len(transfers), ''
      seconds = machine.wire_seconds(event.collective)
      for wire, occupied in seconds.items():
        before = turns[wire][-1].end if turns[wire] else 0.0
        begin = max(before, clock)
        turns[wire].append(_Turn(begin, begin + occupied, index))
        if not last or turns[wire][-1].end > turns[last][-1].end:
          last = wire
      in_flight[event.key] = (index, last, busy)
      longest = max(seconds.values(), default=0.0)
      transfers.append(Transfer(event.collective, longest, 0.0, 0.0))
    elif isinstance(event, hlo_events.End):
      index, wire, busy_before = in_flight.pop(event.key)
      beside = busy - busy_before
      transfers[index] = dataclasses.replace(transfers[index], beside=beside)
      queue = turns[wire]
      arrival = next(
        (t.end for t in reversed(queue) if t.index == index), clock
      )
      for turn in reversed(queue):
        if turn.end <= clock:
          break
        waited = min(turn.end, arrival) - max(turn.begin, clock)
        if waited > 0:
          other = transfers[turn.index]
          transfers[turn.index] = dataclasses.replace(
            other, waited=other.waited + waited
          )
      clock = max(clock, arrival)
    elif isinstance(event, hlo_events.Repeat):
      inner = run(event.events, machine)
      clock += event.trips * inner.seconds
      busy += event.trips * inner.busy
      transfers.extend(_repeated(inner, event))
    else:
      seconds = machine.product_seconds(event)
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
