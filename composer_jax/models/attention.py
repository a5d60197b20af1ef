"""Grouped-query self-attention with rotary positions.

Functions of a layer's parameters (`models.parameters`) after
`models.layer.prepare`. Latent attention (`models.mla`) has the same functions.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.core import rounding
from composer_jax.kernels import linear, norm
from composer_jax.kernels.attention import grouped_query as attention_kernel
from composer_jax.models import config as model_config
from composer_jax.models import rope
from composer_jax.parallel import exchange, sequence


def visible_of(segment_ids_BT: jax.Array) -> attention_kernel.Visible:
  """Returns each token's visible keys: those before it in its segment.

  Rows are whole, and a segment's tokens are neighbours. Padding (0) sees no
  keys and costs nothing.
  """
  order_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
  begins_BT = segment_ids_BT != jnp.roll(segment_ids_BT, 1, axis=1)
  start_BT = jax.lax.cummax(jnp.where(begins_BT, order_T, 0), axis=1)
  end_BT = jnp.where(segment_ids_BT != 0, order_T + 1, start_BT)
  return attention_kernel.Visible(start_BT, end_BT)


def visible_in_shard(
  segment_ids_BT: jax.Array, plan: exchange.ExchangePlan | None
) -> attention_kernel.Visible:
  """Returns the visible keys of a shard's tokens, in their whole rows."""
  visible = visible_of(sequence.gather_row(segment_ids_BT, plan))
  return attention_kernel.Visible(
    *(sequence.own_part(x_BS, plan) for x_BS in visible)
  )


def gather_kept(
  kept: tuple[jax.Array, jax.Array], plan: exchange.ExchangePlan | None
) -> tuple[jax.Array, jax.Array]:
  """Gathers the cache entries of the whole rows of a shard.

  They are named 'keys', so that recomputation can keep them.
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
  """Returns rotated q_BTNH, and cache entries: rotated k_BTKH, v_BTKH."""
  q_BTNH, k_BTKH, v_BTKH = (
    _project(params, name, x_BTD) for name in ('query', 'key', 'value')
  )
  q_BTNH = _normalise(params.get('query_norm'), q_BTNH, config)
  k_BTKH = _normalise(params.get('key_norm'), k_BTKH, config)
  q_BTNH = rope.rotate(q_BTNH, cos_sin, config.rope)
  k_BTKH = rope.rotate(k_BTKH, cos_sin, config.rope)
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
  """Returns the query for attention over pages: scaled."""
  del params
  scale = rope.softmax_scale(config.attention.head_dim, config.rope)
  return rounding.rounded(q_BTNH * scale)


def from_pages(params: Any, out_BTNH: jax.Array) -> jax.Array:
  """Returns the heads' outputs from the result of attention over pages."""
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

  With a plan it runs inside of a shard and gathers the keys and values of the
  shard's rows.
  """
  del params
  kept = gather_kept(kept, plan)
  scale = rope.softmax_scale(config.attention.head_dim, config.rope)
  return attention_kernel.attend(q_BTNH, *kept, visible, scale=scale)


def project_out(params: Any, out_BTNH: jax.Array) -> jax.Array:
  """Returns y_BTD, the heads' outputs back in the residual stream."""
  y_BTD = linear.linear(out_BTNH, params['out'], num_contracted=2)
  bias_D = params.get('out_bias')
  return y_BTD if bias_D is None else rounding.rounded(y_BTD + bias_D)
