"""The decoder laid out for serving: same modules, unrolled layers, own cache.

`models.decoder` scans stacked layers and keeps one stacked cache, which suits
training and costs a copy of the whole cache per token here. This module calls
the same projections, feed-forward, router, norm and rotation code layer by
layer, with cache arrays per layer in the order that the products of attention
read: keys_BKHS and values_BKSH. It serves on one device.
`tests/rollout/forward_test.py` holds it to the decoder.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.models import attention, decoder, experts, mla, norm, rope
from composer_jax.models import config as config_lib

# Finite, so that a row that sees nothing is uniform rather than NaN.
_MASKED = -1e30


class Weights(flax.struct.PyTreeNode, kw_only=True):
  """Decoder variables, one tree per layer.

  Attributes:
    outer: what lies outside the layers, as `models.head` expects it.
    layers: variables of each layer in order, dense layers first.
  """

  outer: decoder.Variables
  layers: tuple[decoder.Variables, ...]


class Cache(flax.struct.PyTreeNode, kw_only=True):
  """What is kept of consumed tokens, two arrays per layer.

  Slot s of a row holds its token at position s; a query at position p sees the
  slots s <= p, so a row can be reused without being cleared.

  Attributes:
    layers: (keys_BKHS, values_BKSH) of grouped-query attention, or
      (latents_BSC, rotated_keys_BSJ) of latent attention.
  """

  layers: tuple[tuple[jax.Array, jax.Array], ...]

  @property
  def max_len(self) -> int:
    return self.layers[0][1].shape[-2]


def unstack(
  variables: decoder.Variables, config: config_lib.ModelConfig
) -> Weights:
  """Splits stacked layers; `compute_dtype` float32 widens bfloat16 weights.

  Widening is exact, and done once it spares every step the conversion. The
  arrays are copies, so the caller may donate its own to the next train step.
  """
  widen = config.compute_dtype == 'float32'

  def copy(x):
    narrow = widen and x.dtype == jnp.bfloat16
    return jnp.array(x, jnp.float32 if narrow else x.dtype, copy=True)

  variables = jax.tree.map(copy, variables)
  stacks = [('dense_layers', config.num_dense_layers)]
  stacks.append(('moe_layers', config.num_moe_layers))
  layers = []
  for name, length in stacks:
    stack = {k: tree[name] for k, tree in variables.items() if name in tree}
    for i in range(length):
      layers.append(jax.tree.map(lambda x, i=i: x[i], stack))
  names = [name for name, _ in stacks]
  params = variables['params']
  outer = {k: tree for k, tree in params.items() if k not in names}
  return Weights(outer={'params': outer}, layers=tuple(layers))


def empty_cache(
  config: config_lib.ModelConfig, batch: int, max_len: int
) -> Cache:
  a, dtype = config.attention, jnp.dtype(config.compute_dtype)
  if isinstance(a, config_lib.MLAConfig):
    first = (batch, max_len, a.kv_lora_dim)
    second = (batch, max_len, a.rope_dim)
  else:
    first = (batch, a.num_kv_heads, a.head_dim, max_len)
    second = (batch, a.num_kv_heads, max_len, a.head_dim)
  return Cache(
    layers=tuple(
      (jnp.zeros(first, dtype), jnp.zeros(second, dtype))
      for _ in range(config.num_layers)
    )
  )


def forward(
  weights: Weights,
  cache: Cache,
  tokens_BT: jax.Array,
  valid_BT: jax.Array,
  positions_BT: jax.Array,
  *,
  config: config_lib.ModelConfig,
) -> tuple[jax.Array, jax.Array, Cache]:
  """Consumes a chunk [B, T] or a decode step [B, 1].

  Args:
    weights: of `unstack`.
    cache: a row per batch row.
    tokens_BT: int32.
    valid_BT: where false, the token is padding: no expert works for it and
      the cache does not change.
    positions_BT: int32 within the session.
    config: of the decoder.

  Returns:
    hidden_BTD after the final norm, uint16 expert_ids_MBTA, and the cache.
  """
  c = config
  x_BTD = weights.outer['params']['embedding'][tokens_BT]
  x_BTD = x_BTD.astype(c.compute_dtype)
  cos_sin = rope.angles(positions_BT, c.attention.rotary_dim, c.rope)
  # Past the end of the cache, where a write is dropped.
  write_BT = jnp.where(valid_BT, positions_BT, cache.max_len)
  caches, routes = [], []
  attend = _ATTENTIONS[c.attention.kind]
  for i, layer in enumerate(weights.layers):
    params = layer['params']
    h_BTD = _norm(params['attention_norm'], x_BTD, c)
    with jax.named_scope('attention'):
      y_BTD, layer_cache = attend(
        params['attention'],
        h_BTD,
        cos_sin,
        (positions_BT, write_BT),
        cache.layers[i],
        c,
      )
    x_BTD += y_BTD
    h_BTD = _norm(params['ffw_norm'], x_BTD, c)
    if i < c.num_dense_layers:
      mlp = experts.DenseMLP(c, c.dense_ffw_dim)
      x_BTD += mlp.apply({'params': params['ffw']}, h_BTD)
    else:
      variables = {k: tree['moe'] for k, tree in layer.items()}
      moe = experts.MoE(c)
      result: Any = moe.apply(variables, h_BTD, valid_BT, None)
      y_BTD, ids_BTA, _ = result
      x_BTD += y_BTD
      routes.append(ids_BTA.astype(jnp.uint16))
    caches.append(layer_cache)
  hidden_BTD = _norm(weights.outer['params']['final_norm'], x_BTD, c)
  return hidden_BTD, jnp.stack(routes), Cache(layers=tuple(caches))


def _norm(params, x_BTD, config) -> Any:
  return norm.RMSNorm(config.norm_eps).apply({'params': params}, x_BTD)


def _grouped(params, h_BTD, cos_sin, positions, cache, config):
  """Grouped-query attention over the cache, this chunk included."""
  dtype = h_BTD.dtype
  q_BTNH, k_BTKH, v_BTKH = attention.project(params, h_BTD, cos_sin, config)
  positions_BT, write_BT = positions
  keys_BKHS, values_BKSH = cache
  rows_B1 = jnp.arange(keys_BKHS.shape[0])[:, None]
  keys_BKHS = keys_BKHS.at[rows_B1, :, :, write_BT].set(
    k_BTKH.astype(keys_BKHS.dtype), mode='drop'
  )
  values_BKSH = values_BKSH.at[rows_B1, :, write_BT].set(
    v_BTKH.astype(values_BKSH.dtype), mode='drop'
  )
  out_BTNH = _attend_grouped(
    q_BTNH,
    keys_BKHS.astype(dtype),
    values_BKSH.astype(dtype),
    positions_BT,
    rope.softmax_scale(config.attention.head_dim, config.rope),
  )
  y_BTD = attention.project_out(params, out_BTNH)
  return y_BTD, (keys_BKHS, values_BKSH)


def _attend_grouped(q_BTNH, keys_BKHS, values_BKSH, positions_BT, scale):
  batch, length, num_heads, head_dim = q_BTNH.shape
  num_kv_heads, max_len = keys_BKHS.shape[1], keys_BKHS.shape[3]
  # Queries that share a key head are rows of one product, [T G, H] by [H, S].
  q_BTKGH = (q_BTNH * scale).reshape(batch, length, num_kv_heads, -1, head_dim)
  q_BKXH = q_BTKGH.transpose(0, 2, 1, 3, 4).reshape(
    batch, num_kv_heads, -1, head_dim
  )
  scores_BKXS = jnp.einsum(
    'BKXH,BKHS->BKXS',
    q_BKXH,
    keys_BKHS,
    preferred_element_type=jnp.float32,
  )
  seen_BTS = jnp.arange(max_len) <= positions_BT[:, :, None]
  seen_BXS = jnp.repeat(seen_BTS, num_heads // num_kv_heads, axis=1)
  scores_BKXS = jnp.where(seen_BXS[:, None], scores_BKXS, _MASKED)
  probabilities_BKXS = jax.nn.softmax(scores_BKXS, axis=-1)
  out_BKXH = jnp.einsum(
    'BKXS,BKSH->BKXH',
    probabilities_BKXS.astype(values_BKSH.dtype),
    values_BKSH,
  )
  out_BKTGH = out_BKXH.reshape(batch, num_kv_heads, length, -1, head_dim)
  return out_BKTGH.transpose(0, 2, 1, 3, 4).reshape(q_BTNH.shape)


def _latent(params, h_BTD, cos_sin, positions, cache, config):
  """Latent attention over the cache in the absorbed form (`models.mla`).

  A chunk of context goes the same way. Above some hundred tokens (171 for Kimi
  K2) making keys and values of the cache anew would cost it less.
  """
  dtype = h_BTD.dtype
  query = mla.queries(params, h_BTD, cos_sin, config)
  positions_BT, write_BT = positions
  rows_B1 = jnp.arange(h_BTD.shape[0])[:, None]
  cache = tuple(
    cache_BS.at[rows_B1, write_BT].set(
      new_BT.astype(cache_BS.dtype), mode='drop'
    )
    for cache_BS, new_BT in zip(
      cache, mla.latents(params, h_BTD, cos_sin, config), strict=True
    )
  )
  out_BTNW = _attend_latent(
    query,
    tuple(cache_BS.astype(dtype) for cache_BS in cache),
    (params['key_up'].astype(dtype), params['value_up'].astype(dtype)),
    positions_BT,
    rope.softmax_scale(config.attention.head_dim, config.rope),
  )
  return attention.project_out(params, out_BTNW), cache


def _attend_latent(query, latent, weights, positions_BT, scale):
  q_BTNH, q_BTNJ = (q * scale for q in query)
  latents_BSC, keys_BSJ = latent
  key_up_CNH, value_up_CNW = weights
  batch, length, num_heads, _ = q_BTNH.shape
  q_BTNC = jnp.einsum('BTNH,CNH->BTNC', q_BTNH, key_up_CNH)
  # Queries of all heads meet the same latents: rows of one product. Two
  # products and a sum, since joining C and J would copy the cache.
  scores_BXS = sum(
    jnp.einsum(
      'BXC,BSC->BXS',
      q_BTN.reshape(batch, length * num_heads, -1),
      cache_BS,
      preferred_element_type=jnp.float32,
    )
    for q_BTN, cache_BS in ((q_BTNC, latents_BSC), (q_BTNJ, keys_BSJ))
  )
  seen_BTS = jnp.arange(latents_BSC.shape[1]) <= positions_BT[:, :, None]
  seen_BXS = jnp.repeat(seen_BTS, num_heads, axis=1)
  scores_BXS = jnp.where(seen_BXS, scores_BXS, _MASKED)
  probabilities_BXS = jax.nn.softmax(scores_BXS, axis=-1)
  out_BXC = jnp.einsum(
    'BXS,BSC->BXC', probabilities_BXS.astype(latents_BSC.dtype), latents_BSC
  )
  out_BTNC = out_BXC.reshape(batch, length, num_heads, -1)
  return jnp.einsum('BTNC,CNW->BTNW', out_BTNC, value_up_CNW)


_ATTENTIONS = {'gqa': _grouped, 'mla': _latent}
