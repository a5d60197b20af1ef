"""Moves copies of tokens to the devices of their experts and back, in rounds.

A device sorts the copies of its tokens by expert and tells all others how many
it has for each expert. No ids travel: the counts say which expert each row of a
buffer belongs to. A buffer has a fixed size, so a round moves an equal part of
the copies of each pair of devices, and as many rounds follow as the busiest
device needs; with even load one, without a copy none. No routing drops a token
or needs more memory, and the program is the same for all.

'ragged_a2a' moves rows from one sorted array into another by offsets, and a
buffer holds the rows of all senders. 'a2a' has slots for each pair of devices,
of which the fullest decides the number of rounds: it is for CPU, where XLA has
no ragged collective. For tests on CPU 'ragged_a2a' gathers all rows, and each
device picks its own.

On accelerators an exchange has at least `PARTS` rounds, which stand before the
loop of further ones: while one is multiplied, the next arrives and the last one
returns. Only the first arrival and the last return have no products beside
them.

The gradient has rounds of its own and keeps inputs and counts only: rows travel
again, with the gradients of the outputs. Without recomputation what the rounds
before the loop received is kept instead. The small arrays that say where rows
are have the checkpoint name 'routes'. If a policy of recomputation keeps them,
it repeats no collective and no sort.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.core import platforms
from composer_jax.parallel import dispatch

TRANSPORTS = ('a2a', 'ragged_a2a')
# What travels to experts: tokens in the dtype of the model, or their codes.
WIRES = ('values', 'codes')
# Copies that a buffer holds over their mean, by default. With 1.25 a step on 8
# CPU devices took 13 % longer than with 4, since it needed several rounds.
ROOM = 2.0
# Least rounds of a layer's exchanges on accelerators. More leave less exposed,
# but each reads the experts' weights, and adds to their gradients, once more.
PARTS = 4
# Scope of the loop of further rounds, where the first ones stand apart.
FURTHER = 'further_rounds'
# A kernel's tile of rows on TPU; ragged buffers are whole tiles.
_TILE = 512


def transport_of(platform: str) -> str:
  """Returns the transport that 'auto' means on a platform."""
  return 'a2a' if platform == 'cpu' else 'ragged_a2a'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
  """Devices that hold all experts together, and the room of their buffers.

  Attributes:
    transport: one of TRANSPORTS.
    axes: mesh axes of these devices.
    num_local: experts of each device.
    others: other mesh axes, whose devices need the same number of rounds.
    copies: copies of one device's tokens, the mean load.
    rows: copies that a device can take in a round, from each other device for
      'a2a' and from all together for 'ragged_a2a'.
    wire: one of WIRES.
    parts: least number of rounds if they stand before the loop of others, where
      transfers of one can take place beside products of another; 0 if all are
      in the loop.
  """

  transport: str
  axes: tuple[str, ...]
  others: tuple[str, ...]
  num_shards: int
  num_local: int
  copies: int
  rows: int
  wire: str = 'values'
  parts: int = 0

  @property
  def buffer(self) -> int:
    """Rows of a receive buffer."""
    if self.transport == 'a2a':
      return self.num_shards * self.rows
    # Parts of pairs are whole rows, so each pair may have one more.
    return self.rows + self.num_shards

  def rounds_of(self, pairs_PP: Any) -> Any:
    """Returns the rounds for copies by sender and receiver."""
    load = pairs_PP if self.transport == 'a2a' else pairs_PP.sum(0)
    rounds = -(-load.max() // self.rows)
    return jnp.maximum(rounds, self.parts * (rounds > 0))


def rows_of(
  transport: str, *, copies: int, most: int, num_shards: int, room: float
) -> int:
  """Returns `Shards.rows` for `room` times the mean load.

  `copies` are those of one device's tokens, and `most` those that it can have
  for one other device. There is no more room than these could need.
  """
  if transport == 'a2a':
    return min(most, math.ceil(room * copies / num_shards))
  rows = math.ceil(room * copies)
  if rows > _TILE:
    rows = _aligned(rows + num_shards) - num_shards
  return min(most * num_shards, rows)


def _aligned(rows):
  return -(-rows // _TILE) * _TILE


def bytes_received(
  shards: Shards,
  copies: int,
  width: int,
  *,
  keeps: bool = False,
  coded: int = 0,
) -> int:
  """Returns bytes into a device of a layer's rows in both passes.

  With even load, which takes one round if buffers have room for the mean.
  `width` are the bytes of a row, and `coded` those of its codes and scales, if
  they travel to experts; gates and counts are left out.
  """
  others = shards.num_shards - 1
  rows = copies * others / shards.num_shards
  if shards.transport == 'a2a':
    rounds = -(-copies // (shards.num_shards * shards.rows))
    rounds = max(rounds, shards.parts)
    rows = rounds * others * shards.rows
  # y, two gradients, and x, which goes again unless it is kept.
  return round(rows * (3 * width + (2 - keeps) * (coded or width)))


def exchange(
  experts: dispatch.Experts,
  weights: Any,
  tokens: dispatch.RoutedTokens,
  shards: Shards,
  keeps: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns y_ZD, each token's gated sum, and the number of rounds.

  `tokens` are those of `dispatch.prepare`, of this shard.
  """
  num_experts = shards.num_shards * shards.num_local
  # Axes behind the second are one, as the products take them.
  weights = jax.tree.map(lambda w: w.reshape(*w.shape[:2], -1), weights)
  with jax.named_scope('dispatch'):
    is_any_ZA = (tokens.ids_ZA >= 0) & (tokens.ids_ZA < num_experts)
    order, sizes_E = dispatch.sort_copies(
      jnp.where(is_any_ZA, tokens.ids_ZA, num_experts), num_experts
    )
    counts_PE = jax.lax.all_gather(sizes_E, shards.axes)
    counts_PPE = counts_PE.reshape(shards.num_shards, shards.num_shards, -1)
  rounds = shards.rounds_of(counts_PPE.sum(-1))
  if shards.others:
    rounds = jax.lax.pmax(rounds, shards.others)
  draws_Y = None
  if tokens.draws_ZA is not None:
    draws_Y = tokens.draws_ZA.reshape(-1)[order.copy_Y]
  where = dispatch.named_routes((order, counts_PPE, rounds, draws_Y))
  static = experts, shards, keeps
  y_ZD = _sums(static, weights, tokens.x_ZD, tokens.gates_ZA, where)
  return y_ZD, rounds


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(static, *arrays):
  return _forward(static, *arrays)[0]


