"""Rounding that XLA cannot skip.

XLA may skip a rounding to bfloat16 between two operations that it computes in
float32 ('excess precision'), depending on how a program is fused. Sampler and
trainer would then differ in the last bit of bfloat16 almost everywhere.
"""

import jax
import jax.numpy as jnp

from composer_jax.core import platforms


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike | None = None):
  """Returns x rounded to `dtype`; None is the dtype of x."""
  dtype = jnp.dtype(dtype or x.dtype)
  if dtype == jnp.bfloat16:
    # Exponent and mantissa bits of bfloat16.
    x = jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7)
  return x.astype(dtype)


def wide_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """Returns the widest dtype between two products that costs nothing.

  It is float32 on CPU, whose bfloat16 products widen their operands anyway, and
  `dtype` on accelerators.
  """
  if platforms.current() == 'cpu':
    return jnp.promote_types(dtype, jnp.float32)
  return jnp.dtype(dtype)
