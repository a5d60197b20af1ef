"""Grouped-query attention: one function, one implementation per backend.

'blocked' is plain JAX; 'pallas_gpu' and 'pallas_tpu' are kernels, interpreted
on other platforms. All visit only the key blocks that a tile of queries sees,
in memory linear in the length of a row. The real compilers accept both kernels
(H200, v5p) and the interpreter agrees with 'blocked'; neither kernel has run on
its hardware yet.

The outputs and the logarithms of the softmax's sums, which the backward pass
needs, have the checkpoint name 'attention_out'.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.core import platforms, rounding
from composer_jax.kernels.attention import blocked, blocks, gpu, tpu

# Keys of a block in `kernels.attention.tiled`, the batch-invariant attention.
KEY_BLOCK = 32

Visible = blocks.Visible

# Modules with the functions `forward` and `backward`.
_KERNELS = {'blocked': blocked, 'pallas_gpu': gpu, 'pallas_tpu': tpu}
# using(backend) is a context in which 'auto' means that backend; it is part of
# the keys of jit's caches.
using = jax.make_user_context(None)


def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  visible: Visible,
  *,
  scale: float | None = None,
  backend: str | Callable[..., Any] = 'auto',
) -> tuple[jax.Array, jax.Array]:
  """Returns out_BTNH, softmax(scale q k) v over visible keys, and tops_BTN.

  The tops are each query's largest scaled score over visible keys, in float32
  and without a gradient; QK-clip needs them. A query without visible keys has
  an output of zeros and a top of -1e30.

  Args:
    q_BTNH: queries; query head n reads key/value head n // (N / K).
    v_BSKH: values; their width, which is the result's, may differ from H.
    scale: factor on the scores; None means 1 / sqrt(H).
    backend: name of a backend, a function of (arrays, visible), or 'auto' to
      choose by platform and dtype.
  """
  if backend == 'auto':
    platform = platforms.current()
    # The kernels' products are fast in bfloat16 only.
    is_plain = platform == 'cpu' or q_BTNH.dtype == jnp.float32
    backend = using.value or ('blocked' if is_plain else f'pallas_{platform}')
  if not callable(backend) and backend not in _KERNELS:
    raise ValueError(f'attention backend {backend!r} is not in {[*_KERNELS]}.')
  scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
  q_BTNH = rounding.rounded(q_BTNH * scale)
  run = backend if callable(backend) else functools.partial(_in_blocks, backend)
  return run((q_BTNH, k_BSKH, v_BSKH), visible)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(backend, arrays, visible):
  return _forward(backend, arrays, visible)[0]


def _forward(backend, arrays, visible):
  out_BTNH, tops_BTN, logs = _KERNELS[backend].forward(arrays, visible)
  out_BTNH, logs = (
    ad_checkpoint.checkpoint_name(x, 'attention_out') for x in (out_BTNH, logs)
  )
  return (out_BTNH, tops_BTN), (arrays, visible, out_BTNH, logs)


def _backward(backend, residuals, cotangents):
  arrays, visible, out_BTNH, logs = residuals
  d_out_BTNH, _ = cotangents  # The tops have no gradient.
  # d_scores = weights (d_weights - sum of weights d_weights over keys).
  means_BTN = (d_out_BTNH.astype(jnp.float32) * out_BTNH).sum(-1)
  by_query = d_out_BTNH, logs, means_BTN
  d_arrays = _KERNELS[backend].backward(arrays, visible, by_query)
  return jax.tree.map(lambda d, x: d[:, : x.shape[1]], d_arrays, arrays), None


_in_blocks.defvjp(_forward, _backward)
