"""Multi-head latent attention (DeepSeek-V2, section 2.1).

Keys and values of all heads are products of one short vector per token, the
latent (C), which is all that a cache keeps beside one rotated key part (J)
that the heads share. Two ways to attend, equal up to rounding: 'naive' makes
the keys and values of each head, for few latents and many queries (training);
'absorbed' multiplies the queries by what makes the keys instead, and meets the
latents directly, for few queries and many latents (decoding).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from composer_jax.kernels import attention as attention_kernel
from composer_jax.models import attention, norm, parameters, rope
from composer_jax.models import cache as kv_cache
from composer_jax.models import config as model_config
from composer_jax.parallel import exchange

# What makes keys and values of latents, once for all shards of a sequence.
PER_SHARD = ('key_up', 'value_up')


def queries(
  params: Any,
  x_BTD: jax.Array,
  cos_sin: tuple[jax.Array, jax.Array],
  config: model_config.ModelConfig,
) -> tuple[jax.Array, jax.Array]:
  """Returns q_BTNH, the part without positions, and the rotated q_BTNJ."""
  a, dtype = config.mla, x_BTD.dtype
  if a.q_lora_dim is None:
    q_BTNX = jnp.einsum('BTD,DNX->BTNX', x_BTD, params['query'].astype(dtype))
  else:
    q_BTQ = x_BTD @ params['query_down'].astype(dtype)
    scale_Q = params['query_norm']['scale']
    q_BTQ = norm.rms_norm(q_BTQ, scale_Q, a.latent_norm_eps)
    up_QNX = params['query_up'].astype(dtype)
    q_BTNX = jnp.einsum('BTQ,QNX->BTNX', q_BTQ, up_QNX)
  q_BTNH, q_BTNJ = jnp.split(q_BTNX, [a.nope_dim], axis=-1)
  interleaved = config.rope.interleaved
  return q_BTNH, rope.rotate(q_BTNJ, cos_sin, interleaved=interleaved)


def latents(
  params: Any,
  x_BTD: jax.Array,
  cos_sin: tuple[jax.Array, jax.Array],
  config: model_config.ModelConfig,
) -> tuple[jax.Array, jax.Array]:
  """Returns the normalised latents_BTC and the rotated keys_BTJ."""
  dtype = x_BTD.dtype
  latents_BTC = x_BTD @ params['kv_down'].astype(dtype)
  scale_C = params['kv_norm']['scale']
  eps = config.mla.latent_norm_eps
  latents_BTC = norm.rms_norm(latents_BTC, scale_C, eps)
  keys_BT1J = (x_BTD @ params['key_rope'].astype(dtype))[:, :, None]
  interleaved = config.rope.interleaved
  keys_BT1J = rope.rotate(keys_BT1J, cos_sin, interleaved=interleaved)
  return latents_BTC, keys_BT1J[:, :, 0]


def attend_naive(
  query: tuple[jax.Array, jax.Array],
  latent: tuple[jax.Array, jax.Array],
  weights: dict[str, jax.Array],
  mask_BTS: jax.Array,
  *,
  scale: float,
) -> jax.Array:
  """Returns out_BTNW from keys and values made for each head.

  Args:
    query: q_BTNH, q_BTNJ of `queries`.
    latent: latents_BSC, keys_BSJ of `latents`.
    weights: the arrays PER_SHARD, in the dtype of the latents.
    mask_BTS: true where the query may look.
    scale: on the scores.
  """
  latents_BSC, keys_BSJ = latent
  k_BSNH = jnp.einsum('BSC,CNH->BSNH', latents_BSC, weights['key_up'])
  v_BSNW = jnp.einsum('BSC,CNW->BSNW', latents_BSC, weights['value_up'])
  k_BSNJ = jnp.broadcast_to(
    keys_BSJ[:, :, None], (*k_BSNH.shape[:3], keys_BSJ.shape[-1])
  )
  return attention_kernel.attend(
    jnp.concatenate(query, axis=-1),
    jnp.concatenate([k_BSNH, k_BSNJ], axis=-1),
    v_BSNW,
    mask_BTS,
    scale=scale,
  )


def attend_absorbed(
  query: tuple[jax.Array, jax.Array],
  latent: tuple[jax.Array, jax.Array],
  weights: dict[str, jax.Array],
  mask_BTS: jax.Array,
  *,
  scale: float,
) -> jax.Array:
  """Returns out_BTNW like `attend_naive`, over one shared key and value.

  q (W c) = (W' q) c, so queries move to the latents' space and all heads read
  the same C + J numbers of a token.
  """
  q_BTNH, q_BTNJ = query
  latents_BSC, keys_BSJ = latent
  q_BTNC = jnp.einsum('BTNH,CNH->BTNC', q_BTNH, weights['key_up'])
  out_BTNC = attention_kernel.attend(
    jnp.concatenate([q_BTNC, q_BTNJ], axis=-1),
    jnp.concatenate([latents_BSC, keys_BSJ], axis=-1)[:, :, None],
    latents_BSC[:, :, None],
    mask_BTS,
    scale=scale,
  )
  return jnp.einsum('BTNC,CNW->BTNW', out_BTNC, weights['value_up'])


class LatentAttention(nn.Module):
  """Compresses, rotates, attends, projects back."""

  config: model_config.ModelConfig
  plan: exchange.ExchangePlan | None = None

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    mask_BTS: jax.Array,
    positions_BT: jax.Array,
    cache: kv_cache.LatentCache | None,
    layer: jax.Array,
  ) -> tuple[jax.Array, kv_cache.LatentCache | None]:
    """Returns y_BTD and the cache with this chunk written at `layer`."""
    c = self.config
    params = self._parameters(c.attention)
    query = queries(params, x_BTD, cos_sin, c)
    latent = latents(params, x_BTD, cos_sin, c)
    form = attend_naive
    if cache is not None:
      cache = kv_cache.write(cache, layer, latent, positions_BT)
      latent, form = kv_cache.read(cache, layer, x_BTD.dtype), attend_absorbed
    scale = rope.softmax_scale(c.attention.head_dim, c.rope)

    def attend(query, latent, weights, mask_BTS):
      return form(query, latent, weights, mask_BTS, scale=scale)

    # Context shards gather latents, not keys and values, and make those of
    # all heads themselves: C + J numbers a token travel instead of N (H + W).
    out_BTNW = exchange.attend_per_shard(
      attend,
      query,
      latent,
      {name: params[name].astype(x_BTD.dtype) for name in PER_SHARD},
      mask_BTS,
      plan=self.plan,
    )
    return attention.project_out(params, out_BTNW), cache

  def _parameters(self, a: Any) -> dict[str, Any]:
    embed_dim, params = self.config.embed_dim, {}
    matrix, per_head = (
      attention.initializer(0, 1),
      attention.initializer(0, (1, 2)),
    )

    def create(name, axes, shape, init):
      params[name] = parameters.create(self, name, init, axes, shape)

    heads = ('heads', 'head_dim')
    wide = (a.num_heads, a.head_dim)
    if a.q_lora_dim is None:
      create('query', ('embed', *heads), (embed_dim, *wide), per_head)
    else:
      shape = (embed_dim, a.q_lora_dim)
      create('query_down', ('embed', 'q_lora'), shape, matrix)
      params['query_norm'] = norm.scale_of('query_norm', a.q_lora_dim)
      create('query_up', ('q_lora', *heads), (a.q_lora_dim, *wide), per_head)
    latent = (embed_dim, a.kv_lora_dim)
    create('kv_down', ('embed', 'kv_lora'), latent, matrix)
    create('key_rope', ('embed', 'head_dim'), (embed_dim, a.rope_dim), matrix)
    params['kv_norm'] = norm.scale_of('kv_norm', a.kv_lora_dim)
    for name, dim in (('key_up', a.nope_dim), ('value_up', a.value_dim)):
      shape = (a.kv_lora_dim, a.num_heads, dim)
      create(name, ('kv_lora', *heads), shape, per_head)
    create(
      'out',
      (*heads, 'embed'),
      (a.num_heads, a.value_dim, embed_dim),
      attention.initializer((0, 1), 2, 0.5 / self.config.num_layers),
    )
    return params
