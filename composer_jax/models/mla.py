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

from composer_jax.core import rounding
from composer_jax.kernels import linear
from composer_jax.kernels.attention import grouped_query as attention_kernel
from composer_jax.models import attention, norm, parameters, rope
from composer_jax.models import config as model_config
from composer_jax.parallel import exchange


def queries(
  params: Any,
  x_BTD: jax.Array,
  cos_sin: tuple[jax.Array, jax.Array],
  config: model_config.ModelConfig,
) -> tuple[jax.Array, jax.Array]:
  """Returns q_BTNH, the part without positions, and the rotated q_BTNJ."""
  a = config.mla
  if a.q_lora_dim is None:
    q_BTNX = linear.linear(x_BTD, params['query'])
  else:
    q_BTQ = linear.linear(x_BTD, params['query_down'])
    scale_Q = params['query_norm']['scale']
    q_BTQ = norm.rms_norm(q_BTQ, scale_Q, a.latent_norm_eps)
    q_BTNX = linear.linear(q_BTQ, params['query_up'])
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
  latents_BTC = linear.linear(x_BTD, params['kv_down'])
  scale_C = params['kv_norm']['scale']
  eps = config.mla.latent_norm_eps
  latents_BTC = norm.rms_norm(latents_BTC, scale_C, eps)
  keys_BT1J = linear.linear(x_BTD, params['key_rope'])[:, :, None]
  interleaved = config.rope.interleaved
  keys_BT1J = rope.rotate(keys_BT1J, cos_sin, interleaved=interleaved)
  return latents_BTC, keys_BT1J[:, :, 0]


def project(
  params: Any,
  x_BTD: jax.Array,
  cos_sin: tuple[jax.Array, jax.Array],
  config: model_config.ModelConfig,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
  """Returns `queries` and what is kept, `latents`."""
  return (
    queries(params, x_BTD, cos_sin, config),
    latents(params, x_BTD, cos_sin, config),
  )


def for_pages(
  params: Any,
  query: tuple[jax.Array, jax.Array],
  config: model_config.ModelConfig,
) -> tuple[jax.Array, jax.Array]:
  """Returns the query as attention over pages takes it: absorbed and scaled."""
  scale = rope.softmax_scale(config.attention.head_dim, config.rope)
  q_BTNH, q_BTNJ = (rounding.rounded(q * scale) for q in query)
  return _up('BTNH,CNH->BTNC', q_BTNH, params['key_up']), q_BTNJ


def from_pages(params: Any, out_BTNC: jax.Array) -> jax.Array:
  """Returns the heads' outputs of the latents that they attended to."""
  value_up_CNW = params['value_up']
  out_BTNW = _up('BTNC,CNW->BTNW', out_BTNC, value_up_CNW)
  return rounding.rounded(out_BTNW, value_up_CNW.dtype)


def _up(spec, array, weight):
  # Unrounded where that is free: the two forms round in other places, and so
  # differ by a rounding to bfloat16 in everything that follows.
  dtype = rounding.wide_dtype(weight.dtype)
  return jnp.einsum(spec, array.astype(dtype), weight.astype(dtype))


def attend(
  params: Any,
  query: tuple[jax.Array, jax.Array],
  kept: tuple[jax.Array, jax.Array],
  visible: attention_kernel.Visible,
  config: model_config.ModelConfig,
  *,
  plan: exchange.ExchangePlan | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns out_BTNW and tops_BTN of `grouped_query.attend`.

  With a plan it runs inside of a shard, which gathers the latents of its rows,
  not keys and values, and makes those of all heads itself: C + J numbers a
  token travel instead of N (H + W).
  """
  scale = rope.softmax_scale(config.attention.head_dim, config.rope)
  kept = attention.gather_kept(kept, plan)
  return attend_naive(query, kept, params, visible, scale=scale)


def attend_naive(
  query: tuple[jax.Array, jax.Array],
  latent: tuple[jax.Array, jax.Array],
  weights: dict[str, jax.Array],
  visible: attention_kernel.Visible,
  *,
  scale: float,
) -> tuple[jax.Array, jax.Array]:
  """Returns out_BTNW from keys and values made for each head, and tops_BTN.

  Args:
    query: q_BTNH, q_BTNJ of `queries`.
    latent: latents_BSC, keys_BSJ of `latents`.
    weights: key_up and value_up, in the dtype of the latents.
    visible: what each query sees.
    scale: on the scores.
  """
  out_BTNW, tops_BTN = attention_kernel.attend(
    *_per_head(query, latent, weights), visible, scale=scale
  )
  return rounding.rounded(out_BTNW, query[0].dtype), tops_BTN


def _per_head(query, latent, weights):
  """Returns queries, keys and values of each head."""
  latents_BSC, keys_BSJ = latent
  k_BSNH = _up('BSC,CNH->BSNH', latents_BSC, weights['key_up'])
  v_BSNW = _up('BSC,CNW->BSNW', latents_BSC, weights['value_up'])
  k_BSNJ = jnp.broadcast_to(
    keys_BSJ[:, :, None].astype(k_BSNH.dtype),
    (*k_BSNH.shape[:3], keys_BSJ.shape[-1]),
  )
  return (
    jnp.concatenate(query, axis=-1),
    jnp.concatenate([k_BSNH, k_BSNJ], axis=-1),
    v_BSNW,
  )


def attend_absorbed(
  query: tuple[jax.Array, jax.Array],
  latent: tuple[jax.Array, jax.Array],
  weights: dict[str, jax.Array],
  visible: attention_kernel.Visible,
  *,
  scale: float,
) -> jax.Array:
  """Returns out_BTNW like `attend_naive`, over one shared key and value.

  q (W c) = (W' q) c, so queries move to the latents' space and all heads read
  the same C + J numbers of a token.
  """
  q_BTNH, q_BTNJ = query
  latents_BSC, keys_BSJ = latent
  q_BTNC = _up('BTNH,CNH->BTNC', q_BTNH, weights['key_up'])
  out_BTNC, _ = attention_kernel.attend(
    jnp.concatenate([q_BTNC, q_BTNJ.astype(q_BTNC.dtype)], axis=-1),
    jnp.concatenate([latents_BSC, keys_BSJ], axis=-1)[:, :, None],
    latents_BSC[:, :, None],
    visible,
    scale=scale,
  )
  return from_pages(weights, out_BTNC)


class Parameters(nn.Module):
  """Creates the parameters of a layer's attention."""

  config: model_config.ModelConfig

  @nn.compact
  def __call__(self) -> dict[str, Any]:
    a: Any = self.config.attention
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
