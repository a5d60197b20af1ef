"""Formats of low precision: codes of few bits, with a scale for each block.

A value is code times scale, in NVFP4 times an outer scale, too. All scales but
those of INT4 have few bits, so that their products with codes are exact in
bfloat16: dequantised weights are policies like any other, which sampler and
trainer multiply by the same kernels.

| format | code | scale | block |
| --- | --- | --- | --- |
| 'mxfp8' | E4M3 | E8M0, rounded up | 32 |
| 'nvfp4' | E2M1 | E4M3, and a power of two for each row | 16 |
| 'fp8' | E4M3 | E8M0, rounded up | 128, of weights 128 x 128 |
| 'int4' | -7 .. 7 | bfloat16 (largest / 7, at least 1e-5) | 32 |

Blocks lie along the axis that a product contracts; a last one may be shorter.
The outer scale of NVFP4 is that of a token or of a weight's output, never of a
tensor, in which later tokens would change earlier ones (Composer 2, section on
low precision); as a power of two it wastes at most one of E4M3's 15 exponents.
Codes of floats are exact, whatever a backend makes of a division
(`numerics.grids`). The scales of NVFP4 and all of INT4 take one quotient each,
which is exact where the backend's division is: on CPU, not on a TPU.
A number that is not finite makes its block NaN, in NVFP4 its row.

Packed, a code has 8 bits or 4, two of these a byte, and an outer scale 8: NVFP4
takes 4.5 bits a weight and 8 bits a row, INT4 4.5, MXFP8 8.25.

Sources: OCP Microscaling Formats 1.0; NVFP4 of arXiv 2509.25149; blocks of 128
of DeepSeek-V3, with the scales of V3.1; INT4 of Kimi K2 Thinking.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.core import rounding
from composer_jax.numerics import grids

BLOCKS = {'mxfp8': 32, 'nvfp4': 16, 'fp8': 128, 'int4': 32}
NAMES = tuple(BLOCKS)
# Formats of activations, too; INT4 is one of weights alone.
ACTIVATIONS = ('mxfp8', 'nvfp4', 'fp8')
# Those whose values, in any part of whole blocks, round to themselves: scales
# are powers of two.
BYTES = ('mxfp8', 'fp8')
_DTYPES = {
  'mxfp8': (jnp.float8_e4m3fn, jnp.float8_e8m0fnu),
  'nvfp4': (jnp.float4_e2m1fn, jnp.float8_e4m3fn),
  'fp8': (jnp.float8_e4m3fn, jnp.float8_e8m0fnu),
  'int4': (jnp.int4, jnp.bfloat16),
}
_INT4_MAX, _INT4_LEAST = 7.0, 1e-5


class Quantised(NamedTuple):
  """An array in a format.

  Attributes:
    codes: codes in the shape of the array.
    scales: scale of each block, in that shape with blocked axes divided by the
      block, rounded up.
    outer: float32 powers of two that broadcast with the codes; None but for
      NVFP4.
  """

  codes: jax.Array
  scales: jax.Array
  outer: jax.Array | None


# The arrays of `pack`, by name.
PARTS = ('codes', 'scales', 'outer')


class Axes(NamedTuple):
  """The axes of an array, counted from its first.

  Attributes:
    blocks: axes of the blocks: the one that a product contracts, and a second
      one for the square blocks of weights in 'fp8'.
    row: axes over which NVFP4 has one outer scale: the contracted one, and that
      of gate and up.
  """

  blocks: tuple[int, ...]
  row: tuple[int, ...]

  def without(self, num: int) -> 'Axes':
    """Returns the axes of an array that lacks the first `num`."""
    return Axes(*(tuple(axis - num for axis in axes) for axes in self))


def last(x: jax.Array) -> Axes:
  """Returns the axes of activations, whose last one is contracted."""
  return Axes((x.ndim - 1,), (x.ndim - 1,))


def quantise(x: jax.Array, name: str, axes: Axes) -> Quantised:
  """Returns an array's codes and scales in the format of a name."""
  codes, scales, outer = _scaled(x, name, axes)
  codes = _whole(codes, x.shape, axes.blocks)
  return _stored(codes, scales, outer, name, axes)


def _stored(codes, scales, outer, name, axes):
  code_dtype, scale_dtype = _DTYPES[name]
  scales = scales.squeeze(_inner(axes.blocks)).astype(scale_dtype)
  return Quantised(codes.astype(code_dtype), scales, outer)


