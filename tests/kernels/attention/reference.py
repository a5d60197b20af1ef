"""Attention by the whole softmax, the reference for the kernels."""

import jax
import jax.numpy as jnp

from composer_jax.core import rounding
from composer_jax.kernels.attention import blocks


def as_mask(visible, num_keys):
  """Returns mask_BTS, true for visible keys."""
  key_S = jnp.arange(num_keys)
  start_BT1, end_BT1 = (x[..., None] for x in visible)
  return (key_S >= start_BT1) & (key_S < end_BT1)


def whole(arrays, visible):
  """Computes all scores in float32, as a backend of `grouped_query.attend`."""
  q_BTNH, k_BSKH, v_BSKH = arrays
  batch, length, num_heads, head_dim = q_BTNH.shape
  num_keys, num_kv_heads = k_BSKH.shape[1:3]
  q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, -1, head_dim)
  scores_BKGTS = jnp.einsum(
    'BTKGH,BSKH->BKGTS',
    q_BTKGH,
    k_BSKH,
    preferred_element_type=jnp.float32,
  )
  mask_BTS = as_mask(visible, num_keys)
  scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, blocks.MASKED)
  weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
  out_BTKGH = blocks.weighted_sum('BKGTS,BSKH->BTKGH', weights_BKGTS, v_BSKH)
  out_BTNH = out_BTKGH.reshape(batch, length, num_heads, -1)
  out_BTNH = jnp.where(mask_BTS.any(-1)[:, :, None, None], out_BTNH, 0)
  out_BTNH = rounding.rounded(out_BTNH, v_BSKH.dtype)
  tops_BTKG = scores_BKGTS.max(-1).transpose(0, 3, 1, 2)
  tops_BTN = tops_BTKG.reshape(batch, length, num_heads)
  return out_BTNH, jax.lax.stop_gradient(tops_BTN)
