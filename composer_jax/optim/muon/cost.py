"""Modelled times of a chunk of Muon's step, from published speeds.

Such times are lower bounds, not predictions; the planner compares them with
each other.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from composer_jax.optim.muon import newton_schulz
from composer_jax.optim.muon import plan as muon_plan


@dataclasses.dataclass(frozen=True)
class Rates:
  """Speeds of one device.

  Attributes:
    flops: operations per second of dense products, in Newton-Schulz's dtype.
    memory: bytes per second of main memory.
    within: bytes per second into a device from its node, without the traffic
      of others that passes through devices of a torus.
    across: bytes per second into a device from other nodes.
    node: number of devices that the fast network joins.
    latency: seconds of a collective of no bytes.
  """

  name: str
  flops: float
  memory: float
  within: float
  across: float
  node: int
  latency: float

  def wire_seconds(self, num_bytes: float, span: int) -> float:
    """Returns the time of bytes into a device, without latency.

    `span` is the number of devices from the first to the last participant.
    """
    return num_bytes / (self.within if span <= self.node else self.across)

  def transfer_seconds(
    self, kind: str, num_bytes: float, strides: muon_plan.Strides, count: int
  ) -> float:
    """Returns the time of a collective of `count` neighbours along strides."""
    del kind
    return self.wire_seconds(num_bytes, span(strides, count))


# TPUs: Google Cloud's tables: bfloat16 peak, HBM bandwidth, half of a chip's
# bidirectional interconnect bandwidth (v5p 1,200 GB/s, v5e 400, v6e 800), and
# between slices a chip's share of the data-centre network (50, 25 and 100
# Gbit/s). A node is the largest pod. A chip of TPU7x (2,307 TFLOP/s, HBM 7,380
# GB/s, interconnect 1,200 GB/s, network 100 Gbit/s) is two devices.
# GPUs: NVIDIA's data sheets, dense bfloat16, half of NVLink's 900 GB/s, and 400
# Gbit/s for each GPU between nodes of 8. The CPU is a rough estimate of one of
# several emulated devices.
BY_NAME = {
  rates.name: rates
  for rates in (
    Rates('v5e', 197e12, 819e9, 200e9, 3.125e9, 256, 10e-6),
    Rates('v5p', 459e12, 2765e9, 600e9, 6.25e9, 8960, 10e-6),
    Rates('v6e', 918e12, 1638e9, 400e9, 12.5e9, 256, 10e-6),
    Rates('tpu7x', 1153.5e12, 3690e9, 300e9, 6.25e9, 18432, 10e-6),
    Rates('h100', 989e12, 3350e9, 450e9, 50e9, 8, 20e-6),
    Rates('h200', 989e12, 4800e9, 450e9, 50e9, 8, 20e-6),
    Rates('cpu', 20e9, 2e9, 1e9, 1e9, 1 << 30, 2e-3),
  )
}


class ChunkTimes(NamedTuple):
  """Modelled seconds of a chunk: to bring it, work on it and return it."""

  bring: float
  work: float
  give: float


def chunk_times(
  group: muon_plan.MuonGroup, chunk: muon_plan.Chunk, rates: Rates
) -> ChunkTimes:

  def transfer(kind, num_bytes, strides, count):
    if not num_bytes:
      return 0.0
    seconds = rates.transfer_seconds(kind, num_bytes, strides, count)
    return seconds + rates.latency

  shards, replicas = group.shard_strides, group.replica_strides
  exchange = transfer(
    'all-to-all', group.exchange_bytes(chunk.owned), shards, group.num_shards
  )
  gather = transfer(
    'all-gather', group.gather_bytes(chunk.owned), replicas, group.sharers
  )
  work = max(
    chunk.owned * group.matrix_flops / rates.flops,
    memory_bytes(group, chunk) / rates.memory,
  )
  # Devices that share a matrix wait for each other in every iteration.
  for kind, num_bytes in group.split_collectives(chunk):
    work += transfer(kind, num_bytes, shards, group.split)
  return ChunkTimes(bring=exchange, work=work, give=exchange + gather)


def span(strides: muon_plan.Strides, count: int) -> int:
  """Returns the devices from the first to the last of `count` neighbours."""
  span = 1
  for size, stride in reversed(strides):
    if count > 1:
      span = max(span, stride * min(size, count))
    count = -(-count // size)
  return span


def memory_bytes(group: muon_plan.MuonGroup, chunk: muon_plan.Chunk) -> int:
  """Returns a chunk's bytes to and from main memory.

  Beside Newton-Schulz these are float32 gradient and momentum in, momentum and
  update out, and both exchanges written and read.
  """
  p, q, options = group.p, group.q, group.newton_schulz
  # Operands and results of products.
  if group.split > 1 or not options.is_gram(p, q):
    elements = len(options.triples) * (3 * p * q + 4 * p * p) / group.split
  else:
    products = [newton_schulz.gram_products(len(s)) for s in options.segments]
    elements = sum(3 * p * q + (2 + 3 * n) * p * p for n in products)
  size = jnp.dtype(options.dtype).itemsize
  local = group.p_side.local * group.q_side.local
  around = 4 * 4 * local + 4 * group.shard_bytes
  return chunk.owned * int(size * elements) + chunk.count * around