def _forward(static, weights, x_ZD, gates_ZA, where):
  experts, shards, keeps = static
  order, counts_PPE, rounds, _ = where
  sent, decoded, _ = _wire(experts, shards, x_ZD)
  sent_YX = _packed(*(dispatch.take(x, order) for x in sent))

  def body(r, y_YD, kept=None, earlier=()):
    part = _part(shards, counts_PPE, rounds, r)
    words_RX = part.there(platforms.after(earlier, sent_YX))
    rows_RD = decoded(_unpacked(words_RX, *sent))
    y_RD, hidden_RX = experts.kept(weights, rows_RD, part.sizes_E)
    return part.back(y_RD, y_YD), (rows_RD, hidden_RX), y_RD

  y_YD = jnp.zeros((len(sent_YX), x_ZD.shape[1]), x_ZD.dtype)
  y_YD, kept = _each_round(shards, rounds, body, y_YD)
  with jax.named_scope('combine'):
    y_ZD = dispatch.combine(y_YD, gates_ZA, order)
  return y_ZD, (weights, x_ZD, gates_ZA, where, kept if keeps else None)


def _backward(static, residuals, d_y_ZD):
  weights, x_ZD, gates_ZA, where, kept = residuals
  order, counts_PPE, rounds, draws_Y = where
  experts, shards, _ = static
  dim, dtype = x_ZD.shape[1], x_ZD.dtype
  gates_Y = gates_ZA.reshape(-1)[order.copy_Y]
  numbers_YK = gates_Y[:, None]
  if draws_Y is not None:
    numbers_YK = jnp.stack([gates_Y, _as(jnp.float32, draws_Y)], axis=1)
  sent, decoded, width = _wire(experts, shards, x_ZD)
  given = *(dispatch.take(x, order) for x in (*sent, d_y_ZD)), numbers_YK
  given_YX = _packed(*given)

  def body(r, carry, kept=None, earlier=()):
    d_YX, sums = carry
    part = _part(shards, counts_PPE, rounds, r)
    words_YX = given_YX[:, width:] if kept else given_YX
    words_RX = part.there(platforms.after(earlier, words_YX))
    columns = given[len(sent) :] if kept else given
    *rows, d_out_RD, numbers_RK = _unpacked(words_RX, *columns)
    rows_RD, hidden_RX = kept or (decoded(rows), None)
    drawing = weights
    if draws_Y is not None:
      drawing = {**weights, 'draws': _as(jnp.uint32, numbers_RK[:, 1])}
    d_rows_RD, d_gates_R, sums = experts.gradient(
      drawing,
      (rows_RD, d_out_RD, numbers_RK[:, 0]),
      part.sizes_E,
      sums,
      hidden_RX,
    )
    d_RX = _packed(d_rows_RD, d_gates_R[:, None])
    return (part.back(d_RX, d_YX), sums), None, d_RX

  back = jnp.zeros((len(given_YX), dim), dtype), gates_Y[:, None]
  d_YX = jnp.zeros_like(_packed(*back))
  # The first round apart writes the weights' gradients, others add to them.
  carry = d_YX, None if shards.parts else experts.zeros(weights)
  (d_YX, sums), _ = _each_round(shards, rounds, body, carry, kept)
  d_x_YD, d_gates_Y1 = _unpacked(d_YX, *back)
  with jax.named_scope('dispatch'):
    d_x_ZD = dispatch.combine(d_x_YD, None, order)
  d_gates_ZA = (
    d_gates_Y1[:, 0].at[order.place_ZA].get(mode='fill', fill_value=0)
  )
  d_weights = jax.tree.map(
    lambda total, w: None if total is None else total.astype(w.dtype),
    sums,
    weights,
    is_leaf=lambda x: x is None,
  )
  return d_weights, d_x_ZD, d_gates_ZA.astype(gates_ZA.dtype), None


