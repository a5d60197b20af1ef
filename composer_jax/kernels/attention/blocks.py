"""Which keys a query sees, and which blocks of keys a kernel therefore visits.

A packed row needs no mask of size T S: what a query sees is one range of keys,
from the beginning of its document to itself. A tile of queries visits the key
blocks from the first to the last that any of them sees, a number that depends
on the data, so documents and causality save work and not only results. The
kernels take their loops' bounds from here, and what is counted is what runs.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


class Visible(NamedTuple):
  """The keys that each query sees, in the order of the row.

  Attributes:
    start_BT: int32, the first.
    end_BT: int32, the one after the last; a query whose end is not behind its
      start sees nothing, and its result is zero.
  """

  start_BT: jax.Array
  end_BT: jax.Array


def as_mask(visible: Visible, num_keys: int) -> jax.Array:
  """Returns mask_BTS, true where a query may look."""
  key_S = jnp.arange(num_keys)
  start_BT1, end_BT1 = (x[..., None] for x in visible)
  return (key_S >= start_BT1) & (key_S < end_BT1)


def pad(visible: Visible, length: int) -> Visible:
  """Appends queries that see nothing."""
  missing = length - visible.start_BT.shape[1]
  return Visible(*(jnp.pad(x, ((0, 0), (0, missing))) for x in visible))


def ranges(
  visible: Visible, queries: int, keys: int
) -> tuple[jax.Array, jax.Array]:
  """Returns first_BX and last_BX, the range of key blocks of each tile.

  Args:
    visible: whole tiles of queries.
    queries: in a tile.
    keys: in a block.
  """
  batch, length = visible.start_BT.shape
  start_BXT, end_BXT = (
    x.reshape(batch, length // queries, queries) for x in visible
  )
  sees_BXT = end_BXT > start_BXT
  end_BX = jnp.where(sees_BXT, end_BXT, 0).max(-1)
  # A tile that sees nothing visits nothing.
  start_BX = jnp.where(sees_BXT, start_BXT, end_BX[..., None]).min(-1)
  return start_BX // keys, (end_BX + keys - 1) // keys


def visited(
  visible: Visible, queries: int, keys: int, num_blocks: int
) -> jax.Array:
  """Returns the same as a table, bool [row, tile, block]."""
  first_BX1, last_BX1 = (x[..., None] for x in ranges(visible, queries, keys))
  block_S = jnp.arange(num_blocks)
  return (block_S >= first_BX1) & (block_S < last_BX1)


def executed(visible: Visible, queries: int, keys: int) -> jax.Array:
  """Returns how many pairs of tile and key block each row visits, int32 [B]."""
  length = visible.start_BT.shape[1]
  visible = pad(visible, length + -length % queries)
  first_BX, last_BX = ranges(visible, queries, keys)
  return (last_BX - first_BX).sum(1)


class Pairs(NamedTuple):
  """The steps of a grid, each of a tile and a block.

  Attributes:
    row: int32, each step's batch row.
    outer: what results are summed for: a tile, or a block.
    inner: the other.
    is_first: 1 in the first step of an outer one.
    is_last: 1 in the last.
  """

  row: jax.Array
  outer: jax.Array
  inner: jax.Array
  is_first: jax.Array
  is_last: jax.Array


def pairs(visited_BXX: jax.Array) -> tuple[Pairs, jax.Array]:
  """Returns the pairs of a table [row, outer, inner], and their number.

  Each outer one has a step at least, which writes its zeros.
  """
  batch, num_outer, num_inner = visited_BXX.shape
  is_empty = ~visited_BXX.any(-1, keepdims=True)
  visited_BXX |= is_empty & (jnp.arange(num_inner) == 0)
  size = visited_BXX.size
  (place,) = jnp.nonzero(visited_BXX.reshape(-1), size=size, fill_value=size)
  group, inner = place // num_inner, place % num_inner
  is_first = jnp.diff(group, prepend=-1) != 0
  is_last = jnp.diff(group, append=-1) != 0
  columns = group // num_outer, group % num_outer, inner, is_first, is_last
  return (
    Pairs(*(column.astype(jnp.int32) for column in columns)),
    visited_BXX.sum(),
  )


def cost(scores: tuple[int, ...], widths: int, arrays: Any) -> pl.CostEstimate:
  """Returns what a kernel does, for whoever adds up a program's operations.

  Args:
    scores: [row, query head, query, key], of which causality lets half through.
    widths: of the rows that its products multiply, all together.
    arrays: tree of what it reads and writes.
  """
  pairs = math.prod(scores) // 2
  return pl.CostEstimate(
    flops=2 * pairs * widths,
    transcendentals=pairs,
    bytes_accessed=sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)
    ),
  )
