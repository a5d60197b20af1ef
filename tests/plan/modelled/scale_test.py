"""Goodput, fan-out and sums of many replicas, against simulation and forms."""

import dataclasses
import math

import numpy as np
import pytest

from composer_jax.models import config as model_config
from composer_jax.plan.modelled import scale
from tests.plan import params_test


def simulated(interval, checkpoint, restart, mtbf, segments=4000) -> float:
  """Plays failures one by one; memoryless, so each wait is drawn afresh."""
  random = np.random.default_rng(0)
  clock = 0.0
  for _ in range(segments):
    while (failure := random.exponential(mtbf)) < interval + checkpoint:
      clock += failure
      while (failure := random.exponential(mtbf)) < restart:
        clock += failure
      clock += restart
    clock += interval + checkpoint
  return segments * interval / clock


@pytest.mark.parametrize(
  'times', [(600, 30, 300, 3600), (1800, 60, 600, 1200), (100, 5, 20, 1e6)]
)
def test_goodput_is_that_of_played_failures(times):
  assert scale.goodput(*times) == pytest.approx(simulated(*times), rel=0.05)


@pytest.mark.parametrize('checkpoint', [5.0, 60.0, 600.0])
@pytest.mark.parametrize('mtbf', [1800.0, 3600.0 * 24])
def test_the_best_interval_is_the_optimum(checkpoint, mtbf):
  of = lambda x: scale.goodput(x, checkpoint, 300.0, mtbf)
  best = of(scale.best_interval(checkpoint, mtbf))
  grid = np.geomspace(checkpoint / 10, 20 * mtbf, 4000)
  assert best >= 0.997 * max(map(of, grid))
  # Young's rule, which holds for rare failures.
  rare = scale.best_interval(1.0, 1e8)
  assert rare == pytest.approx(math.sqrt(2e8), rel=1e-3)


def test_failures_that_come_before_a_restart_ends_leave_nothing():
  assert scale.goodput(600, 30, 1e6, 10.0) == 0.0
  assert scale.goodput(600, 0, 0, 1e15) == pytest.approx(1.0)


def test_times_of_the_network_have_closed_forms():
  o = scale.ScaleOptions(
    bundle_gb=10, network_gbs=5, receivers=64, fan_out=4, round_trip_s=1
  )
  # Four copies leave a relay; three levels reach 64.
  assert scale.fan_out_seconds(o) == 4 * 2 + 3
  lone = dataclasses.replace(o, receivers=1)
  assert scale.fan_out_seconds(lone) == 2
  assert scale.sum_seconds(1e12, 100, o) == 0.0  # One replica.
  pair = dataclasses.replace(o, replicas=2)
  assert scale.sum_seconds(1e12, 100, pair) == pytest.approx(1e10 / 5e9)


def test_more_devices_fail_more_often_and_the_tables_say_so():
  model = model_config.ModelConfig.from_dict(params_test.fields('tiny'))
  few, many = (
    scale.tables(model, 512, scale.ScaleOptions(replicas=n))[0].rows
    for n in (2, 196)
  )
  for before, after in zip(few, many, strict=True):
    assert before[1] == pytest.approx(98 * after[1])
    assert before[2] > after[2] and before[4] > after[4]
    assert after[4] >= max(after[3], after[5])
  with pytest.raises(ValueError, match='fan_out must be .* at least 2; got 1'):
    scale.ScaleOptions(fan_out=1)


def test_the_command_takes_what_a_run_measured():
  run = lambda *options: params_test.command(
    *('--config=configs/models/tiny.py', '--what=scale', *options)
  )
  code, text, _ = run('--scale=replicas=12500,checkpoint_s=20')
  assert code == 0 and 'MODELLED goodput of 100000 devices' in text
  code, _, error = run('--scale=replica=2')
  assert code == 1 and 'replica=2 must be NAME=NUMBER' in error[0]
