"""Rounding that happens where it is written, in every program.

XLA may skip a rounding to bfloat16 between two operations that it computes in
float32 anyway ('excess precision'), in one program and not in another, as its
fusions have it. A sampler and a trainer then disagree in the last bit of
bfloat16 almost everywhere, though each is as exact as it can be. What crosses
from one operation to the next goes through here instead.
"""

import jax
import jax.numpy as jnp

from composer_jax.core import platforms


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike | None = None):
  """Returns x as `dtype`, its own by default, rounded whatever follows."""
  dtype = jnp.dtype(dtype or x.dtype)
  if dtype == jnp.bfloat16:
    # Exponent and mantissa bits of bfloat16.
    x = jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7)
  return x.astype(dtype)


def wide_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """Returns the dtype of what need not be rounded between two products.

  float32 on CPU, whose bfloat16 products widen their operands anyway; `dtype`
  on accelerators, which multiply nothing faster.
  """
  if platforms.current() == 'cpu':
    return jnp.promote_types(dtype, jnp.float32)
  return jnp.dtype(dtype)
