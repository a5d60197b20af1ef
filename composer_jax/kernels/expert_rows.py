"""Experts of few tokens, each expert's weights in an array of its own.

A decode step takes the time to read its active experts' matrices. On XLA:CPU,
`dynamic_slice` of stacked weights copies each matrix before the product reads
it, and padding to sixteen rows makes the product limited by arithmetic. Here
every expert is an array and a branch of `lax.switch`, whose product reads the
array in place: three to four times the speed of stacked weights at 1 to 8
tokens, and still faster at a thousand.

For engines on CPU: there is no gradient (`kernels.grouped.matmul` has one), and
branches stall accelerators.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.kernels.grouped import blocked

_CACHE_BYTES = 1 << 20  # A usual second-level cache.


def block_of(num_rows: int, num_experts: int, num_bytes: int) -> int:
  """Returns the fastest number of rows per product, for experts of `num_bytes`.

  Up to two rows per expert on average, products of one row are fastest: the
  second row finds the weights in cache. For experts larger than the cache this
  holds up to one row (8 to 15 % of a decode step at two).
  """
  most_rows = 2 if num_bytes <= _CACHE_BYTES else 1
  if num_rows <= most_rows * num_experts:
    return 1
  return next((b for b in (4, 8) if num_rows <= 2 * b * num_experts), 16)


def expert_rows(
  mlp: Callable[[Any, jax.Array], jax.Array],
  experts: Sequence[Any],
  x_ZD: jax.Array,
  ids_ZA: jax.Array,
  gates_ZA: jax.Array,
  valid_Z: jax.Array,
  *,
  block: int | None = None,
) -> jax.Array:
  """Returns y_ZD, each token's gated sum over its experts.

  Args:
    mlp: (an expert's weights, rows [block, D]) -> rows [block, D].
    experts: weights of each expert, not stacked.
    ids_ZA: int32 experts of each token.
    gates_ZA: float32 gates of these experts.
    valid_Z: false for padding, which reads no expert and gets zeros.
    block: rows per product; None lets `block_of` choose.
  """
  num_tokens, num_active = ids_ZA.shape
  num_rows, num_experts = ids_ZA.size, len(experts)
  num_bytes = sum(x.nbytes for x in jax.tree.leaves(experts[0]))
  block = block or block_of(num_rows, num_experts, num_bytes)
  source_Y, place_Y, sizes_E = _sort(ids_ZA, valid_Z, num_experts)
  branches = [lambda rows, w=w: mlp(w, rows) for w in experts]
  out_YD = blocked.each_block(
    lambda expert, rows_bD: jax.lax.switch(expert, branches, rows_bD),
    x_ZD[source_Y // num_active],
    sizes_E,
    block,
  )
  out_ZAD = out_YD[place_Y].reshape(num_tokens, num_active, -1)
  # Rows of padding hold leftovers of the last block, not zeros.
  out_ZAD = jnp.where(valid_Z[:, None, None], out_ZAD, 0)
  y_ZD = (out_ZAD.astype(jnp.float32) * gates_ZA[..., None]).sum(1)
  return y_ZD.astype(x_ZD.dtype)


def _sort(ids_ZA, valid_Z, num_experts):
  """Returns each sorted row's source, each row's place, and rows per expert."""
  # On CPU an argsort, which compares pairs, takes five times as long.
  keys_Y = jnp.where(valid_Z[:, None], ids_ZA, num_experts).reshape(-1)
  num_rows = keys_Y.shape[0]
  rows_Y = jnp.arange(num_rows, dtype=jnp.int32)
  source_Y = jnp.sort(keys_Y.astype(jnp.int32) * num_rows + rows_Y) % num_rows
  place_Y = jnp.zeros_like(rows_Y).at[source_Y].set(rows_Y, unique_indices=True)
  sizes_E = (keys_Y[:, None] == jnp.arange(num_experts)).sum(0)
  return source_Y, place_Y, sizes_E.astype(jnp.int32)
