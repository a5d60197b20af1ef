"""Attention in blocks of keys in plain JAX, for CPU and as reference.

A tile holds some queries of one row and the heads that share a key. Every
product contracts the last axis of a plain left matrix, after a small transpose
where necessary: XLA:CPU multiplies that form up to twice as fast.
"""

import functools

import jax.numpy as jnp
from jax import lax

from composer_jax.core import rounding
from composer_jax.kernels.attention import blocks

# Queries of a tile and keys of a block.
QUERIES = 64
KEYS = 64


def sizes(num_queries: int, num_keys: int) -> tuple[int, int]:
  """Returns the queries of a tile and the keys of a block for a row."""
  return min(QUERIES, num_queries), min(KEYS, num_keys)


class _Call:
  """Loops over rows (b, key head), tiles of queries and blocks of keys."""

  def __init__(self, arrays, visible):
    q_BTNH, *kept = arrays
    self.batch, length, num_heads, _ = q_BTNH.shape
    num_keys, self.num_kv_heads = kept[0].shape[1:3]
    self.groups = num_heads // self.num_kv_heads
    self.queries, self.keys = sizes(length, num_keys)
    self.num_tiles = -(-length // self.queries)
    self.dtype = rounding.wide_dtype(q_BTNH.dtype)
    self.visible = blocks.pad(visible, self.queries)
    self.ranges = blocks.ranges(self.visible, self.queries, self.keys)
    # No query sees the padding of the last block.
    self.kept = [blocks.pad(x, self.keys).astype(self.dtype) for x in kept]

  def each_tile(self, body, by_query, by_key=()):
    """Returns (by_query, by_key) after all tiles of all rows.

    `body` is (place, (k_SH, v_SH), (by_query, sums)) -> (by_query, sums), where
    place is (b, head, tile) and sums are float32 [S, H] of one row for each
    array by key.
    """

    def row(index, results):
      b, head = index // self.num_kv_heads, index % self.num_kv_heads
      k_SH, v_SH = (_row(x, b, head) for x in self.kept)
      tile = lambda i, state: body((b, head, i), (k_SH, v_SH), state)
      by_query, by_key = results
      like = (k_SH, v_SH)[: len(by_key)]
      sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in like)
      state = by_query, sums
      by_query, sums = lax.fori_loop(0, self.num_tiles, tile, state)
      return by_query, tuple(
        lax.dynamic_update_slice(
          x, rounding.rounded(part, x.dtype)[None, :, None], (b, 0, head, 0)
        )
        for x, part in zip(by_key, sums, strict=True)
      )

    num_rows = self.batch * self.num_kv_heads
    return lax.fori_loop(0, num_rows, row, (by_query, by_key))

  def tile(self, x_BTN, place):
    """Returns the part [X, ...] of a tile, X = T G."""
    part = lax.dynamic_slice(x_BTN, *self._box(x_BTN, place))
    return part.reshape(-1, *x_BTN.shape[3:])

  def put(self, x_BTN, part_X, place):
    start, sizes = self._box(x_BTN, place)
    part = rounding.rounded(part_X, x_BTN.dtype).reshape(sizes)
    return lax.dynamic_update_slice(x_BTN, part, start)

  def _box(self, x_BTN, place):
    (b, head, tile), beyond = place, x_BTN.shape[3:]
    start = b, tile * self.queries, head * self.groups
    start += (jnp.zeros_like(b),) * len(beyond)
    return start, (1, self.queries, self.groups, *beyond)

  def each_block(self, body, state, place):
    """Folds body(state, block, sees_XS) over the blocks that a tile sees."""
    b, _, tile = place
    start_X1, end_X1 = (
      jnp.repeat(
        lax.dynamic_slice(x, (b, tile * self.queries), (1, self.queries))[0],
        self.groups,
      )[:, None]
      for x in self.visible
    )

    def visit(block, state):
      key_S = block * self.keys + jnp.arange(self.keys)
      return body(state, block, (key_S >= start_X1) & (key_S < end_X1))

    first_BX, last_BX = self.ranges
    return lax.fori_loop(first_BX[b, tile], last_BX[b, tile], visit, state)

  def block(self, x_SH, index):
    return lax.dynamic_slice_in_dim(x_SH, index * self.keys, self.keys)

  def add(self, x_SH, part, index):
    part += self.block(x_SH, index)
    return lax.dynamic_update_slice_in_dim(x_SH, part, index * self.keys, 0)


