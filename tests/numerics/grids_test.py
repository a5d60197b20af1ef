"""Roundings equal the casts of ml_dtypes, for every code and about each tie."""

import jax
import ml_dtypes
import numpy as np
import pytest

from composer_jax.numerics import grids

GRIDS = {
  'e4m3': (grids.e4m3, ml_dtypes.float8_e4m3fn, 8, grids.E4M3_MAX),
  'e2m1': (grids.e2m1, ml_dtypes.float4_e2m1fn, 4, grids.E2M1_MAX),
}


def _codes(dtype, bits):
  codes = np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32)
  return np.sort(codes[np.isfinite(codes)])


@pytest.mark.parametrize('name', GRIDS)
def test_every_float_goes_where_ml_dtypes_casts_it(name):
  rounded, dtype, bits, largest = GRIDS[name]
  codes = _codes(dtype, bits)
  ties = (codes[1:] + codes[:-1]) / 2
  beside = [np.nextafter(ties, np.float32(x)) for x in (np.inf, -np.inf)]
  rng = np.random.default_rng(0)
  random = rng.standard_normal(100_000) * np.exp2(
    rng.integers(-14, 12, 100_000)
  )
  odd = [0.0, -0.0, 1e-45, -1e-38, 3e38, -3e38, np.inf, -np.inf]
  x = np.concatenate([random, codes, ties, *beside, odd]).astype(np.float32)
  wanted = np.clip(x, -largest, largest).astype(dtype).astype(np.float32)
  got = np.asarray(jax.jit(rounded)(x))
  np.testing.assert_array_equal(got, wanted)
  np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))
  assert np.isnan(rounded(np.float32(np.nan)))


def test_powers_of_two_are_rounded_up():
  x = np.array([1, 3, 0.7, 2**-20, 448, 449, -3, 0, 1e-45], np.float32)
  wanted = [1, 4, 1, 2**-20, 512, 512, 4, 2.0**-126, 2.0**-126]
  np.testing.assert_array_equal(jax.jit(grids.power_of_two)(x), wanted)
  odd = grids.power_of_two(np.array([np.inf, np.nan, -np.inf], np.float32))
  np.testing.assert_array_equal(odd, [np.inf, np.nan, np.inf])


def test_rounding_by_chance_has_the_mean_of_its_argument():
  """Between every two neighbours; codes themselves stay."""
  codes = np.unique(_codes(ml_dtypes.float8_e4m3fn, 8))
  below, above = codes[:-1], codes[1:]
  rng = np.random.default_rng(0)
  share = rng.random(len(below))
  x = (below + share * (above - below)).astype(np.float32)
  count = 20_000
  uniform = rng.integers(0, 2**23, (count, len(x))) * np.float32(2**-23)
  got = np.asarray(
    jax.jit(grids.e4m3)(np.broadcast_to(x, uniform.shape), uniform)
  )
  assert ((got == below) | (got == above)).all()
  error = (got.mean(0, dtype=float) - x) / (above - below)
  # A draw is one of two values.
  assert (np.abs(error) <= 4 * np.sqrt(share * (1 - share) / count)).all()
  highest = np.full_like(codes, 1 - 2**-23)
  np.testing.assert_array_equal(grids.e4m3(codes, highest), codes)
