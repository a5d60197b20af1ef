"""Keys and values of consumed tokens, as the decoder itself keeps them.

The plain form: all layers in one array that the layer scan carries. The engine
lays them out otherwise (`rollout.forward`), which is faster there; this form is
what says that the decoder can consume a session in chunks, and
`tests/models/decoder_test.py` holds it to the whole pass.
"""

import dataclasses
from typing import Any

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


class LatentCache(flax.struct.PyTreeNode, kw_only=True):
  """The same for latent attention, which keeps what keys are made of.

  Attributes:
    latents_LBSC: normalised compressed keys and values.
    rotated_keys_LBSJ: the key part with positions, one for all heads.
  """

  latents_LBSC: jax.Array
  rotated_keys_LBSJ: jax.Array

  @property
  def max_len(self) -> int:
    return self.latents_LBSC.shape[2]


Cache = KVCache | LatentCache


def init(
  config: model_config.ModelConfig,
  batch: int,
  max_len: int,
  dtype: str | None = None,
) -> Cache:
  """Returns an empty cache; `dtype` defaults to the compute dtype."""
  a = config.attention
  kind = jnp.dtype(dtype or config.compute_dtype)

  # Each its own array, not one twice: a step donates both.
  def zeros(*dims: int) -> jax.Array:
    return jnp.zeros((config.num_layers, batch, max_len, *dims), kind)

  if isinstance(a, model_config.MLAConfig):
    return LatentCache(
      latents_LBSC=zeros(a.kv_lora_dim), rotated_keys_LBSJ=zeros(a.rope_dim)
    )
  return KVCache(
    keys_LBSKH=zeros(a.num_kv_heads, a.head_dim),
    values_LBSKH=zeros(a.num_kv_heads, a.head_dim),
  )


def write(
  cache: Any,
  layer: jax.Array,
  chunk: tuple[jax.Array, jax.Array],
  positions_BT: jax.Array,
) -> Any:
  """Writes each token at its position; positions past the cache are dropped.

  All layers lie in one array that the layer scan carries, so that a step
  writes its tokens in place instead of copying every layer out and back.

  Args:
    cache: to write to.
    layer: index of the decoder layer.
    chunk: an array [B, T, ...] for each field of the cache, in their order.
    positions_BT: int32.
  """
  rows_B1 = jnp.arange(positions_BT.shape[0])[:, None]

  def put(cache_LBS, new_BT):
    # Wrapping would turn a negative position into one at the end.
    return cache_LBS.at[layer, rows_B1, positions_BT].set(
      new_BT.astype(cache_LBS.dtype), mode='drop', wrap_negative_indices=False
    )

  names = [field.name for field in dataclasses.fields(cache)]
  written = {
    name: put(getattr(cache, name), new_BT)
    for name, new_BT in zip(names, chunk, strict=True)
  }
  return cache.replace(**written)


def read(
  cache: Any, layer: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
  """Returns the fields of one layer, [B, S, ...], as `dtype`."""
  first, second = (
    getattr(cache, field.name)[layer].astype(dtype)
    for field in dataclasses.fields(cache)
  )
  return first, second
