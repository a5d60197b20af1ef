"""Root-mean-square normalisation."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from composer_jax.core import rounding
from composer_jax.models import parameters


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Divides by the root mean square, in float32 (Zhang & Sennrich 2019).

  Args:
    x: any array; the mean is over its last axes, as many as `scale` has.
    scale: multiplies the result.
    eps: added to the mean square.
  """
  with jax.named_scope('norm'):
    wide = x.astype(jnp.float32)
    axes = tuple(range(-scale.ndim, 0))
    mean_square = jnp.square(wide).mean(axes, keepdims=True)
    y = wide * jax.lax.rsqrt(mean_square + eps)
    return rounding.rounded(y * scale.astype(jnp.float32), x.dtype)


class Scale(nn.Module):
  """The parameter of a norm over an axis of this length."""

  dim: int

  @nn.compact
  def __call__(self) -> jax.Array:
    return parameters.create(
      self, 'scale', nn.initializers.ones, ('norm',), (self.dim,)
    )


def scale_of(name: str, dim: int) -> dict[str, Any]:
  """Creates `<name>/scale` inside a compact module, as a params tree."""
  return {'scale': Scale(dim, name=name)()}
