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


def last(x: jax.Array) -> Axes:
  """Returns the axes of activations, whose last one is contracted."""
  return Axes((x.ndim - 1,), (x.ndim - 1,))


def quantise(x: jax.Array, name: str, axes: Axes) -> Quantised:
  """Returns an array's codes and scales in the format of a name."""
  codes, scales, outer = _scaled(x, name, axes)
  code_dtype, scale_dtype = _DTYPES[name]
  codes = _whole(codes, x.shape, axes.blocks).astype(code_dtype)
  inner = _inner(axes.blocks)
  return Quantised(codes, scales.squeeze(inner).astype(scale_dtype), outer)


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


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def rounded(x: jax.Array, name: str, axes: Axes) -> jax.Array:
  """Returns what `dequantise` makes of the codes of x, in the dtype of x.

  The gradient passes unchanged (straight-through, Bengio et al. 2013).
  """
  codes, scales, outer = _scaled(x, name, axes)
  values = _whole(codes * scales, x.shape, axes.blocks)
  return rounding.rounded(values if outer is None else values * outer, x.dtype)


@rounded.defjvp
def _rounded_jvp(name, axes, primals, tangents):
  return rounded(*primals, name, axes), tangents[0]


def stochastic(x: jax.Array, uniform: jax.Array, axes: Axes) -> jax.Array:
  """Returns x rounded to MXFP8 up or down, so that the mean is x.

  `uniform` are numbers from [0, 1) in the shape of x.
  """
  codes, scales, _ = _scaled(x, 'mxfp8', axes, uniform)
  return rounding.rounded(_whole(codes * scales, x.shape, axes.blocks), x.dtype)


def _scaled(x, name, axes, uniform=None):
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
    scales = grids.e4m3(_divided(top, grids.E2M1_MAX))
    codes = grids.e2m1(x, scales)
  elif name == 'int4':
    scales = jnp.maximum(_divided(top, _INT4_MAX), _INT4_LEAST)
    scales = rounding.rounded(scales, jnp.bfloat16).astype(jnp.float32)
    codes = jnp.clip(jnp.round(_divided(x, scales)), -_INT4_MAX, _INT4_MAX)
    codes = jnp.where(codes == 0, 0.0, codes)  # INT4 has no -0.
  else:
    scales = grids.scale_up(top, grids.E4M3_MAX)
    if uniform is not None:
      uniform = _in_blocks(uniform, name, axes.blocks)
    codes = grids.e4m3(x / scales, uniform)
  return codes, scales, outer


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
