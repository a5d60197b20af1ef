"""Every shipped list maps (0, 1.02] to positive, finite, useful values."""

import numpy as np
import pytest

from composer_jax.optim.muon import coefficients

STEPS = {
  'polar_express': range(4, 9),
  'quintic': (5,),
  'keller': range(1, 11),
  'deepseek_v4': (10,),
  'flash_aol': (4,),
}


def _composed(triples, values):
  for a, b, c in triples:
    values = a * values + b * values**3 + c * values**5
  return values


def _is_safe(triples):
  values = np.linspace(0, 1.02, 20001)[1:]
  with np.errstate(over='ignore', invalid='ignore'):
    composed = _composed(triples, values)
  is_finite = np.isfinite(composed).all() and composed.max() < 2
  return bool(is_finite and composed.min() > 0 and _composed(triples, 1) > 0.5)


def _cases():
  for name in coefficients.NAMES:
    for steps in STEPS[name]:
      yield name, steps, 1.02
      if name == 'polar_express':
        yield name, steps, 1.05
        yield name, steps, 1.1


def test_every_list_at_every_number_of_steps_is_safe():
  unsafe = [
    case for case in _cases() if not _is_safe(coefficients.triples(*case))
  ]
  assert not unsafe


def test_the_law_refuses_the_lists_that_are_left_out():
  # Emerging-Optimizers' 'aol' turns a rank-1 momentum round; Polar Express
  # as published diverges above 1.
  aol = (
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
  )
  assert _composed(aol, 1) == pytest.approx(-0.994, abs=5e-4)
  stretch = 1.02 / 1.01
  nearly = [
    (a * stretch, b * stretch**3, c * stretch**5)
    for a, b, c in coefficients.triples('polar_express')
  ]
  assert not _is_safe(aol) and not _is_safe(nearly)


@pytest.mark.parametrize(
  'name,steps,low,high',
  [
    ('keller', 5, 0.682, 1.202),
    ('quintic', 5, 0.978, 1.145),
    ('polar_express', 5, 0.864, 1.124),
    ('polar_express', 6, 0.996, 1.001),
    ('deepseek_v4', 10, 0.999, 1.002),
    ('flash_aol', 4, 0.941, 1.050),
  ],
)
def test_range_of_the_composed_polynomial(name, steps, low, high):
  composed = _composed(
    coefficients.triples(name, steps), np.linspace(0.01, 1, 20001)
  )
  assert low - 6e-4 < composed.min() and composed.max() < high + 6e-4


def test_safety_stretches_all_but_the_fixed_point():
  triples = coefficients.triples('polar_express', 8, 1.05)
  a, b, c = triples[0]
  np.testing.assert_allclose(
    [a * 1.05, b * 1.05**3, c * 1.05**5],
    [8.28721201814563, -23.595886519098837, 17.300387312530933],
    rtol=1e-12,
  )
  assert triples[-1] == (1.875, -1.25, 0.375)


@pytest.mark.parametrize(
  'arguments,message',
  [
    (('kellar',), "'kellar' are not one of .*'keller'"),
    (('quintic', 6), "'quintic' cannot give 6 steps, only 5 to 5; leave"),
    (('polar_express', 9), '9 steps, only 4 to 8; leave steps unset'),
    (('quintic', None, 1.05), "1.05 stretches polar_express only, not 'quin"),
    (('polar_express', 5, 1.01), r'1.01 must lie in \[1.02, 1.1\]'),
  ],
)
def test_what_a_list_cannot_give_is_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    coefficients.triples(*arguments)