def _row(x_BSKH, b, head):
  part = lax.dynamic_slice_in_dim(x_BSKH, b, 1, 0)
  return lax.dynamic_slice_in_dim(part, head, 1, 2)[0, :, 0]


_dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)


def _times(left_XS, right_SH):
  return _dot(left_XS, right_SH, (((1,), (0,)), ((), ())))


def _times_transposed(left_XH, right_SH):
  return _dot(left_XH, right_SH, (((1,), (1,)), ((), ())))


def _transposed_times(left_XS, right_XH):
  # The barrier keeps XLA from folding the transpose into the product.
  return _times(lax.optimization_barrier(left_XS.T), right_XH)


def forward(arrays: blocks.Arrays, visible: blocks.Visible) -> blocks.Arrays:
  """Returns out_BTNH, tops_BTN and logs_BTN; see `blocks.finish`."""
  q_BTNH, _, v_BSKH = arrays
  call = _Call(arrays, visible)
  length, width, dtype = q_BTNH.shape[1], v_BSKH.shape[-1], v_BSKH.dtype
  q_BTNH = blocks.pad(q_BTNH, call.queries)

  def tile(place, row, state):
    results, _ = state
    k_SH, v_SH = row
    q_XH = call.tile(q_BTNH, place).astype(call.dtype)

    def visit(state, block, sees_XS):
      scores_XS = _times_transposed(q_XH, call.block(k_SH, block))
      weigh = lambda weights_XS: _times(
        weights_XS.astype(call.dtype), call.block(v_SH, block)
      )
      return blocks.meet(state, scores_XS, sees_XS, weigh)

    met = call.each_block(visit, blocks.met_none((len(q_XH), width)), place)
    parts = zip(results, blocks.finish(met), strict=True)
    return tuple(call.put(x, part, place) for x, part in parts), ()

  shape = q_BTNH.shape[:3]
  out_BTNH = jnp.zeros((*shape, width), dtype)
  results = out_BTNH, *(jnp.zeros(shape, jnp.float32) for _ in range(2))
  results, _ = call.each_tile(tile, results)
  return tuple(x[:, :length] for x in results)


def backward(
  arrays: blocks.Arrays, visible: blocks.Visible, by_query: blocks.Arrays
) -> blocks.Arrays:
  """Returns the gradients of q, k and v, which may have zeros appended.

  `by_query` are d_out_BTNH, logs_BTN of `forward`, and means_BTN, the sum of
  d_out times out.
  """
  call = _Call(arrays, visible)
  q_BTNH, d_out_BTNH, logs_BTN, means_BTN = blocks.pad(
    (arrays[0], *by_query), call.queries
  )

  def tile(place, row, state):
    k_SH, v_SH = row
    (d_q_BTNH,), d_row = state
    q_XH, d_out_XH = (
      call.tile(x, place).astype(call.dtype) for x in (q_BTNH, d_out_BTNH)
    )
    log_X1, mean_X1 = (
      call.tile(x, place)[:, None] for x in (logs_BTN, means_BTN)
    )

    def visit(state, block, sees_XS):
      d_q_XH, d_k_SH, d_v_SH = state
      part_SH, values_SH = call.block(k_SH, block), call.block(v_SH, block)
      scores_XS = _times_transposed(q_XH, part_SH)
      d_weights_XS = _times_transposed(d_out_XH, values_SH)
      weights_XS, d_scores_XS = (
        x.astype(call.dtype)
        for x in blocks.weights_and_gradient(
          scores_XS, sees_XS, d_weights_XS, log_X1, mean_X1
        )
      )
      return (
        d_q_XH + _times(d_scores_XS, part_SH),
        call.add(d_k_SH, _transposed_times(d_scores_XS, q_XH), block),
        call.add(d_v_SH, _transposed_times(weights_XS, d_out_XH), block),
      )

    d_q_XH = jnp.zeros(q_XH.shape, jnp.float32)
    d_q_XH, *d_row = call.each_block(visit, (d_q_XH, *d_row), place)
    return (call.put(d_q_BTNH, d_q_XH, place),), tuple(d_row)

  d_q_BTNH, *d_kept = (
    jnp.zeros(padded.shape, x.dtype)
    for padded, x in zip((q_BTNH, *call.kept), arrays, strict=True)
  )
  (d_q_BTNH,), d_kept = call.each_tile(tile, (d_q_BTNH,), tuple(d_kept))
  return d_q_BTNH, *d_kept
