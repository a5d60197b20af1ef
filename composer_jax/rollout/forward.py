"""The decoder laid out for serving: same modules, unrolled layers, own cache.

`models.decoder` scans stacked layers and keeps one stacked cache, which suits
training and costs a copy of the whole cache per token here. This module calls
the same feed-forward, router, norm and rotation code layer by layer, with one
cache array per layer in the order that the products of attention read:
keys_BKHS and values_BKSH. It serves on one device.
`tests/rollout/forward_test.py` holds it to the decoder.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from composer_jax.models import config as config_lib
from composer_jax.models import decoder, experts, norm, rope

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
  """Keys and values of consumed tokens, one array per layer.

  Slot s of a row holds its token at position s; a query at position p sees the
  slots s <= p, so a row can be reused without being cleared.
  """

  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]

  @property
  def max_len(self) -> int:
    return self.values[0].shape[2]


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
  c, dtype = config, jnp.dtype(config.compute_dtype)
  keys = (batch, c.num_kv_heads, c.head_dim, max_len)
  values = (batch, c.num_kv_heads, max_len, c.head_dim)
  layers = range(c.num_layers)
  return Cache(
    keys=tuple(jnp.zeros(keys, dtype) for _ in layers),
    values=tuple(jnp.zeros(values, dtype) for _ in layers),
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
  cos_sin = rope.angles(positions_BT, c.head_dim, c.rope_theta)
  # Past the end of the cache, where a write is dropped.
  write_BT = jnp.where(valid_BT, positions_BT, cache.max_len)
  all_keys, all_values, routes = [], [], []
  for i, layer in enumerate(weights.layers):
    params = layer['params']
    h_BTD = _norm(params['attention_norm'], x_BTD, c)
    with jax.named_scope('attention'):
      y_BTD, keys_BKHS, values_BKSH = _attention(
        params['attention'],
        h_BTD,
        cos_sin,
        (positions_BT, write_BT),
        (cache.keys[i], cache.values[i]),
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
    all_keys.append(keys_BKHS)
    all_values.append(values_BKSH)
  hidden_BTD = _norm(weights.outer['params']['final_norm'], x_BTD, c)
  cache = Cache(keys=tuple(all_keys), values=tuple(all_values))
  return hidden_BTD, jnp.stack(routes), cache


def _norm(params, x_BTD, config) -> Any:
  return norm.RMSNorm(config.norm_eps).apply({'params': params}, x_BTD)


def _attention(params, h_BTD, cos_sin, positions, cache):
  """Grouped-query attention over the cache, this chunk included."""
  dtype = h_BTD.dtype
  q_BTNH, k_BTKH, v_BTKH = (
    jnp.einsum('BTD,DNH->BTNH', h_BTD, params[name].astype(dtype))
    for name in ('query', 'key', 'value')
  )
  positions_BT, write_BT = positions
  keys_BKHS, values_BKSH = cache
  rows_B1 = jnp.arange(keys_BKHS.shape[0])[:, None]
  keys_BKHS = keys_BKHS.at[rows_B1, :, :, write_BT].set(
    rope.rotate(k_BTKH, cos_sin).astype(keys_BKHS.dtype), mode='drop'
  )
  values_BKSH = values_BKSH.at[rows_B1, :, write_BT].set(
    v_BTKH.astype(values_BKSH.dtype), mode='drop'
  )
  out_BTNH = _attend(
    rope.rotate(q_BTNH, cos_sin),
    keys_BKHS.astype(dtype),
    values_BKSH.astype(dtype),
    positions_BT,
  )
  y_BTD = jnp.einsum('BTNH,NHD->BTD', out_BTNH, params['out'].astype(dtype))
  return y_BTD, keys_BKHS, values_BKSH


def _attend(q_BTNH, keys_BKHS, values_BKSH, positions_BT):
  batch, length, num_heads, head_dim = q_BTNH.shape
  num_kv_heads, max_len = keys_BKHS.shape[1], keys_BKHS.shape[3]
  # Queries that share a key head are rows of one product, [T G, H] by [H, S].
  q_BTKGH = (q_BTNH * head_dim**-0.5).reshape(
    batch, length, num_kv_heads, -1, head_dim
  )
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
