"""Formats equal an oracle in numpy and ml_dtypes, code by code."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from composer_jax.numerics import formats

E2M1, E4M3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn

# Op by op it would take seconds to compile.
_rounded = jax.jit(formats.rounded, static_argnames=('name', 'axes'))


def _power_above(x):
  """Returns the smallest power of two from x on, at least 2^-126."""
  mantissa, exponent = np.frexp(x)
  exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
  power = np.ldexp(np.float32(1), np.maximum(exponent, -126))
  return np.where(x == 0, np.float32(2.0**-126), power).astype(np.float32)


def _oracle(x_ND, name):
  """Returns codes, scales and outer scales of rows of whole blocks."""
  num, width = x_ND.shape
  size, outer = formats.BLOCKS[name], None
  if name == 'nvfp4':
    top = np.abs(x_ND).max(-1, keepdims=True)
    outer = _power_above((top / np.float32(6 * 448)).astype(np.float32))
    x_ND = x_ND / outer
  x = x_ND.reshape(num, width // size, size)
  top = np.abs(x).max(-1, keepdims=True)
  if name == 'nvfp4':
    scale = (top / np.float32(6)).astype(E4M3).astype(np.float32)
    ratio = np.divide(x, scale, out=0 * x, where=scale != 0)
    codes = np.clip(ratio, -6, 6).astype(E2M1)
  elif name == 'int4':
    scale = np.maximum(top / np.float32(7), np.float32(1e-5))
    scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    codes = np.clip(np.rint(x / scale), -7, 7)
  else:
    scale = _power_above(top / np.float32(448))
    codes = np.clip(x / scale, -448, 448).astype(E4M3)
  codes = codes.astype(np.float32).reshape(num, width)
  return codes, scale[..., 0], outer


def _hard(num, width, seed):
  """Returns rows with zeros, zero blocks, ties, and magnitudes far apart."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((num, width)) * np.exp2(
    rng.integers(-12, 12, (num, 1))
    + rng.integers(-8, 3, (num, width // 16)).repeat(16, 1)
  )
  coarse = rng.random((num, 1)) < 0.3
  x = np.where(coarse, np.round(x * 4) / 4, x)
  x[rng.random(x.shape) < 0.05] = 0
  x[::7, :128] = 0
  x[::31] = 0
  return x.astype(np.float32)


def _check(num, seed):
  x = _hard(num, 256, seed)
  for name in formats.NAMES:
    fn = jax.jit(formats.quantise, static_argnums=(1, 2))
    got = fn(x, name, formats.last(x))
    codes, scales, outer = _oracle(x, name)
    np.testing.assert_array_equal(got.codes.astype(np.float32), codes, name)
    np.testing.assert_array_equal(got.scales.astype(np.float32), scales, name)
    if outer is not None:
      np.testing.assert_array_equal(got.outer, outer, name)


def test_codes_and_scales_are_those_of_the_oracle():
  _check(400, 0)


@pytest.mark.slow
def test_a_million_blocks_are_those_of_the_oracle():
  for seed in range(16):
    _check(4096, seed)  # 256 numbers a row: 16, 8 and 2 blocks


def _axes(name):
  return formats.Axes((1, 3) if name == 'fp8' else (1,), (1, 2))


@pytest.mark.parametrize('name', formats.NAMES)
def test_rounding_is_quantising_and_back(name):
  """Over a weight [N, D, 2, F] whose axes are no whole blocks."""
  x = _hard(3 * 72, 80, 1).reshape(3, 72, 2, 40).copy()
  axes = _axes(name)
  array = formats.quantise(x, name, axes)
  got = formats.dequantise(array, name, axes)
  rounded = _rounded(jnp.asarray(x), name, axes)
  np.testing.assert_array_equal(got, rounded)
  if name != 'int4':
    # Exact in bfloat16, so that a policy can hold it.
    np.testing.assert_array_equal(got.astype(jnp.bfloat16), got)
  np.testing.assert_array_equal(np.signbit(got), np.signbit(rounded))
  if array.outer is not None:
    assert array.outer.shape == (3, 1, 1, 40)  # One of gate and up.
  blocks = -(-72 // formats.BLOCKS[name])
  columns = 1 if name == 'fp8' else 40
  assert array.scales.shape == (3, blocks, 2, columns)


def _policy_values(x, name, axes):
  rounded = _rounded(jnp.asarray(x), name, axes)
  return rounded.astype(jnp.bfloat16)


@pytest.mark.parametrize('name', formats.NAMES)
def test_packed_codes_have_every_bit_of_the_values(name):
  """To quantise again would change subnormal scales, and those of INT4."""
  x = _hard(3 * 72, 80, 2).reshape(3, 72, 2, 40).copy()
  x[:, :16] *= 2.0**-13
  x[:, 32:48] *= 3e-5
  axes = _axes(name)
  values = _policy_values(x, name, axes)
  packed = jax.jit(formats.pack, static_argnums=(1, 2))(values, name, axes)
  back = jax.jit(formats.unpack, static_argnums=(1, 2))(packed, name, axes)
  bits = lambda array: np.asarray(array).view(np.uint16)
  np.testing.assert_array_equal(bits(back), bits(values))
  # Codes are a function of the values, so that identities are.
  again = formats.pack(back, name, axes)
  for part, array in packed.items():
    np.testing.assert_array_equal(again[part], array, part)
  if name in ('nvfp4', 'int4'):
    assert packed['codes'].shape == (3, 36, 2, 40)
    twice = formats.quantise(values, name, axes)
    dequantised = formats.dequantise(twice, name, axes, jnp.bfloat16)
    assert (dequantised != values).any()


def test_codes_that_fill_no_byte_are_refused():
  x = jnp.ones((5, 3))
  with pytest.raises(ValueError, match=r'two codes in a byte.*\[5, 3\] is odd'):
    formats.pack(x, 'nvfp4', formats.Axes((0,), (0,)))


def test_int4_of_others_stays():
  """Scales of any bfloat16, and the code -8, which no scale of ours gives."""
  rng = np.random.default_rng(0)
  codes = rng.integers(-8, 8, (500, 4, 32)).astype(np.float32)
  codes[:, :, 5] = rng.choice([-8, 7, -7], (500, 4))
  scales = np.exp(rng.normal(size=(500, 4, 1))).astype(ml_dtypes.bfloat16)
  x = (codes * scales.astype(np.float32)).astype(ml_dtypes.bfloat16)
  x = x.reshape(500, 128).astype(np.float32)
  keep = jax.jit(formats.rounded, static_argnums=(1, 2, 3))
  kept = keep(x, 'int4', formats.last(x), True).astype(jnp.bfloat16)
  np.testing.assert_array_equal(kept.astype(np.float32), x)


@pytest.mark.parametrize('name', ['mxfp8', 'nvfp4', 'fp8'])
def test_values_of_a_format_stay(name):
  """Every code, in blocks that reach the largest one."""
  dtype, _ = formats._DTYPES[name]
  codes = np.arange(16 if name == 'nvfp4' else 256, dtype=np.uint8)
  codes = codes.view(np.dtype(dtype)).astype(np.float32)
  codes = codes[np.isfinite(codes)]
  size = formats.BLOCKS[name]
  pieces = [codes[i : i + size - 1] for i in range(0, len(codes), size - 1)]
  largest = codes.max()
  rows = np.zeros((len(pieces), size), np.float32)
  for row, piece in zip(rows, pieces, strict=True):
    row[0], row[1 : len(piece) + 1] = largest, piece
  scales = np.float32([2**-7, 1, 2**9])
  x = (rows * scales[:, None, None]).reshape(-1, size)
  got = _rounded(jnp.asarray(x), name, formats.last(x))
  np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize(
  'name, odd',
  [
    *((name, np.nan) for name in formats.NAMES),
    ('nvfp4', np.inf),
    ('mxfp8', -np.inf),
  ],
)
def test_a_number_that_is_not_finite_makes_its_block_nan(name, odd):
  x = np.ones((2, 256), np.float32)
  x[0, 130] = odd
  got = np.asarray(_rounded(jnp.asarray(x), name, formats.last(x)))
  size = 256 if name == 'nvfp4' else formats.BLOCKS[name]  # NVFP4: the row
  start = 130 // size * size
  assert np.isnan(got[0, start : start + size]).all()
  assert np.isfinite(got[0, :start]).all() and np.isfinite(got[1]).all()
  # Larger arrays, where a maximum of floats would lose NaN.
  many = np.ones((140, 64), np.float32)
  many[3, 5] = odd
  array = jax.jit(formats.quantise, static_argnums=(1, 2))(
    many, name, formats.last(many)
  )
  for made in (
    _rounded(many, name, formats.last(many)),
    formats.dequantise(array, name, formats.last(many)),
  ):
    assert np.isnan(np.asarray(made)[3, 5]) and np.isnan(made[3, 4])
    assert np.isfinite(np.delete(np.asarray(made), 3, 0)).all()
  array = formats.quantise(x, name, formats.last(x))
  back = np.asarray(formats.dequantise(array, name, formats.last(x)))
  assert np.isfinite(back[1]).all()


def test_a_reciprocal_would_change_codes():
  """XLA:CPU would multiply by one: x / scale is a tie, and that is none."""
  x = _hard(2000, 256, 2)
  _, scales, outer = _oracle(x, 'nvfp4')
  scales = np.repeat(scales, 16, axis=-1)
  with np.errstate(divide='ignore', invalid='ignore'):
    near = (x / outer) * (np.float32(1) / scales)
  near = np.clip(np.where(scales == 0, 0, near), -6, 6).astype(E2M1)
  exact, *_ = _oracle(x, 'nvfp4')
  changed = (near.astype(np.float32) != exact).sum()
  assert changed > 0
  got = formats.quantise(x, 'nvfp4', formats.last(x)).codes.astype(np.float32)
  np.testing.assert_array_equal(got, exact)


@pytest.mark.parametrize('name', formats.ACTIVATIONS)
def test_a_row_does_not_depend_on_others(name):
  """The control, one scale for all rows, fails: it tells of later tokens."""
  x = _hard(64, 128, 3)
  rounded = functools.partial(_rounded, name=name)
  alone = rounded(jnp.asarray(x[:5]), axes=formats.last(x))
  changed = np.concatenate([x[:5], 1e3 * x[5:] + 7])
  together = rounded(jnp.asarray(changed), axes=formats.last(x))
  np.testing.assert_array_equal(together[:5], alone)
  if name == 'nvfp4':
    tensor = formats.Axes((1,), (0, 1))
    first, second = (
      rounded(jnp.asarray(v), axes=tensor)[:5] for v in (x, changed)
    )
    assert (first != second).any()


def test_the_gradient_passes():
  x = jnp.asarray(_hard(4, 64, 4))
  weight = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
  loss = lambda x: (_rounded(x, 'nvfp4', formats.last(x)) * weight).sum()
  np.testing.assert_array_equal(jax.grad(loss)(x), weight)


def test_values_of_int4_keep_every_bit_whatever_their_scale():
  """Scales of others may lie below the least one of `quantise`."""
  random = np.random.default_rng(3)
  codes = random.integers(-7, 8, (64, 32)).astype(np.float32)
  codes[np.arange(64), random.integers(0, 32, 64)] = 7
  scales = np.float32(2.0) ** random.uniform(-30, 3, (64, 1))
  scales = np.asarray(jnp.asarray(scales, jnp.bfloat16), np.float32)
  values = jnp.asarray(codes * scales, jnp.bfloat16)
  axes = formats.Axes((1,), ())
  back = formats.unpack(formats.pack(values, 'int4', axes), 'int4', axes)
  np.testing.assert_array_equal(
    np.asarray(back).view(np.uint16), np.asarray(values).view(np.uint16)
  )
