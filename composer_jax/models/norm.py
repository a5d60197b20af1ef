"""Root-mean-square normalisation."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from composer_jax.models import parameters


class RMSNorm(nn.Module):
  """Divides by the root mean square over D, in float32 (Zhang & Sennrich)."""

  eps: float

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    scale_D = parameters.create(
      self, 'scale', nn.initializers.ones, ('norm',), (x_BTD.shape[-1],)
    )
    wide_BTD = x_BTD.astype(jnp.float32)
    mean_square = jnp.square(wide_BTD).mean(-1, keepdims=True)
    y_BTD = wide_BTD * jax.lax.rsqrt(mean_square + self.eps)
    return (y_BTD * scale_D.astype(jnp.float32)).astype(x_BTD.dtype)
