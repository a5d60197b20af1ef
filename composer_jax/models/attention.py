"""Grouped-query self-attention with rotary positions.

What happens to activations are functions of a parameter tree, which the module
below creates and `models.layer` prepares. The same functions by the same names
exist of latent attention (`models.mla`).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.core import rounding
from composer_jax.kernels import linear
from composer_jax.kernels.attention import grouped_query as attention_kernel
from composer_jax.models import config as model_config
from composer_jax.models import norm, parameters, rope
from composer_jax.parallel import exchange, sequence

# (name, heads axis) of what is made from the residual stream.
_PROJECTIONS = (
  ('query', 'heads'),
  ('key', 'kv_heads'),
  ('value', 'kv_heads'),
)


def visible_of(segment_ids_BT: jax.Array) -> attention_kernel.Visible:
  """Lets a token see those before it in the row and in its own segment.

  Padding sees nothing, and costs nothing.

  Args:
    segment_ids_BT: of whole rows; equal ones follow each other, 0 is padding.
  """
  order_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
  begins_BT = segment_ids_BT != jnp.roll(segment_ids_BT, 1, axis=1)
  start_BT = jax.lax.cummax(jnp.where(begins_BT, order_T, 0), axis=1)
  end_BT = jnp.where(segment_ids_BT != 0, order_T + 1, start_BT)
  return attention_kernel.Visible(start_BT, end_BT)


def visible_in_shard(
  segment_ids_BT: jax.Array, plan: exchange.ExchangePlan | None
) -> attention_kernel.Visible:
  """Returns what the tokens of a shard see of their whole rows."""
  visible = visible_of(sequence.gather_row(segment_ids_BT, plan))
  return attention_kernel.Visible(
    *(sequence.own_part(x_BS, plan) for x_BS in visible)
  )


def gather_kept(
  kept: tuple[jax.Array, jax.Array], plan: exchange.ExchangePlan | None
) -> tuple[jax.Array, jax.Array]:
  """Returns what a shard's queries meet: what is kept of their whole rows.

  It is named 'keys', so that the backward pass can do without another gather.
  """
  if plan is None or not plan.sequence_axes:
    return kept
  with jax.named_scope('gather_keys'):
    first, second = (
      ad_checkpoint.checkpoint_name(sequence.gather_row(x_BT, plan), 'keys')
      for x_BT in kept
    )
    return first, second


def project(
  params: Any,
  x_BTD: jax.Array,
  cos_sin: tuple[jax.Array, jax.Array],
  config: model_config.ModelConfig,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Returns the rotated q_BTNH, and what is kept: rotated k_BTKH, v_BTKH."""
  q_BTNH, k_BTKH, v_BTKH = (
    _project(params, name, x_BTD) for name, _ in _PROJECTIONS
  )
  q_BTNH = _normalise(params.get('query_norm'), q_BTNH, config)
  k_BTKH = _normalise(params.get('key_norm'), k_BTKH, config)
  interleaved = config.rope.interleaved
  q_BTNH = rope.rotate(q_BTNH, cos_sin, interleaved=interleaved)
  k_BTKH = rope.rotate(k_BTKH, cos_sin, interleaved=interleaved)
  return q_BTNH, (k_BTKH, v_BTKH)


def _project(params, name, x_BTD):
  y_BTNH = linear.linear(x_BTD, params[name])
  bias_NH = params.get(f'{name}_bias')
  return y_BTNH if bias_NH is None else rounding.rounded(y_BTNH + bias_NH)


def _normalise(params, x_BTNH, config):
  if params is None:
    return x_BTNH
  # One scale for all heads, or one for the whole projection.
  scale = params['scale'] if isinstance(params, dict) else params
  return norm.rms_norm(x_BTNH, scale, config.norm_eps)


def for_pages(
  params: Any, q_BTNH: jax.Array, config: model_config.ModelConfig
) -> jax.Array:
  """Returns the query as attention over pages takes it: scaled."""
  del params
  scale = rope.softmax_scale(config.attention.head_dim, config.rope)
  return rounding.rounded(q_BTNH * scale)


def from_pages(params: Any, out_BTNH: jax.Array) -> jax.Array:
  """Returns the heads' outputs of what attention over pages gives: itself."""
  del params
  return out_BTNH


def attend(
  params: Any,
  q_BTNH: jax.Array,
  kept: tuple[jax.Array, jax.Array],
  visible: attention_kernel.Visible,
  config: model_config.ModelConfig,
  *,
  plan: exchange.ExchangePlan | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns out_BTNH and tops_BTN of `grouped_query.attend`.

  With a plan it runs inside of a shard: queries, and the keys and values that
  are kept, are of the shard's tokens, and those of its rows are gathered.
  """
  del params
  scale = rope.softmax_scale(config.attention.head_dim, config.rope)
  kept = gather_kept(kept, plan)
  return attention_kernel.attend(q_BTNH, *kept, visible, scale=scale)


def project_out(params: Any, out_BTNH: jax.Array) -> jax.Array:
  """Returns y_BTD, the heads' outputs back in the residual stream."""
  y_BTD = linear.linear(out_BTNH, params['out'], num_contracted=2)
  bias_D = params.get('out_bias')
  return y_BTD if bias_D is None else rounding.rounded(y_BTD + bias_D)


def initializer(in_axis: Any, out_axis: Any, scale: float = 1.0) -> Any:
  """Returns a truncated normal of variance scale / fan-in."""
  return nn.initializers.variance_scaling(
    scale, 'fan_in', 'truncated_normal', in_axis=in_axis, out_axis=out_axis
  )


class Parameters(nn.Module):
  """Creates the parameters of a layer's attention."""

  config: model_config.ModelConfig

  @nn.compact
  def __call__(self) -> dict[str, Any]:
    a: Any = self.config.attention
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
