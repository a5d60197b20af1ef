"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp

from composer_jax.core import rounding


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Divides by the root mean square, in float32 (Zhang & Sennrich 2019).

  The mean is over the last axes of `x`, as many as `scale` has.
  """
  with jax.named_scope('norm'):
    wide = x.astype(jnp.float32)
    axes = tuple(range(-scale.ndim, 0))
    mean_square = jnp.square(wide).mean(axes, keepdims=True)
    y = wide * jax.lax.rsqrt(mean_square + eps)
    return rounding.rounded(y * scale.astype(jnp.float32), x.dtype)
