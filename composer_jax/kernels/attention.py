"""Grouped-query attention: one function, one implementation per backend.

'reference' materialises the scores in float32 and runs anywhere; 'fused' hands
bfloat16 to `jax.nn.dot_product_attention`, which XLA compiles to one kernel.
"""

import jax
import jax.numpy as jnp

# Finite, so that a row that sees nothing is uniform rather than NaN.
_MASKED = -1e30


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
    *,
    backend: str = 'auto',
) -> jax.Array:
  """Returns out_BTNH: softmax(q k / sqrt(H)) v over the slots mask_BTS allows.

  Args:
    q_BTNH: queries; query head n reads key/value head n // (N / K).
    k_BSKH: keys.
    v_BSKH: values.
    mask_BTS: bool, true where the query may look.
    backend: 'reference', 'fused', or 'auto' by dtype and platform.
  """
  if backend == 'auto':
    fused = q_BTNH.dtype == jnp.bfloat16 and jax.default_backend() == 'gpu'
    backend = 'fused' if fused else 'reference'
  if backend == 'fused':
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=mask_BTS[:, None]
    )
  if backend != 'reference':
    raise ValueError(
        f'attention backend {backend!r} is not one of auto, reference, fused.'
    )
  return _reference(q_BTNH, k_BSKH, v_BSKH, mask_BTS)


def _reference(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
  batch, length, num_heads, head_dim = q_BTNH.shape
  num_kv_heads = k_BSKH.shape[2]
  q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, -1, head_dim)
  scores_BKGTS = jnp.einsum(
      'BTKGH,BSKH->BKGTS',
      q_BTKGH * head_dim**-0.5,
      k_BSKH,
      preferred_element_type=jnp.float32,
  )
  scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, _MASKED)
  probabilities_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
  out_BTKGH = jnp.einsum(
      'BKGTS,BSKH->BTKGH', probabilities_BKGTS.astype(v_BSKH.dtype), v_BSKH
  )
  return out_BTKGH.reshape(batch, length, num_heads, head_dim)
