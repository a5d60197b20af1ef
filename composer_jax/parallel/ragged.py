"""Each token goes once to each shard that has an expert of it, densely packed.

As `all_to_all`, without slots for pairs of shards: counts travel first, then
only rows that exist, into a buffer that all senders share (`Group.slots`). The
transpose of an exchange is the exchange with its counts transposed.

XLA:CPU has no ragged-all-to-all. There, `_move` gathers every shard's rows and
picks its own: the same result, so that all else here runs anywhere.
"""

import functools

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.core import platforms
from composer_jax.parallel import all_to_all, dispatch


def carry(
  compute: dispatch.Compute,
  tokens: dispatch.Tokens,
  group: dispatch.Group,
) -> tuple[jax.Array, dispatch.Needs]:
  """As `ring.carry`."""
  x_ZD, ids_ZA, gates_ZA = tokens
  worst = group.num_shards * x_ZD.shape[0]
  num_rows = min(group.slots or worst, worst)
  swap = functools.partial(exchange_rows, axes=group.axes)
  with jax.named_scope('dispatch'):
    order, counts_2P = all_to_all.sort_by_shard(ids_ZA, group)
    order = all_to_all.narrow(order, group.num_shards)
    counts_P2P = jax.lax.all_gather(counts_2P, group.axes)
    order, counts_P2P = dispatch.named_routes((order, counts_P2P))
    counts_PP = _within(counts_P2P[:, 0], num_rows)
    x_YD = swap(dispatch.take(x_ZD, order), counts_PP, num_rows)
    x_YD = ad_checkpoint.checkpoint_name(x_YD, 'dispatched')
    packed_YA = dispatch.take(dispatch.pack(ids_ZA, gates_ZA), order)
    packed_YA = swap(packed_YA, counts_PP, num_rows)
    received = counts_PP[:, jax.lax.axis_index(group.axes)].sum()
    packed_YA = jnp.where(
      jnp.arange(num_rows)[:, None] < received,
      packed_YA,
      float(group.no_expert),
    )
    packed_YA = dispatch.named_routes(packed_YA)
  y_YD, _ = compute(dispatch.Tokens(x_YD, *dispatch.unpack(packed_YA)))
  with jax.named_scope('combine'):
    back_YD = swap(y_YD, counts_PP.T, order.source_Y.shape[0])
    y_ZD = dispatch.combine(back_YD, None, order)
    y_ZD = ad_checkpoint.checkpoint_name(y_ZD, 'combined')
  needed_2P = counts_P2P.sum(0)
  return y_ZD, dispatch.Needs(
    copies=needed_2P[1].max(), tokens=needed_2P[0].max()
  )


def _within(counts_PP, num_rows):
  """Cuts counts so that no receiver's exceed its rows.

  A step in which this does anything has a wrong result and is repeated; until
  then it must not write where it has no memory.
  """
  ends_PP = jnp.minimum(jnp.cumsum(counts_PP, axis=0), num_rows)
  return jnp.diff(ends_PP, axis=0, prepend=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def exchange_rows(
  rows_YD: jax.Array,
  counts_PP: jax.Array,
  num_rows: int,
  axes: tuple[str, ...],
) -> jax.Array:
  """Sends counts_PP[me, p] rows to each p, in order; rows beyond are zero.

  Args:
    rows_YD: to send, those for the first shard first.
    counts_PP: from each to each, the same on every shard.
    num_rows: of the result, enough for what each shard receives.
    axes: mesh axes of the shards.
  """
  return _move(rows_YD, counts_PP, num_rows, axes)


def _exchange_forward(rows_YD, counts_PP, num_rows, axes):
  out_YD = exchange_rows(rows_YD, counts_PP, num_rows, axes)
  # Of the input, only the number of rows is needed again.
  return out_YD, (counts_PP, rows_YD[:, :0])


def _exchange_backward(num_rows, axes, residuals, d_out_YD):
  del num_rows
  counts_PP, rows_Y0 = residuals
  return (
    exchange_rows(d_out_YD, counts_PP.T, rows_Y0.shape[0], axes),
    None,
  )


exchange_rows.defvjp(_exchange_forward, _exchange_backward)


def _move(rows_YD, counts_PP, num_rows, axes):
  if platforms.current() == 'cpu':
    return _emulated(rows_YD, counts_PP, num_rows, axes)
  me = jax.lax.axis_index(axes)
  # Where shard s puts its rows for p: in its own memory, and in that of p.
  from_PP = jnp.cumsum(counts_PP, axis=1) - counts_PP
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


def _emulated(rows_YD, counts_PP, num_rows, axes):
  me = jax.lax.axis_index(axes)
  from_PP = jnp.cumsum(counts_PP, axis=1) - counts_PP
  ends_P = jnp.cumsum(counts_PP[:, me])
  row_Y = jnp.arange(num_rows)
  sender_Y = (row_Y[:, None] >= ends_P).sum(1)
  sender_Y = jnp.minimum(sender_Y, ends_P.shape[0] - 1)
  offset_Y = row_Y - (ends_P - counts_PP[:, me])[sender_Y]
  index_Y = from_PP[sender_Y, me] + offset_Y
  index_Y += sender_Y * rows_YD.shape[0]
  all_YD = jax.lax.all_gather(rows_YD, axes, axis=0, tiled=True)
  index_Y = jnp.where(row_Y < ends_P[-1], index_Y, all_YD.shape[0])
  return all_YD.at[index_Y].get(mode='fill', fill_value=0)
