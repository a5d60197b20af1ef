"""Three transports of tokens to the shards of their experts and back.

'ring': every shard sees all tokens and adds its experts' outputs, by an
all_gather and a psum_scatter. Nothing depends on the routes.

'a2a': each token goes once to each shard that has one of its experts, and the
gated sum of that shard comes back, by two all_to_alls with equally many slots
for each pair of shards. One slot per token fits any routes. With fewer
(`ExpertShards.slots`), counts tell whether they sufficed; otherwise the step
must be repeated with more.

'ragged_a2a': as 'a2a', but counts travel first and then only existing rows,
into one buffer for all senders (also `ExpertShards.slots`). The transpose of an
exchange is the exchange with transposed counts. XLA:CPU has no
ragged-all-to-all; there all rows are gathered and each shard picks its own,
with the same result.
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
  """Devices that hold all experts together, the same number on each.

  Attributes:
    num_local: experts of each device.
    rows: capacity of a device in copies of tokens; None for the worst case.
    slots: capacity in received tokens, of a device for 'ragged_a2a', of each
      pair of devices for 'a2a'; None for the worst case.
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
  """Capacity that the busiest shard needed, as int32.

  Attributes:
    copies: copies of tokens for the shard's experts.
    tokens: received tokens in the unit of `ExpertShards.slots`; None if the
      transport has room for any number.
  """

  copies: jax.Array
  tokens: jax.Array | None = None


class Carrier(NamedTuple):
  """The functions of one exchange.

  Attributes:
    send: (rows_ZX of this shard's tokens, fill) -> received rows_YX; rows
      without a token hold `fill`, or any value if it is None.
    send_back: sums by received row -> sums by token of this shard.
    needs: (copies computed here, received ids_YA) -> Needs.
  """

  send: Callable[[jax.Array, float | None], jax.Array]
  send_back: Callable[[jax.Array], jax.Array]
  needs: Callable[[jax.Array, jax.Array], Needs]


def carry(
  name: str,
  compute: Callable[[dispatch.RoutedTokens], tuple[jax.Array, jax.Array]],
  tokens: dispatch.RoutedTokens,
  shards: ExpertShards,
) -> tuple[jax.Array, Needs]:
  """Returns y_ZD of this shard's tokens, and the needs of the exchange.

  `compute` maps tokens to their sums over this shard's experts and the number
  of copies; `name` is a key of CARRIERS.
  """
  with jax.named_scope('dispatch'):
    carrier = CARRIERS[name](tokens.ids_ZA, shards)
    x_YD = ad_checkpoint.checkpoint_name(
      carrier.send(tokens.x_ZD, None), 'dispatched'
    )
    # Ids and gates travel as one array; ids are exact as float32 up to 2 ** 24.
    packed_ZA = jnp.concatenate(
      [tokens.ids_ZA.astype(jnp.float32), tokens.gates_ZA], axis=-1
    )
    packed_YA = carrier.send(packed_ZA, float(shards.no_expert))
    packed_YA = dispatch.named_routes(packed_YA)
  ids_YA, gates_YA = jnp.split(packed_YA, 2, axis=-1)
  ids_YA = jax.lax.stop_gradient(ids_YA).astype(jnp.int32)
  y_YD, copies = compute(dispatch.RoutedTokens(x_YD, ids_YA, gates_YA))
  with jax.named_scope('combine'):
    y_ZD = ad_checkpoint.checkpoint_name(carrier.send_back(y_YD), 'combined')
  return y_ZD, carrier.needs(copies, ids_YA)


def _ring(ids_ZA: jax.Array, shards: ExpertShards) -> Carrier:
  # Shards are a dimension of their own, since XLA:TPU pads the scattered
  # dimension to whole tiles, which are larger for rows.
  def send(rows_ZX, fill):
    del fill  # Every row holds a token.
    rows_PZX = jax.lax.all_gather(rows_ZX, shards.axes, tiled=False)
    return rows_PZX.reshape(-1, rows_ZX.shape[1])

  def send_back(y_YD):
    y_PZD = y_YD.reshape(shards.num_shards, -1, y_YD.shape[1])
    return jax.lax.psum_scatter(y_PZD, shards.axes, tiled=False)

  del ids_ZA
  return Carrier(send, send_back, lambda copies, _: Needs(copies))


def _slotted(ids_ZA: jax.Array, shards: ExpertShards) -> Carrier:
  num_tokens = ids_ZA.shape[0]
  slots = min(shards.slots or num_tokens, num_tokens)
  order, counts_2P = _sort_by_shard(ids_ZA, shards)
  order = _narrow(_in_slots(order, counts_2P[0], slots), shards.num_shards)
  order, counts_2P = dispatch.named_routes((order, counts_2P))

  def swap(rows_YX):
    return jax.lax.all_to_all(rows_YX, shards.axes, 0, 0, tiled=True)

  def send(rows_ZX, fill):
    rows_YX = dispatch.take(rows_ZX, order)
    if fill is not None:
      is_used_PC = jnp.arange(slots) < counts_2P[0, :, None]
      rows_YX = jnp.where(is_used_PC.reshape(-1, 1), rows_YX, fill)
    return swap(rows_YX)

  def needs(copies, ids_YA):
    if slots == num_tokens:
      # Everything arrived and is counted here. The count must not be below the
      # one that made fewer slots too few.
      is_used_Y = (ids_YA < shards.no_expert).any(-1)
      tokens_P = is_used_Y.reshape(shards.num_shards, slots).sum(1)
      return Needs(copies, tokens_P.max().astype(jnp.int32))
    # Rows without a slot did not arrive, so the senders' counts are used.
    counts_P2P = jax.lax.all_gather(counts_2P, shards.axes)
    return Needs(counts_P2P[:, 1].sum(0).max(), counts_P2P[:, 0].max())

  def send_back(y_YD):
    return dispatch.combine(swap(y_YD), None, order)

  return Carrier(send, send_back, needs)


