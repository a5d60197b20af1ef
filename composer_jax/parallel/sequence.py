"""Which tokens of a row lie on which device, where several share the row.

'contiguous' gives every device one piece of the row. Under causal attention the
last then sees many times the keys that the first does. 'zigzag' cuts the row
into 2 C chunks for C devices and gives device r the chunks r and 2 C - 1 - r,
an early and a late one, which together see as many keys on every device.

A batch is brought into the order of the devices once, on the host, by
`to_device`. Every array of tokens goes with it, positions and segments
included, so nothing that treats tokens one by one knows of it. What needs the
row itself, inside of a shard, gathers it (`gather_row`) and finds its own part
of it (`own_part`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from composer_jax.parallel import exchange


def order(length: int, context: int) -> np.ndarray:
  """Returns the place in the row, int64 [T], of each place on the devices.

  Raises:
    ValueError: the row does not divide into 2 chunks for each device.
  """
  _check_divides(length, context)
  chunks = np.arange(length).reshape(2 * context, -1)
  early, late = chunks[:context], chunks[context:][::-1]
  return np.stack([early, late], axis=1).reshape(-1)


def to_device(array: np.ndarray, context: int, axis: int = 1) -> np.ndarray:
  """Brings the tokens of a row into the zigzag order."""
  return np.take(array, order(array.shape[axis], context), axis=axis)


def gather_row(
  x_BT: jax.Array, plan: exchange.ExchangePlan | None
) -> jax.Array:
  """Returns whole rows of an array of this shard, in the order of the row.

  Its gradient is reduced to shards.
  """
  if plan is None or lax.axis_size(plan.sequence_axes) == 1:
    return x_BT
  axes = plan.sequence_axes
  x_BS = lax.all_gather(x_BT, axes, axis=1, tiled=True)
  if plan.sequence_order == 'contiguous':
    return x_BS
  context = lax.axis_size(axes)
  batch, length, *rest = x_BS.shape
  _check_divides(length, context)
  x_B = x_BS.reshape(batch, context, 2, length // (2 * context), *rest)
  x_B = jnp.concatenate([x_B[:, :, 0], x_B[:, ::-1, 1]], axis=1)
  return x_B.reshape(x_BS.shape)


def own_part(x_BS: jax.Array, plan: exchange.ExchangePlan | None) -> jax.Array:
  """Returns this shard's tokens of whole rows: the inverse of `gather_row`."""
  if plan is None or lax.axis_size(plan.sequence_axes) == 1:
    return x_BS
  axes = plan.sequence_axes
  context, rank = lax.axis_size(axes), lax.axis_index(axes)
  length = x_BS.shape[1]
  if plan.sequence_order == 'contiguous':
    size = length // context
    return lax.dynamic_slice_in_dim(x_BS, rank * size, size, 1)
  size = length // (2 * context)
  chunks = (
    lax.dynamic_slice_in_dim(x_BS, chunk * size, size, 1)
    for chunk in (rank, 2 * context - 1 - rank)
  )
  return jnp.concatenate(list(chunks), axis=1)


def _check_divides(length: int, context: int) -> None:
  chunks = 2 * context
  if length % chunks:
    nearest = max(round(length / chunks), 1) * chunks
    raise ValueError(
      f'sequence length ({length}) must divide by {chunks}, two chunks for '
      f'each of {context} context shards; the nearest that does is {nearest}. '
      "Or take sequence_order 'contiguous'."
    )
