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


def stochastic(key: jax.Array, x: jax.Array) -> jax.Array:
  """Rounds float32 to one of the two nearest bfloat16, whose mean is x.

  The random numbers depend on the key and the element alone. Values that are
  not finite stay so.
  """
  bits = jax.random.bits(key, x.shape, jnp.uint16)
  return _carried(x.astype(jnp.float32), bits)


def _carried(x, bits):
  # A carry out of the 16 low bits comes as often as these bits say.
  words = jax.lax.bitcast_convert_type(x, jnp.uint32)
  sums = words + bits.astype(jnp.uint32) & jnp.uint32(0xFFFF0000)
  words = jnp.where(jnp.isfinite(x), sums, words)
  return jax.lax.bitcast_convert_type(words, jnp.float32).astype(jnp.bfloat16)


def wide_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """Returns the widest dtype between two products that costs nothing.

  It is float32 on CPU, whose bfloat16 products widen their operands anyway, and
  `dtype` on accelerators.
  """
  if platforms.current() == 'cpu':
    return jnp.promote_types(dtype, jnp.float32)
  return jnp.dtype(dtype)
