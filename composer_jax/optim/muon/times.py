"""What a plan takes of a device in time and memory: models, not measurements.

A roofline is a bound. The pipelined time lies above it: it adds the transfers
that nothing hides, and the traffic of main memory. Temporary bytes are an
estimate of what `optim.muon.exchange` keeps; the compiler decides.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from composer_jax.optim.muon import cost
from composer_jax.optim.muon import plan as muon_plan


class _Spans(NamedTuple):
  """How many devices apart the first and the last of a collective are.

  Attributes:
    exchange: of those that hold one matrix.
    split: of those that share the work on one.
    gather: of the replicas that share a list of matrices.
  """

  exchange: int
  split: int
  gather: int


class Stage(NamedTuple):
  """Seconds of one chunk: to bring it, to work on it, to return it."""

  bring: float
  work: float
  give: float


def memory_bytes(group: muon_plan.MuonGroup, chunk: muon_plan.Chunk) -> int:
  """Returns the traffic of main memory that a chunk makes.

  Beside Newton-Schulz: float32 gradient and momentum in, momentum and update
  out, and the chunk written and read on its way to and from its owners.
  """
  elements = chunk.count * group.p_side.local * group.q_side.local
  wire = jnp.dtype(group.wire_dtype).itemsize
  options = group.newton_schulz
  if group.split > 1:
    options = dataclasses.replace(options, method='standard')
  matrix = cost.matrix_bytes(group.p, group.q, options) // group.split
  return chunk.owned * matrix + elements * (4 * 4 + 4 * wire)


def _spans(group: muon_plan.MuonGroup) -> _Spans:
  return _Spans(
    exchange=span(group.shard_strides, group.num_shards),
    split=span(group.shard_strides, group.split),
    gather=span(group.replica_strides, group.sharers),
  )


def span(strides: muon_plan.Strides, count: int) -> int:
  """Returns the devices from the first to the last of `count` neighbours."""
  span = 1
  for size, stride in reversed(strides):
    if count > 1:
      span = max(span, stride * min(size, count))
    count = -(-count // size)
  return span


def stage(
  group: muon_plan.MuonGroup, chunk: muon_plan.Chunk, rates: cost.Rates
) -> Stage:
  """Returns the seconds of a chunk."""

  def transfer(num_bytes, span, collectives=1):
    seconds = rates.wire_seconds(num_bytes, span)
    return seconds + collectives * rates.latency if num_bytes else 0.0

  spans = _spans(group)
  exchange = transfer(group.exchange_bytes(chunk.owned), spans.exchange)
  gather = transfer(group.gather_bytes(chunk.owned), spans.gather)
  work = max(
    chunk.owned * group.matrix_flops / rates.flops,
    memory_bytes(group, chunk) / rates.memory,
  )
  # Devices that share a matrix wait for each other at every step.
  shared = [num_bytes for _, num_bytes in group.split_collectives(chunk)]
  work += transfer(sum(shared), spans.split, len(shared))
  return Stage(bring=exchange, work=work, give=exchange + gather)


def wire_seconds(plan: muon_plan.MuonPlan) -> float:
  """Returns the time of all transfers one after the other, without latency."""
  total = 0.0
  for group in plan.groups:
    spans = _spans(group)
    for num_bytes, span in (
      (2 * group.exchange_bytes(group.owned), spans.exchange),
      (group.split_bytes, spans.split),
      (group.gather_bytes(group.owned), spans.gather),
    ):
      total += plan.rates.wire_seconds(num_bytes, span)
  return total


def roofline_seconds(plan: muon_plan.MuonPlan) -> float:
  """Returns the time of all products at peak, or of all transfers beside."""
  return max(plan.flops / plan.rates.flops, wire_seconds(plan))


def stages(plan: muon_plan.MuonPlan) -> list[Stage]:
  """Returns the seconds of each chunk in the order of execution."""
  return [
    stage(plan.groups[g], plan.groups[g].chunks[c], plan.rates)
    for g, c in plan.sequence
  ]


def pipelined_seconds(stages: Sequence[Stage]) -> float:
  """Returns the time of stages whose transfers run beside others' work.

  One network and one processor, each doing one thing at a time. While a stage
  is worked on, the one before is returned and the next one brought, not
  earlier: what is in flight takes memory.
  """
  processor = 0.0
  wire = arrived = stages[0].bring if stages else 0.0
  for i, stage in enumerate(stages):
    begin = max(processor, arrived)
    if i:
      wire = max(wire, processor) + stages[i - 1].give
    processor = begin + stage.work
    if i + 1 < len(stages):
      wire = max(wire, begin) + stages[i + 1].bring
      arrived = wire
  return max(processor, wire) + (stages[-1].give if stages else 0.0)


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