def pack(x: jax.Array, name: str, axes: Axes) -> dict[str, jax.Array]:
  """Returns codes and scales of `PARTS`, with no bit of a dtype unused.

  Values that `rounded` has made are kept, and alone decide on the codes; to
  `quantise` them would change some where a scale is subnormal, or where INT4
  has rounded to bfloat16. Other blocks get the codes of `quantise`.

  Raises:
    ValueError: two codes of 4 bits do not share a byte, as the contracted axis
      is odd.
  """
  axis = axes.blocks[0]
  if name in _BITS and x.shape[axis] % 2:
    raise ValueError(
      f'{name!r} packs two codes in a byte, and the contracted axis of '
      f'{list(x.shape)} is odd. Choose a format of 8 bits.'
    )
  codes, scales, outer = _scaled(x, name, axes, recovers=True)
  codes = _whole(codes, x.shape, axes.blocks)
  whole = _stored(codes, scales, outer, name, axes)
  if name in _BITS:
    pairs = jnp.moveaxis(_BITS[name][0](codes) & 15, axis, 0)
    pairs = (pairs[::2] | pairs[1::2] << 4).astype(jnp.uint8)
    whole = whole._replace(codes=jnp.moveaxis(pairs, 0, axis))
  if outer is not None:
    whole = whole._replace(outer=outer.astype(jnp.float8_e8m0fnu))
  return {k: v for k, v in whole._asdict().items() if v is not None}


