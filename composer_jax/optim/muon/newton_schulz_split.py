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

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from composer_jax.optim.muon import newton_schulz

_FLOAT32_BYTES = 4


def index_groups(size: int, k: int) -> list[list[int]]:
  """Returns the subgroups of k consecutive indices of `size` devices."""
  return [list(range(i, i + k)) for i in range(0, size, k)]


def as_bits(
  collective: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
  """Applies a collective that only moves: XLA:CPU widens those of bfloat16."""
  if x.dtype != jnp.bfloat16:
    return collective(x)

  def move_bits(x):
    moved = collective(lax.bitcast_convert_type(x, jnp.uint16))
    return lax.bitcast_convert_type(moved, jnp.bfloat16)

  return lax.platform_dependent(x, cpu=move_bits, default=collective)


def split_flops(
  p: int, q: int, k: int, options: newton_schulz.NewtonSchulz
) -> int:
  """Returns one device's operations on one p x q matrix split k ways."""
  rows, columns = -(-p // k), -(-q // k)
  return len(options.triples) * (4 * p * p * columns + 2 * p * p * rows)


def split_collectives(
  p: int, k: int, options: newton_schulz.NewtonSchulz, num: int = 1
) -> tuple[tuple[str, int], ...]:
  """Returns the collectives of `orthogonalize` in order of execution.

  Each is (kind, bytes into one of k devices), of `num` matrices at once.
  """
  entries = num * (k - 1) * -(-p // k) * p
  gather = ('all-gather', entries * jnp.dtype(options.dtype).itemsize)
  step = (('reduce-scatter', entries * _FLOAT32_BYTES), gather, gather)
  # Of the largest entry and of the norm: a reduce-scatter and an all-gather.
  norm = ('all-reduce', 2 * num * _FLOAT32_BYTES * (k - 1) // k)
  return (norm, norm) + step * len(options.triples)


def orthogonalize(
  x_npq: jax.Array,
  options: newton_schulz.NewtonSchulz,
  *,
  axes: tuple[str, ...],
  index_groups: Sequence[Sequence[int]],
) -> jax.Array:
  """Orthogonalises matrices of which this device holds some columns.

  Args:
    x_npq: columns of this device.
    options: with the dtype resolved; the method is of no consequence.
    axes: mesh axes that the subgroups are drawn from.
    index_groups: which indices along `axes`, major to minor, share matrices.

  Returns:
    The columns given, in the operands' dtype.
  """
  k, p = len(index_groups[0]), x_npq.shape[-2]
  assert p <= k * x_npq.shape[-1], 'the longer side is to be in columns'
  among = dict(axis_name=axes, axis_index_groups=index_groups)

  def gathered(rows):
    whole = as_bits(
      lambda rows: lax.all_gather(rows, **among, axis=1, tiled=True), rows
    )
    return whole[:, :p]

  x = newton_schulz.normalized(
    x_npq,
    maximum=lambda v: lax.pmax(v, **among),
    total=lambda v: lax.psum(v, **among),
  ).astype(options.dtype)
  for a, b, c in options.triples:
    with jax.named_scope('split_step'):
      partial = newton_schulz.product(x, x.mT)
      # Blocks of rows lead: XLA's TPU compiler makes a reduce-scatter along an
      # inner dimension an all-reduce, and rounds before it adds.
      blocks = jnp.pad(partial, ((0, 0), (0, -p % k), (0, 0)))
      blocks = blocks.reshape(len(x), k, -1, p).swapaxes(0, 1)
      rows = lax.psum_scatter(blocks, **among).astype(x.dtype)
      squares = newton_schulz.product(rows, gathered(rows))
      polynomial = gathered(
        newton_schulz.rounded_sum(b, rows, c * squares, x.dtype)
      )
      update = newton_schulz.product(polynomial, x)
      x = newton_schulz.rounded_sum(a, x, update, x.dtype)
  return x
