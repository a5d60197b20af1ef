"""Attention of a chunk of queries over keys and values kept in pages.

A pool holds pages of a fixed number of tokens; a row's table says which page
holds its tokens p * page .. (p + 1) * page - 1. The loop goes over the logical
pages of all rows at once, as many as the longest row needs, and gathers one
page per row and turn: no copy of a row's whole cache is ever made, and a step
reads what is there rather than what could be.

A page past a query's position changes no bit of its result: its weights are
zeros and the softmax's maximum stays.
"""

from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.core import rounding
from composer_jax.kernels.attention import blocks

Pools = tuple[jax.Array, jax.Array]

# Queries per key head up to which, on a CPU, multiplying and summing beats a
# product: of one or two rows it is bound by reading, and what reads the pool
# where it lies spares the copy that a product's operand must be. 30 % faster at
# 64 rows of two queries and pages of 64, 20 % at 8, level at 1.
_FEW_QUERIES = 2


def token_axes(pools: Pools) -> tuple[int, int]:
  """Returns the axis of a page's tokens in each of the two pools."""
  return (3, 2) if pools[0].ndim == 4 else (1, 1)


def write(
  pool: jax.Array,
  new_BT: jax.Array,
  pages_BT: jax.Array,
  offsets_BT: jax.Array,
  *,
  token_axis: int,
) -> jax.Array:
  """Puts what is kept of each token at its offset within its page.

  A page out of range drops it. The pool has pages first and the tokens of a
  page along `token_axis`, the other axes of `new_BT` in its order.
  """
  between = (slice(None),) * (token_axis - 1)
  index = (pages_BT, *between, offsets_BT)
  return pool.at[index].set(new_BT.astype(pool.dtype), mode='drop')


