"""The gate and the trial: closed forms, levels, and both known hacks."""

import dataclasses
import math

import numpy as np
import pytest

from composer_jax.live import pricing, shipping, trial

PRICES = pricing.PriceOptions()
GATE = shipping.ShippingOptions()


def rows(passed, tools=('edit',), invalid=0):
  return [
    {
      'task_id': f't{i}',
      'sample': 0,
      'status': 'graded',
      'domain': 'web',
      'passed': bool(p),
      'satisfied': float(p),
      'num_invalid': invalid,
      'tools': list(tools),
    }
    for i, p in enumerate(passed)
  ]


@pytest.mark.parametrize('count', [20, 60, 400])
def test_without_a_lost_task_the_bound_is_the_rule_of_three(count):
  """Of n draws among n tasks with one loss, 3 losses are the 5 % quantile."""
  bound = shipping.paired_bound([[0.0]] * count, 0.05)
  assert bound == pytest.approx(-3 / (count + 1), rel=1e-6)


def test_the_bound_of_many_pairs_is_that_of_the_normal_distribution():
  changes = np.repeat([1.0, 0.0, -1.0], (300, 1500, 200))
  bound = shipping.paired_bound(changes[:, None].tolist(), 0.05)
  spread = changes.std() / math.sqrt(len(changes))
  assert bound == pytest.approx(changes.mean() - 1.645 * spread, abs=2e-3)


def test_samples_of_a_task_are_drawn_together():
  """Forty equal samples of one task say no more than one."""
  draw = np.random.default_rng(0)
  changes = draw.choice([1.0, 0.0, -1.0], 100)
  single = shipping.paired_bound([[c] for c in changes], 0.05)
  repeated = shipping.paired_bound([[c] * 40 for c in changes], 0.05)
  assert repeated == pytest.approx(single)


def test_nothing_is_no_evidence():
  assert shipping.paired_bound([], 0.05) == -1.0
  few = shipping.judge(
    {'all': rows([1] * 20)}, {'all': rows([1] * 20)}, PRICES, GATE
  )
  assert not few.ships and 'all:' in few.reasons[0]
  with pytest.raises(ValueError, match='same domains'):
    shipping.judge({'a': []}, {'b': []}, PRICES, GATE)


def test_a_domain_that_loses_stops_what_gains_elsewhere():
  before = {'web': rows([0, 1] * 200), 'data': rows([1] * 400)}
  after = {'web': rows([1] * 400), 'data': rows([1] * 360 + [0] * 40)}
  result = shipping.judge(before, after, PRICES, GATE)
  assert not result.ships
  assert [f.name for f in result.findings if not f.is_shown] == ['data']
  assert shipping.judge(before, before, PRICES, GATE).ships


@pytest.mark.parametrize(
  'names, tools, invalid',
  [
    # A broken call instead of an edit, so that nothing is judged.
    (['invalid', 'broken'], ('',), 1),
    # A question instead of an edit, so that nothing is undone.
    (['asked'], ('ask',), 0),
  ],
)
def test_both_hacks_of_live_rewards_trip_a_canary(names, tools, invalid):
  """Even where the pass rate does not fall: they replace failing edits."""
  before = rows([1] * 200 + [0] * 200)
  after = before[:350] + [
    {**row, 'tools': list(tools), 'num_invalid': invalid}
    for row in before[350:]
  ]
  result = shipping.judge({'all': before}, {'all': after}, PRICES, GATE)
  assert {f.name for f in result.findings if not f.is_shown} == {
    *names,
    'edited',
  }
  mixed = np.random.default_rng(0).permutation(400)
  users = lambda rows: [rows[i] for i in mixed]
  watched = shipping.judge_arms(users(before), users(after), PRICES, GATE)
  assert {f.name for f in watched.findings if not f.is_shown} == {
    *(f'{name} in the trial' for name in names),
    'edited in the trial',
  }
  # Fewer of them is no alarm.
  assert shipping.judge({'all': after}, {'all': before}, PRICES, GATE).ships
  assert shipping.judge_arms(after, before, PRICES, GATE).ships