def unpack(
  parts: dict[str, jax.Array],
  name: str,
  axes: Axes,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> jax.Array:
  """Returns the values of packed arrays."""
  codes, outer = parts['codes'], parts.get('outer')
  if name in _BITS:
    axis = axes.blocks[0]
    pairs = jnp.stack([codes & 15, codes >> 4], axis + 1).astype(jnp.int32)
    shape = list(codes.shape)
    shape[axis] *= 2
    codes = _BITS[name][1](pairs).reshape(shape)
  if outer is not None:
    outer = outer.astype(jnp.float32)
  whole = Quantised(codes, parts['scales'], outer)
  return dequantise(whole, name, axes, dtype)


# Not casts of four-bit types, which XLA:CPU cannot compile everywhere. The bits
# of E2M1 are a sign, two of exponent with bias 1, and one of mantissa; 0 and
# 1/2 have no exponent.


def _e2m1_bits(codes):
  words = jax.lax.bitcast_convert_type(codes, jnp.int32)
  size = jnp.abs(codes)
  normal = ((words >> 22) & 0x1FF) - 2 * 126
  bits = jnp.where(size >= 1, normal, (2 * size).astype(jnp.int32))
  return bits | (words >> 28) & 8


def _e2m1_of(bits):
  words = ((bits & 7) << 22) + (126 << 23)
  normal = jax.lax.bitcast_convert_type(words, jnp.float32)
  size = jnp.where((bits & 6) != 0, normal, 0.5 * (bits & 1))
  return jnp.where((bits & 8) != 0, -size, size)


_BITS = {
  'nvfp4': (_e2m1_bits, _e2m1_of),
  'int4': (lambda codes: codes.astype(jnp.int32), lambda bits: (bits ^ 8) - 8),
}


def dequantise(
  array: Quantised,
  name: str,
  axes: Axes,
  dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
  """Returns the values of a quantised array."""
  codes = _in_blocks(array.codes.astype(jnp.float32), name, axes.blocks)
  scales = jnp.expand_dims(
    array.scales.astype(jnp.float32), _inner(axes.blocks)
  )
  values = _whole(codes * scales, array.codes.shape, axes.blocks)
  if array.outer is not None:
    values *= array.outer
  return rounding.rounded(values, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def rounded(
  x: jax.Array, name: str, axes: Axes, recovers: bool = False
) -> jax.Array:
  """Returns what `dequantise` makes of the codes of x, in the dtype of x.

  With `recovers` the codes are those of `pack`, so that values of the format
  stay. The gradient passes unchanged (straight-through, Bengio et al. 2013).
  """
  codes, scales, outer = _scaled(x, name, axes, recovers=recovers)
  values = _whole(codes * scales, x.shape, axes.blocks)
  return rounding.rounded(values if outer is None else values * outer, x.dtype)


@rounded.defjvp
def _rounded_jvp(name, axes, recovers, primals, tangents):
  return rounded(*primals, name, axes, recovers), tangents[0]


def stochastic(x: jax.Array, uniform: jax.Array, axes: Axes) -> jax.Array:
  """Returns x rounded to MXFP8 up or down, so that the mean is x.

  `uniform` are numbers from [0, 1) in the shape of x.
  """
  codes, scales, _ = _scaled(x, 'mxfp8', axes, uniform=uniform)
  return rounding.rounded(_whole(codes * scales, x.shape, axes.blocks), x.dtype)


def _scaled(x, name, axes, recovers=False, uniform=None):
  """Returns codes in float32 and blocks, scales of blocks, and outer scales."""
  x = x.astype(jnp.float32)
  outer = None
  if name == 'nvfp4':
    # Largest code times largest scale.
    most = grids.E2M1_MAX * grids.E4M3_MAX
    top = grids.largest(x, axes.row)
    outer = grids.scale_up(top, most)
    x /= outer
  x = _in_blocks(x, name, axes.blocks)
  top = grids.largest(x, _inner(axes.blocks))
  if name == 'nvfp4':
    # The largest code is 6, but of a subnormal scale, which may be far off.
    tops = (grids.E2M1_MAX, 4.0, 3.0)[: 3 if recovers else 1]
    scales = [grids.e4m3(_divided(top, code)) for code in tops]
    codes, scales = _first_exact(x, scales, grids.e2m1, jnp.float32)
  elif name == 'int4':
    scale = jnp.maximum(_divided(top, _INT4_MAX), _INT4_LEAST)
    scales = [rounding.rounded(scale, jnp.bfloat16).astype(jnp.float32)]
    if recovers:
      scales += _near_int4(top)
    codes, scales = _first_exact(x, scales, _int4, jnp.bfloat16)
  else:
    scales = grids.scale_up(top, grids.E4M3_MAX)
    if uniform is not None:
      uniform = _in_blocks(uniform, name, axes.blocks)
    codes = grids.e4m3(x / scales, uniform)
  return codes, scales, outer


def _first_exact(x, scales, code, dtype):
  """Returns codes and the first scale of each block whose values are x.

  If none is, the scale is the first of all.
  """
  codes, best = code(x, scales[0]), scales[0]
  if len(scales) == 1:
    return codes, best
  inner = tuple(a for a, n in enumerate(best.shape) if n != x.shape[a])
  is_exact = _is_exact(x, codes * best, inner, dtype)
  for scale in scales[1:]:
    other = code(x, scale)
    takes = ~is_exact & _is_exact(x, other * scale, inner, dtype)
    codes, best = jnp.where(takes, other, codes), jnp.where(takes, scale, best)
    is_exact |= takes
  return codes, best


def _is_exact(x, values, inner, dtype):
  same = rounding.rounded(values, dtype).astype(jnp.float32) == x
  return same.all(inner, keepdims=True)


def _int4(x, scales):
  # A scale of `quantise` never gives -8; checkpoints of others have it.
  codes = jnp.clip(jnp.round(_divided(x, scales)), -_INT4_MAX - 1, _INT4_MAX)
  return jnp.where(codes == 0, 0.0, codes)  # INT4 has no -0.


def _near_int4(top):
  """Returns other scales with which a block may have been rounded.

  Seven times a scale is rounded to bfloat16, a seventh of which is rounded to
  the scale or its neighbour. The least scale is that of smaller numbers, too,
  and checkpoints of others have the code -8.
  """
  own = rounding.rounded(_divided(top, _INT4_MAX), jnp.bfloat16)
  bits = jax.lax.bitcast_convert_type(own.astype(jnp.float32), jnp.int32)
  near = [bits + step * 2**16 for step in (-1, 0, 1)]
  least = jnp.asarray(_INT4_LEAST, jnp.bfloat16).astype(jnp.float32)
  return [
    *(jax.lax.bitcast_convert_type(word, jnp.float32) for word in near),
    jnp.full_like(top, least),
    top / 8,
  ]


def _divided(x, divisor):
  """Divides as IEEE says, where XLA would multiply by a reciprocal."""
  divisor = jnp.broadcast_to(divisor, x.shape).astype(jnp.float32)
  return x / jax.lax.optimization_barrier(divisor)


def _inner(blocks):
  """Returns the axes within blocks of an array in blocks."""
  return tuple(axis + i + 1 for i, axis in enumerate(sorted(blocks)))


def _in_blocks(x, name, blocks):
  """Splits each blocked axis in two, after zeros that fill the last block."""
  size = BLOCKS[name]
  pads = [(0, -n % size if a in blocks else 0) for a, n in enumerate(x.shape)]
  if any(pad for _, pad in pads):
    x = jnp.pad(x, pads)
  shape = []
  for axis, n in enumerate(x.shape):
    shape += [n // size, size] if axis in blocks else [n]
  return x.reshape(shape)


def _whole(x, shape, blocks):
  """Inverts `_in_blocks`."""
  padded = list(x.shape)
  for axis in _inner(blocks)[::-1]:
    padded[axis - 1 : axis + 1] = [padded[axis - 1] * padded[axis]]
  return x.reshape(padded)[tuple(map(slice, shape))]
