"""Rounding of float32 to grids of few bits.

Values stay float32: to cast to a narrow dtype and back is a pair of operations
that XLA may leave out, and slow on a CPU. Each function rounds as the cast of
`ml_dtypes` to the type of its name (nearest, ties to even), but for values past
the largest of the grid, which become that, and NaN, which stays NaN.

XLA:CPU turns a division by a broadcast array into a product with reciprocals,
which moves a fourth of random quotients, and with them codes at ties; a TPU has
no exact division at all. So nothing here divides but by powers of two, whose
reciprocals are exact: ties times a scale are exact, too, and are compared.
"""

import math

import jax
import jax.numpy as jnp

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E4M3_BITS, _E4M3_LOWEST = 3, -6  # of the mantissa; smallest normal exponent
# From one number of E2M1 to the next: the tie, the step, and whether the tie
# itself goes up, to the number whose last bit is zero.
_E2M1_STEPS = (
  (0.25, 0.5, False),
  (0.75, 0.5, True),
  (1.25, 0.5, False),
  (1.75, 0.5, True),
  (2.5, 1.0, False),
  (3.5, 1.0, True),
  (5.0, 2.0, False),
)
# The smallest normal float32: devices take smaller numbers for zero.
SMALLEST = 2.0**-126


def e4m3(x: jax.Array, uniform: jax.Array | None = None) -> jax.Array:
  """Returns the nearest float8_e4m3fn: 3 bits of mantissa, up to 448.

  With numbers from [0, 1) of the shape of x it is one of the two neighbours,
  and their mean over all such numbers is x.
  """
  x = x.astype(jnp.float32)
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  exponent = ((bits >> 23) & 0xFF) - 127
  # Numbers past the grid have larger exponents.
  steps = jnp.clip(exponent, _E4M3_LOWEST, 20) - _E4M3_BITS
  step, inverse = (
    jax.lax.bitcast_convert_type((127 + sign * steps) << 23, jnp.float32)
    for sign in (1, -1)
  )
  codes = x * inverse
  if uniform is None:
    codes = jnp.round(codes)
  else:
    below = jnp.floor(codes)  # The difference is exact.
    codes = below + (uniform < codes - below)
  return jnp.clip(codes * step, -E4M3_MAX, E4M3_MAX)


def e2m1(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
  """Returns the nearest of 0, 1/2, 1, 3/2, 2, 3, 4, 6 to x / scale, signed.

  The scale is positive, of at most 20 bits of mantissa; 0 gives zeros.
  """
  x = x.astype(jnp.float32)
  size = jnp.abs(x)
  code = jnp.zeros_like(size)
  for tie, step, goes_up in _E2M1_STEPS:
    is_past = size >= tie * scale if goes_up else size > tie * scale
    code += jnp.where(is_past & (scale > 0), step, 0.0)
  return jnp.where(jnp.isnan(x), x, jnp.copysign(code, x))


def scale_up(top: jax.Array, most: float) -> jax.Array:
  """Returns the smallest power of two with which `most` reaches top.

  `most` is 7/8 or 21/32 of a power of two: 448 = 7 * 64, 2688 = 21 * 128.
  """
  power = power_of_two(top / 2.0 ** math.ceil(math.log2(most)))
  return jnp.where(power * most < top, 2 * power, power)


def largest(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Returns the largest magnitude over axes, which are kept; NaN if any is.

  XLA:CPU's maximum of floats loses NaN in large arrays. As integers NaN is
  above infinity, and both are above all numbers.
  """
  bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
  top = bits.max(axes, keepdims=True)
  return jax.lax.bitcast_convert_type(top, jnp.float32)


def power_of_two(x: jax.Array) -> jax.Array:
  """Returns the smallest power of two from x on, as E8M0 rounded up.

  Zero gives 2^-126, the least that float32 keeps normal; infinity and NaN
  stay.
  """
  bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
  # Any bit of the mantissa carries into the exponent.
  whole = (bits + 0x7FFFFF) & 0x7F800000
  power = jax.lax.bitcast_convert_type(whole, jnp.float32)
  power = jnp.maximum(power, jnp.float32(SMALLEST))
  return jnp.where(jnp.isfinite(x), power, jnp.abs(x))
