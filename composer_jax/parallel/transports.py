"""Which way tokens travel to their experts, what it costs, and how much fits.

'ring' carries every token to every shard; 'a2a' and 'ragged_a2a' carry a token
once to each shard that has an expert of it, in slots or densely packed. All are
exact for any routes as long as buffers are of the worst case. A `bucket` makes
them that many times the mean instead: `Needs` of the device, or `needed_rows`
of recorded routes on the host, then say whether a step fits. One number says
it, counted in copies of tokens; tokens to receive are converted to it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.parallel import all_to_all, dispatch, ragged, ring

CARRIERS = {
  'ring': ring.carry,
  'a2a': all_to_all.carry,
  'ragged_a2a': ragged.carry,
}
# XLA:CPU has no ragged-all-to-all; tests run its emulation by name.
_AVAILABLE = {
  'cpu': ('ring', 'a2a'),
  'gpu': ('ring', 'a2a', 'ragged_a2a'),
  'tpu': ('ring', 'a2a', 'ragged_a2a'),
}
# Conversions are exact in units of 1 / 16.
_UNIT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
  """The size of one exchange.

  Attributes:
    num_tokens: of each shard, padding included.
    num_active: experts of each token.
    num_experts: that there are.
    num_shards: that hold them.
    embed_dim: elements of a token.
    item_bytes: of each element.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A transport and why.

  Attributes:
    name: of CARRIERS.
    reason: one line to print.
    bytes_by_name: what a shard receives for one layer of experts, forward and
      backward; of all transports, whether the platform has them or not.
  """

  name: str
  reason: str
  bytes_by_name: dict[str, int]


def bytes_received(load: Load, name: str, *, bucket: float | None) -> int:
  """Returns what a shard receives for a layer, forward and backward, if all
  experts are alike."""
  width = load.embed_dim * load.item_bytes
  # Ids and gates there; their gradient back.
  routes = 2 * 4 * load.num_active
  peers = load.num_shards - 1
  if name == 'ring':
    tokens = load.num_tokens
  elif name == 'a2a':
    group = sized(load, name, bucket=bucket)
    tokens = group.slots or load.num_tokens
  else:
    tokens = load.num_tokens * load.visits
  # x, y and their gradients.
  return round(peers * tokens * (4 * width + 2 * routes))


def choose(
  load: Load,
  *,
  platform: str,
  bucket: float | None = None,
  imbalance: float = 1.25,
) -> Choice:
  """Picks the transport whose busiest shard receives the fewest bytes.

  Without a shard to share with there is nothing to choose. A token sent once
  for each of its A experts would cost as much as the ring at A shards; sent
  once to each shard, it never costs more, but only the ring is as fast for a
  busy shard as for any other.

  Args:
    load: of one layer.
    platform: 'cpu', 'gpu' or 'tpu'.
    bucket: of `ExchangePlan`.
    imbalance: what the busiest shard of ragged_a2a receives, in means.
  """
  table = {name: bytes_received(load, name, bucket=bucket) for name in CARRIERS}
  cost = {name: float(table[name]) for name in _AVAILABLE[platform]}
  if 'ragged_a2a' in cost:
    cost['ragged_a2a'] *= imbalance
  # The first of equals: the simplest.
  name = min(cost, key=lambda n: cost[n])
  megabytes = ', '.join(f'{n} {b / 1e6:.3g}' for n, b in table.items())
  reason = (
    f'transport {name}: {load.num_shards} expert shards, '
    f'{load.num_active} of {load.num_experts} experts, a token visits '
    f'{load.visits * load.num_shards:.2f} shards; MB received by a shard per '
    f'layer forward and backward: {megabytes} (busiest shard of ragged_a2a '
    f'x{imbalance:g}; {platform} has {", ".join(_AVAILABLE[platform])})'
  )
  return Choice(name=name, reason=reason, bytes_by_name=table)


def sized(
  load: Load,
  name: str,
  *,
  bucket: float | None,
  axes: tuple[str, ...] = (),
  chunks: int = 1,
) -> dispatch.Group:
  """Returns the group of a transport with the room that a bucket gives it."""
  rows = slots = None
  capacity = capacity_rows(load, bucket)
  if capacity < load.worst_rows:
    rows = capacity
    if name != 'ring':
      slots = capacity * _UNIT // _rows_per_token(load, name)
  return dispatch.Group(
    axes=axes,
    num_shards=load.num_shards,
    num_local=load.num_local,
    rows=rows,
    slots=slots,
    chunks=chunks,
  )


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


def needed_rows(
  ids_MBTA: np.ndarray,
  valid_BT: np.ndarray,
  name: str,
  *,
  num_experts: int,
  mesh_shape: dict[str, int],
  batch_axes: Sequence[str],
  sequence_axes: Sequence[str],
  expert_axes: Sequence[str],
) -> np.ndarray:
  """Counts on the host what the device will report for recorded routes.

  Args:
    ids_MBTA: experts of each token as the device will have them; tokens of
      `NO_ROUTE` are routed afresh and are not counted here.
    valid_BT: false on padding.
    name: of the transport.
    num_experts: that there are.
    mesh_shape: size of each mesh axis.
    batch_axes: that shard B.
    sequence_axes: that shard T.
    expert_axes: that shard the experts.

  Returns:
    int64 rows_M, of the shard that needs most in each layer.
  """
  ids_MBTA = ids_MBTA.astype(np.int64)
  # As `dispatch.prepare`.
  same = ids_MBTA[..., :, None] == ids_MBTA[..., None, :]
  is_used = ~np.tril(same, -1).any(-1) & valid_BT[..., None]
  ids_MBTA = np.where(is_used, ids_MBTA, -1)
  num_layers, _, _, num_active = ids_MBTA.shape
  axes = (*batch_axes, *sequence_axes)
  sizes = [mesh_shape[axis] for axis in axes]
  batch = math.prod(mesh_shape[axis] for axis in batch_axes)
  sequence = math.prod(mesh_shape[axis] for axis in sequence_axes)
  b, t = ids_MBTA.shape[1] // batch, ids_MBTA.shape[2] // sequence
  split = ids_MBTA.reshape(num_layers, batch, b, sequence, t, num_active)
  split = split.swapaxes(2, 3).reshape(num_layers, *sizes, b * t, num_active)
  # Groups of shards that exchange with each other, in the order of the mesh.
  outer = [axis for axis in axes if axis not in expert_axes]
  order = [axes.index(axis) + 1 for axis in (*outer, *expert_axes)]
  split = split.transpose(0, *order, len(sizes) + 1, len(sizes) + 2)
  shards = math.prod(mesh_shape[axis] for axis in expert_axes)
  split = split.reshape(num_layers, -1, shards, b * t, num_active)
  load = Load(
    num_tokens=b * t,
    num_active=num_active,
    num_experts=num_experts,
    num_shards=shards,
    embed_dim=0,
  )
  is_any = (split >= 0) & (split < num_experts)
  shard = np.where(is_any, split // load.num_local, shards)
  # [M, group, sender, token, A, receiver]
  visits = shard[..., None] == np.arange(shards)
  copies = visits.sum((2, 3, 4)).max((1, 2))
  if name == 'ring':
    return copies
  tokens_from = visits.any(4).sum(3)
  if name == 'a2a':
    tokens = tokens_from.max((1, 2, 3))
  else:
    tokens = tokens_from.sum(2).max((1, 2))
  return np.maximum(copies, rows_for_tokens(load, name, tokens))
