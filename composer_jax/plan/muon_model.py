"""What a plan of Muon takes of a device: models, not measurements.

A roofline is a bound. The pipelined time lies above it: it adds the transfers
that nothing hides, and the traffic of main memory. Temporary bytes are an
estimate of what `optim.muon.exchange` keeps; the compiler decides.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from composer_jax.optim.muon import cost
from composer_jax.optim.muon import plan as muon_plan


def collectives(
  group: muon_plan.MuonGroup,
) -> tuple[tuple[str, int, int], ...]:
  """(kind, number, bytes into a device), by kind, as the program has them."""
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
  """Returns the least that owners of whole matrices can exchange.

  Each matrix has one owner among the shards * replicas devices. It lacks
  (shards - 1) / shards of its matrices, which are 1 / replicas of as many bytes
  as it holds shards; afterwards a device has the results of its own matrices
  and lacks the rest of its shards.
  """
  total = 0.0
  for group in plan.groups:
    owners = group.num_shards * group.num_replicas
    share = (group.num_shards - 1) / owners + 1 - 1 / owners
    total += group.count * group.shard_bytes * share
  return total


def critical_path(plan: muon_plan.MuonPlan) -> float:
  """Returns a device's operations over an even share of the same methods'."""
  return plan.flops / max(sum(group.even_flops for group in plan.groups), 1)


def padding(plan: muon_plan.MuonPlan) -> float:
  """Returns the share of the slots' work that is on zeros."""
  real = sum(
    group.count * group.matrix_flops / group.owners for group in plan.groups
  )
  return 1 - real / plan.flops if plan.flops else 0.0


def wire_seconds(plan: muon_plan.MuonPlan, rates: cost.Rates) -> float:
  """Returns the time of all transfers one after the other, without latency."""
  total = 0.0
  for group in plan.groups:
    shards, replicas = group.shard_strides, group.replica_strides
    for num_bytes, strides, count in (
      (2 * group.exchange_bytes(group.owned), shards, group.num_shards),
      (group.split_bytes, shards, group.split),
      (group.gather_bytes(group.owned), replicas, group.sharers),
    ):
      total += rates.wire_seconds(num_bytes, cost.span(strides, count))
  return total


def roofline_seconds(plan: muon_plan.MuonPlan, rates: cost.Rates) -> float:
  """Returns the time of all products at peak, or of all transfers beside."""
  return max(plan.flops / rates.flops, wire_seconds(plan, rates))


def chunk_times(
  plan: muon_plan.MuonPlan, rates: cost.Rates
) -> list[cost.ChunkTimes]:
  """Returns the seconds of each chunk in the order of execution."""
  return [
    cost.chunk_times(plan.groups[g], plan.groups[g].chunks[c], rates)
    for g, c in plan.sequence
  ]


def pipelined_seconds(chunks: Sequence[cost.ChunkTimes]) -> float:
  """Returns the time of chunks whose transfers run beside others' work.

  One network and one processor, each doing one thing at a time. While a chunk
  is worked on, the one before is returned and the next one brought, not
  earlier: what is in flight takes memory.
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


def temporary_bytes(plan: muon_plan.MuonPlan) -> int:
  """Returns an estimate: results, three chunks in flight, one at work.

  The TPU compiler reuses some of it, and takes more where it copies a whole
  parameter to another memory order; it has needed 0.7 to 2 times as much.
  """
  chunks = [
    (plan.groups[g], plan.groups[g].chunks[c]) for g, c in plan.sequence
  ]
  in_flight = [_in_flight(group, chunk) for group, chunk in chunks]
  most = 0
  for i, (group, chunk) in enumerate(chunks):
    flying = sum(in_flight[max(i - 1, 0) : i + 2])
    width = jnp.dtype(group.newton_schulz.dtype).itemsize
    workspace = width * (2 * group.p * group.split_columns + 3 * group.p**2)
    most = max(most, flying + chunk.owned * workspace)
  return most + sum(g.count * g.shard_bytes for g in plan.groups)


def _in_flight(group: muon_plan.MuonGroup, chunk: muon_plan.Chunk) -> int:
  """Returns the bytes of a chunk that comes or goes.

  It is there before and after the all-to-all, and where replicas share it, as
  all of them see it.
  """
  one = chunk.owned * group.num_shards * group.piece_bytes
  return 2 * one + (group.sharers * one if group.sharers > 1 else 0)
