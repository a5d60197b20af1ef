"""Three ways for tokens to get to the shards of their experts, and back.

'ring': every shard sees every token and adds what its experts make of it. An
all_gather there and a psum_scatter back, whatever the routes are: nothing to
count and nothing to balance.

'a2a': each token goes once to each shard that has an expert of it, however many
of its experts are there, and its gated sum comes back. One all_to_all there and
one back, with as many slots for each pair of shards: one for each token is
enough for any routes. With fewer (`ExpertShards.slots`) the counts say whether
they were enough; a step for which they were not must be repeated with more.

'ragged_a2a': likewise, densely packed: counts travel first, then only rows that
exist, into a buffer that all senders share (again `ExpertShards.slots`). The
transpose of an exchange is the exchange with its counts transposed. XLA:CPU has
no ragged-all-to-all; there, every shard's rows are gathered and each picks its
own: the same result, so that all else here runs anywhere.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.core import platforms
from composer_jax.parallel import dispatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertShards:
  """Devices that hold all experts between them, each as many as another.

  Attributes:
    num_local: experts of each.
    rows: copies that one of them has room for; None for the worst case.
    slots: tokens that one of them has room for, or one has for each of the
      others; None for the worst case.
  """

  axes: tuple[str, ...]
  num_shards: int
  num_local: int
  rows: int | None = None
  slots: int | None = None

  @property
  def no_expert(self) -> int:
    return self.num_shards * self.num_local


class Needs(NamedTuple):
  """What the shard with the most had to have room for.

  Attributes:
    copies: int32, rows of experts.
    tokens: int32, rows to receive of all shards, or of one, as the transport
      has it; None where it always has room.
  """

  copies: jax.Array
  tokens: jax.Array | None = None


class Way(NamedTuple):
  """How one exchange moves rows.

  Attributes:
    there: (rows_ZX of this shard's tokens, a number) -> rows_YX that arrive
      here; rows without a token hold the number, or anything if it is None.
    back: sums of what arrived -> those of this shard's tokens.
    needs: (copies computed here, ids_YA that arrived) -> Needs.
  """

  there: Callable[[jax.Array, float | None], jax.Array]
  back: Callable[[jax.Array], jax.Array]
  needs: Callable[[jax.Array, jax.Array], Needs]


def carry(
  name: str,
  compute: Callable[[dispatch.RoutedTokens], tuple[jax.Array, jax.Array]],
  tokens: dispatch.RoutedTokens,
  shards: ExpertShards,
) -> tuple[jax.Array, Needs]:
  """Returns y_ZD of this shard's tokens, and what this shard needed for it.

  `compute` maps tokens to their sum over the experts of this shard, and the
  copies that there were.
  """
  with jax.named_scope('dispatch'):
    way = CARRIERS[name](tokens.ids_ZA, shards)
    x_YD = ad_checkpoint.checkpoint_name(
      way.there(tokens.x_ZD, None), 'dispatched'
    )
    # Ids and gates travel as one array; ids are exact as float32 up to 2 ** 24.
    packed_ZA = jnp.concatenate(
      [tokens.ids_ZA.astype(jnp.float32), tokens.gates_ZA], axis=-1
    )
    packed_YA = way.there(packed_ZA, float(shards.no_expert))
    packed_YA = dispatch.named_routes(packed_YA)
  ids_YA, gates_YA = jnp.split(packed_YA, 2, axis=-1)
  ids_YA = jax.lax.stop_gradient(ids_YA).astype(jnp.int32)
  y_YD, copies = compute(dispatch.RoutedTokens(x_YD, ids_YA, gates_YA))
  with jax.named_scope('combine'):
    y_ZD = ad_checkpoint.checkpoint_name(way.back(y_YD), 'combined')
  return y_ZD, way.needs(copies, ids_YA)


def _ring(ids_ZA: jax.Array, shards: ExpertShards) -> Way:
  # Both ways shards are a dimension of their own: XLA:TPU fills up what it
  # scatters to whole tiles, and tiles of rows are larger.
  def there(rows_ZX, empty):
    del empty  # Every row holds a token.
    rows_PZX = jax.lax.all_gather(rows_ZX, shards.axes, tiled=False)
    return rows_PZX.reshape(-1, rows_ZX.shape[1])

  def back(y_YD):
    y_PZD = y_YD.reshape(shards.num_shards, -1, y_YD.shape[1])
    return jax.lax.psum_scatter(y_PZD, shards.axes, tiled=False)

  del ids_ZA
  return Way(there, back, lambda copies, _: Needs(copies))


def _slotted(ids_ZA: jax.Array, shards: ExpertShards) -> Way:
  num_tokens = ids_ZA.shape[0]
  slots = min(shards.slots or num_tokens, num_tokens)
  order, counts_2P = _sort_by_shard(ids_ZA, shards)
  order = _narrow(_in_slots(order, counts_2P[0], slots), shards.num_shards)
  order, counts_2P = dispatch.named_routes((order, counts_2P))

  def swap(rows_YX):
    return jax.lax.all_to_all(rows_YX, shards.axes, 0, 0, tiled=True)

  def there(rows_ZX, empty):
    rows_YX = dispatch.take(rows_ZX, order)
    if empty is not None:
      is_used_PC = jnp.arange(slots) < counts_2P[0, :, None]
      rows_YX = jnp.where(is_used_PC.reshape(-1, 1), rows_YX, empty)
    return swap(rows_YX)

  def needs(copies, ids_YA):
    if slots == num_tokens:
      # All of it arrived, to be counted here; the need of fewer slots must not
      # be told as less than what made them too few.
      is_used_Y = (ids_YA < shards.no_expert).any(-1)
      tokens_P = is_used_Y.reshape(shards.num_shards, slots).sum(1)
      return Needs(copies, tokens_P.max().astype(jnp.int32))
    # What arrived may lack what had no slot.
    counts_P2P = jax.lax.all_gather(counts_2P, shards.axes)
    return Needs(counts_P2P[:, 1].sum(0).max(), counts_P2P[:, 0].max())

  def back(y_YD):
    return dispatch.combine(swap(y_YD), None, order)

  return Way(there, back, needs)


def _ragged(ids_ZA: jax.Array, shards: ExpertShards) -> Way:
  worst = shards.num_shards * ids_ZA.shape[0]
  num_rows = min(shards.slots or worst, worst)
  order, counts_2P = _sort_by_shard(ids_ZA, shards)
  order = _narrow(order, shards.num_shards)
  counts_P2P = jax.lax.all_gather(counts_2P, shards.axes)
  order, counts_P2P = dispatch.named_routes((order, counts_P2P))
  # Cut so that no receiver's exceed its rows. A step in which this does
  # anything has a wrong result and is repeated; until then it must not write
  # where it has no memory.
  ends_PP = jnp.minimum(jnp.cumsum(counts_P2P[:, 0], axis=0), num_rows)
  counts_PP = jnp.diff(ends_PP, axis=0, prepend=0)

  def there(rows_ZX, empty):
    rows_YX = dispatch.take(rows_ZX, order)
    rows_YX = _exchange_rows(rows_YX, counts_PP, num_rows, shards.axes)
    if empty is None:
      return rows_YX
    received = counts_PP[:, jax.lax.axis_index(shards.axes)].sum()
    return jnp.where(jnp.arange(num_rows)[:, None] < received, rows_YX, empty)

  def back(y_YD):
    num_sent = order.source_Y.shape[0]
    y_YD = _exchange_rows(y_YD, counts_PP.T, num_sent, shards.axes)
    return dispatch.combine(y_YD, None, order)

  needed_2P = counts_P2P.sum(0)
  return Way(
    there, back, lambda *_: Needs(needed_2P[1].max(), needed_2P[0].max())
  )


CARRIERS = {'ring': _ring, 'a2a': _slotted, 'ragged_a2a': _ragged}


def _sort_by_shard(
  ids_ZA: jax.Array, shards: ExpertShards
) -> tuple[dispatch.Order, jax.Array]:
  """Sorts tokens by the shards that they visit, each shard once.

  Returns:
    the order, and counts_2P: the tokens that visit each shard and the copies
    that they make there.
  """
  num_tokens, num_active = ids_ZA.shape
  num_shards = shards.num_shards
  is_any_ZA = (ids_ZA >= 0) & (ids_ZA < shards.no_expert)
  shard_ZA = jnp.where(is_any_ZA, ids_ZA // shards.num_local, num_shards)
  copies_P = (shard_ZA.reshape(-1, 1) == jnp.arange(num_shards)).sum(0)
  same_ZAA = shard_ZA[:, :, None] == shard_ZA[:, None, :]
  is_first_ZA = ~jnp.tril(same_ZAA, -1).any(-1)
  order, tokens_P = dispatch.sort_copies(
    jnp.where(is_first_ZA, shard_ZA, num_shards),
    num_shards,
    num_tokens * min(num_active, num_shards),
  )
  return order, jnp.stack([tokens_P, copies_P.astype(jnp.int32)])


def _narrow(order: dispatch.Order, num_shards: int) -> dispatch.Order:
  """Keeps as many columns of places as a token can visit shards."""
  # No place is the largest number, so it sorts last.
  place_ZA = jnp.sort(order.place_ZA, axis=1)[:, :num_shards]
  return order._replace(place_ZA=place_ZA)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange_rows(
  rows_YD: jax.Array,
  counts_PP: jax.Array,
  num_rows: int,
  axes: tuple[str, ...],
) -> jax.Array:
  """Sends counts_PP[me, p] rows to each p, in order; rows beyond are zero.

  Counts are the same on every shard, and `num_rows`, of the result, are enough
  for what each receives.
  """
  me = jax.lax.axis_index(axes)
  # Where shard s has the rows for p in its own memory.
  from_PP = jnp.cumsum(counts_PP, axis=1) - counts_PP
  if platforms.current() == 'cpu':
    return _gathered_rows(
      rows_YD, counts_PP[:, me], from_PP[:, me], num_rows, axes
    )
  # And where it puts them in that of p.
  to_PP = jnp.cumsum(counts_PP, axis=0) - counts_PP
  return jax.lax.ragged_all_to_all(
    rows_YD,
    jnp.zeros((num_rows, rows_YD.shape[1]), rows_YD.dtype),
    from_PP[me],
    counts_PP[me],
    to_PP[me],
    counts_PP[:, me],
    axis_name=axes,
  )


def _exchange_rows_forward(rows_YD, counts_PP, num_rows, axes):
  out_YD = _exchange_rows(rows_YD, counts_PP, num_rows, axes)
  # Of the input, only the number of rows is needed again.
  return out_YD, (counts_PP, rows_YD[:, :0])


def _exchange_rows_backward(num_rows, axes, residuals, d_out_YD):
  del num_rows
  counts_PP, rows_Y0 = residuals
  num_sent = rows_Y0.shape[0]
  return _exchange_rows(d_out_YD, counts_PP.T, num_sent, axes), None


_exchange_rows.defvjp(_exchange_rows_forward, _exchange_rows_backward)


def _gathered_rows(rows_YD, counts_P, from_P, num_rows, axes):
  """Picks counts_P[s] rows of each shard s, from from_P[s] on."""
  ends_P = jnp.cumsum(counts_P)
  row_Y = jnp.arange(num_rows)
  sender_Y = (row_Y[:, None] >= ends_P).sum(1)
  sender_Y = jnp.minimum(sender_Y, ends_P.shape[0] - 1)
  offset_Y = row_Y - (ends_P - counts_P)[sender_Y]
  index_Y = from_P[sender_Y] + offset_Y + sender_Y * rows_YD.shape[0]
  all_YD = jax.lax.all_gather(rows_YD, axes, axis=0, tiled=True)
  index_Y = jnp.where(row_Y < ends_P[-1], index_Y, all_YD.shape[0])
  return all_YD.at[index_Y].get(mode='fill', fill_value=0)