_sums.defvjp(_forward, _backward)


def _each_round(shards, rounds, body, carry, kept=None):
  """Returns the last carry, and what the rounds before the loop made.

  Outside of the loop transfers can take place beside other work, such as the
  shared experts. A CPU has no use of that.
  """
  made, done = [], []
  for r in range(shards.parts):
    # Arrives beside the products of the round before, not earlier, so that
    # returns find the wires free and few buffers are alive.
    carry, one, out = body(r, carry, kept and kept[r], done[-2:-1])
    made.append(one)
    done.append(out)
  with jax.named_scope(FURTHER if shards.parts else 'rounds'):
    further = lambda r, carry: body(r, carry)[0]
    return jax.lax.fori_loop(shards.parts, rounds, further, carry), made


def _as(dtype, x):
  return jax.lax.bitcast_convert_type(x, dtype)


def _wire(experts, shards, x_ZD):
  """Returns the arrays of tokens that travel, their decoder, and their words.

  Of codes, which are all that the experts use of a token, nothing is lost, and
  the gradient is that of the token.
  """
  if shards.wire == 'values':
    return [x_ZD], lambda rows: rows[0], x_ZD.shape[1]
  sent = experts.coding.encode(x_ZD)
  width = sum(x.shape[1] for x in sent)
  return sent, lambda rows: experts.coding.decode(rows, x_ZD.dtype), width


def _packed(*arrays: jax.Array) -> jax.Array:
  """Returns rows of arrays side by side, as words of the narrowest of them.

  A transfer of few numbers on their own would take as long as one of rows, and
  integers keep all bits.
  """
  word = jnp.dtype(f'uint{8 * min(x.dtype.itemsize for x in arrays)}')
  return jnp.concatenate([_as(word, x).reshape(len(x), -1) for x in arrays], 1)


