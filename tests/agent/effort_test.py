"""The concave penalty against its closed forms and its derivative."""

import dataclasses
import math

import numpy as np
import pytest

from composer_jax.agent import effort

CASES = [(0.0, 0.5), (0.5, 0.01), (1.0, 0.2), (1.5, 0.1), (3.0, 2.0)]


@pytest.mark.parametrize(('q', 'k'), CASES)
def test_it_is_the_closed_form(q, k):
  for x in (0.0, 0.3, 10.0, 5000.0):
    if q == 1:
      expected = math.log(1 + k * x) / k
    else:
      expected = ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))
    assert effort.concave(x, k, q) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(('q', 'k'), CASES)
def test_its_slope_is_a_power_that_only_falls(q, k):
  x = np.linspace(0.0, 20 / k, 201)
  values = np.array([effort.concave(v, k, q) for v in x])
  middle = (x[1:] + x[:-1]) / 2
  h = 1e-3 / k
  slopes = [
    (effort.concave(v + h, k, q) - effort.concave(v - h, k, q)) / (2 * h)
    for v in middle
  ]
  np.testing.assert_allclose(slopes, (1 + k * middle) ** -q, rtol=1e-5)
  assert (np.diff(values) > 0).all()
  assert (np.diff(values, n=2) <= 1e-12 / k).all()


def test_it_is_continuous_at_the_logarithm():
  for q in (1 - 1e-9, 1 + 1e-9):
    near = effort.concave(70.0, 0.02, q)
    assert near == pytest.approx(effort.concave(70.0, 0.02, 1.0), rel=1e-7)


def test_it_saturates_above_q_1():
  assert effort.concave(1e12, 0.5, 3.0) == pytest.approx(1 / (0.5 * 2))


def test_the_coefficient_is_the_price_of_one_scale_of_linear_effort():
  options = effort.EffortOptions(
    coefficient=0.2, scale=50.0, q=0.0, turn_tokens=5.0
  )
  # 30 sampled tokens and four turns are one scale.
  assert options.penalty(30, 4) == pytest.approx(0.2)
  # So are ten sampled tokens, four turns and forty of answers at half price.
  half = dataclasses.replace(options, answer_weight=0.5)
  assert half.penalty(10, 4, 40) == pytest.approx(0.2)
  assert effort.EffortOptions().penalty(10**6, 10**6) == 0


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('coefficient', -0.1),
    ('scale', 0.0),
    ('q', -1.0),
    ('turn_tokens', -1.0),
    ('answer_weight', float('nan')),
  ],
)
def test_an_impossible_value_is_named(field, value):
  told = rf'--config\.rewards\.effort_{field} must be .* not {value}'
  with pytest.raises(ValueError, match=told):
    effort.EffortOptions(**{field: value})
