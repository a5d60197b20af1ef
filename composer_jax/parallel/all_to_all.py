"""Each token goes once to each shard that has an expert of it, in fixed slots.

One all_to_all with as many slots for each pair of shards there, and one back. A
shard sends a token once however many of its experts are there, and gets back
their gated sum: a slot for each of its tokens is then enough for any routes.
With fewer slots than that (`Group.slots`) the counts say whether they were
enough, and a step for which they were not must be repeated with more.
"""

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.parallel import dispatch


def sort_by_shard(
  ids_ZA: jax.Array, group: dispatch.Group
) -> tuple[dispatch.Order, jax.Array]:
  """Sorts tokens by the shards that they visit, each shard once.

  Returns:
    the order, and counts_2P: the tokens that visit each shard and the copies
    that they make there.
  """
  num_tokens, num_active = ids_ZA.shape
  num_shards = group.num_shards
  is_any_ZA = (ids_ZA >= 0) & (ids_ZA < group.no_expert)
  shard_ZA = jnp.where(is_any_ZA, ids_ZA // group.num_local, num_shards)
  copies_P = (shard_ZA.reshape(-1, 1) == jnp.arange(num_shards)).sum(0)
  same_ZAA = shard_ZA[:, :, None] == shard_ZA[:, None, :]
  is_first_ZA = ~jnp.tril(same_ZAA, -1).any(-1)
  order, tokens_P = dispatch.sort_copies(
    jnp.where(is_first_ZA, shard_ZA, num_shards),
    num_shards,
    num_tokens * min(num_active, num_shards),
  )
  return order, jnp.stack([tokens_P, copies_P.astype(jnp.int32)])


def narrow(order: dispatch.Order, num_shards: int) -> dispatch.Order:
  """Keeps as many columns of places as a token can visit shards."""
  # No place is the largest number, so it sorts last.
  place_ZA = jnp.sort(order.place_ZA, axis=1)[:, :num_shards]
  return order._replace(place_ZA=place_ZA)


def carry(
  compute: dispatch.Compute,
  tokens: dispatch.Tokens,
  group: dispatch.Group,
) -> tuple[jax.Array, dispatch.Needs]:
  """As `ring.carry`."""
  x_ZD, ids_ZA, gates_ZA = tokens
  num_tokens = x_ZD.shape[0]
  slots = min(group.slots or num_tokens, num_tokens)

  def swap(rows_YD):
    return jax.lax.all_to_all(rows_YD, group.axes, 0, 0, tiled=True)

  with jax.named_scope('dispatch'):
    order, counts_2P = sort_by_shard(ids_ZA, group)
    order = narrow(_in_slots(order, counts_2P[0], slots), group.num_shards)
    order, counts_2P = dispatch.named_routes((order, counts_2P))
    packed_YA = dispatch.take(dispatch.pack(ids_ZA, gates_ZA), order)
    is_used_PC = jnp.arange(slots) < counts_2P[0, :, None]
    # An empty slot must not bring the routes of the token that pads it.
    packed_YA = jnp.where(
      is_used_PC.reshape(-1, 1), packed_YA, float(group.no_expert)
    )
    x_YD = swap(dispatch.take(x_ZD, order))
    x_YD = ad_checkpoint.checkpoint_name(x_YD, 'dispatched')
    packed_YA = dispatch.named_routes(swap(packed_YA))
  y_YD, count = compute(dispatch.Tokens(x_YD, *dispatch.unpack(packed_YA)))
  with jax.named_scope('combine'):
    y_ZD = dispatch.combine(swap(y_YD), None, order)
    y_ZD = ad_checkpoint.checkpoint_name(y_ZD, 'combined')
  if slots == num_tokens:
    # All of it arrived, to be counted here; the need of fewer slots must not be
    # told as less than what made them too few.
    ids_YA, _ = dispatch.unpack(packed_YA)
    is_used_Y = (ids_YA < group.no_expert).any(-1)
    tokens_P = is_used_Y.reshape(group.num_shards, slots).sum(1)
    return y_ZD, dispatch.Needs(count, tokens_P.max().astype(jnp.int32))
  # What arrived may lack what had no slot.
  counts_Y2P = jax.lax.all_gather(counts_2P, group.axes)
  return y_ZD, dispatch.Needs(
    copies=counts_Y2P[:, 1].sum(0).max(), tokens=counts_Y2P[:, 0].max()
  )


def _in_slots(order, tokens_P, slots):
  """Gives each shard's rows a place of their own among P * slots."""
  num_shards = tokens_P.shape[0]
  num_rows = order.source_Y.shape[0]
  start_P = jnp.cumsum(tokens_P) - tokens_P
  row_PC = start_P[:, None] + jnp.arange(slots)
  row_Y = jnp.minimum(row_PC.reshape(-1), num_rows - 1)
  # Which shard a place is of follows from the place.
  shard_ZA = (order.place_ZA[..., None] >= jnp.cumsum(tokens_P)).sum(-1)
  shard_ZA = jnp.minimum(shard_ZA, num_shards - 1)
  slot_ZA = order.place_ZA - start_P[shard_ZA]
  has_place_ZA = (order.place_ZA < num_rows) & (slot_ZA < slots)
  place_ZA = jnp.where(
    has_place_ZA, shard_ZA * slots + slot_ZA, num_shards * slots
  )
  return dispatch.Order(order.source_Y[row_Y], order.copy_Y[row_Y], place_ZA)
