"""Attention in blocks of keys: what its kernels have in common.

A packed row needs no mask of size T S: what a query sees is one range of keys,
from the beginning of its document to itself. A tile of queries visits the key
blocks from the first to the last that any of them sees, so documents and
causality save work. The kernels take their loops' bounds from here, and what is
counted is what runs.

The softmax is the running one (Milakov & Gimelshein 2018), in float32. The
backward pass makes the scores anew and the weights of them, with the logarithm
of the sum (flash attention, Dao 2022).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from composer_jax.core import rounding

# A score that is not seen; finite, so that a query that sees none has no NaN.
MASKED = -1e30
# q_BTNH, k_BSKH, v_BSKH; their gradients; or numbers of three kinds by query.
Arrays = tuple[jax.Array, jax.Array, jax.Array]


class Visible(NamedTuple):
  """The keys that each query sees, in the order of the row.

  int32; a query whose end is not behind its start sees nothing, and its result
  is zero.
  """

  start_BT: jax.Array
  end_BT: jax.Array


def pad(arrays_BT: Any, multiple: int) -> Any:
  """Appends zeros up to whole tiles; such queries of `Visible` see nothing."""

  def one(x_BT):
    missing = -x_BT.shape[1] % multiple
    return jnp.pad(x_BT, ((0, 0), (0, missing)) + ((0, 0),) * (x_BT.ndim - 2))

  return jax.tree.map(one, arrays_BT)


def ranges(
  visible: Visible, queries: int, keys: int
) -> tuple[jax.Array, jax.Array]:
  """Returns first_BX and last_BX, the key blocks that each whole tile sees."""
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
  first_BX, last_BX = ranges(pad(visible, queries), queries, keys)
  return (last_BX - first_BX).sum(1)


class Pairs(NamedTuple):
  """The steps of a grid, each of a tile and a block.

  Attributes:
    row: int32, as are the others: each step's batch row.
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


def meet(
  state: Arrays,
  scores: jax.Array,
  sees: jax.Array,
  weigh: Callable[[jax.Array], jax.Array],
  *,
  axis: int = -1,
  forgets: bool = True,
) -> Arrays:
  """Returns the state of queries after they have met a block of keys.

  Args:
    state: weighted sums of values; largest score so far and sum of weights by
      query, with or without an axis of one for keys.
    scores: [..., query, key], or the last two the other way round.
    sees: likewise.
    weigh: from weights to weighted sums of the block's values.
    axis: of the keys.
    forgets: whether a block of which a query sees nothing may leave something
      that its first key makes it forget (and `finish`, where there is none).
  """
  sums, top, total = state
  has_axis = top.ndim == scores.ndim
  beside = (lambda x: x) if has_axis else (lambda x: jnp.expand_dims(x, axis))
  scores = jnp.where(sees, scores, MASKED)
  now = jnp.maximum(top, scores.max(axis, keepdims=has_axis))
  weights = jnp.exp(scores - beside(now))
  if not forgets:
    weights = jnp.where(sees, weights, 0)
  shrink = jnp.exp(top - now)
  sums = sums * beside(shrink) + weigh(weights)
  return sums, now, total * shrink + weights.sum(axis, keepdims=has_axis)


def met_none(shape: tuple[int, ...], *, has_axis: bool = False) -> Arrays:
  """Returns the state of queries that met no key, with sums of this shape."""
  by_query = (*shape[:-1], 1) if has_axis else shape[:-1]
  return (
    jnp.zeros(shape, jnp.float32),
    jnp.full(by_query, MASKED, jnp.float32),
    jnp.zeros(by_query, jnp.float32),
  )


def finish(state: Arrays) -> Arrays:
  """Returns outputs, largest scores and logarithms of the sums.

  A query that meets no key forgets here what was added.
  """
  sums, top, total = state
  sees = top > MASKED
  factor = jnp.where(sees, 1 / total, 0)
  out = sums * (factor if factor.ndim == sums.ndim else factor[:, None])
  return out, top, jnp.where(sees, top + jnp.log(total), 0)


def weighted_sum(spec: str, weights: jax.Array, values: jax.Array) -> jax.Array:
  """Returns the float32 product of softmax weights and values.

  Weights stay float32 on CPU, where a bfloat16 product of this form is one of
  float32 anyway: a rounding less, and the same for whole and running softmax,
  whose weights differ by a factor.
  """
  dtype = rounding.wide_dtype(values.dtype)
  weights, values = weights.astype(dtype), values.astype(dtype)
  return jnp.einsum(spec, weights, values, preferred_element_type=jnp.float32)


def weights_and_gradient(
  scores: jax.Array,
  sees: jax.Array,
  d_weights: jax.Array,
  log: jax.Array,
  mean: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the softmax's weights and the gradient of the scores.

  Of each query it takes `finish`'s log, and the mean of d_weights under the
  weights.
  """
  weights = jnp.exp(jnp.where(sees, scores, MASKED) - log)
  return weights, weights * (d_weights - mean)


def cost(scores: tuple[int, ...], widths: int, arrays: Any) -> pl.CostEstimate:
  """Returns what a kernel does, for whoever adds up a program's operations.

  Args:
    scores: [row, query head, query, key], of which causality lets half through.
    widths: of the rows that its products multiply, all together.
    arrays: that it reads and writes.
  """
  pairs = math.prod(scores) // 2
  return pl.CostEstimate(
    flops=2 * pairs * widths,
    transcendentals=pairs,
    bytes_accessed=sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)
    ),
  )
