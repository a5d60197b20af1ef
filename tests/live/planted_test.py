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
        'task_id': f'{domain}{i:03d}',
        'sample': 0,
        'status': 'graded',
        'passed': bool(draw.random() < chance),
        'num_turns': 1,
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


def test_equal_versions_draw_nothing_anew_and_others_all(versions):
  assert planted.redrawn_share([versions[0], versions[0]]) == 0.0
  assert planted.redrawn_share(versions) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize('change', [-0.3, -0.05, 0.0, 0.1])
@pytest.mark.parametrize('share', [0.0, 0.5])
def test_a_planted_change_is_that_of_the_mean(versions, change, share):
  rows = versions[0]['web']
  draw = np.random.default_rng(3)
  rate = lambda of: np.mean([r['passed'] for r in of])
  made = [planted.changed(rows, change, share, draw) for _ in range(40)]
  rates = [rate(of) for of in made]
  assert np.mean(rates) == pytest.approx(rate(rows) + change, abs=0.01)
  if not share:
    kept = [a['passed'] for a, b in zip(made[0], rows, strict=True)
            if b['passed'] == (change > 0)]  # fmt: skip
    assert len(set(kept)) == 1  # The others do not change.


def test_regressions_stay_away_and_improvements_ship(versions):
  plant = lambda kind, count, share: planted.plant(
    versions, 0.6, OPTIONS, kind=kind, share=share, count=count, seed=1
  )
  for share in (0.3, 1.0):
    bad = plant('regression', 12, share)
    assert all(c.change >= OPTIONS.gate.margin for c in bad)
    assert sum(c.shipped for c in bad) <= 2
  good = plant('improvement', 10, 0.3)
  assert sum(c.shipped for c in good) >= 0.8 * 10
