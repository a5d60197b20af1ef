"""Laws of a whole fleet, in virtual time, by the code that a run has."""

import numpy as np
import pytest

from tests.fleet import simulator

# A worker has boxes for all that it holds, unless a test says otherwise.
FULL = dict(workers=10_000, boxes=100_000, prompts=3125, steps=5, train_s=200.0)
FULL |= dict(tick_s=10.0, beat_s=60.0, lease_s=240.0)


def idle_of(sim):
  """Share of time that the trainer waits, once the fleet has filled up."""
  late = sim.idle_s[len(sim.idle_s) // 3 :]
  return sum(late) / (sum(late) + len(late) * sim.setting.train_s)


def check_laws(sim):
  """What holds whatever happens."""
  s = sim.setting
  assert sim.trained == list(range(s.steps * s.prompts))
  # The admission bound, and that on staleness, which it implies.
  assert sim.most_open <= (s.staleness + 1) * s.prompts
  assert 0 <= max(sim.staleness) <= s.staleness
  # Nobody waits while somebody has room, and no group is given up.
  assert sim.starved == 0
  fates = sim.reconciler.ledger.totals()
  assert fates.keys() <= {'trained'}


@pytest.mark.parametrize(
  'workers', [8, pytest.param(6, marks=pytest.mark.slow)]
)
def test_too_few_workers_leave_the_trainer_idle_as_littles_law_says(workers):
  """L = X W: of leases held, results a second, and seconds of a lease.

  All workers hold as many leases as they want, so that L is known.
  """
  sim = simulator.simulate(workers=workers, steps=15)
  check_laws(sim)
  leases = workers * sim.setting.capacity / sim.setting.members
  rate = leases / np.mean(sim.sojourns)
  expected = 1 - rate * sim.setting.train_s / sim.setting.prompts
  assert idle_of(sim) == pytest.approx(expected, rel=0.05)


def test_too_few_boxes_bind_as_too_few_workers_do():
  sim = simulator.simulate(workers=30, boxes=64, steps=8)
  check_laws(sim)
  assert idle_of(sim) > 0.5


def test_enough_workers_keep_the_trainer_busy():
  sim = simulator.simulate(train_s=150.0, steps=10)
  check_laws(sim)
  assert idle_of(sim) < 0.05 and not sim.reconciler.ledger.lost


@pytest.mark.parametrize(
  'seed', [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))]
)
def test_crashes_and_preemption_waves_break_no_bound(seed):
  sim = simulator.simulate(
    train_s=100.0, steps=8, crash_s=1500.0, wave_s=300.0, seed=seed
  )
  check_laws(sim)
  lost = sim.reconciler.ledger.lost
  assert lost.keys() == {'silent'} and lost['silent'] > 10
  # Of who was lost nothing is accepted later.
  assert len(sim.sojourns) >= sim.setting.steps * sim.setting.prompts


@pytest.mark.slow
def test_ten_thousand_workers_in_four_regions_under_waves():
  sim = simulator.simulate(**FULL, crash_s=20_000.0, wave_s=600.0)
  check_laws(sim)
  assert sim.reconciler.ledger.lost['silent'] > 100
  print(simulator.summary(sim))