@pytest.mark.parametrize(
  'changed, stopped',
  [
    # An edit beside the question, that nobody wanted.
    (dict(tools=['edit', 'ask']), {'asked', 'turns'}),
    (dict(tools=['edit', 'ask', 'ask'], done=['ask']), {'asked', 'edited'}),
    # Refused calls, in no more episodes than before.
    (dict(num_failed=1, done=['edit']), {'broken'}),
    (dict(tools=['edit'] * 30), {'turns'}),
  ],
)
def test_the_hacks_trip_a_canary_in_other_clothes_too(changed, stopped):
  before = rows([1] * 400)
  after = [{**row, **changed} for row in before]
  names = lambda result: {f.name for f in result.findings if not f.is_shown}
  found = names(shipping.judge({'all': before}, {'all': after}, PRICES, GATE))
  assert stopped <= found
  tried = names(shipping.judge_arms(before, after, PRICES, GATE))
  assert {f'{name} in the trial' for name in stopped} <= tried
  assert shipping.judge({'all': before}, {'all': before}, PRICES, GATE).ships


def test_a_canary_of_one_domain_stops_what_all_of_them_hide():
  before = {'web': rows([1] * 640), 'data': rows([1] * 80)}
  asks = [
    {**row, 'tools': ['ask'] if i < 20 else row['tools']}
    for i, row in enumerate(before['data'])
  ]
  result = shipping.judge(before, {**before, 'data': asks}, PRICES, GATE)
  assert not result.ships
  hidden = {f.name for f in result.findings if not f.is_shown}
  assert hidden == {'asked in data', 'edited in data'}


@pytest.mark.parametrize('is_missing', [False, True])
def test_what_only_the_candidate_did_not_play_is_lost(is_missing):
  before = rows([1] * 400)
  broken = {**before[0], 'status': 'infrastructure'}
  after = [] if is_missing else [{**r, **broken, 'task_id': r['task_id']}
                                 for r in before[:40]]  # fmt: skip
  after += before[40:]
  judge = lambda old, new: shipping.judge({'a': old}, {'a': new}, PRICES, GATE)
  lost = judge(before, after)
  assert [f.name for f in lost.findings if not f.is_shown] == ['a']
  assert lost.findings[0].after == 0.9
  # What the version before did not play says nothing of either.
  assert judge(after, before).ships


def test_trials_without_a_change_are_seldom_stopped_by_canaries():
  """Looked at after every tenth pair, at the level over all looks."""
  draw, stopped = np.random.default_rng(2), 0
  users = lambda: [
    {
      'domain': draw.choice(['web', 'data']),
      'satisfied': float(draw.random() < 0.6),
      'num_invalid': int(draw.random() < 0.1),
      'tools': ['edit'] * (draw.random() < 0.75) + ['ask'] * int(i % 9 == 0),
    }
    for i in draw.permutation(100)
  ]
  for _ in range(60):
    old, new = users(), users()
    stopped += not all(
      shipping.judge_arms(old[:n], new[:n], PRICES, GATE).ships
      for n in range(10, 101, 10)
    )
  assert stopped <= 0.05 * 60


def test_canaries_of_a_trial_share_its_level():
  """Five and satisfaction have half of it, and domains the other half."""
  old, new = rows([1] * 20), rows([1] * 20, tools=('edit', 'ask'))
  ships = [
    shipping.judge_arms(old[:n], new[:n], PRICES, GATE).ships
    for n in range(1, 21)
  ]
  capital_N = trial.capital(np.ones(20))  # Each pair differs as far as it can.
  assert ships == list(capital_N < 2 * 6 / GATE.alpha)
  assert sum(1 / (k * (k + 1)) for k in range(1, 1000)) < 1


def test_a_trial_is_stopped_by_what_one_domain_alone_loses():
  web, data = rows([1] * 600), rows([1] * 60)
  data = [{**row, 'domain': 'data'} for row in data]
  users = lambda *parts: [
    sum(parts, [])[i] for i in np.random.default_rng(0).permutation(660)
  ]
  for changed, name in (
    (dict(satisfied=0.0), 'satisfied'),
    (dict(tools=['ask', 'edit']), 'asked'),
  ):
    worse = [{**row, **changed} if i % 2 else row for i, row in enumerate(data)]
    alike = shipping.judge_arms(
      users(web, data), users(web, data), PRICES, GATE
    )
    assert alike.ships
    result = shipping.judge_arms(
      users(web, data), users(web, worse), PRICES, GATE
    )
    held = {f.name for f in result.findings if not f.is_shown}
    assert f'{name} in data of the trial' in held
    assert not [f for f in held if 'web' in f]
    # Of all users that is less than the margin.
    assert f'{name} in the trial' not in held


