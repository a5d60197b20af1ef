"""Cuts groups of rows into pieces of static sizes for grouped products.

A product of fixed shape wastes the rows that a group does not fill. A group is
therefore cut into large pieces (bulks), which are always full, and one last
piece, of the smallest size (tail) that holds the remaining rows. Kernels loop
over the pieces of each size from `schedule`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Fewer rows (tests, decode steps) get pieces of one size, since each size is
# one more loop to compile.
_FEW_ROWS = 512


class Pieces(NamedTuple):
  """A loop over pieces of one size, with first <= i < last.

  Attributes:
    rows: rows of one product, a Python integer.
    is_full: true if every row of a piece belongs to its group.
    is_first: true if a piece is the first of its group to be computed.
    stop_P: end of the rows that belong to the piece's group.
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
  """Returns the sizes of tails, ascending, and of bulks, descending.

  A single tail and no bulks mean that every piece has that size. A group wastes
  fewer rows than the smallest tail: less than a quarter of its rows from 64 on
  average, 6 % from 512 on.
  """
  mean = num_rows / num_groups
  step = 4 * 2 ** sum(mean >= x for x in (8, 32, 128))
  if num_rows < _FEW_ROWS:
    return (min(step, num_rows),), ()
  # XLA:CPU copies the matrix for each piece, which takes as long as some 50
  # rows: large tails leave most groups in one piece.
  top = min(8 * step, 256)
  bulks = (512, top) if mean >= 512 else (top,)
  return tuple(range(step, top + 1, step)), bulks


def schedule(group_sizes_E: jax.Array, num_rows: int) -> tuple[Pieces, ...]:
  """Returns one loop per size, in the order to run them."""
  if not num_rows:
    return ()
  tail_sizes, bulk_sizes = sizes(num_rows, len(group_sizes_E))
  if not bulk_sizes:
    return (_one_size(group_sizes_E, num_rows, tail_sizes[0]),)
  stop_E = jnp.cumsum(group_sizes_E)
  start_E = stop_E - group_sizes_E
  bulks = []
  for rows in bulk_sizes:
    # At least one row stays, so that every group with rows has one tail.
    count_E = jnp.maximum(stop_E - start_E - 1, 0) // rows
    bulks.append(_loop(rows, count_E, start_E, max(num_rows // rows, 1)))
    start_E = start_E + count_E * rows
  left_E = stop_E - start_E
  tail_E = (left_E[:, None] > jnp.array(tail_sizes)).sum(1)
  # Groups without rows come last and are in no loop.
  tail_E = jnp.where(left_E > 0, tail_E, len(tail_sizes))
  group_P = jnp.argsort(tail_E)
  count = (tail_E[:, None] == jnp.arange(len(tail_sizes))).sum(0)
  last = jnp.cumsum(count)
  places = group_P, start_E[group_P], stop_E[group_P]
  tails = [
    Pieces(rows, False, True, *places, last[i] - count[i], last[i])
    for i, rows in enumerate(tail_sizes)
  ]
  return (*tails, *bulks)


def _one_size(group_sizes_E, num_rows, rows):
  stop_E = jnp.cumsum(group_sizes_E)
  count_E = (group_sizes_E + rows - 1) // rows
  # Enough for any sizes, since each group wastes less than one piece.
  limit = num_rows // rows + len(count_E)
  return _loop(rows, count_E, stop_E - group_sizes_E, limit, stop_E)


def _loop(rows, count_E, start_E, limit, stop_E=None):
  """Returns at most `limit` pieces; they are full if `stop_E` is None."""
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


def blocks(
  group_sizes_E: jax.Array, num_rows: int, block: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns each block's group, first row and rows, and the number of blocks.

  A loop that computes rows past the end of a group runs the blocks in order,
  so that the next block overwrites them.
  """
  pieces = _one_size(group_sizes_E, num_rows, block)
  rows_P = jnp.clip(pieces.stop_P - pieces.start_P, 0, block)
  # Blocks past the last start inside the padded array too.
  start_P = jnp.clip(pieces.start_P, 0, num_rows)
  return pieces.group_P, start_P, rows_P, pieces.last


def places(
  group_sizes_E: jax.Array, num_rows: int, block: int
) -> tuple[jax.Array, jax.Array]:
  """Returns each block's group, and the places of its rows.

  A block has rows of one group, the last of each with places past the last row.
  """
  group_N, start_N, count_N, _ = blocks(group_sizes_E, num_rows, block)
  within_b = jnp.arange(block)
  is_row_Nb = within_b < count_N[:, None]
  return group_N, jnp.where(is_row_Nb, start_N[:, None] + within_b, num_rows)
