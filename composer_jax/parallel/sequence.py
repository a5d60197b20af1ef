"""Order of a row's tokens on the devices that share the row.

'contiguous' gives each device one piece of the row; under causal attention the
last device then sees many times the keys of the first. 'zigzag' cuts the row
into 2 C pieces for C devices and gives device r the pieces r and 2 C - 1 - r,
which together see equally many keys on every device.

`to_device` reorders a batch once, on the host, with all its arrays by token
(positions and segments included), so functions of single tokens need not know
the order. Inside a shard, `gather_row` returns the row in its own order and
`own_part` the shard's part of a row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from composer_jax.core import checks
from composer_jax.parallel import exchange


def order(length: int, context: int) -> np.ndarray:
  """Returns the int64 [T] positions in the row in the order of the devices."""
  _check_divides(length, context)
  chunks = np.arange(length).reshape(2 * context, -1)
  early, late = chunks[:context], chunks[context:][::-1]
  return np.stack([early, late], axis=1).reshape(-1)


def to_device(array: np.ndarray, context: int, axis: int = 1) -> np.ndarray:
  """Returns an array with its tokens in the zigzag order."""
  return np.take(array, order(array.shape[axis], context), axis=axis)


def gather_row(
  x_BT: jax.Array, plan: exchange.ExchangePlan | None
) -> jax.Array:
  """Returns whole rows in their order; the gradient is reduced to shards."""
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
  """Returns this shard's tokens of whole rows, the inverse of `gather_row`."""
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
  parts = 'two pieces for each context shard of zigzag order'
  checks.divides(2 * context, parts, length, 'sequence length')
