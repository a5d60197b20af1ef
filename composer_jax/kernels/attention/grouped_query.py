"""Grouped-query attention: one function, one implementation per backend.

'reference' materialises the scores in float32. The others visit the key blocks
that a query sees and no more, in memory that grows with the length of a row and
not with its square: 'blocked' in plain JAX, 'pallas_gpu' and 'pallas_tpu' as
kernels, which are interpreted elsewhere. The real compilers take both (H200,
v5p) and the interpreter agrees with the others; neither has run on its hardware
yet.

Each can also return what the softmax subtracts, the largest score that a query
sees (`attend_measured`), which QK-clip needs and which is at hand.
"""

import jax
import jax.numpy as jnp

from composer_jax.core import platforms, rounding
from composer_jax.kernels.attention import blocked, blocks, gpu, tpu

# Keys that batch-invariant attention visits at once
# (`kernels.attention.tiled`).
KEY_BLOCK = 32

# Finite, so that a row that sees nothing has no NaN.
_MASKED = -1e30

Visible = blocks.Visible

_PLATFORM_BACKENDS = {
  'cpu': 'blocked',
  'gpu': 'pallas_gpu',
  'tpu': 'pallas_tpu',
}
# Part of what jit's caches tell programs apart by.
_chosen = jax.make_user_context(None)


def using(backend: str):
  """Returns a context in which 'auto' means `backend`."""
  return _chosen(backend)


def backend_for(platform: str, dtype: jax.typing.DTypeLike) -> str:
  """Returns the backend that 'auto' means on 'cpu', 'gpu' or 'tpu'."""
  if _chosen.value:
    return _chosen.value
  # Kernels are for what accelerators multiply fast.
  is_wide = jnp.dtype(dtype) == jnp.float32
  return 'blocked' if is_wide else _PLATFORM_BACKENDS[platform]


def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  visible: Visible,
  *,
  scale: float | None = None,
  backend: str = 'auto',
) -> jax.Array:
  """Returns out_BTNH: softmax(scale q k) v over the keys that are visible.

  Zero where none is.

  Args:
    q_BTNH: queries; query head n reads key/value head n // (N / K).
    k_BSKH: keys.
    v_BSKH: values, whose width may be another; the result has it.
    visible: the range of keys that each query sees.
    scale: on the scores; None means 1 / sqrt(H).
    backend: one of BACKENDS, or 'auto' by platform and dtype.
  """
  out_BTNH, _ = attend_measured(
    q_BTNH, k_BSKH, v_BSKH, visible, scale=scale, backend=backend
  )
  return out_BTNH


def attend_measured(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  visible: Visible,
  *,
  scale: float | None = None,
  backend: str = 'auto',
) -> tuple[jax.Array, jax.Array]:
  """Returns what `attend` does, and tops_BTN.

  Those are each query's largest scaled score over the keys that it sees, in
  float32 and without a gradient; -1e30 where it sees none.
  """
  if backend == 'auto':
    backend = backend_for(platforms.current(), q_BTNH.dtype)
  if backend not in BACKENDS:
    raise ValueError(f'attention backend {backend!r} is not in {BACKENDS}.')
  scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
  q_BTNH = rounding.rounded(q_BTNH * scale)
  out_BTNH, tops_BTN = _RUN[backend](q_BTNH, k_BSKH, v_BSKH, visible)
  return out_BTNH, jax.lax.stop_gradient(tops_BTN)


def weighted_sum(spec: str, weights: jax.Array, values: jax.Array) -> jax.Array:
  """Returns the float32 product of softmax weights and values.

  Weights stay float32 on CPU, where a bfloat16 product of this form is one of
  float32 anyway: a rounding less, and the same for whole and running softmax,
  whose weights differ by a factor. Accelerators take bfloat16.
  """
  dtype = rounding.wide_dtype(values.dtype)
  return jnp.einsum(
    spec,
    weights.astype(dtype),
    values.astype(dtype),
    preferred_element_type=jnp.float32,
  )


def _reference(q_BTNH, k_BSKH, v_BSKH, visible):
  batch, length, num_heads, head_dim = q_BTNH.shape
  num_keys, num_kv_heads = k_BSKH.shape[1:3]
  q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, -1, head_dim)
  scores_BKGTS = jnp.einsum(
    'BTKGH,BSKH->BKGTS',
    q_BTKGH,
    k_BSKH,
    preferred_element_type=jnp.float32,
  )
  mask_BTS = blocks.as_mask(visible, num_keys)
  scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, _MASKED)
  weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
  out_BTKGH = weighted_sum('BKGTS,BSKH->BTKGH', weights_BKGTS, v_BSKH)
  out_BTNH = out_BTKGH.reshape(batch, length, num_heads, -1)
  out_BTNH = jnp.where(mask_BTS.any(-1)[:, :, None, None], out_BTNH, 0)
  out_BTNH = rounding.rounded(out_BTNH, v_BSKH.dtype)
  tops_BTKG = scores_BKGTS.max(-1).transpose(0, 3, 1, 2)
  return out_BTNH, tops_BTKG.reshape(batch, length, num_heads)


def _on_gpu(*arrays):
  return gpu.attend(*arrays, platforms.current() != 'gpu')


def _on_tpu(*arrays):
  return tpu.attend(*arrays, platforms.current() != 'tpu')


_RUN = {
  'reference': _reference,
  'blocked': blocked.attend,
  'pallas_gpu': _on_gpu,
  'pallas_tpu': _on_tpu,
}
BACKENDS = tuple(_RUN)
