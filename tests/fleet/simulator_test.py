"""Laws of a whole fleet, in virtual time, by the code that a run has."""

import numpy as np
import pytest
from scipy import stats

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
  assert sorted(sum(sim.trained, [])) == list(range(s.steps * s.prompts))
  assert s.overtake or sim.trained == [sorted(ids) for ids in sim.trained]
  # The admission bound, and that on staleness, which it implies.
  assert sim.most_open <= (s.staleness + 1) * s.prompts - s.overtake
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


SEEDS = [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))]
# Half of the groups take 160 s or more, and one in twenty 500 s.
UNEVEN = dict(workers=80, train_s=300.0, spread=0.8, tick_s=8.0, beat_s=40.0)


@pytest.mark.parametrize('seed', SEEDS)
def test_slow_groups_that_are_overtaken_hold_up_less(seed):
  """Before and after, with about as many groups under way."""
  before = simulator.simulate(**UNEVEN, staleness=1, steps=20, seed=seed)
  after = simulator.simulate(
    **UNEVEN, staleness=4, overtake=40, steps=20, seed=seed
  )
  for sim in (before, after):
    check_laws(sim)
  assert (before.most_open, after.most_open) == (32, 40)
  print(f'{idle_of(before):.3f} {idle_of(after):.3f}')
  assert idle_of(before) > 0.25 and idle_of(after) < 0.12
  # The bound is for the few.
  assert np.mean(after.staleness) < 1.5 and max(after.staleness) >= 3


def lengths_differ(sim, groups):
  """Returns the p-value that groups have the lengths of all, by chi-square."""
  everyone = range(sim.setting.steps * sim.setting.prompts)
  edges = np.quantile([sim.seconds(g) for g in everyone], [0.2, 0.4, 0.6, 0.8])
  bins = np.searchsorted(edges, [sim.seconds(g) for g in groups])
  return stats.chisquare(np.bincount(bins, minlength=5)).pvalue


@pytest.mark.parametrize('seed', SEEDS)
def test_long_groups_are_trained_as_often_as_short_ones(seed):
  """Though long ones are lost with their workers more often, and overtaken."""
  sim = simulator.simulate(
    **UNEVEN, staleness=4, overtake=40, crash_s=3000.0, steps=24, seed=seed
  )
  check_laws(sim)
  assert sim.reconciler.ledger.lost['silent'] > 20
  # While the run goes on; in the end all are trained.
  assert lengths_differ(sim, sum(sim.trained[4:-4], [])) > 0.01
  # What was overtaken, and would otherwise be thrown away, is long.
  overtaken = [
    g
    for step, ids in enumerate(sim.trained)
    for g in ids
    if step > g // sim.setting.prompts
  ]
  assert len(overtaken) > 20 and lengths_differ(sim, overtaken) < 1e-6


@pytest.mark.parametrize('seed', SEEDS)
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
