"""What a plan of Muon can choose: owners, sharing, chunks and their order.

Each choice takes and returns groups. Times are modelled from published rates
(`optim.muon.cost`); choices are coarse enough not to hang on a few per cent.
"""

import dataclasses
import math
from typing import Any

from composer_jax.optim.muon import cost
from composer_jax.optim.muon import plan as muon_plan

_Groups = list[muon_plan.MuonGroup]

# Of the step. Of splits that differ by less the smaller is taken: short
# messages and narrow products cost what no rate tells.
_INDIFFERENT = 0.01
# Chunks are cut until one takes as long as this many collectives without load.
_LATENCIES = 50
# More leave little to gain: the first and the last are then 4 % of the step,
# and what is in flight, at Kimi K2's size, a quarter of the update.
_MOST_CHUNKS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
  """What a plan may be told instead of choosing by modelled times.

  Attributes:
    rates: speeds of the machine; None: by platform, v5p for abstract meshes.
    chunks: pieces that the step is cut into, as far as its groups allow.
    split: devices that share a matrix where there are too few matrices for all
      owners; 1 for none.
    repeats: each replica does all work, and gathers nothing; False: each matrix
      has one owner among all replicas.
  """

  rates: cost.Rates | None = None
  chunks: int | None = None
  split: int | None = None
  repeats: bool | None = None


NOTHING_TOLD = PlanOptions()


def in_chunks(group: muon_plan.MuonGroup, wanted: int) -> muon_plan.MuonGroup:
  """Cuts a group's local list; only its last chunk is padded."""
  count, owners = group.count, group.owners
  owned = -(-count // owners)
  each = -(-owned // min(wanted, owned))
  # Ends of whole layers where they are near: slices of those are cheap.
  inner = math.lcm(*(member.inner for member in group.members))
  unit = inner // math.gcd(inner, owners)
  if each < owned and unit <= each:
    each = -(-each // unit) * unit
  chunks = tuple(
    muon_plan.Chunk(
      start=first * owners,
      count=min(each * owners, count - first * owners),
      owned=min(each, owned - first),
    )
    for first in range(0, owned, each)
  )
  return dataclasses.replace(group, chunks=chunks)


def share_giants(
  groups: _Groups, told: PlanOptions, rates: cost.Rates
) -> _Groups:
  """Lets devices share matrices that are few and expensive.

  A group with fewer matrices than half its owners makes every device, running
  the same program, wait for the few that own one.
  """
  if (k := told.split) is not None:
    return [
      _dealt(group, split=k)
      if group.num_shards % k == 0 and group.count * k <= group.owners
      else group
      for group in groups
    ]
  if any(group.newton_schulz.deterministic for group in groups):
    # Bits of a shared matrix depend on who shares it.
    return groups
  even = sum(group.even_flops for group in groups)
  return [_shared(group, even, rates) for group in groups]


def _shared(
  group: muon_plan.MuonGroup, even_flops: float, rates: cost.Rates
) -> muon_plan.MuonGroup:
  if 2 * group.count > group.owners:
    return group
  candidates = [_dealt(group, split=k) for k in _divisors(group.num_shards)]
  seconds = [sum(_roofs([candidate], rates)) for candidate in candidates]
  enough = min(seconds) + _INDIFFERENT * even_flops / rates.flops
  return next(
    c for c, s in zip(candidates, seconds, strict=True) if s <= enough
  )


def place_replicas(
  groups: _Groups, told: PlanOptions, rates: cost.Rates
) -> _Groups:
  """Chooses where replicas repeat work instead of gathering results.

  Where matrices are fewer than owners, repeating costs nothing: they are dealt
  to as few replicas as take no longer. Elsewhere it pays if transfers would be
  the longer part of the step.
  """
  repeated = [_dealt(group, sharers=1) for group in groups]
  if told.repeats is not None:
    return repeated if told.repeats else groups
  chosen = []
  for group in groups:
    dealt = (_dealt(group, sharers=n) for n in _divisors(group.num_replicas))
    chosen.append(next(g for g in dealt if g.flops <= group.flops))
  # Where most is saved on the wire for each operation that is added.
  order = sorted(
    (i for i, group in enumerate(chosen) if repeated[i] != group),
    key=lambda i: _roofs([chosen[i]], rates)[1] / repeated[i].flops,
    reverse=True,
  )
  for i in order:
    candidate = [*chosen[:i], repeated[i], *chosen[i + 1 :]]
    best = max(_roofs(chosen, rates))
    if max(_roofs(candidate, rates)) < (1 - _INDIFFERENT) * best:
      chosen = candidate
  return chosen


def _dealt(group: muon_plan.MuonGroup, **to: Any) -> muon_plan.MuonGroup:
  """Returns the group dealt out to other numbers of devices, in one chunk."""
  return in_chunks(dataclasses.replace(group, **to), 1)


def _divisors(n: int) -> list[int]:
  return [d for d in range(1, n + 1) if n % d == 0]


def _roofs(groups: _Groups, rates: cost.Rates) -> tuple[float, float]:
  """Returns the seconds of all work and of all transfers."""
  times = [cost.chunk_times(g, c, rates) for g in groups for c in g.chunks]
  return sum(t.work for t in times), sum(t.bring + t.give for t in times)


def cut(groups: _Groups, told: PlanOptions, rates: cost.Rates) -> _Groups:
  """Cuts groups into chunks of about equal work, or of equal bytes.

  A group that holds more of the step's bytes than of its work, as heads do, is
  cut by bytes: what is in flight takes memory.
  """
  work = [_roofs([group], rates)[0] for group in groups]
  held = [group.count * group.shard_bytes for group in groups]
  longest = sum(work) / (_LATENCIES * rates.latency)
  wanted = told.chunks or min(_MOST_CHUNKS, int(longest))
  return [
    in_chunks(
      group,
      max(1, round(wanted * max(seconds / sum(work), size / sum(held)))),
    )
    for group, seconds, size in zip(groups, work, held, strict=True)
  ]


def sequence(groups: _Groups, rates: cost.Rates) -> tuple[tuple[int, int], ...]:
  """Orders chunks so that transfers have work to run beside.

  Groups are spread over the step, as those of small matrices bring more bytes
  for their work. The first and the last chunk, with a transfer that nothing can
  hide, are those that exchange least.
  """
  singles = [g for g, group in enumerate(groups) if len(group.chunks) == 1]
  places = []
  for g, group in enumerate(groups):
    for c, chunk in enumerate(group.chunks):
      place = (c + 0.5) / len(group.chunks)
      if g in singles:  # They would meet in the middle.
        place = (singles.index(g) + 0.5) / len(singles)
      times = cost.chunk_times(group, chunk, rates)
      places.append((place, (g, c), times.bring + times.give))
  places.sort()
  if len(places) > 2:
    exchanged = lambda entry: entry[2]
    first = min(places, key=exchanged)
    places.remove(first)
    last = min(reversed(places), key=exchanged)
    places.remove(last)
    places = [first, *places, last]
  return tuple(identity for _, identity, _ in places)
