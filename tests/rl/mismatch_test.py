"""Mismatch against closed forms, below float32's resolution; and bands."""

import dataclasses
import math

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.gate import bands, routes
from composer_jax.rl import mismatch

GATE = mismatch.GateOptions(
  action='flag',
  max_kl_exact=1e-9,
  max_unrecorded=0.01,
  max_kl=0.1,
  max_p99=1.0,
  max_large_ratio_share=0.1,
  min_agreement=0.5,
)


def make_trajectory(logprobs, versions=None, mask=None, ids_TMA=None):
  T = len(logprobs)
  if ids_TMA is None:
    ids_TMA = np.zeros((T, 1, 1), np.uint16)
  return records.Trajectory(
    tokens_T=np.zeros(T, np.int32),
    loss_mask_T=np.ones(T, bool) if mask is None else np.array(mask),
    logprobs_T=np.array(logprobs, np.float32),
    expert_ids_TMA=ids_TMA,
    policy_version_T=np.array(versions or [0] * T, np.int32),
    context_version_T=np.array(versions or [0] * T, np.int32),
    consumed_version_T=np.array(versions or [0] * T, np.int32),
    temperature=1.0,
  )


@pytest.mark.parametrize('x', [1e-12, 1e-9, 9.9e-4, 1.01e-3, 0.5, -0.3, -1e-8])
def test_k3_keeps_its_digits_at_every_size(x):
  # The series in exact rational steps: x^2/2 + x^3/6 + ...
  want = math.fsum(x**n / math.factorial(n) for n in range(2, 30))
  assert mismatch.k3(np.array(x)) == pytest.approx(want, rel=1e-10, abs=0)


def test_k3_is_zero_at_equality_positive_elsewhere_and_never_overflows():
  x = np.array([0.0, 1e-300, -1e-9, 5.0, -80.0, 800.0])
  values = mismatch.k3(x)
  assert values[0] == 0 and (values[2:] > 0).all() and values[-1] == np.inf
  assert values[4] == pytest.approx(79.0)


def test_k3_mean_estimates_the_kl_of_two_categoricals():
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
  estimate = (p * mismatch.k3(np.log(q) - np.log(p))).sum()
  assert estimate == pytest.approx((p * np.log(p / q)).sum(), rel=1e-12)


def test_differences_of_float32_are_exact():
  rollout = np.float32(-0.1)
  train = np.nextafter(rollout, np.float32(0))
  ((difference,),) = mismatch.log_ratios(
    [make_trajectory([rollout])], [train[None]]
  )
  assert difference == 2.0**-27  # the spacing of float32 in [2^-4, 2^-3)
  assert mismatch.k3(difference) == pytest.approx(2.0**-55, rel=1e-7, abs=0)


def test_gap_in_closed_form():
  # 200 tokens: two at ratio 3, one at 1/3, one at 1.9, the others equal.
  x_Z = np.zeros(200)
  x_Z[:4] = np.log([3.0, 3.0, 1 / 3, 1.9])
  measures = mismatch.gap(x_Z)
  k3_of_3, k3_of_third = 2 - math.log(3), -2 / 3 + math.log(3)
  total = 2 * k3_of_3 + k3_of_third + 0.9 - math.log(1.9)
  assert measures['mismatch_kl'] == pytest.approx(total / 200, rel=1e-12)
  assert measures['mismatch_max'] == pytest.approx(math.log(3))
  assert measures['mismatch_large'] == 3 / 200
  # 199 * 0.99 = 197.01: the next of the sorted values is the 199th.
  assert measures['mismatch_p99'] == pytest.approx(k3_of_3)
  assert mismatch.gap(np.zeros(0)) == {}
  assert mismatch.gap(x_Z, '_x') == {f'{k}_x': v for k, v in measures.items()}


def test_context_has_no_say_and_lengths_weigh_by_tokens():
  trajectories = [
    make_trajectory([-1.0, -2.0, -1.0], mask=[False, True, True]),
    make_trajectory([-3.0]),
  ]
  train = [np.float32([-9.0, -2.0, -1.0]), np.float32([-3.5])]
  ratios = mismatch.log_ratios(trajectories, train)
  measures = mismatch.gap(np.concatenate(ratios))
  assert [len(x) for x in ratios] == [2, 1] and measures['mismatch_max'] == 0.5
  mean = (math.exp(-0.5) - 0.5) / 3
  assert measures['mismatch_kl'] == pytest.approx(mean, rel=1e-6)


def test_routes_agree_as_sets_layer_by_layer():
  recorded_TMA = np.array(
    [
      [[0, 1], [2, 3]],
      [[0, 1], [2, 3]],
      [[4, 5], [6, 7]],
      [[records.NO_ROUTE] * 2] * 2,
    ],
    np.uint16,
  )
  own_TMA = recorded_TMA.copy()
  own_TMA[0] = [[1, 0], [3, 2]]  # another order
  own_TMA[1, 1] = [2, 4]
  own_TMA[2, 1] = [6, 0]
  own_TMA[3] = 1  # no record: not compared
  agreement = routes.route_agreement([recorded_TMA], [own_TMA])
  assert agreement['route_agreement_layers'] == [1.0, pytest.approx(1 / 3)]
  assert agreement['routed_differently'] == pytest.approx(2 / 3)
  assert agreement['route_agreement'] == agreement['route_agreement_layers'][1]
  assert routes.route_agreement([recorded_TMA[3:]], [own_TMA[3:]]) == {}


HEALTHY = {
  'mismatch_kl_exact': 1e-9,
  'exact_agreement': 0.999,
  'mismatch_kl_afresh': 1e-5,
  'unrecorded': 0.01,
  'mismatch_kl_hints': 0.1,
  'mismatch_kl': 0.1,
  'mismatch_p99': 1.0,
  'mismatch_large': 0.1,
  'replay_agreement': 0.5,
  'route_agreement': 0.5,
}


@pytest.mark.parametrize('name', HEALTHY)
def test_each_measure_has_its_band_and_ends_belong_to_it(name):
  assert bands.breaches(HEALTHY, GATE) == {}
  is_low = name.endswith('agreement')
  beyond = (0.99 if is_low else 1.01) * HEALTHY[name]
  for value in (beyond, math.nan):
    (message,) = bands.breaches(HEALTHY | {name: value}, GATE).values()
    assert message.startswith(f'{name} is {value:.3g}, its band is at ')
    assert '(--config.rl.gate.m' in message and 'check ' in message
  off = dataclasses.replace(GATE, action='off')
  assert bands.breaches(HEALTHY | {name: math.nan}, off) == {}


@pytest.mark.parametrize(
  'change, message',
  [
    ({'action': 'halt'}, "action must be one of .*'halt'"),
    ({'max_kl': -1.0}, r'GateOptions.max_kl must be .* at least 0; got -1'),
    ({'max_p99': math.nan}, 'GateOptions.max_p99'),
    (
      {'max_large_ratio_share': 1.5},
      'max_large_ratio_share must be .* at most 1; got 1.5',
    ),
    ({'min_agreement': 2}, 'min_agreement must be .* at most 1; got 2'),
    ({'max_kl_exact': 'tight'}, "GateOptions.max_kl_exact.*got 'tight'"),
  ],
)
def test_a_gate_that_cannot_be_is_refused_by_name_and_value(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(GATE, **change)
