"""Bytes and capacity of the transports of tokens to experts.

All `carriers` are exact for any routes with buffers for the worst case. A
`bucket` makes buffers that multiple of the mean load instead; `carriers.Needs`
on the device and `exchange.needed_rows` on the host then tell if a step fits.
Capacity is one number in copies of tokens, into which received tokens are
converted.
"""

import dataclasses
import math
from typing import Any

from composer_jax.parallel import carriers

# XLA:CPU has no ragged-all-to-all; its emulation is for tests.
_AVAILABLE = {
  'cpu': ('ring', 'a2a'),
  'gpu': tuple(carriers.CARRIERS),
  'tpu': tuple(carriers.CARRIERS),
}
# Assumed load of the busiest shard of ragged_a2a relative to the mean.
_IMBALANCE = 1.25
# Conversions between tokens and copies are integers in units of 1 / 16.
_UNIT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """The size of one exchange.

  Attributes:
    num_tokens: tokens of each shard, padding included.
    num_active: experts of each token.
    num_experts: experts on all shards.
    num_shards: devices that hold all experts together.
    item_bytes: bytes of an element of a token.
  """

  num_tokens: int
  num_active: int
  num_experts: int
  num_shards: int
  embed_dim: int
  item_bytes: int = 2

  @property
  def num_local(self) -> int:
    return self.num_experts // self.num_shards

  @property
  def visits(self) -> float:
    """Mean share of the shards that a token visits under even load."""
    others = self.num_experts - self.num_local
    missed = math.comb(others, self.num_active)
    return 1 - missed / math.comb(self.num_experts, self.num_active)

  @property
  def worst_rows(self) -> int:
    tokens = self.num_tokens * self.num_shards
    return tokens * min(self.num_active, self.num_local)


def bytes_received(load: Load, name: str, *, bucket: float | None) -> int:
  """Returns a layer's bytes into a shard in both passes under even load."""
  width = load.embed_dim * load.item_bytes
  # Ids and gates there; their gradient back.
  routes = 2 * 4 * load.num_active
  tokens = float(load.num_tokens)
  if name == 'a2a':
    tokens = sized(load, name, bucket=bucket).slots or tokens
  elif name == 'ragged_a2a':
    tokens *= load.visits
  # x, y and their gradients.
  return round((load.num_shards - 1) * tokens * (4 * width + 2 * routes))


def choose(
  load: Load, *, platform: str, bucket: float | None = None
) -> tuple[str, str]:
  """Returns the name of a transport, and the reason for it in one line.

  The choice is the transport whose busiest shard receives the fewest bytes.
  Sent once to each shard, a token never costs more than in the ring, but only
  the ring is as fast for a busy shard as for others.
  """
  table = {n: bytes_received(load, n, bucket=bucket) for n in carriers.CARRIERS}
  busiest = table | {'ragged_a2a': _IMBALANCE * table['ragged_a2a']}
  # The first of equals is the simplest.
  name = min(_AVAILABLE[platform], key=lambda n: busiest[n])
  megabytes = ', '.join(f'{n} {b / 1e6:.3g}' for n, b in table.items())
  return name, (
    f'transport {name}: {load.num_shards} expert shards, '
    f'{load.num_active} of {load.num_experts} experts, a token visits '
    f'{load.visits * load.num_shards:.2f} shards; MB received by a shard per '
    f'layer forward and backward: {megabytes} (busiest shard of ragged_a2a '
    f'x{_IMBALANCE:g}; {platform} has {", ".join(_AVAILABLE[platform])})'
  )


def sized(
  load: Load, name: str, *, bucket: float | None, axes: tuple[str, ...] = ()
) -> carriers.ExpertShards:
  """Returns the shards with the capacity that a bucket gives a transport."""
  rows = slots = None
  capacity = capacity_rows(load, bucket)
  if capacity < load.worst_rows:
    rows = capacity
    if name != 'ring':
      slots = capacity * _UNIT // _rows_per_token(load, name)
  shards = dict(num_shards=load.num_shards, num_local=load.num_local)
  return carriers.ExpertShards(axes=axes, rows=rows, slots=slots, **shards)


def capacity_rows(load: Load, bucket: float | None) -> int:
  """Returns a shard's capacity in copies, at most that of the worst case."""
  if bucket is None:
    return load.worst_rows
  mean = load.num_tokens * load.num_active
  return min(load.worst_rows, math.ceil(bucket * mean / 8) * 8)


def _rows_per_token(load, name):
  """Returns the mean copies per received token in units, rounded down.

  Tokens are those from all shards for 'ragged_a2a', and from one for 'a2a'.
  """
  tokens = load.visits * (load.num_shards if name == 'ragged_a2a' else 1)
  return max(1, math.floor(_UNIT * load.num_active / tokens))


def rows_for_tokens(load: Load, name: str, tokens: Any) -> Any:
  """Converts received tokens to copies.

  These exceed `capacity_rows` exactly if tokens exceed the slots of `sized`.
  """
  return -(tokens * _rows_per_token(load, name) // -_UNIT)
