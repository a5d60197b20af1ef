"""Keys and values of consumed tokens, as the decoder itself keeps them.

The plain form: all layers in one array that the layer scan carries. The engine
lays them out otherwise (`rollout.forward`), which is faster there; this form is
what says that the decoder can consume a session in chunks, and
`tests/models/decoder_test.py` holds it to the whole pass.
"""

import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.models import config as model_config


class KVCache(flax.struct.PyTreeNode, kw_only=True):
  """One row per session: slot s of a row holds its token at position s.

  There is no length in here: a query at position p sees the slots s <= p, so
  what stands behind is invisible until it is overwritten. Reusing a row for
  another session needs no clearing.
  """

  keys_LBSKH: jax.Array
  values_LBSKH: jax.Array

  @property
  def max_len(self) -> int:
    return self.keys_LBSKH.shape[2]


def init(
  config: model_config.ModelConfig,
  batch: int,
  max_len: int,
  dtype: str | None = None,
) -> KVCache:
  """Returns an empty cache; `dtype` defaults to the compute dtype."""
  shape = (
    config.num_layers,
    batch,
    max_len,
    config.num_kv_heads,
    config.head_dim,
  )
  kind = jnp.dtype(dtype or config.compute_dtype)
  # Two arrays, not one twice: a step donates both.
  return KVCache(
    keys_LBSKH=jnp.zeros(shape, kind), values_LBSKH=jnp.zeros(shape, kind)
  )


def write(
  cache: KVCache,
  layer: jax.Array,
  keys_BTKH: jax.Array,
  values_BTKH: jax.Array,
  positions_BT: jax.Array,
) -> KVCache:
  """Writes each token at its position; positions past the cache are dropped.

  All layers lie in one array that the layer scan carries, so that a step
  writes its tokens in place instead of copying every layer out and back.
  """
  rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]

  def put(cache_LBSKH, new_BTKH):
    # Wrapping would turn a negative position into one at the end.
    return cache_LBSKH.at[layer, rows_B1, positions_BT].set(
      new_BTKH.astype(cache_LBSKH.dtype),
      mode='drop',
      wrap_negative_indices=False,
    )

  return KVCache(
    keys_LBSKH=put(cache.keys_LBSKH, keys_BTKH),
    values_LBSKH=put(cache.values_LBSKH, values_BTKH),
  )
