"""Which rows of which group are multiplied together, and how many that makes.

A product of fixed shape multiplies every row it is given, so a group of other
than so many rows wastes some. Here a group is cut into pieces of a few static
sizes: large ones (bulks) that are always full, and one last piece, whose size
is the smallest of the tails that holds what is left. Kernels loop over the
pieces of each size as `schedule` returns them, and `executed_rows` adds up the
same loops.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Inputs of fewer rows, tests and decode steps, have one size: each is one more
# loop to compile.
_FEW_ROWS = 512


class Pieces(NamedTuple):
  """A loop over pieces of one size: those with first <= i < last.

  Attributes:
    rows: static, of the product.
    is_full: whether every row of a piece belongs to its group.
    is_first: whether each piece is the first of its group to be computed.
    group_P: of each piece.
    start_P: its first row.
    stop_P: the end of its rows; those further on are not its own.
  """

  rows: int
  is_full: bool
  is_first: bool
  group_P: jax.Array
  start_P: jax.Array
  stop_P: jax.Array
  first: jax.Array
  last: jax.Array


def sizes(
  num_rows: int, num_groups: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the sizes of tails and bulks for so many rows of so many groups.

  Tails ascend in multiples of the first and bulks descend to the largest tail;
  there are no bulks where every piece is of the one size in tails. A tail
  wastes less than the smallest size: less than a quarter of a group's rows from
  64 on average, 6 % from 512 on.
  """
  mean = num_rows / num_groups
  step = 4 * 2 ** sum(mean >= x for x in (8, 32, 128))
  if num_rows < _FEW_ROWS:
    return (min(step, num_rows),), ()
  top = min(8 * step, 128)
  # The larger a piece, the less often its matrix is read.
  bulks = tuple(rows for rows in (512, 256) if top < rows <= mean)
  return tuple(range(step, top + 1, step)), (*bulks, top)


def schedule(group_sizes_E: jax.Array, num_rows: int) -> tuple[Pieces, ...]:
  """Returns one loop per size, to be run in any order if none `is_first`."""
  if not num_rows:
    return ()
  tail_sizes, bulk_sizes = sizes(num_rows, len(group_sizes_E))
  if not bulk_sizes:
    return (_one_size(group_sizes_E, num_rows, tail_sizes[0]),)
  stop_E = jnp.cumsum(group_sizes_E)
  start_E = stop_E - group_sizes_E
  bulks = []
  for rows in bulk_sizes:
    # A tail is left for last, so that every group with rows has exactly one.
    count_E = jnp.maximum(stop_E - start_E - 1, 0) // rows
    bulks.append(_loop(rows, count_E, start_E, max(num_rows // rows, 1)))
    start_E = start_E + count_E * rows
  left_E = stop_E - start_E
  tail_E = (left_E[:, None] > jnp.array(tail_sizes)).sum(1)
  # Groups of no rows come last, in no loop.
  tail_E = jnp.where(left_E > 0, tail_E, len(tail_sizes))
  group_P = jnp.argsort(tail_E)
  count = (tail_E[:, None] == jnp.arange(len(tail_sizes))).sum(0)
  last = jnp.cumsum(count)
  start_P, stop_P = start_E[group_P], stop_E[group_P]
  tails = [
    Pieces(
      rows, False, True, group_P, start_P, stop_P, last[i] - count[i], last[i]
    )
    for i, rows in enumerate(tail_sizes)
  ]
  return (*tails, *bulks)


def _one_size(group_sizes_E, num_rows, rows):
  stop_E = jnp.cumsum(group_sizes_E)
  count_E = (group_sizes_E + rows - 1) // rows
  # Suffices for any sizes: each group wastes less than one piece.
  limit = num_rows // rows + len(count_E)
  return _loop(rows, count_E, stop_E - group_sizes_E, limit, stop_E)


def _loop(rows, count_E, start_E, limit, stop_E=None):
  """Returns at most `limit` pieces; full ones, unless their groups end."""
  last_E = jnp.cumsum(count_E)
  index_P = jnp.arange(limit)
  group_P = (index_P[:, None] >= last_E[None, :]).sum(1)
  group_P = jnp.minimum(group_P, len(count_E) - 1)
  within_P = index_P - (last_E - count_E)[group_P]
  start_P = start_E[group_P] + within_P * rows
  stop_P = start_P + rows if stop_E is None else stop_E[group_P]
  last, is_full = last_E[-1], stop_E is None
  zero = jnp.zeros_like(last)
  return Pieces(rows, is_full, False, group_P, start_P, stop_P, zero, last)


def executed_rows(group_sizes_E: jax.Array, num_rows: int) -> jax.Array:
  """Returns how many rows the loops of `schedule` multiply."""
  loops = schedule(group_sizes_E, num_rows)
  return jnp.stack([p.rows * (p.last - p.first) for p in loops]).sum()


def blocks(
  group_sizes_E: jax.Array, num_rows: int, block: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns per block of one size its group, first row and rows, and the total.

  For loops whose body computes rows past a group's end: in order, since the
  next block overwrites what the last one computed there.
  """
  pieces = _one_size(group_sizes_E, num_rows, block)
  rows_P = jnp.clip(pieces.stop_P - pieces.start_P, 0, block)
  # Blocks past the last keep their start inside the padded array.
  start_P = jnp.clip(pieces.start_P, 0, num_rows)
  return pieces.group_P, start_P, rows_P, pieces.last
