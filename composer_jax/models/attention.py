"""Grouped-query self-attention with rotary positions and an optional cache."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from composer_jax.kernels import attention as attention_kernel
from composer_jax.models import cache as kv_cache
from composer_jax.models import config as model_config
from composer_jax.models import parameters, rope
from composer_jax.parallel import exchange


def packed_mask(segment_ids_BT: jax.Array) -> jax.Array:
  """Lets a token see those before it in the row and in its own segment."""
  order_T = jnp.arange(segment_ids_BT.shape[1])
  causal_TS = order_T[:, None] >= order_T[None, :]
  return causal_TS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])


def cached_mask(positions_BT: jax.Array, max_len: int) -> jax.Array:
  """Lets the token at position p see the cache slots s <= p."""
  return jnp.arange(max_len)[None, None, :] <= positions_BT[:, :, None]


class Attention(nn.Module):
  """Projects, rotates, attends, projects back."""

  config: model_config.ModelConfig
  plan: exchange.ExchangePlan | None = None

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    mask_BTS: jax.Array,
    positions_BT: jax.Array,
    cache: kv_cache.KVCache | None,
    layer: jax.Array,
  ) -> tuple[jax.Array, kv_cache.KVCache | None]:
    """Returns y_BTD and the cache with this chunk written at `layer`."""
    c = self.config
    q_BTNH = self._project('query', x_BTD, c.num_heads, 'heads')
    k_BTKH = self._project('key', x_BTD, c.num_kv_heads, 'kv_heads')
    v_BTKH = self._project('value', x_BTD, c.num_kv_heads, 'kv_heads')
    q_BTNH = rope.rotate(q_BTNH, cos_sin)
    k_BTKH = rope.rotate(k_BTKH, cos_sin)
    if cache is not None:
      cache = kv_cache.write(cache, layer, k_BTKH, v_BTKH, positions_BT)
      k_BTKH = cache.keys_LBSKH[layer].astype(x_BTD.dtype)
      v_BTKH = cache.values_LBSKH[layer].astype(x_BTD.dtype)
    out_BTNH = exchange.attend_per_shard(
      attention_kernel.attend, q_BTNH, k_BTKH, v_BTKH, mask_BTS, plan=self.plan
    )
    out_NHD = parameters.create(
      self,
      'out',
      nn.initializers.variance_scaling(
        0.5 / c.num_layers,
        'fan_in',
        'truncated_normal',
        in_axis=(0, 1),
        out_axis=2,
      ),
      ('heads', 'head_dim', 'embed'),
      (c.num_heads, c.head_dim, c.embed_dim),
    )
    y_BTD = jnp.einsum(
      'BTNH,NHD->BTD', out_BTNH, out_NHD.astype(out_BTNH.dtype)
    )
    return y_BTD, cache

  def _project(
    self, name: str, x_BTD: jax.Array, num_heads: int, axis: str
  ) -> jax.Array:
    c = self.config
    weight_DNH = parameters.create(
      self,
      name,
      nn.initializers.variance_scaling(
        1.0,
        'fan_in',
        'truncated_normal',
        in_axis=0,
        out_axis=(1, 2),
      ),
      ('embed', axis, 'head_dim'),
      (c.embed_dim, num_heads, c.head_dim),
    )
    return jnp.einsum('BTD,DNH->BTNH', x_BTD, weight_DNH.astype(x_BTD.dtype))