def test_a_candidate_at_the_margin_ships_at_most_at_the_level():
  """Of 100 candidates that lose exactly the margin in a domain."""
  draw, shipped = np.random.default_rng(1), 0
  for _ in range(100):
    before = draw.random(240) < 0.7
    lost = draw.random(240) < GATE.margin / 0.7
    changes = (before & ~lost).astype(float) - before
    # Luck that is no change: both ways alike.
    flips = draw.choice([0.0, 1.0, -1.0], 240, p=[0.9, 0.05, 0.05])
    bound = shipping.paired_bound((changes + flips)[:, None].tolist(), 0.05)
    shipped += bound > -GATE.margin
  assert shipped <= 5 + 2 * math.sqrt(100 * 0.05 * 0.95)


def test_capital_is_the_mean_of_products():
  capital = trial.capital([1.0, -1.0, 0.5])
  stakes = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8])
  np.testing.assert_allclose(
    capital,
    [
      (1 + stakes).mean(),
      ((1 + stakes) * (1 - stakes)).mean(),
      ((1 + stakes) * (1 - stakes) * (1 + stakes / 2)).mean(),
    ],
  )


def test_a_fair_game_is_lost_at_most_at_the_level_whenever_one_looks():
  """Ville's inequality, for the highest capital of whole trials."""
  draw = np.random.default_rng(0)
  highest = [
    trial.capital(draw.choice([1.0, 0.0, -1.0], 400, p=[0.2, 0.6, 0.2])).max()
    for _ in range(400)
  ]
  share = np.mean(np.array(highest) >= 20)
  assert share <= 0.05
  # The mean of the capital itself stays 1.
  ends = [trial.capital(draw.choice([1.0, -1.0], 3))[-1] for _ in range(4000)]
  assert np.mean(ends) == pytest.approx(1.0, abs=0.05)


OPTIONS = trial.TrialOptions(margin=0.1, alpha=0.05, most_users=300)


def decided(control, candidate, seed, options=OPTIONS):
  """Looks after each pair, as a learner does; returns the first decision."""
  draw = np.random.default_rng(seed)
  old, new = draw.random((2, options.most_users))
  satisfied = lambda draws_N, chance: (draws_N < chance).astype(float)
  return trial.judge(
    satisfied(old, control), satisfied(new, candidate), options
  )


def test_a_trial_decides_by_what_it_shows_first():
  better = [decided(0.5, 0.7, seed) for seed in range(40)]
  worse = [decided(0.5, 0.3, seed) for seed in range(40)]
  at_margin = [decided(0.5, 0.4, seed) for seed in range(200)]
  of = lambda results, d: sum(r.decision == d for r in results)
  assert of(better, trial.PROMOTE) >= 38 and of(worse, trial.ROLL_BACK) == 40
  assert of(at_margin, trial.PROMOTE) <= 10 + 6  # 5 % of 200, and luck
  assert not of(better + worse + at_margin, trial.GO_ON)


def test_a_trial_without_result_goes_on_until_its_end():
  even = [0.0, 1.0] * 10
  assert trial.judge(even, even, OPTIONS).decision == trial.GO_ON
  assert trial.judge([], [1.0], OPTIONS).decision == trial.GO_ON
  short = dataclasses.replace(OPTIONS, most_users=20)
  ended = trial.judge(even, even, short)
  assert ended.decision == trial.ROLL_BACK and '20 pairs' in ended.reason


def test_a_decision_does_not_change_with_what_comes_later():
  first = decided(0.3, 0.9, 0)
  new = np.repeat([1.0, 0.0], [60, 240])
  old = 1 - new
  early = trial.judge(old[:60], new[:60], OPTIONS)
  assert early.decision == first.decision == trial.PROMOTE
  assert trial.judge(old, new, OPTIONS).reason == early.reason
  # Nor if it was harmful first.
  assert trial.judge(new, old, OPTIONS).decision == trial.ROLL_BACK


def test_users_are_divided_by_their_share_and_trials_are_independent():
  arms = {
    name: np.array(
      [
        trial.arm_of(f'u{i}', trial.Running(name=name, share=0.3))
        == trial.CANDIDATE
        for i in range(4000)
      ]
    )
    for name in ('a', 'b')
  }
  for name in arms:
    assert arms[name].mean() == pytest.approx(0.3, abs=0.03)
  assert (arms['a'] & arms['b']).mean() == pytest.approx(0.09, abs=0.02)
  assert trial.arm_of('u', None) == trial.CONTROL
