"""Newton-Schulz on matrices too large for one device, split by columns.

For the few matrices whose cost would make their owner the last to finish.
Runs inside `shard_map` (check_vma=False, which collectives over subgroups
need): k devices hold q/k columns each of the same p x q matrices, p <= q; any
partition of the columns does, and zero columns may pad. Always the standard
iteration. Each step shares all of its products evenly:

  1. each device multiplies its columns with themselves; a reduce-scatter adds
     these p x p matrices and leaves each device p/k rows of A = X X^T;
  2. an all-gather of the rounded rows, and each device computes its rows of
     b A + c A^2;
  3. an all-gather of those, and each device updates its columns.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from composer_jax.optim.muon import newton_schulz

_FLOAT32_BYTES = 4


def index_groups(size: int, k: int) -> tuple[tuple[int, ...], ...]:
  """Returns the subgroups of k consecutive indices of `size` devices."""
  if size % k:
    raise ValueError(
      f'{size} devices do not form subgroups of {k}; it must divide them.'
    )
  return tuple(tuple(range(i, i + k)) for i in range(0, size, k))


def rows_per_device(p: int, k: int) -> int:
  """Returns the rows of a p x p product that each of k devices computes."""
  return -(-p // k)


def split_flops(
  p: int, q: int, k: int, options: newton_schulz.NewtonSchulz
) -> int:
  """Returns one device's operations on one p x q matrix split k ways."""
  p, q = sorted((p, q))
  columns = -(-q // k)
  step = 4 * p * p * columns + 2 * p * p * rows_per_device(p, k)
  return len(options.triples) * step


def split_collectives(
  p: int, k: int, options: newton_schulz.NewtonSchulz, num: int = 1
) -> tuple[tuple[str, int], ...]:
  """Returns the collectives of `orthogonalize` in order of execution.

  Args:
    p: the shorter side.
    k: devices that share a matrix.
    options: with the dtype resolved, see `newton_schulz.resolved`.
    num: matrices at once; they take the same collectives.

  Returns:
    (kind, bytes into one device).
  """
  width = jnp.dtype(newton_schulz.resolved(options).dtype).itemsize
  entries = num * (k - 1) * rows_per_device(p, k) * p
  gather = ('all-gather', entries * width)
  step = (('reduce-scatter', entries * _FLOAT32_BYTES), gather, gather)
  # Of the largest entry and of the norm: a reduce-scatter and an all-gather.
  norm = ('all-reduce', 2 * num * _FLOAT32_BYTES * (k - 1) // k)
  return (norm, norm) + step * len(options.triples)


def orthogonalize(
  x_npq: jax.Array,
  options: newton_schulz.NewtonSchulz,
  *,
  axes: str | tuple[str, ...],
  index_groups: Sequence[Sequence[int]],
) -> jax.Array:
  """Orthogonalises matrices of which this device holds some columns.

  Args:
    x_npq: [n, p, columns of this device].
    options: of Newton-Schulz; its method and restarts are of no consequence.
    axes: mesh axes that the subgroups are drawn from.
    index_groups: which indices along `axes`, major to minor, share matrices.

  Returns:
    The columns given, in the operands' dtype.
  """
  options = newton_schulz.resolved(options)
  k = len(index_groups[0])
  groups = [list(group) for group in index_groups]
  p = x_npq.shape[-2]
  if p > k * x_npq.shape[-1]:
    raise ValueError(
      f'A split matrix has its longer side in columns, but {x_npq.shape} on '
      f'each of {k} devices has fewer columns than rows; transpose it first.'
    )
  padding = k * rows_per_device(p, k) - p

  def gathered(rows):
    # XLA's CPU backend widens a bfloat16 collective, but not its bits.
    dtype = rows.dtype
    if dtype == jnp.bfloat16:
      rows = jax.lax.bitcast_convert_type(rows, jnp.uint16)
    whole = jax.lax.all_gather(
      rows, axes, axis_index_groups=groups, axis=1, tiled=True
    )
    if dtype == jnp.bfloat16:
      whole = jax.lax.bitcast_convert_type(whole, dtype)
    return whole[:, :p]

  x = newton_schulz.normalized(
    x_npq,
    maximum=lambda v: jax.lax.pmax(v, axes, axis_index_groups=groups),
    total=lambda v: jax.lax.psum(v, axes, axis_index_groups=groups),
  ).astype(options.dtype)
  for a, b, c in options.triples:
    with jax.named_scope('split_step'):
      partial = newton_schulz.product(x, x.mT)
      # Blocks of rows lead: XLA's TPU compiler makes a reduce-scatter along an
      # inner dimension an all-reduce, and rounds before it adds.
      blocks = jnp.pad(partial, ((0, 0), (0, padding), (0, 0)))
      blocks = blocks.reshape(len(x), k, -1, p).swapaxes(0, 1)
      rows = jax.lax.psum_scatter(
        blocks, axes, axis_index_groups=groups
      ).astype(x.dtype)
      squares = newton_schulz.product(rows, gathered(rows))
      polynomial = gathered(
        newton_schulz.rounded_sum(b, rows, c * squares, x.dtype)
      )
      update = newton_schulz.product(polynomial, x)
      x = newton_schulz.rounded_sum(a, x, update, x.dtype)
  return x
