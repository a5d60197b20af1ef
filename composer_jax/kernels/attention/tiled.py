"""Attention whose bits depend only on a query and the keys that it sees.

The batch-invariant counterpart of `grouped_query` (packed batches) and `paged`
(caches). Both become one loop over tiles of queries with an inner loop over
blocks of KEY_BLOCK keys, whose body has fixed shapes (`kernels.rows` explains
why). A tile has ENTRIES entries of QUERIES successive queries of one row. Each
entry gathers its own keys, so a tile holds four sessions of a decode step or
sixteen tokens of a packed row. A block without visible keys changes no bit.

Bits are equal where documents begin at multiples of KEY_BLOCK in a packed row
and pages hold multiples of KEY_BLOCK tokens. Elsewhere results are correct, but
their bits depend on where a document begins.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from composer_jax.kernels import rows
from composer_jax.kernels.attention import blocks, grouped_query, paged

KEY_BLOCK = grouped_query.KEY_BLOCK
QUERIES = 4
ENTRIES = rows.TILE // QUERIES


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend_packed(
  query: Any,
  kept: paged.Pools,
  visible: grouped_query.Visible,
  is_measured: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the outputs [B, T, N, .] of a packed batch, and tops_BTN or None.

  Args:
    query: scaled q_BTNH, or q_BTNC and q_BTNJ, as in `paged.attend`.
    kept: k_BSKH and v_BSKH, or latents_BSC and keys_BSJ.
    is_measured: true to return the tops of `grouped_query.attend`.
  """
  batch, length = visible.start_BT.shape
  num_blocks = -(-length // KEY_BLOCK)
  # Pages of one block.
  pools = tuple(
    array_BS.reshape(batch * num_blocks, KEY_BLOCK, *array_BS.shape[2:])
    for array_BS in blocks.pad(kept, KEY_BLOCK)
  )
  if pools[0].ndim == 4:
    pools = pools[0].transpose(0, 2, 3, 1), pools[1].transpose(0, 2, 1, 3)
  tables_BP = jnp.arange(batch * num_blocks).reshape(batch, num_blocks)
  # The last key of a query that sees none is -1.
  last_BT = jnp.where(visible.end_BT > visible.start_BT, visible.end_BT - 1, -1)
  seen = visible.start_BT, last_BT
  return _attend(query, pools, tables_BP, seen, is_measured)


def _packed_backward(_, arrays, d_results):
  query, kept, visible = arrays
  d_out, _ = d_results  # The tops have no gradient.

  def whole(query, kept):
    first, second = kept
    if isinstance(query, tuple):
      # One key head, whose key is latent and rotated key, its value the latent.
      query = jnp.concatenate(query, axis=-1)
      second = first[:, :, None]
      first = jnp.concatenate(kept, axis=-1)[:, :, None]
    out, _ = grouped_query.attend(query, first, second, visible, scale=1.0)
    return out.astype(query.dtype)

  _, pull = jax.vjp(whole, query, kept)
  return *pull(d_out), None


attend_packed.defvjp(
  lambda *args: (attend_packed(*args), args[:3]), _packed_backward
)


def attend_paged(
  query: Any,
  pools: paged.Pools,
  tables_BP: jax.Array,
  positions_BT: jax.Array,
  valid_BT: jax.Array,
) -> jax.Array:
  """Returns the outputs [B, T, N, .] of a chunk over pages.

  The arguments are those of `paged.attend`; a query that is not valid sees no
  key.

  Raises:
    ValueError: a page does not hold a multiple of KEY_BLOCK tokens.
  """
  page_size = pools[1].shape[-2]
  if page_size % KEY_BLOCK:
    raise ValueError(
      f'page_size ({page_size}) must be a multiple of {KEY_BLOCK}, the keys '
      "that attention visits at once in numerics 'batch_invariant'."
    )
  last_BT = jnp.where(valid_BT, positions_BT, -1)
  seen = jnp.zeros_like(last_BT), last_BT
  return _attend(query, pools, tables_BP, seen, is_measured=False)[0]


def _attend(query, pools, tables_BP, seen, is_measured):
  """Returns the outputs [B, T, N, .], and tops_BTN or None.

  Query, pools and tables are those of `paged.attend`. `seen` are the int32
  positions of the first and last key that each query sees; the last is -1 if
  there is none.
  """
  kv_heads = pools[0].shape[1] if pools[0].ndim == 4 else 1
  # Queries [X, K, T G, H] by entry (X), with QUERIES tokens (T) each.
  query_X = jax.tree.map(
    lambda q_BTNH: paged.by_kv_head(_entries(q_BTNH, 0), kv_heads), query
  )
  first_XT, last_XT = _entries(seen[0], 0), _entries(seen[1], -1)
  # An entry counts its blocks from the first that its queries see.
  none = tables_BP.shape[1] * pools[1].shape[-2]
  block_X = jnp.where(last_XT < 0, none, first_XT).min(1) // KEY_BLOCK
  shift_X1 = block_X[:, None] * KEY_BLOCK
  entries = query_X, first_XT - shift_X1, last_XT - shift_X1
  row_X = jnp.arange(len(block_X)) // -(-seen[0].shape[1] // QUERIES)
  per_page = pools[1].shape[-2] // KEY_BLOCK
  like = jax.tree.leaves(query_X)[0]
  width = pools[0].shape[-1] if pools[0].ndim == 3 else pools[1].shape[-1]
  shape = (*like.shape[:3], width)

  def tile(i, results):
    start = i * ENTRIES
    index_X = start + jnp.arange(ENTRIES)
    part, first_XT, last_XT = jax.tree.map(
      lambda x: lax.dynamic_slice_in_dim(x, start, ENTRIES), entries
    )

    def visit(block, state):
      at_X = block_X[index_X] + block
      page_X = tables_BP.at[row_X[index_X], at_X // per_page].get(mode='clip')
      offset_X = at_X % per_page * KEY_BLOCK
      kept = tuple(
        _gather(pool, axis, page_X, offset_X)
        for pool, axis in zip(pools, paged.token_axes(pools), strict=True)
      )
      key_S = block * KEY_BLOCK + jnp.arange(KEY_BLOCK)
      seen_XTS = (key_S >= first_XT[..., None]) & (key_S <= last_XT[..., None])
      # Barriers make the body one program, whatever surrounds it.
      return lax.optimization_barrier(
        _turn(*lax.optimization_barrier((part, kept, seen_XTS, state)))
      )

    state = blocks.met_none((ENTRIES, *shape[1:]), has_axis=True)
    num_blocks = last_XT.max() // KEY_BLOCK + 1
    state = lax.fori_loop(0, num_blocks, visit, state)
    sums, top, total = lax.optimization_barrier(state)
    result = (sums / jnp.where(total > 0, total, 1)).astype(like.dtype)
    result = lax.optimization_barrier(result)
    return jax.tree.map(
      lambda x, part: lax.dynamic_update_slice_in_dim(x, part, start, 0),
      results,
      (result, top if is_measured else None),
    )

  results = (
    jnp.zeros(shape, like.dtype),
    jnp.zeros((*shape[:3], 1), jnp.float32) if is_measured else None,
  )
  count = rows.opaque(len(block_X) // ENTRIES)
  out, tops = lax.fori_loop(0, count, tile, results)
  if is_measured:
    tops = _from_entries(tops, query)[..., 0]
  return _from_entries(out, query), tops


def _entries(array_BT, fill):
  """Returns [entry, QUERIES, ...], padded to whole tiles of entries."""
  batch, length = array_BT.shape[:2]
  per_row = -(-length // QUERIES)
  # At least two tiles, as in `kernels.rows`.
  tiles = max(2, -(-batch * per_row // ENTRIES))
  pad = [(0, 0)] * array_BT.ndim
  pad[1] = (0, per_row * QUERIES - length)
  array_BT = jnp.pad(array_BT, pad, constant_values=fill)
  array_XT = array_BT.reshape(batch * per_row, QUERIES, *array_BT.shape[2:])
  pad[:2] = (0, tiles * ENTRIES - batch * per_row), (0, 0)
  return jnp.pad(array_XT, pad, constant_values=fill)


def _from_entries(out_XKRH, query):
  batch, length, num_heads, _ = jax.tree.leaves(query)[0].shape
  num_entries = batch * -(-length // QUERIES)
  out_XTNH = paged.from_kv_heads(out_XKRH[:num_entries], QUERIES)
  return out_XTNH.reshape(batch, -1, num_heads, out_XTNH.shape[-1])[:, :length]


def _gather(pool, axis, page_X, offset_X):
  sizes = list(pool.shape)
  sizes[0], sizes[axis] = 1, KEY_BLOCK

  def one(page, offset):
    start = [jnp.int32(0)] * pool.ndim
    start[0], start[axis] = page, offset
    return lax.dynamic_slice(pool, start, sizes)[0]

  return jax.vmap(one)(page_X, offset_X)


def _turn(query, kept, seen_XTS, state):
  """Adds one block of keys: the body of every attention in this mode."""
  scores_XKRS, weigh = paged.products(query, kept)
  per_query = scores_XKRS.shape[2] // QUERIES
  seen_X1RS = jnp.repeat(seen_XTS, per_query, axis=1)[:, None]
  return blocks.meet(state, scores_XKRS, seen_X1RS, weigh, forgets=False)
