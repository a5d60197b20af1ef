"""What a plan of Muon can choose: owners, sharing, chunks and their order.

Each choice takes and returns groups. Times are modelled from published rates
(`optim.muon.cost.Rates`); choices are coarse enough not to hang on a few per
cent.
"""

import dataclasses
import math

from composer_jax.optim.muon import cost, times
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
  groups: _Groups,
  plan: muon_plan.PlanOptions,
  rates: cost.Rates,
) -> _Groups:
  """Lets devices share matrices that are few and expensive.

  A group with fewer matrices than half its owners makes every device, running
  the same program, wait for the few that own one.

  Args:
    groups: each with one owner a matrix.
    plan: its `giants`.
    rates: to compare by.
  """
  if plan.giants == 'owner':
    return groups
  if isinstance(plan.giants, int):
    shared = [_forced(group, plan.giants) for group in groups]
    if shared == groups:
      raise ValueError(
        f'giants={plan.giants}: no matrices can be shared by {plan.giants} '
        'devices; it must divide the shards of a group with at most as many '
        'matrices as there are such sets of devices. Shards and matrices are '
        f'{sorted({(g.num_shards, g.count) for g in groups})}.'
      )
    return shared
  if any(group.newton_schulz.deterministic for group in groups):
    # Bits of a shared matrix depend on who shares it.
    return groups
  even = sum(group.even_flops for group in groups)
  return [_shared(group, even, rates) for group in groups]


def _forced(group: muon_plan.MuonGroup, split: int) -> muon_plan.MuonGroup:
  if group.num_shards % split or group.count * split > group.owners:
    return group
  return _split(group, split)


def _shared(
  group: muon_plan.MuonGroup,
  even_flops: float,
  rates: cost.Rates,
) -> muon_plan.MuonGroup:
  if 2 * group.count > group.owners:
    return group
  candidates = [
    group if k == 1 else _split(group, k) for k in _divisors(group.num_shards)
  ]
  seconds = [_seconds(candidate, rates) for candidate in candidates]
  enough = min(seconds) + _INDIFFERENT * even_flops / rates.flops
  return next(
    c for c, s in zip(candidates, seconds, strict=True) if s <= enough
  )


def _split(group: muon_plan.MuonGroup, split: int) -> muon_plan.MuonGroup:
  mode = muon_plan.GRAM_SHARDED
  return in_chunks(dataclasses.replace(group, mode=mode, split=split), 1)


def _seconds(group: muon_plan.MuonGroup, rates: cost.Rates) -> float:
  """Returns the time of a group by itself."""
  return sum(sum(times.stage(group, chunk, rates)) for chunk in group.chunks)


def place_replicas(
  groups: _Groups, plan: muon_plan.PlanOptions, rates: cost.Rates
) -> _Groups:
  """Chooses where replicas repeat work instead of gathering results.

  Where matrices are fewer than owners, repeating costs nothing: they are dealt
  to as few replicas as take no longer. Elsewhere it pays if transfers would be
  the longer part of the step.
  """
  repeated = [_dealt(group, 1) for group in groups]
  if plan.replicas == 'redundant':
    return repeated
  if plan.replicas == 'split':
    return groups
  chosen = [_dealt_to_fewest(group) for group in groups]
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


def _dealt(group: muon_plan.MuonGroup, sharers: int) -> muon_plan.MuonGroup:
  """Returns the group with its work shared by so many replicas."""
  if sharers == group.sharers:
    return group
  is_whole = group.split == 1
  mode = muon_plan.REDUNDANT if is_whole and sharers == 1 else group.mode
  return in_chunks(dataclasses.replace(group, mode=mode, sharers=sharers), 1)


def _dealt_to_fewest(group: muon_plan.MuonGroup) -> muon_plan.MuonGroup:
  """Returns the group on as few replicas as need no more operations."""
  dealt = (_dealt(group, n) for n in _divisors(group.num_replicas))
  return next(g for g in dealt if g.flops <= group.flops)


def _divisors(n: int) -> list[int]:
  return [d for d in range(1, n + 1) if n % d == 0]


def _roofs(groups: _Groups, rates: cost.Rates) -> tuple[float, float]:
  """Returns the seconds of all work and of all transfers."""
  stages = [times.stage(g, chunk, rates) for g in groups for chunk in g.chunks]
  return (
    sum(stage.work for stage in stages),
    sum(stage.bring + stage.give for stage in stages),
  )


def cut(
  groups: _Groups, plan: muon_plan.PlanOptions, rates: cost.Rates
) -> _Groups:
  """Cuts groups into chunks of about equal work, or of equal bytes.

  A group that holds more of the step's bytes than of its work, as heads do, is
  cut by bytes: what is in flight takes memory.
  """
  work = [_roofs([group], rates)[0] for group in groups]
  held = [group.count * group.shard_bytes for group in groups]
  wanted = plan.target_chunks
  if wanted is None:
    longest = sum(work) / (_LATENCIES * rates.latency)
    wanted = min(_MOST_CHUNKS, int(longest))
  shares = [
    max(seconds / sum(work), num_bytes / sum(held))
    for seconds, num_bytes in zip(work, held, strict=True)
  ]
  return [
    in_chunks(group, max(1, round(wanted * share)))
    for group, share in zip(groups, shares, strict=True)
  ]


def sequence(groups: _Groups, rates: cost.Rates) -> tuple[tuple[int, int], ...]:
  """Orders chunks so that transfers have work to run beside.

  Groups are spread over the step, as those of small matrices bring more bytes
  for their work. The first and the last chunk, with a transfer that nothing can
  hide, are those that exchange least.
  """
  places = []
  singles = [g for g, group in enumerate(groups) if len(group.chunks) == 1]
  for g, group in enumerate(groups):
    number = len(group.chunks)
    for c, chunk in enumerate(group.chunks):
      # Groups of one chunk would meet in the middle.
      place = (
        (singles.index(g) + 0.5) / len(singles)
        if number == 1
        else ((c + 0.5) / number)
      )
      stage = times.stage(group, chunk, rates)
      places.append((place, stage.bring + stage.give, (g, c)))
  places.sort(key=lambda entry: (entry[0], entry[2]))
  if len(places) > 2:
    exchanged = lambda entry: entry[1]
    first = min(places, key=exchanged)
    places.remove(first)
    last = min(reversed(places), key=exchanged)
    places.remove(last)
    places = [first, *places, last]
  return tuple(identity for _, _, identity in places)
