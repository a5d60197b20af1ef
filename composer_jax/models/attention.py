"""Grouped-query self-attention with rotary positions and an optional cache.

What happens to activations are functions of a parameter tree, which the module
below creates and the engine (`rollout.forward`) reads from a checkpoint.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from composer_jax.kernels import attention as attention_kernel
from composer_jax.models import cache as kv_cache
from composer_jax.models import config as model_config
from composer_jax.models import norm, parameters, rope
from composer_jax.parallel import exchange

# (name, heads axis) of what is made from the residual stream.
_PROJECTIONS = (
  ('query', 'heads'),
  ('key', 'kv_heads'),
  ('value', 'kv_heads'),
)


def packed_mask(segment_ids_BT: jax.Array) -> jax.Array:
  """Lets a token see those before it in the row and in its own segment."""
  order_T = jnp.arange(segment_ids_BT.shape[1])
  causal_TS = order_T[:, None] >= order_T[None, :]
  return causal_TS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])


def cached_mask(positions_BT: jax.Array, max_len: int) -> jax.Array:
  """Lets the token at position p see the cache slots s <= p."""
  return jnp.arange(max_len)[None, None, :] <= positions_BT[:, :, None]


def project(
  params: Any,
  x_BTD: jax.Array,
  cos_sin: tuple[jax.Array, jax.Array],
  config: model_config.ModelConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns rotated q_BTNH and k_BTKH, and v_BTKH."""
  q_BTNH, k_BTKH, v_BTKH = (
    _project(params, name, x_BTD) for name, _ in _PROJECTIONS
  )
  q_BTNH = _normalise(params.get('query_norm'), q_BTNH, config)
  k_BTKH = _normalise(params.get('key_norm'), k_BTKH, config)
  interleaved = config.rope.interleaved
  q_BTNH = rope.rotate(q_BTNH, cos_sin, interleaved=interleaved)
  k_BTKH = rope.rotate(k_BTKH, cos_sin, interleaved=interleaved)
  return q_BTNH, k_BTKH, v_BTKH


def _project(params, name, x_BTD):
  y_BTNH = jnp.einsum('BTD,DNH->BTNH', x_BTD, params[name].astype(x_BTD.dtype))
  bias_NH = params.get(f'{name}_bias')
  return y_BTNH if bias_NH is None else y_BTNH + bias_NH.astype(y_BTNH.dtype)


def _normalise(params, x_BTNH, config):
  if params is None:
    return x_BTNH
  # One scale for all heads, or one for the whole projection.
  scale = params['scale'] if isinstance(params, dict) else params
  return norm.rms_norm(x_BTNH, scale, config.norm_eps)


def project_out(params: Any, out_BTNH: jax.Array) -> jax.Array:
  """Returns y_BTD, the heads' outputs back in the residual stream."""
  out_NHD = params['out'].astype(out_BTNH.dtype)
  y_BTD = jnp.einsum('BTNH,NHD->BTD', out_BTNH, out_NHD)
  bias_D = params.get('out_bias')
  return y_BTD if bias_D is None else y_BTD + bias_D.astype(y_BTD.dtype)


def initializer(in_axis: Any, out_axis: Any, scale: float = 1.0) -> Any:
  """Returns a truncated normal of variance scale / fan-in."""
  return nn.initializers.variance_scaling(
    scale, 'fan_in', 'truncated_normal', in_axis=in_axis, out_axis=out_axis
  )


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
    params = self._parameters(c.attention)
    q_BTNH, k_BSKH, v_BSKH = project(params, x_BTD, cos_sin, c)
    if cache is not None:
      cache = kv_cache.write(cache, layer, (k_BSKH, v_BSKH), positions_BT)
      k_BSKH, v_BSKH = kv_cache.read(cache, layer, x_BTD.dtype)

    def attend(query, keys, weights, mask_BTS):
      del weights
      (k_BSKH, v_BSKH), head_dim = keys, c.attention.head_dim
      scale = rope.softmax_scale(head_dim, c.rope)
      return attention_kernel.attend(
        query, k_BSKH, v_BSKH, mask_BTS, scale=scale
      )

    out_BTNH = exchange.attend_per_shard(
      attend, q_BTNH, (k_BSKH, v_BSKH), {}, mask_BTS, plan=self.plan
    )
    return project_out(params, out_BTNH), cache

  def _parameters(self, a: Any) -> dict[str, Any]:
    embed_dim = self.config.embed_dim
    heads = {'heads': a.num_heads, 'kv_heads': a.num_kv_heads}
    params: dict[str, Any] = {}
    for name, axis in _PROJECTIONS:
      shape = (embed_dim, heads[axis], a.head_dim)
      params[name] = parameters.create(
        self,
        name,
        initializer(0, (1, 2)),
        ('embed', axis, 'head_dim'),
        shape,
      )
      if a.qkv_bias:
        params[f'{name}_bias'] = parameters.create(
          self,
          f'{name}_bias',
          nn.initializers.zeros,
          (axis, 'head_dim'),
          shape[1:],
        )
    for name, axis in (('query_norm', 'heads'), ('key_norm', 'kv_heads')):
      if a.qk_norm == 'head':
        params[name] = norm.scale_of(name, a.head_dim)
      elif a.qk_norm == 'projection':
        params[name] = parameters.create(
          self,
          name,
          nn.initializers.ones,
          (axis, 'norm'),
          (heads[axis], a.head_dim),
        )
    params['out'] = parameters.create(
      self,
      'out',
      initializer((0, 1), 2, 0.5 / self.config.num_layers),
      ('heads', 'head_dim', 'embed'),
      (a.num_heads, a.head_dim, embed_dim),
    )
    if a.out_bias:
      params['out_bias'] = parameters.create(
        self, 'out_bias', nn.initializers.zeros, ('embed',), (embed_dim,)
      )
    return params
