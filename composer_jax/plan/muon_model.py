"""Models of the time that a plan of Muon takes on a device.

The roofline is a lower bound. The pipelined time adds the transfers that no
product hides and the traffic of main memory. `--what=compile` tells the memory.
"""

from collections.abc import Sequence

from composer_jax.optim.muon import cost
from composer_jax.optim.muon import plan as muon_plan


def collectives(
  group: muon_plan.MuonGroup,
) -> tuple[tuple[str, int, int], ...]:
  """Returns (kind, number, bytes into a device) of a group's collectives."""
  totals: dict[str, tuple[int, int]] = {}
  for chunk in group.chunks:
    exchange = ('all-to-all', group.exchange_bytes(chunk.owned))
    gather = ('all-gather', group.gather_bytes(chunk.owned))
    shared = group.split_collectives(chunk)
    for kind, num_bytes in (exchange, *shared, exchange, gather):
      if num_bytes:
        number, total = totals.get(kind, (0, 0))
        totals[kind] = number + 1, total + num_bytes
  return tuple((kind, *counts) for kind, counts in totals.items())


def bound_bytes(plan: muon_plan.MuonPlan) -> float:
  """Returns the fewest bytes into a device if owners hold whole matrices.

  Each matrix has one owner among the shards * replicas devices. An owner lacks
  (shards - 1) / shards of the matrices it owns, and it owns 1 / replicas as
  many bytes as it stores. Afterwards a device lacks the results of its shards
  that it does not own.
  """
  total = 0.0
  for group in plan.groups:
    owners = group.num_shards * group.num_replicas
    share = (group.num_shards - 1) / owners + 1 - 1 / owners
    total += group.count * group.shard_bytes * share
  return total


def padding(plan: muon_plan.MuonPlan) -> float:
  """Returns the share of the operations that empty slots cause."""
  real = sum(
    group.count * group.matrix_flops / group.owners for group in plan.groups
  )
  return 1 - real / plan.flops if plan.flops else 0.0


def wire_seconds(plan: muon_plan.MuonPlan, rates: cost.Rates) -> float:
  """Returns the time of all transfers in sequence, without latency."""
  total = 0.0
  for group in plan.groups:
    shards, replicas = group.shard_strides, group.replica_strides
    parts = [
      (
        'all-to-all',
        2 * group.exchange_bytes(group.owned),
        shards,
        group.num_shards,
      ),
      ('all-gather', group.gather_bytes(group.owned), replicas, group.sharers),
    ]
    for chunk in group.chunks:
      shared = group.split_collectives(chunk)
      parts += [(*collective, shards, group.split) for collective in shared]
    for kind, num_bytes, strides, count in parts:
      if num_bytes:
        total += rates.transfer_seconds(kind, num_bytes, strides, count)
  return total


def roofline_seconds(plan: muon_plan.MuonPlan, rates: cost.Rates) -> float:
  return max(plan.flops / rates.flops, wire_seconds(plan, rates))


def chunk_times(
  plan: muon_plan.MuonPlan, rates: cost.Rates
) -> list[cost.ChunkTimes]:
  return [
    cost.chunk_times(plan.groups[g], plan.groups[g].chunks[c], rates)
    for g, c in plan.sequence
  ]


def pipelined_seconds(chunks: Sequence[cost.ChunkTimes]) -> float:
  """Returns the time of chunks whose transfers run beside other chunks' work.

  The network and the processor each do one thing at a time. During the work on
  a chunk, the previous chunk is returned and the next one gathered, not
  earlier, since chunks in flight take memory.
  """
  processor = 0.0
  wire = arrived = chunks[0].bring if chunks else 0.0
  for i, chunk in enumerate(chunks):
    begin = max(processor, arrived)
    if i:
      wire = max(wire, processor) + chunks[i - 1].give
    processor = begin + chunk.work
    if i + 1 < len(chunks):
      wire = max(wire, begin) + chunks[i + 1].bring
      arrived = wire
  return max(processor, wire) + (chunks[-1].give if chunks else 0.0)
