"""Multi-head latent attention (DeepSeek-V2, section 2.1).

Keys and values of all heads are projections of one short vector per token, the
latent (C). A cache keeps it and one rotated key part (J) that the heads share.
Two forms of attention are equal up to rounding: 'naive', for training, projects
latents to the keys and values of each head; 'absorbed', for decoding, projects
queries into the space of the latents.
"""

from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.core import rounding
from composer_jax.kernels import linear, norm
from composer_jax.kernels.attention import grouped_query as attention_kernel
from composer_jax.models import attention, rope
from composer_jax.models import config as model_config
from composer_jax.parallel import exchange


def project(
  params: Any,
  x_BTD: jax.Array,
  cos_sin: tuple[jax.Array, jax.Array],
  config: model_config.ModelConfig,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
  """Returns the query and the cache entry of each token.

  The query is q_BTNH, the part without positions, and the rotated q_BTNJ; the
  entry is the normalised latents_BTC and the rotated keys_BTJ.
  """
  query = _queries(params, x_BTD, cos_sin, config)
  return query, _latents(params, x_BTD, cos_sin, config)


def _queries(params, x_BTD, cos_sin, config):
  a = config.mla
  if a.q_lora_dim is None:
    q_BTNX = linear.linear(x_BTD, params['query'])
  else:
    q_BTQ = linear.linear(x_BTD, params['query_down'])
    scale_Q = params['query_norm']['scale']
    q_BTQ = norm.rms_norm(q_BTQ, scale_Q, a.latent_norm_eps)
    q_BTNX = linear.linear(q_BTQ, params['query_up'])
  q_BTNH, q_BTNJ = jnp.split(q_BTNX, [a.nope_dim], axis=-1)
  return q_BTNH, rope.rotate(q_BTNJ, cos_sin, config.rope)


def _latents(params, x_BTD, cos_sin, config):
  latents_BTC = linear.linear(x_BTD, params['kv_down'])
  scale_C = params['kv_norm']['scale']
  latents_BTC = norm.rms_norm(latents_BTC, scale_C, config.mla.latent_norm_eps)
  keys_BT1J = linear.linear(x_BTD, params['key_rope'])[:, :, None]
  keys_BT1J = rope.rotate(keys_BT1J, cos_sin, config.rope)
  return latents_BTC, keys_BT1J[:, :, 0]


def for_pages(
  params: Any,
  query: tuple[jax.Array, jax.Array],
  config: model_config.ModelConfig,
) -> tuple[jax.Array, jax.Array]:
  """Returns the query for attention over pages: absorbed and scaled.

  Since q (W c) = (W' q) c, all heads read the same C + J numbers of a token.
  """
  scale = rope.softmax_scale(config.attention.head_dim, config.rope)
  q_BTNH, q_BTNJ = (rounding.rounded(q * scale) for q in query)
  return _up('BTNH,CNH->BTNC', q_BTNH, params['key_up']), q_BTNJ


def from_pages(params: Any, out_BTNC: jax.Array) -> jax.Array:
  """Returns the heads' outputs from the latents that they attended to."""
  value_up_CNW = params['value_up']
  out_BTNW = _up('BTNC,CNW->BTNW', out_BTNC, value_up_CNW)
  return rounding.rounded(out_BTNW, value_up_CNW.dtype)


def _up(spec, array, weight):
  # Not rounded where that is free, as the two forms would round at different
  # places and their results differ in bfloat16.
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

  In the naive form. With a plan it runs inside of a shard, which gathers the
  latents of its rows: C + J numbers of a token instead of N (H + W).
  """
  latents_BSC, keys_BSJ = attention.gather_kept(kept, plan)
  k_BSNH = _up('BSC,CNH->BSNH', latents_BSC, params['key_up'])
  v_BSNW = _up('BSC,CNW->BSNW', latents_BSC, params['value_up'])
  k_BSNJ = jnp.broadcast_to(
    keys_BSJ[:, :, None].astype(k_BSNH.dtype),
    (*k_BSNH.shape[:3], keys_BSJ.shape[-1]),
  )
  out_BTNW, tops_BTN = attention_kernel.attend(
    jnp.concatenate(query, axis=-1),
    jnp.concatenate([k_BSNH, k_BSNJ], axis=-1),
    v_BSNW,
    visible,
    scale=rope.softmax_scale(config.attention.head_dim, config.rope),
  )
  return rounding.rounded(out_BTNW, query[0].dtype), tops_BTN
