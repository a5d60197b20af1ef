"""Attention in blocks of keys, in plain JAX: the choice on CPU.

Flash attention (Dao 2022), and what other kernels are compared with: the
softmax runs over blocks of keys, and the backward pass computes the scores anew
from the logarithm of their sum, so that nothing of size T S exists. A tile is
some queries of one row with the heads that share a key. Every product is one of
two plain matrices with the left one contracted on its last axis, by a small
transpose where need be: XLA:CPU multiplies that form at up to twice the speed.

What may be kept for the backward pass, the outputs and those logarithms, is
named 'attention_out' (`jax.ad_checkpoint.checkpoint_name`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import ad_checkpoint, lax

from composer_jax.core import rounding
from composer_jax.kernels.attention import blocks

# Queries of a tile, and keys that they meet at once.
QUERIES = 64
KEYS = 64
# Finite, so that the running maximum of a query that sees nothing stays so.
_MASKED = -1e30


@jax.custom_vjp
def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  visible: blocks.Visible,
) -> tuple[jax.Array, jax.Array]:
  """Returns out_BTNH, zero where nothing is seen, and tops_BTN.

  Args:
    q_BTNH: scaled.
    k_BSKH: keys.
    v_BSKH: values, whose width may be another.
    visible: what each query sees.
  """
  out_BTNH, tops_BTN, _ = _forward(q_BTNH, k_BSKH, v_BSKH, visible)
  return out_BTNH, tops_BTN


def sizes(num_queries: int, num_keys: int) -> tuple[int, int]:
  """Returns the queries of a tile and the keys of a block, of a row's."""
  return min(QUERIES, num_queries), min(KEYS, num_keys)


def executed(
  visible: blocks.Visible, num_keys: int, num_kv_heads: int
) -> jax.Array:
  """Returns how often the innermost loops run: pairs of a tile and a block."""
  per_head = blocks.executed(
    visible, *sizes(visible.start_BT.shape[1], num_keys)
  )
  return per_head.sum() * num_kv_heads


