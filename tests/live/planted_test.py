"""Planted versions: what gate and trial let through, at a size for tests."""

import numpy as np
import pytest

from composer_jax.live import options, trial
from experiments.studies.live import planted

OPTIONS = options.LiveOptions(trial=trial.TrialOptions(most_users=300))


def version(seed, count=320, chance=0.85):
  draw = np.random.default_rng(seed)
  return {
    domain: [
      {
        'task_id': f'{domain}{i}',
        'passed': bool(draw.random() < chance),
        'num_invalid': int(draw.random() < 0.03),
        'tools': ['edit' if draw.random() < 0.95 else 'ask'],
      }
      for i in range(count)
    ]
    for domain in ('web', 'data')
  }


@pytest.fixture(scope='module')
def versions():
  return [version(seed) for seed in range(3)]


def test_chances_are_those_of_the_versions(versions):
  known = planted.chances(versions)
  passed = sum(v['web'][7]['passed'] for v in versions)
  assert known['web'][7] == pytest.approx((passed + 0.5) / 4)


@pytest.mark.parametrize('change', [-0.3, -0.05, 0.1, 0.9])
def test_a_planted_change_is_that_of_the_mean(change):
  old = np.linspace(0.2, 0.95, 50)
  new = np.array(planted._changed(old, change))
  expected = min(old.mean() + change, 1.0)
  assert new.mean() == pytest.approx(expected)
  assert (new >= 0).all() and (new <= 1).all()


def test_regressions_stay_away_and_improvements_ship(versions):
  plant = lambda kind, count: planted.plant(
    versions, 0.6, OPTIONS, kind=kind, count=count, seed=1
  )
  bad, good = plant('regression', 60), plant('improvement', 20)
  assert all(c.change <= -OPTIONS.gate.margin for c in bad)
  assert sum(c.shipped for c in bad) <= 0.05 * 60 + 3
  assert sum(c.shipped for c in good) >= 0.8 * 20 - 3
