"""Attention in blocks of keys: functions that all its kernels share.

A packed row needs no mask of size T S, since a query sees one range of keys,
from the beginning of its document to itself. A tile of queries visits the key
blocks from the first to the last that any of its queries sees. Kernels and
counts take these bounds from the same functions.

The softmax is the running one (Milakov & Gimelshein 2018) in float32. The
backward pass recomputes the scores and, with the logarithm of the sum, the
weights (flash attention, Dao 2022).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from composer_jax.core import rounding

# Score of an invisible key; finite, so that queries without keys get no NaN.
MASKED = -1e30
# q_BTNH, k_BSKH and v_BSKH, their gradients, or three arrays by query.
Arrays = tuple[jax.Array, jax.Array, jax.Array]


class Visible(NamedTuple):
  """The int32 range of keys that each query sees; an empty one gives zeros."""

  start_BT: jax.Array
  end_BT: jax.Array


def pad(arrays_BT: Any, multiple: int) -> Any:
  """Appends zeros up to a multiple; padded queries of `Visible` see no key."""

  def one(x_BT):
    missing = -x_BT.shape[1] % multiple
    return jnp.pad(x_BT, ((0, 0), (0, missing)) + ((0, 0),) * (x_BT.ndim - 2))

  return jax.tree.map(one, arrays_BT)


def ranges(
  visible: Visible, queries: int, keys: int
) -> tuple[jax.Array, jax.Array]:
  """Returns first_BX and the end last_BX of the key blocks each tile sees."""
  batch, length = visible.start_BT.shape
  start_BXT, end_BXT = (
    x.reshape(batch, length // queries, queries) for x in visible
  )
  sees_BXT = end_BXT > start_BXT
  end_BX = jnp.where(sees_BXT, end_BXT, 0).max(-1)
  # A tile whose queries see no key visits no block.
  start_BX = jnp.where(sees_BXT, start_BXT, end_BX[..., None]).min(-1)
  return start_BX // keys, (end_BX + keys - 1) // keys


def visited(
  visible: Visible, queries: int, keys: int, num_blocks: int
) -> jax.Array:
  """Returns `ranges` as a bool table [row, tile, block]."""
  first_BX1, last_BX1 = (x[..., None] for x in ranges(visible, queries, keys))
  block_S = jnp.arange(num_blocks)
  return (block_S >= first_BX1) & (block_S < last_BX1)


def executed(visible: Visible, queries: int, keys: int) -> jax.Array:
  """Returns the number of (tile, key block) pairs of each row, int32 [B]."""
  first_BX, last_BX = ranges(pad(visible, queries), queries, keys)
  return (last_BX - first_BX).sum(1)


class Pairs(NamedTuple):
  """Steps of a grid, each with a tile and a block; all arrays are int32.

  Attributes:
    row: batch row of each step.
    outer: index of the tile or block that results are summed for.
    inner: index of the block or tile that is summed over.
    is_first: 1 in the first step of an outer index.
    is_last: 1 in the last step of an outer index.
  """

  row: jax.Array
  outer: jax.Array
  inner: jax.Array
  is_first: jax.Array
  is_last: jax.Array


def pairs(visited_BXX: jax.Array) -> tuple[Pairs, jax.Array]:
  """Returns the pairs of a table [row, outer, inner], and their number.

  An outer index without pairs gets one step, which writes its zeros.
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
  """Returns the state of queries after one more block of keys.

  Args:
    state: weighted sums of values, largest scores and sums of weights by query;
      the last two with or without an axis of one for keys.
    scores: scores [..., query, key] or [..., key, query].
    sees: true for visible keys, in the shape of scores.
    weigh: function from weights to weighted sums of the block's values.
    axis: axis of the keys.
    forgets: true if blocks without visible keys may change the sums, which the
      first visible key or `finish` resets; false keeps them exact.
  """
  sums, top, total = state
  has_axis = top.ndim == scores.ndim
  expand = (lambda x: x) if has_axis else (lambda x: jnp.expand_dims(x, axis))
  scores = jnp.where(sees, scores, MASKED)
  new_top = jnp.maximum(top, scores.max(axis, keepdims=has_axis))
  weights = jnp.exp(scores - expand(new_top))
  if not forgets:
    weights = jnp.where(sees, weights, 0)
  shrink = jnp.exp(top - new_top)
  sums = sums * expand(shrink) + weigh(weights)
  return sums, new_top, total * shrink + weights.sum(axis, keepdims=has_axis)


def met_none(shape: tuple[int, ...], *, has_axis: bool = False) -> Arrays:
  """Returns the state of queries before any key; `shape` is that of sums."""
  by_query = (*shape[:-1], 1) if has_axis else shape[:-1]
  return (
    jnp.zeros(shape, jnp.float32),
    jnp.full(by_query, MASKED, jnp.float32),
    jnp.zeros(by_query, jnp.float32),
  )


def finish(state: Arrays) -> Arrays:
  """Returns outputs, largest scores and logarithms of the sums of weights.

  The output and the logarithm of a query without visible keys are zero.
  """
  sums, top, total = state
  sees = top > MASKED
  factor = jnp.where(sees, 1 / total, 0)
  out = sums * (factor if factor.ndim == sums.ndim else factor[:, None])
  return out, top, jnp.where(sees, top + jnp.log(total), 0)


def weighted_sum(spec: str, weights: jax.Array, values: jax.Array) -> jax.Array:
  """Returns the float32 product of softmax weights and values.

  On CPU weights stay float32, since a bfloat16 product of this form computes in
  float32 anyway. That saves a rounding in which whole and running softmax would
  differ.
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

  `log` is the logarithm from `finish`, `mean` the mean of d_weights under the
  weights, both by query.
  """
  weights = jnp.exp(jnp.where(sees, scores, MASKED) - log)
  return weights, weights * (d_weights - mean)


def cost(scores: tuple[int, ...], widths: int, arrays: Any) -> pl.CostEstimate:
  """Returns the cost of a kernel, for counts of a program's operations.

  Args:
    scores: sizes [row, query head, query, key]; causality halves the pairs.
    widths: sum of the contracted or produced widths of the kernel's products.
    arrays: arrays that it reads and writes.
  """
  pairs = math.prod(scores) // 2
  return pl.CostEstimate(
    flops=2 * pairs * widths,
    transcendentals=pairs,
    bytes_accessed=sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays)
    ),
  )
