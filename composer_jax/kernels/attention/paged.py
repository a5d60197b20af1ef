"""Attention of a chunk of queries over keys and values in pages.

A pool holds pages of a fixed number of tokens; entry p of a row's table is the
page of its tokens p * page to (p + 1) * page - 1. One loop over the logical
pages of all rows, up to the longest row, gathers one page per row and trip, so
a row's cache is never copied whole. A page past a query's position changes no
bit of its result.
"""

from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.core import rounding
from composer_jax.kernels.attention import blocks

Pools = tuple[jax.Array, jax.Array]

# Queries per key head up to which, on a CPU, multiplying and summing beats a
# product, which needs a copy from the pool: by 30 % at 64 rows of two queries
# and pages of 64, by 20 % at 8 rows, not at 1.
_FEW_QUERIES = 2


def token_axes(pools: Pools) -> tuple[int, int]:
  """Returns the axis of a page's tokens in each pool."""
  return (3, 2) if pools[0].ndim == 4 else (1, 1)


def write(
  pool: jax.Array,
  new_BT: jax.Array,
  pages_BT: jax.Array,
  offsets_BT: jax.Array,
  *,
  token_axis: int,
) -> jax.Array:
  """Returns the pool with each token's entry at its page and offset.

  Tokens lie along `token_axis` of the pool; those with a page out of range are
  dropped.
  """
  between = (slice(None),) * (token_axis - 1)
  index = (pages_BT, *between, offsets_BT)
  return pool.at[index].set(new_BT.astype(pool.dtype), mode='drop')


def attend(
  query: Any,
  pools: Pools,
  tables_BP: jax.Array,
  positions_BT: jax.Array,
  *,
  num_blocks: Any,
) -> jax.Array:
  """Returns out_BTNH, or out_BTNC in float32 for latent attention.

  Args:
    query: scaled q_BTNH, whose head n reads key/value head n // (N / K); for
      latent attention scaled q_BTNC in the latents' space and rotated q_BTNJ.
    pools: keys [pages, K, H, page] and values [pages, K, page, H]; for latent
      attention latents [pages, page, C] and rotated keys [pages, page, J].
    tables_BP: int32 page of each logical page of a row.
    positions_BT: int32 positions; a query sees the positions up to its own.
    num_blocks: number of logical pages to visit, an integer or traced scalar.
  """
  if isinstance(query, tuple):
    batch, length, num_heads, _ = query[0].shape
    # Queries of all heads are rows of one product with the latents.
    query_BX = tuple(q.reshape(batch, length * num_heads, -1) for q in query)
    positions_BX1 = jnp.repeat(positions_BT, num_heads, axis=1)[..., None]
    out_BXC = _attend(query_BX, pools, tables_BP, positions_BX1, num_blocks)
    return out_BXC.reshape(batch, length, num_heads, -1)
  num_kv_heads, groups = pools[0].shape[1], query.shape[2] // pools[0].shape[1]
  positions_BX = jnp.repeat(positions_BT, groups, axis=1)
  out_BKXH = _attend(
    by_kv_head(query, num_kv_heads),
    pools,
    tables_BP,
    positions_BX[:, None, :, None],
    num_blocks,
  )
  return from_kv_heads(rounding.rounded(out_BKXH, query.dtype), query.shape[1])


def by_kv_head(q_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
  """Returns q_BKXH with X = T G, one matrix per key head."""
  batch, length, _, head_dim = q_BTNH.shape
  q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, -1, head_dim)
  q_BKTGH = q_BTKGH.transpose(0, 2, 1, 3, 4)
  return q_BKTGH.reshape(batch, num_kv_heads, -1, head_dim)


def from_kv_heads(out_BKXH: jax.Array, length: int) -> jax.Array:
  batch, num_kv_heads, _, width = out_BKXH.shape
  out_BKTGH = out_BKXH.reshape(batch, num_kv_heads, length, -1, width)
  out_BTKGH = out_BKTGH.transpose(0, 2, 1, 3, 4)
  return out_BTKGH.reshape(batch, length, -1, width)


def products(query: Any, kept: tuple[jax.Array, ...]) -> tuple[Any, Any]:
  """Returns the scores of queries over a block of keys, and `meet`'s `weigh`.

  Args:
    query: q_BKXH, or [B, ..., C] and [B, ..., J] for latent attention.
    kept: k_BKHS and v_BKSH, or latents_BSC and keys_BSJ.
  """
  if not isinstance(query, tuple):
    scores_BKXS = jnp.einsum(
      'BKXH,BKHS->BKXS', query, kept[0], preferred_element_type=jnp.float32
    )
    return scores_BKXS, lambda weights_BKXS: blocks.weighted_sum(
      'BKXS,BKSH->BKXH', weights_BKXS, kept[1]
    )
  # Two products, since joining C and J would copy the cache.
  scores = sum(
    jnp.einsum('B...C,BSC->B...S', q, k, preferred_element_type=jnp.float32)
    for q, k in zip(query, kept, strict=True)
  )
  return scores, lambda weights: blocks.weighted_sum(
    'B...S,BSC->B...C', weights, kept[0]
  )


def _take(pool, pages_B, dtype, is_few):
  # XLA:CPU fuses a flat gather with the operations that read it.
  source = pool.reshape(pool.shape[0], -1) if is_few else pool
  pages = jnp.take(source, pages_B, axis=0, mode='clip').astype(dtype)
  return pages.reshape(-1, *pool.shape[1:])


def _few_products(q_BKXH, kept):
  """Returns the results of `products` by multiplying and summing."""
  k_BKHS, v_BKSH = kept
  wide_BKXH1 = q_BKXH.astype(jnp.float32)[..., None]
  scores_BKXS = (wide_BKXH1 * k_BKHS[:, :, None]).sum(-2)
  return scores_BKXS, lambda weights_BKXS: (
    weights_BKXS[..., None] * v_BKSH[:, :, None]
  ).sum(-2)


def _attend(query, pools, tables_BP, positions, num_blocks):
  """Returns softmax(scores) @ values in float32 for a query of `products`."""
  first = jax.tree.leaves(query)[0]
  if isinstance(query, tuple):
    page, width, is_few = pools[0].shape[1], pools[0].shape[2], False
  else:
    page, width = pools[1].shape[2:]
    is_few = first.shape[2] <= _FEW_QUERIES and jax.default_backend() == 'cpu'

  def body(block, state):
    pages_B = jax.lax.dynamic_index_in_dim(tables_BP, block, 1, keepdims=False)
    kept = tuple(_take(pool, pages_B, first.dtype, is_few) for pool in pools)
    scores, weigh = (_few_products if is_few else products)(query, kept)
    seen = block * page + jnp.arange(page) <= positions
    return blocks.meet(state, scores, seen, weigh, forgets=False)

  state = blocks.met_none((*first.shape[:-1], width), has_axis=True)
  out, _, total = jax.lax.fori_loop(0, num_blocks, body, state)
  # A row of padding sees no key; its unused result must be finite.
  return out / jnp.where(total > 0, total, 1)