def _ragged(ids_ZA: jax.Array, shards: ExpertShards) -> Carrier:
  worst = shards.num_shards * ids_ZA.shape[0]
  num_rows = min(shards.slots or worst, worst)
  order, counts_2P = _sort_by_shard(ids_ZA, shards)
  order = _narrow(order, shards.num_shards)
  counts_P2P = jax.lax.all_gather(counts_2P, shards.axes)
  order, counts_P2P = dispatch.named_routes((order, counts_P2P))
  # Counts are cut to the receivers' rows. A step with cut counts is wrong and
  # will be repeated, but must not write past its buffers.
  ends_PP = jnp.minimum(jnp.cumsum(counts_P2P[:, 0], axis=0), num_rows)
  counts_PP = jnp.diff(ends_PP, axis=0, prepend=0)

  def send(rows_ZX, fill):
    rows_YX = dispatch.take(rows_ZX, order)
    rows_YX = _exchange_rows(rows_YX, counts_PP, num_rows, shards.axes)
    if fill is None:
      return rows_YX
    received = counts_PP[:, jax.lax.axis_index(shards.axes)].sum()
    return jnp.where(jnp.arange(num_rows)[:, None] < received, rows_YX, fill)

  def send_back(y_YD):
    num_sent = order.source_Y.shape[0]
    y_YD = _exchange_rows(y_YD, counts_PP.T, num_sent, shards.axes)
    return dispatch.combine(y_YD, None, order)

  tokens_P, copies_P = counts_P2P.sum(0)
  needs = Needs(copies_P.max(), tokens_P.max())
  return Carrier(send, send_back, lambda *_: needs)


CARRIERS = {'ring': _ring, 'a2a': _slotted, 'ragged_a2a': _ragged}


def _sort_by_shard(
  ids_ZA: jax.Array, shards: ExpertShards
) -> tuple[dispatch.Order, jax.Array]:
  """Sorts tokens by the shards that they visit, once per shard.

  The second result counts the tokens that visit each shard, and their copies.
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
  """Keeps one column of places per shard that a token can visit."""
  # A missing place is the largest number and sorts last.
  place_ZA = jnp.sort(order.place_ZA, axis=1)[:, :num_shards]
  return order._replace(place_ZA=place_ZA)


def _in_slots(order, tokens_P, slots):
  """Gives the rows of each shard places in its own `slots` of P * slots."""
  num_shards = tokens_P.shape[0]
  num_rows = order.source_Y.shape[0]
  start_P = jnp.cumsum(tokens_P) - tokens_P
  row_PC = start_P[:, None] + jnp.arange(slots)
  row_Y = jnp.minimum(row_PC.reshape(-1), num_rows - 1)
  # Places are sorted by shard.
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
  """Sends counts_PP[me, p] rows to each shard p in order, and pads with zeros.

  Counts are the same on every shard; the `num_rows` of the result suffice for
  each receiver.
  """
  me = jax.lax.axis_index(axes)
  # Start of the rows for receiver p in the memory of sender s.
  from_PP = jnp.cumsum(counts_PP, axis=1) - counts_PP
  if platforms.current() == 'cpu':
    return _gathered_rows(
      rows_YD, counts_PP[:, me], from_PP[:, me], num_rows, axes
    )
  # Start of the rows from sender s in the memory of receiver p.
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


def _exchange_rows_backward(num_rows, axes, residuals, d_out_YD):
  del num_rows
  counts_PP, rows_Y0 = residuals
  num_sent = rows_Y0.shape[0]
  return _exchange_rows(d_out_YD, counts_PP.T, num_sent, axes), None


_exchange_rows.defvjp(
  # The backward pass needs only the number of the input's rows.
  lambda rows_YD, counts_PP, *static: (
    _exchange_rows(rows_YD, counts_PP, *static),
    (counts_PP, rows_YD[:, :0]),
  ),
  _exchange_rows_backward,
)


def _gathered_rows(rows_YD, counts_P, from_P, num_rows, axes):
  """Gathers counts_P[s] rows of each shard s, beginning at row from_P[s]."""
  ends_P = jnp.cumsum(counts_P)
  row_Y = jnp.arange(num_rows)
  sender_Y = (row_Y[:, None] >= ends_P).sum(1)
  sender_Y = jnp.minimum(sender_Y, ends_P.shape[0] - 1)
  offset_Y = row_Y - (ends_P - counts_P)[sender_Y]
  index_Y = from_P[sender_Y] + offset_Y + sender_Y * rows_YD.shape[0]
  all_YD = jax.lax.all_gather(rows_YD, axes, axis=0, tiled=True)
  index_Y = jnp.where(row_Y < ends_P[-1], index_Y, all_YD.shape[0])
  return all_YD.at[index_Y].get(mode='fill', fill_value=0)
