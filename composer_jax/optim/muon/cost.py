"""What Muon costs a device: speeds of machines, and closed forms.

Nothing here is measured on the machine at hand. The speeds are those that
vendors publish, so times made of them are bounds and not predictions; the
planner only compares them with each other.

p <= q are the sides of a matrix, `shards` the devices that hold one together,
`replicas` those that hold the same shard.
"""

import dataclasses

import jax.numpy as jnp

from composer_jax.optim.muon import newton_schulz


@dataclasses.dataclass(frozen=True)
class Rates:
  """Speeds of one device.

  Attributes:
    name: of the device.
    flops: per second, of dense products in the dtype that Newton-Schulz has
      there: bfloat16, float32 on a CPU.
    memory: bytes per second of its main memory.
    within: bytes per second into a device from others of its node, if no other
      traffic passes through it; in a torus of TPUs, all-to-alls do.
    across: the same from devices of other nodes.
    node: devices that the fast network joins.
    latency: seconds that a collective takes however little it carries.
  """

  name: str
  flops: float
  memory: float
  within: float
  across: float
  node: int
  latency: float

  def wire_seconds(self, num_bytes: float, span: int) -> float:
    """Returns the time of bytes into a device, latency left out.

    Args:
      num_bytes: of one collective, or of several.
      span: devices from the first to the last that take part.
    """
    return num_bytes / (self.within if span <= self.node else self.across)


# TPUs: the tables of Google Cloud's documentation of each version: bfloat16
# peak, HBM bandwidth, half of a chip's bidirectional interconnect bandwidth
# (v5p 1,200 GB/s, v5e 400, v6e 800), and across slices a chip's share of the
# data-centre network (50, 25 and 100 Gbit/s). A node is the largest pod. A chip
# of TPU7x is two devices, which share its 2,307 TFLOP/s, 7,380 GB/s of HBM,
# 1,200 GB/s and 100 Gbit/s.
# GPUs: NVIDIA's data sheets, dense bfloat16; NVLink brings in half of its 900
# GB/s, between nodes of 8 each GPU has a port of 400 Gbit/s. The CPU is one of
# several emulated devices that share a small machine, and rough.
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

# What a plan assumes where no rates are given. A machine that is not there has
# no platform: it is taken for a TPU.
_OF_PLATFORM = {'cpu': 'cpu', 'gpu': 'h200', 'cuda': 'h200', 'tpu': 'v5p'}


def of_platform(platform: str | None) -> Rates:
  """Returns rates of a jax platform; of a TPU v5p where it is unknown."""
  return BY_NAME[_OF_PLATFORM.get(platform or 'tpu', 'v5p')]


def matrix_bytes(p: int, q: int, options: newton_schulz.NewtonSchulz) -> int:
  """Returns memory traffic of one matrix: each product's operands and result.

  Args:
    p: short side.
    q: long side.
    options: with the dtype resolved.
  """
  size = jnp.dtype(options.dtype).itemsize
  if not options.is_gram(p, q):
    return size * len(options.triples) * (3 * p * q + 4 * p * p)
  total = 0
  for segment in options.segments:
    products = len(segment) + 3 * (len(segment) - 1)
    total += 3 * p * q + 2 * p * p + 3 * p * p * products
  return size * total


def bound_bytes(shards: int, replicas: int, local_bytes: int) -> float:
  """Returns the least that owners of whole matrices can exchange.

  Each matrix has one owner among the shards * replicas devices. It lacks
  (shards - 1) / shards of its matrices, which are 1 / replicas of as many bytes
  as it holds shards; afterwards a device has the results of its own matrices
  and lacks the rest of its shards.

  Args:
    shards: devices that hold a matrix together.
    replicas: devices that hold the same shard.
    local_bytes: of the shards that a device holds, in the wire's dtype.
  """
  owners = shards * replicas
  return local_bytes * ((shards - 1) / owners + 1 - 1 / owners)