def attend_grouped(
  q_BTNH: jax.Array,
  pools: Pools,
  tables_BP: jax.Array,
  positions_BT: jax.Array,
  *,
  num_blocks: Any,
) -> jax.Array:
  """Returns out_BTNH of grouped-query attention.

  Args:
    q_BTNH: scaled queries; query head n reads key/value head n // (N / K).
    pools: keys [pages, K, H, page] and values [pages, K, page, H], in the order
      that the two products read.
    tables_BP: int32 page of each logical page of a row.
    positions_BT: int32; a query sees the positions up to its own.
    num_blocks: logical pages to visit, a number or a traced scalar.
  """
  batch, length, num_heads, head_dim = q_BTNH.shape
  keys, values = pools
  num_kv_heads, dtype = keys.shape[1], q_BTNH.dtype
  q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, -1, head_dim)
  # Queries that share a key head are rows of one product, X = T G.
  q_BKXH = q_BTKGH.transpose(0, 2, 1, 3, 4).reshape(
    batch, num_kv_heads, -1, head_dim
  )
  positions_BX = jnp.repeat(positions_BT, num_heads // num_kv_heads, axis=1)
  is_few = q_BKXH.shape[2] <= _FEW_QUERIES and jax.default_backend() == 'cpu'

  def meet_few(pages_B):
    k_BKHS, v_BKSH = (_take_flat(pool, pages_B, dtype) for pool in pools)
    wide_BKXH1 = q_BKXH.astype(jnp.float32)[..., None]
    scores_BKXS = (wide_BKXH1 * k_BKHS[:, :, None]).sum(-2)
    return scores_BKXS, lambda weights_BKXS: (
      weights_BKXS[..., None] * v_BKSH[:, :, None]
    ).sum(-2)

  def meet(pages_B):
    kept = tuple(_take(pool, pages_B, dtype) for pool in pools)
    return products(q_BKXH, kept)

  out_BKXH = _attend(
    meet_few if is_few else meet,
    tables_BP,
    positions_BX[:, None, :, None],
    num_blocks,
    (*q_BKXH.shape[:-1], values.shape[-1]),
    values.shape[-2],
  )
  out_BKTGH = rounding.rounded(out_BKXH, dtype).reshape(
    batch, num_kv_heads, length, -1, values.shape[-1]
  )
  return out_BKTGH.transpose(0, 2, 1, 3, 4).reshape(
    batch, length, num_heads, -1
  )


def attend_latent(
  query: tuple[jax.Array, jax.Array],
  pools: Pools,
  tables_BP: jax.Array,
  positions_BT: jax.Array,
  *,
  num_blocks: Any,
) -> jax.Array:
  """Returns out_BTNC, float32, of latent attention in the absorbed form.

  Tables, positions and blocks are as of `attend_grouped`.

  Args:
    query: q_BTNC in the latents' space and the rotated q_BTNJ, both scaled.
    pools: latents [pages, page, C] and rotated keys [pages, page, J].
    tables_BP: int32.
    positions_BT: int32.
    num_blocks: logical pages to visit.
  """
  batch, length, num_heads, _ = query[0].shape
  # Queries of all heads meet the same latents: rows of one product.
  query_BX = tuple(q.reshape(batch, length * num_heads, -1) for q in query)
  positions_BX = jnp.repeat(positions_BT, num_heads, axis=1)

  def meet(pages_B):
    pairs = zip(pools, query_BX, strict=True)
    kept = tuple(_take(pool, pages_B, q.dtype) for pool, q in pairs)
    return products(query_BX, kept)

  out_BXC = _attend(
    meet,
    tables_BP,
    positions_BX[..., None],
    num_blocks,
    query_BX[0].shape,
    pools[0].shape[1],
  )
  return out_BXC.reshape(batch, length, num_heads, -1)


def products(query: Any, kept: tuple[jax.Array, jax.Array]):
  """Returns the scores of queries over a block of keys, and `meet`'s `weigh`.

  Args:
    query: q_BKXH, or of latent attention the two [B, ..., C] and [B, ..., J].
    kept: k_BKHS and v_BKSH, or latents_BSC and keys_BSJ.
  """
  if not isinstance(query, tuple):
    scores_BKXS = jnp.einsum(
      'BKXH,BKHS->BKXS', query, kept[0], preferred_element_type=jnp.float32
    )
    return scores_BKXS, lambda weights_BKXS: blocks.weighted_sum(
      'BKXS,BKSH->BKXH', weights_BKXS, kept[1]
    )
  # Two products and a sum, since joining C and J would copy the cache.
  scores = sum(
    jnp.einsum('B...C,BSC->B...S', q, k, preferred_element_type=jnp.float32)
    for q, k in zip(query, kept, strict=True)
  )
  return scores, lambda weights: blocks.weighted_sum(
    'B...S,BSC->B...C', weights, kept[0]
  )


def _take(pool, pages_B, dtype):
  return jnp.take(pool, pages_B, axis=0, mode='clip').astype(dtype)


def _take_flat(pool, pages_B, dtype):
  """As `_take`, in the form that XLA:CPU fuses with what reads it."""
  flat = pool.reshape(pool.shape[0], -1)
  pages = _take(flat, pages_B, dtype)
  return pages.reshape(-1, *pool.shape[1:])


def _attend(meet, tables_BP, positions, num_blocks, shape, page):
  """Returns softmax(scores) @ values, float32 of `shape`.

  Args:
    meet: pages_B -> scores [..., S] and a function from weights to sums.
    tables_BP: int32.
    positions: int32 of each query, with an axis of one for S.
    num_blocks: logical pages to visit.
    shape: of the result, [..., C].
    page: tokens of a page.
  """

  def body(block, state):
    pages_B = jax.lax.dynamic_index_in_dim(
      tables_BP, block, axis=1, keepdims=False
    )
    scores, weigh = meet(pages_B)
    seen = block * page + jnp.arange(page) <= positions
    return blocks.meet(state, scores, seen, weigh, forgets=False)

  state = blocks.met_none(shape, has_axis=True)
  out, _, total = jax.lax.fori_loop(0, num_blocks, body, state)
  # A row of padding sees nothing; its result is never used, but is finite.
  return out / jnp.where(total > 0, total, 1)
