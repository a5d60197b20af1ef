"""What a transport of tokens to experts costs, and how much room it needs.

All of `carriers` are exact for any routes as long as buffers are of the worst
case. A `bucket` makes them that many times the mean instead: `Needs` of the
device, or `exchange.needed_rows` of recorded routes on the host, then say
whether a step fits. One number says it, counted in copies of tokens; tokens to
receive are converted to it.
"""

import dataclasses
import math
from typing import Any

from composer_jax.parallel import carriers

# XLA:CPU has no ragged-all-to-all; tests run its emulation by name.
_AVAILABLE = {
  'cpu': ('ring', 'a2a'),
  'gpu': tuple(carriers.CARRIERS),
  'tpu': tuple(carriers.CARRIERS),
}
# What the busiest shard of ragged_a2a is taken to receive, in means.
_IMBALANCE = 1.25
# Conversions are exact in units of 1 / 16.
_UNIT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """The size of one exchange.

  Attributes:
    num_tokens: of each shard, padding included.
    num_active: experts of each token.
    num_shards: devices that hold all experts between them.
    item_bytes: size of each of the `embed_dim` elements of a token.
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
    """Share of the shards that a token visits if all experts are alike."""
    others = self.num_experts - self.num_local
    missed = math.comb(others, self.num_active)
    return 1 - missed / math.comb(self.num_experts, self.num_active)

  @property
  def worst_rows(self) -> int:
    tokens = self.num_tokens * self.num_shards
    return tokens * min(self.num_active, self.num_local)


def bytes_received(load: Load, name: str, *, bucket: float | None) -> int:
  """Returns what a shard receives for a layer, forward and backward, if all
  experts are alike."""
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
  """Returns the name of a transport, and one line that says why.

  It is the one whose busiest shard receives the fewest bytes on a platform:
  'cpu', 'gpu' or 'tpu'. A token sent once for each of its A experts would cost
  as much as the ring at A shards; sent once to each shard, it never costs more,
  but only the ring is as fast for a busy shard as for any other.
  """
  table = {n: bytes_received(load, n, bucket=bucket) for n in carriers.CARRIERS}
  busiest = table | {'ragged_a2a': _IMBALANCE * table['ragged_a2a']}
  # The first of equals: the simplest.
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
  """Returns the shards with the room that a bucket gives a transport."""
  rows = slots = None
  capacity = capacity_rows(load, bucket)
  if capacity < load.worst_rows:
    rows = capacity
    if name != 'ring':
      slots = capacity * _UNIT // _rows_per_token(load, name)
  shards = dict(num_shards=load.num_shards, num_local=load.num_local)
  return carriers.ExpertShards(axes=axes, rows=rows, slots=slots, **shards)


def capacity_rows(load: Load, bucket: float | None) -> int:
  """Returns the copies that a shard has room for, in whole tiles of 8."""
  if bucket is None:
    return load.worst_rows
  mean = load.num_tokens * load.num_active
  return min(load.worst_rows, math.ceil(bucket * mean / 8) * 8)


def _rows_per_token(load, name):
  """Returns copies of the mean load per token of it, in units, rounded down.

  Tokens are those that a shard receives of all others, or of one.
  """
  tokens = load.visits * (load.num_shards if name == 'ragged_a2a' else 1)
  return max(1, math.floor(_UNIT * load.num_active / tokens))


def rows_for_tokens(load: Load, name: str, tokens: Any) -> Any:
  """Converts tokens to receive to copies, of which `capacity_rows` counts.

  They exceed it exactly if the tokens exceed the slots of `sized`.
  """
  return -(tokens * _rows_per_token(load, name) // -_UNIT)
