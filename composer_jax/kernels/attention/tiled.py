"""Attention whose bits depend on a query and what it sees, and on nothing else.

The batch-invariant counterpart of `attention` (a packed batch) and of
`kernels.attention.paged` (a cache): both become one loop over tiles of queries,
with an inner loop over blocks of KEY_BLOCK keys from the document's first one
on and a body of fixed shapes (`kernels.rows` says why). A tile is ENTRIES
entries of QUERIES successive queries of one row; each entry gathers its own
keys, so a decode step fills a tile with four sessions and a packed row with
sixteen tokens. The running softmax meets a document's keys in the same blocks
however they came in; a block that a query sees nothing of changes no bit.

That holds where documents begin at multiples of KEY_BLOCK in a packed row, and
where pages hold multiples of it. A document that begins elsewhere is computed
correctly, with bits that depend on where.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.kernels import rows
from composer_jax.kernels.attention import blocks, grouped_query, paged

KEY_BLOCK = grouped_query.KEY_BLOCK
QUERIES = 4
ENTRIES = rows.TILE // QUERIES


class _Entries(NamedTuple):
  """Queries by entry (X), QUERIES of a row in each (T).

  Attributes:
    query: tree of arrays [X, K, T G, H]; K is 1 for latent attention.
    last_XT: int32, the last key that a query sees, by logical position; -1 for
      one that sees none.
    first_XT: the first one.
  """

  query: Any
  last_XT: jax.Array
  first_XT: jax.Array


def attend_packed(
  query: Any,
  kept: paged.Pools,
  visible: grouped_query.Visible,
  is_measured: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the outputs [B, T, N, .] of a packed batch, and tops_BTN.

  Args:
    query: as `kernels.attention.paged` takes it: scaled q_BTNH, or q_BTNC and
      q_BTNJ.
    kept: k_BSKH and v_BSKH, or latents_BSC and keys_BSJ.
    visible: what each query sees.
    is_measured: whether the tops of `grouped_query.attend` are wanted; None
      stands for them if not.
  """
  out, tops_BTN = _packed(query, kept, visible, is_measured)
  return out, jax.lax.stop_gradient(tops_BTN)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _packed(query, kept, visible, is_measured):
  batch, length = visible.start_BT.shape
  num_blocks = -(-length // KEY_BLOCK)
  # One that sees nothing has its last key before any.
  last_BT = jnp.where(visible.end_BT > visible.start_BT, visible.end_BT - 1, -1)
  entries = _to_entries(query, last_BT, visible.start_BT, _kv_heads(kept, 2))
  # An entry's blocks are counted from the first that any of its queries sees.
  seen_XT = jnp.where(entries.last_XT < 0, length, entries.first_XT)
  block_X = seen_XT.min(1) // KEY_BLOCK
  shift_X1 = block_X[:, None] * KEY_BLOCK
  entries = entries._replace(
    last_XT=entries.last_XT - shift_X1, first_XT=entries.first_XT - shift_X1
  )
  num_entries = -(-length // QUERIES)
  page_X = jnp.arange(len(block_X)) // num_entries * num_blocks + block_X
  out, tops = _attend(
    entries,
    _to_pools(kept, num_blocks),
    lambda tile_X, block: (page_X[tile_X] + block, 0),
    is_measured,
  )
  if is_measured:
    tops = _from_entries(tops, query)[..., 0]
  return _from_entries(out, query), tops


def attend_paged(
  query: Any,
  pools: paged.Pools,
  tables_BP: jax.Array,
  positions_BT: jax.Array,
  valid_BT: jax.Array,
) -> jax.Array:
  """Returns the outputs [B, T, N, .] of a chunk over pages.

  Args:
    query: as of `attend_packed`.
    pools: as of `kernels.attention.paged`.
    tables_BP: likewise.
    positions_BT: int32.
    valid_BT: a query that is not valid sees nothing.

  Raises:
    ValueError: pages that no number of key blocks fills.
  """
  page_size = pools[1].shape[-2]
  per_page, left = divmod(page_size, KEY_BLOCK)
  if left:
    raise ValueError(
      f'page_size ({page_size}) must be a multiple of {KEY_BLOCK}, the keys '
      "that attention visits at once in numerics 'batch_invariant'."
    )
  last_BT = jnp.where(valid_BT, positions_BT, -1)
  first_BT = jnp.zeros_like(last_BT)
  entries = _to_entries(query, last_BT, first_BT, _kv_heads(pools, 1))
  num_entries = -(-positions_BT.shape[1] // QUERIES)
  row_X = jnp.arange(len(entries.last_XT)) // num_entries

  def place(tile_X, block):
    pages_X = tables_BP.at[row_X[tile_X], block // per_page].get(mode='clip')
    return pages_X, block % per_page * KEY_BLOCK

  out, _ = _attend(entries, pools, place, is_measured=False)
  return _from_entries(out, query)


def _kv_heads(kept, axis):
  return kept[0].shape[axis] if kept[0].ndim == 4 else 1


def _to_pools(kept, num_blocks):
  """Returns what is kept of a packed batch in pages of one key block."""
  first, second = (
    array_BS.reshape(len(array_BS) * num_blocks, KEY_BLOCK, *array_BS.shape[2:])
    for array_BS in blocks.pad(kept, KEY_BLOCK)
  )
  if first.ndim == 4:
    return first.transpose(0, 2, 3, 1), second.transpose(0, 2, 1, 3)
  return first, second


def _to_entries(query, last_BT, first_BT, num_kv_heads):
  batch, length = last_BT.shape
  missing = -length % QUERIES
  num_entries = batch * (length + missing) // QUERIES
  # At least two tiles, as of rows.
  tiles = max(2, -(-num_entries // ENTRIES))

  def split(array_BT, fill):
    pad = [(0, 0)] * array_BT.ndim
    pad[1] = (0, missing)
    array_BT = jnp.pad(array_BT, pad, constant_values=fill)
    array_XT = array_BT.reshape(num_entries, QUERIES, *array_BT.shape[2:])
    pad[:2] = (0, tiles * ENTRIES - num_entries), (0, 0)
    return jnp.pad(array_XT, pad, constant_values=fill)

  def by_kv_head(q_BTNH):
    q_XTNH = split(q_BTNH, 0)
    shape = (*q_XTNH.shape[:2], num_kv_heads, -1, q_XTNH.shape[3])
    q_XKTGH = q_XTNH.reshape(shape).transpose(0, 2, 1, 3, 4)
    return q_XKTGH.reshape(len(q_XTNH), num_kv_heads, -1, shape[-1])

  return _Entries(
    query=jax.tree.map(by_kv_head, query),
    last_XT=split(last_BT, -1),
    first_XT=split(first_BT, 0),
  )


def _from_entries(out_XKRH, query):
  """Returns out_BTNH of what `_attend` made of `query`."""
  batch, length, num_heads, _ = jax.tree.leaves(query)[0].shape
  num_kv_heads, _, width = out_XKRH.shape[1:]
  num_entries = -(-length // QUERIES)
  out_XKRH = out_XKRH[: batch * num_entries]
  out_XKTGH = out_XKRH.reshape(
    -1, num_kv_heads, QUERIES, num_heads // num_kv_heads, width
  )
  out_BTNH = out_XKTGH.transpose(0, 2, 1, 3, 4).reshape(
    batch, num_entries * QUERIES, num_heads, width
  )
  return out_BTNH[:, :length]


def _attend(entries, pools, place, is_measured):
  """Returns the outputs [X, K, T G, .] of entries, and tops [X, K, T G, 1].

  Args:
    entries: whole tiles of them.
    pools: pages of keys and values, or of latents and rotated keys.
    place: (entries of a tile, logical block) -> their pages, and the offset of
      the block within them.
    is_measured: whether the tops are wanted; None stands for them if not.
  """
  query = jax.tree.leaves(entries.query)[0]
  width = pools[0].shape[-1] if pools[0].ndim == 3 else pools[1].shape[-1]
  shape = (ENTRIES, *query.shape[1:3], width)

  def tile(i, results):
    start = i * ENTRIES
    part = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, start, ENTRIES), entries
    )
    index_X = start + jnp.arange(ENTRIES)

    def visit(block, state):
      pages_X, offset = place(index_X, block)
      kept = tuple(
        _gather(pool, axis, pages_X, offset)
        for pool, axis in zip(pools, paged.token_axes(pools), strict=True)
      )
      key_S = block * KEY_BLOCK + jnp.arange(KEY_BLOCK)
      seen_XTS = (key_S >= part.first_XT[..., None]) & (
        key_S <= part.last_XT[..., None]
      )
      # Barriers: one program, whatever surrounds it.
      return jax.lax.optimization_barrier(
        _turn(
          *jax.lax.optimization_barrier((part.query, kept, seen_XTS, state))
        )
      )

    state = blocks.met_none(shape, has_axis=True)
    num_blocks = part.last_XT.max() // KEY_BLOCK + 1
    state = jax.lax.fori_loop(0, num_blocks, visit, state)
    sums, top, total = jax.lax.optimization_barrier(state)
    result = (sums / jnp.where(total > 0, total, 1)).astype(query.dtype)
    result = jax.lax.optimization_barrier(result)
    return jax.tree.map(
      lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, start, 0),
      results,
      (result, top if is_measured else None),
    )

  num_entries = len(entries.last_XT)
  out = jnp.zeros((num_entries, *shape[1:]), query.dtype)
  tops = None
  if is_measured:
    tops = jnp.zeros((*out.shape[:3], 1), jnp.float32)
  return jax.lax.fori_loop(
    0, rows.opaque(num_entries // ENTRIES), tile, (out, tops)
  )


def _gather(pool, axis, pages_X, offset):
  """Returns a key block of each entry's page."""
  sizes = list(pool.shape)
  sizes[0], sizes[axis] = 1, KEY_BLOCK
  zeros = [jnp.int32(0)] * (pool.ndim - 1)
  zeros[axis - 1] = offset

  def one(page):
    return jax.lax.dynamic_slice(pool, (page, *zeros), sizes)[0]

  return jax.vmap(one)(pages_X)


def _turn(query, kept, seen_XTS, state):
  """Meets one block of keys: the body of every attention of this mode."""
  scores_XKRS, weigh = paged.products(query, kept)
  per_query = scores_XKRS.shape[2] // QUERIES
  seen_XRS = jnp.repeat(seen_XTS, per_query, axis=1)
  seen_X1RS = seen_XRS[:, None]
  return blocks.meet(state, scores_XKRS, seen_X1RS, weigh, forgets=False)


def _packed_forward(query, kept, visible, is_measured):
  results = _packed(query, kept, visible, is_measured)
  return results, (query, kept, visible)


def _packed_backward(is_measured, residuals, d_results):
  del is_measured
  query, kept, visible = residuals
  d_out, _ = d_results

  def whole(query, kept):
    first, second = kept
    if isinstance(query, tuple):
      # One key head: the latent and the rotated key, and the latent its value.
      query = jnp.concatenate(query, axis=-1)
      second = first[:, :, None]
      first = jnp.concatenate(kept, axis=-1)[:, :, None]
    out, _ = grouped_query.attend(query, first, second, visible, scale=1.0)
    return out.astype(query.dtype)

  _, pull = jax.vjp(whole, query, kept)
  return *pull(d_out), None


_packed.defvjp(_packed_forward, _packed_backward)
