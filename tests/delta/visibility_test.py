"""Which share of a policy changes: closed forms, and a count of real steps."""

import math

import ml_dtypes
import numpy as np
import pytest

from benchmarks import delta_visibility as visibility

BFLOAT16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize('dtype', (BFLOAT16, np.float16, np.float32, E4M3))
def test_spacing_is_the_distance_to_the_next_code_away_from_zero(dtype):
  bits = f'u{np.dtype(dtype).itemsize}'
  codes = np.arange(1, 2**15, 7) if np.dtype(dtype).itemsize > 1 else range(126)
  below = np.array(list(codes), bits).view(dtype)
  above = np.array([c + 1 for c in codes], bits).view(dtype)
  with np.errstate(invalid='ignore'):
    below, above = below.astype(np.float64), above.astype(np.float64)
  finite = np.isfinite(below) & np.isfinite(above)
  below, above = below[finite], above[finite]
  np.testing.assert_array_equal(visibility.spacing(below, dtype), above - below)
  np.testing.assert_array_equal(
    visibility.spacing(-below, dtype), above - below
  )


def test_spacing_of_zero_is_that_of_the_denormals():
  found = visibility.spacing(np.zeros(1), BFLOAT16)
  assert found == float(np.array([1], 'u2').view(BFLOAT16)[0])


def test_the_law_in_closed_form():
  # Spacing of bfloat16 is 2**-7 in [1, 2) and 2**-6 in [2, 4).
  masters = np.array([1.0, 1.5, 2.0, -3.0])
  update = np.array([2**-9, -(2**-8), 2**-8, 1.0])
  share = (0.25 + 0.5 + 0.25 + 1.0) / 4
  assert visibility.expected_share(masters, update, BFLOAT16) == share


def test_a_number_is_the_rms_of_normal_updates():
  rng = np.random.default_rng(0)
  masters = 0.02 * rng.standard_normal(200_000)
  for rms in (3e-7, 1e-5, 1e-2):
    drawn = rms * rng.standard_normal(masters.size)
    by_draw = visibility.expected_share(masters, drawn, BFLOAT16)
    by_form = visibility.expected_share(masters, rms, BFLOAT16)
    # The draw's own deviation, some 0.3 % of the share.
    assert by_form == pytest.approx(by_draw, rel=0.015)
  assert visibility.expected_share(masters, 0.0, BFLOAT16) == 0
  # One weight: E[min(1, |x|)] of a standard normal, unit 1.
  whole = math.erfc(1 / math.sqrt(2))
  whole += math.sqrt(2 / math.pi) * (1 - math.exp(-0.5))
  masters = np.full(2, 2.0**7)
  found = visibility.expected_share(masters, 1.0, BFLOAT16)
  assert found == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize('dtype', (BFLOAT16, np.float16, E4M3))
def test_it_predicts_what_rounding_changes(dtype):
  rng = np.random.default_rng(1)
  masters = rng.standard_normal(400_000).astype(np.float32)
  update = (1e-3 * rng.standard_normal(masters.size)).astype(np.float32)
  before, after = (
    m.astype(dtype).astype(np.float32) for m in (masters, masters + update)
  )
  measured = (before != after).mean()
  found = visibility.expected_share(masters, update, dtype)
  # Of 5,000 changes and more: 1.4 % is one deviation.
  assert found == pytest.approx(measured, rel=0.05)


def test_parts_add_up(monkeypatch):
  rng = np.random.default_rng(2)
  masters, update = rng.standard_normal((2, 1000))
  whole = visibility.expected_share(masters, update / 100, BFLOAT16)
  monkeypatch.setattr(visibility, '_PART', 64)
  parts = visibility.expected_share(masters, update / 100, BFLOAT16)
  assert parts == pytest.approx(whole, rel=1e-12)
  rms = [visibility.expected_share(masters, 1e-2, BFLOAT16)]
  monkeypatch.setattr(visibility, '_PART', 10**6)
  rms.append(visibility.expected_share(masters, 1e-2, BFLOAT16))
  assert rms[0] == pytest.approx(rms[1], rel=1e-12)


def test_codes_of_integers_count_in_their_scales():
  assert visibility.expected_share_of(np.array([0.5, -4.0]), 2.0) == 0.625


def test_nothing_changes_in_nothing():
  assert visibility.expected_share(np.zeros(0), np.zeros(0), BFLOAT16) == 0


def test_bad_arguments_are_named():
  with pytest.raises(ValueError, match='update has 2 elements and the masters'):
    visibility.expected_share(np.ones(3), np.ones(2), BFLOAT16)
  with pytest.raises(ValueError, match='int8 has no exponents'):
    visibility.spacing(np.ones(3), np.int8)