class _Call:
  """How the loops see a call: rows of (b, head), tiles of T, blocks of S."""

  def __init__(self, q_BTNH, k_BSKH, visible):
    self.batch, length, num_heads, _ = q_BTNH.shape
    num_keys, self.num_kv_heads = k_BSKH.shape[1:3]
    self.groups = num_heads // self.num_kv_heads
    self.queries, self.keys = sizes(length, num_keys)
    self.num_tiles = -(-length // self.queries)
    self.num_blocks = -(-num_keys // self.keys)
    self.dtype = rounding.wide_dtype(q_BTNH.dtype)
    self.visible = blocks.pad(visible, self.num_tiles * self.queries)
    self.ranges = blocks.ranges(self.visible, self.queries, self.keys)

  def tiled(self, x_BTN):
    """Appends queries to fill the last tile."""
    return _lengthened(x_BTN, self.num_tiles * self.queries)

  def blocked(self, x_BSK):
    """Appends keys to fill the last block; nobody sees them."""
    return _lengthened(x_BSK, self.num_blocks * self.keys).astype(self.dtype)

  def each_row(self, body, state):
    """Calls (state, b, head) -> state for each row."""

    def row(index, state):
      return body(state, index // self.num_kv_heads, index % self.num_kv_heads)

    return lax.fori_loop(0, self.batch * self.num_kv_heads, row, state)

  def row(self, x_BSK, b, head):
    """Returns the array [S, ...] of a row."""
    part = lax.dynamic_slice_in_dim(x_BSK, b, 1, 0)
    return lax.dynamic_slice_in_dim(part, head, 1, 2)[0, :, 0]

  def tile(self, x_BTN, place):
    """Returns the array [X, ...] of a tile, X = T G."""
    sizes = (1, self.queries, self.groups, *x_BTN.shape[3:])
    part = lax.dynamic_slice(x_BTN, self._start(x_BTN, place), sizes)
    return part.reshape(-1, *x_BTN.shape[3:])

  def put(self, x_BTN, part_X, place):
    """Returns x_BTN with one tile of it replaced."""
    sizes = (1, self.queries, self.groups, *x_BTN.shape[3:])
    part = rounding.rounded(part_X, x_BTN.dtype).reshape(sizes)
    return lax.dynamic_update_slice(x_BTN, part, self._start(x_BTN, place))

  def _start(self, x_BTN, place):
    b, head, tile = place
    first = b, tile * self.queries, head * self.groups
    return first + (jnp.zeros_like(b),) * (x_BTN.ndim - 3)

  def each_block(self, body, state, place):
    """Calls (state, block, sees_XS) -> state for each that the tile sees."""
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

  def block(self, x_S, index):
    return lax.dynamic_slice_in_dim(x_S, index * self.keys, self.keys)

  def add(self, x_S, part, index):
    part += self.block(x_S, index)
    return lax.dynamic_update_slice_in_dim(x_S, part, index * self.keys, 0)


def _lengthened(x_BT, length):
  missing = length - x_BT.shape[1]
  return jnp.pad(x_BT, ((0, 0), (0, missing)) + ((0, 0),) * (x_BT.ndim - 2))


_dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)


def _times(left_XS, right_SH):
  return _dot(left_XS, right_SH, (((1,), (0,)), ((), ())))


def _times_transposed(left_XH, right_SH):
  return _dot(left_XH, right_SH, (((1,), (1,)), ((), ())))


def _transposed_times(left_XS, right_XH):
  # The barrier keeps XLA from multiplying by the transpose instead.
  return _times(lax.optimization_barrier(left_XS.T), right_XH)


def _forward(q_BTNH, k_BSKH, v_BSKH, visible):
  call = _Call(q_BTNH, k_BSKH, visible)
  length, width = q_BTNH.shape[1], v_BSKH.shape[-1]
  q_BTNH = call.tiled(q_BTNH)
  dtype = v_BSKH.dtype
  k_BSKH, v_BSKH = call.blocked(k_BSKH), call.blocked(v_BSKH)

  def row(results, b, head):
    k_SH, v_SH = call.row(k_BSKH, b, head), call.row(v_BSKH, b, head)

    def tile(index, results):
      place = b, head, index
      q_XH = call.tile(q_BTNH, place).astype(call.dtype)

      def visit(state, block, sees_XS):
        sums_XH, top_X, total_X = state
        scores_XS = _times_transposed(q_XH, call.block(k_SH, block))
        scores_XS = jnp.where(sees_XS, scores_XS, _MASKED)
        now_X = jnp.maximum(top_X, scores_XS.max(1))
        weights_XS = jnp.exp(scores_XS - now_X[:, None])
        shrink_X = jnp.exp(top_X - now_X)
        new_XH = _times(weights_XS.astype(call.dtype), call.block(v_SH, block))
        return (
          sums_XH * shrink_X[:, None] + new_XH,
          now_X,
          total_X * shrink_X + weights_XS.sum(1),
        )

      num = len(q_XH)
      state = (
        jnp.zeros((num, width), jnp.float32),
        jnp.full(num, _MASKED, jnp.float32),
        jnp.zeros(num, jnp.float32),
      )
      sums_XH, top_X, total_X = call.each_block(visit, state, place)
      # What was added before a query met its first key is forgotten by then;
      # one that meets none forgets it here.
      sees_X = top_X > _MASKED
      out_XH = sums_XH * jnp.where(sees_X, 1 / total_X, 0)[:, None]
      log_X = jnp.where(sees_X, top_X + jnp.log(total_X), 0)
      parts = out_XH, top_X, log_X
      return tuple(
        call.put(x, part, place) for x, part in zip(results, parts, strict=True)
      )

    return lax.fori_loop(0, call.num_tiles, tile, results)

  shape = q_BTNH.shape[:3]
  out_BTNH = jnp.zeros((*shape, width), dtype)
  results = out_BTNH, *(jnp.zeros(shape, jnp.float32) for _ in range(2))
  return tuple(x[:, :length] for x in call.each_row(row, results))


def _attend_forward(q_BTNH, k_BSKH, v_BSKH, visible):
  out_BTNH, tops_BTN, logs_BTN = _forward(q_BTNH, k_BSKH, v_BSKH, visible)
  out_BTNH, logs_BTN = (
    ad_checkpoint.checkpoint_name(x, 'attention_out')
    for x in (out_BTNH, logs_BTN)
  )
  arrays = q_BTNH, k_BSKH, v_BSKH, visible
  return (out_BTNH, tops_BTN), (arrays, out_BTNH, logs_BTN)


def _attend_backward(residuals, cotangents):
  (q_BTNH, k_BSKH, v_BSKH, visible), out_BTNH, logs_BTN = residuals
  d_out_BTNH, _ = cotangents
  call = _Call(q_BTNH, k_BSKH, visible)
  length, num_keys = q_BTNH.shape[1], k_BSKH.shape[1]
  dtypes = q_BTNH.dtype, k_BSKH.dtype, v_BSKH.dtype
  # d_scores = weights (d_weights - sum of weights d_weights over keys).
  means_BTN = (d_out_BTNH.astype(jnp.float32) * out_BTNH).sum(-1)
  q_BTNH, d_out_BTNH, logs_BTN, means_BTN = map(
    call.tiled, (q_BTNH, d_out_BTNH, logs_BTN, means_BTN)
  )
  k_BSKH, v_BSKH = call.blocked(k_BSKH), call.blocked(v_BSKH)

  def row(results, b, head):
    k_SH, v_SH = call.row(k_BSKH, b, head), call.row(v_BSKH, b, head)

    def tile(index, state):
      place = b, head, index
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
        scores_XS = jnp.where(sees_XS, scores_XS, _MASKED)
        weights_XS = jnp.exp(scores_XS - log_X1)
        d_weights_XS = _times_transposed(d_out_XH, values_SH)
        d_scores_XS = weights_XS * (d_weights_XS - mean_X1)
        weights_XS, d_scores_XS = (
          x.astype(call.dtype) for x in (weights_XS, d_scores_XS)
        )
        return (
          d_q_XH + _times(d_scores_XS, part_SH),
          call.add(d_k_SH, _transposed_times(d_scores_XS, q_XH), block),
          call.add(d_v_SH, _transposed_times(weights_XS, d_out_XH), block),
        )

      d_q_BTNH, *d_row = state
      d_q_XH = jnp.zeros(q_XH.shape, jnp.float32)
      d_q_XH, *d_row = call.each_block(visit, (d_q_XH, *d_row), place)
      return call.put(d_q_BTNH, d_q_XH, place), *d_row

    d_q_BTNH, *d_rows = results
    state = d_q_BTNH, *(jnp.zeros(x.shape, jnp.float32) for x in (k_SH, v_SH))
    d_q_BTNH, *d_row = lax.fori_loop(0, call.num_tiles, tile, state)
    return d_q_BTNH, *(
      lax.dynamic_update_slice(
        x, rounding.rounded(part, x.dtype)[None, :, None], (b, 0, head, 0)
      )
      for x, part in zip(d_rows, d_row, strict=True)
    )

  arrays = q_BTNH, k_BSKH, v_BSKH
  results = tuple(
    jnp.zeros(x.shape, dtype) for x, dtype in zip(arrays, dtypes, strict=True)
  )
  d_q_BTNH, d_k_BSKH, d_v_BSKH = call.each_row(row, results)
  return (
    d_q_BTNH[:, :length],
    d_k_BSKH[:, :num_keys],
    d_v_BSKH[:, :num_keys],
    None,
  )


attend.defvjp(_attend_forward, _attend_backward)