def _unpacked(words_YX: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
  """Returns the arrays of words, which have columns and dtypes of `arrays`."""
  columns, start = [], 0
  for like in arrays:
    each = like.dtype.itemsize // words_YX.dtype.itemsize
    stop = start + like.shape[1] * each
    words = words_YX[:, start:stop]
    if each > 1:
      words = words.reshape(len(words), -1, each)
    columns.append(_as(like.dtype, words))
    start = stop
  return columns


class _Round(NamedTuple):
  """One round's part of an exchange.

  Attributes:
    there: rows_YX of this shard's copies -> received rows_RX by expert.
    back: (rows_RX, into_YX) -> into_YX with the rows of this round replaced.
    sizes_E: received rows of each local expert.
  """

  there: Callable[[jax.Array], jax.Array]
  back: Callable[[jax.Array, jax.Array], jax.Array]
  sizes_E: jax.Array


def _part(shards, counts_PPE, rounds, r) -> _Round:
  """Returns a round's part; counts_PPE are by sender, receiver and expert."""
  num_shards, num_rows = shards.num_shards, shards.buffer
  me, is_ragged = jax.lax.axis_index(shards.axes), shards.transport != 'a2a'
  pairs_PP = counts_PPE.sum(-1)
  # floor(r * pairs / rounds), which never moves more than the buffers hold,
  # without products that exceed int32.
  rounds = jnp.maximum(rounds, 1)
  begin_PP, end_PP = (
    i * (pairs_PP // rounds) + i * (pairs_PP % rounds) // rounds
    for i in (r, r + 1)
  )
  size_PP = end_PP - begin_PP
  # First row of each pair in the array of the sender, and in that of the
  # receiver.
  from_PP = _before(pairs_PP, 1) + begin_PP
  slot_P = jnp.arange(num_shards, dtype=jnp.int32) * shards.rows
  to_PP = _before(size_PP, 0)
  if not is_ragged:
    to_PP = jnp.broadcast_to(slot_P[:, None], pairs_PP.shape)
  # Rows by sender and expert, which have a place by sender and one by expert.
  last_PE = jnp.cumsum(counts_PPE[:, me], axis=1)
  ends_PE = jnp.clip(last_PE, begin_PP[:, me, None], end_PP[:, me, None])
  got_PE = jnp.diff(ends_PE, axis=1, prepend=begin_PP[:, me, None])
  by_sender_PE = to_PP[:, me, None] + _before(got_PE, 1)
  by_expert_EP = _before(got_PE.T.reshape(-1), 0).reshape(got_PE.T.shape)

  def there(rows_YX):
    with jax.named_scope('dispatch'):
      if is_ragged:
        into_RX = jnp.zeros((num_rows, rows_YX.shape[1]), rows_YX.dtype)
        moves = from_PP, size_PP, to_PP
        rows_RX = _moved(rows_YX, into_RX, *moves, shards)
      else:
        at_R = _places(slot_P, from_PP[me], num_rows)
        rows_RX = _swapped(_rows(rows_YX, at_R), shards)
      at_R = _places(by_expert_EP, by_sender_PE.T, num_rows)
      return _rows(rows_RX, at_R)

  def back(rows_RX, into_YX):
    with jax.named_scope('combine'):
      at_R = _places(by_sender_PE, by_expert_EP.T, num_rows)
      rows_RX = _rows(rows_RX, at_R)
      if is_ragged:
        moves = to_PP.T, size_PP.T, from_PP.T
        return _moved(rows_RX, into_YX, *moves, shards)
      rows_RX = _swapped(rows_RX, shards)
      return _written(rows_RX, into_YX, slot_P, size_PP[me], from_PP[me])

  return _Round(there, back, got_PE.sum(0))


def _before(x, axis):
  """Returns the sums of the elements before each."""
  return jnp.cumsum(x, axis=axis) - x


def _places(to_K, from_K, num_rows):
  """Returns the source of each row, if pieces that rise `to` come `from`.

  One pass without a gather: each piece adds how far it jumps.
  """
  to_K, from_K = to_K.reshape(-1), from_K.reshape(-1)
  jump_K = jnp.diff(from_K - to_K, prepend=0)
  row_Y = jnp.arange(num_rows, dtype=jnp.int32)
  return row_Y + jnp.where(row_Y[:, None] >= to_K, jump_K, 0).sum(-1)


def _rows(rows_YX, at_R):
  # Unused rows hold any row.
  return rows_YX.at[at_R].get(mode='clip')


def _written(rows_YX, into_YX, from_P, size_P, to_P):
  """Returns into_YX with size_P rows from from_P written to to_P."""
  row_Y1 = jnp.arange(len(into_YX))[:, None]
  is_new_Y = ((row_Y1 >= to_P) & (row_Y1 < to_P + size_P)).any(-1)
  new_YX = _rows(rows_YX, _places(to_P, from_P, len(into_YX)))
  return jnp.where(is_new_Y[:, None], new_YX, into_YX)


def _swapped(rows_YX, shards):
  return jax.lax.all_to_all(rows_YX, shards.axes, 0, 0, tiled=True)


def _moved(rows_YX, into_YX, from_PP, size_PP, to_PP, shards):
  """Writes rows of all senders into the arrays of the receivers.

  Matrices are by sender and receiver, the same on every shard.
  """
  me = jax.lax.axis_index(shards.axes)
  if platforms.current() == 'cpu':
    all_YX = jax.lax.all_gather(rows_YX, shards.axes, axis=0, tiled=True)
    shift_P = jnp.arange(shards.num_shards) * len(rows_YX)
    return _written(
      all_YX, into_YX, shift_P + from_PP[:, me], size_PP[:, me], to_PP[:, me]
    )
  return jax.lax.ragged_all_to_all(
    rows_YX,
    into_YX,
    from_PP[me],
    size_PP[me],
    to_PP[me],
    size_PP[:, me],
    axis_name=shards.axes,
  )
