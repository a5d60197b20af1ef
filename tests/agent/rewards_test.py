"""Laws of the reward: its terms, and prices that change during a run."""

import dataclasses
import json
import math

import numpy as np
import pytest

from composer_jax.agent import rewards
from composer_jax.core import records, turns

OPTIONS = dataclasses.replace(
  rewards.UNPRICED,
  version=3,
  invalid_penalty=0.1,
  failed_edit_penalty=0.05,
  open_todo_penalty=0.2,
  unfinished_penalty=0.3,
  shell_only_penalty=0.4,
)


def verdict(passed=True, status=records.GRADED):
  return records.Verdict(
    passed=passed,
    num_passed=3 * passed,
    num_tests=3,
    status=status,
    sandbox_level='none',
  )


def played(*outcomes):
  """Returns turns, each named by its outcome, or by its tool if it is OK."""
  made = []
  for i, name in enumerate(outcomes):
    outcome = name if name in turns.OUTCOMES else turns.OK
    nameless = outcome in (*turns.INVALID_OUTCOMES, turns.SUMMARY)
    tool = 'edit' if name == outcome else name
    made.append(
      turns.Turn(
        trajectory=0,
        start=i,
        stop=i + 1,
        tool='' if nameless else tool,
        outcome=outcome,
      )
    )
  return made


def score(*outcomes, options=OPTIONS, flags=(), judged=None, **facts):
  facts = {'num_sampled': 50, 'open_todos': 0} | facts
  return rewards.score(
    judged or verdict(), played(*outcomes), flags, options, **facts
  )


@pytest.mark.parametrize(
  'outcomes, fields, terms',
  [
    (['edit', 'finish'], {}, {'success': 1.0}),
    (
      ['unknown_tool', 'bad_arguments', 'not_a_call', 'finish'],
      {},
      {'success': 1.0, 'invalid': -0.3},
    ),
    (
      ['failed_edit', 'failed', 'finish'],
      {},
      {'success': 1.0, 'failed_edit': -0.05},
    ),
    (['finish'], {'open_todos': 2}, {'success': 1.0, 'open_todo': -0.4}),
    (
      ['edit'],
      {'judged': verdict(False, records.UNFINISHED)},
      {'success': 0.0, 'unfinished': -0.3},
    ),
    # Only three shell calls or more, without an edit, are penalised.
    (
      ['run', 'run', 'run', 'finish'],
      {},
      {'success': 1.0, 'shell_only': -0.4},
    ),
    (['run', 'run', 'finish'], {}, {'success': 1.0}),
    (['run', 'run', 'run', 'edit', 'finish'], {}, {'success': 1.0}),
    # A summary is no call.
    (['summary', 'edit', 'finish'], {}, {'success': 1.0}),
  ],
)
def test_terms_are_what_they_say_and_add_up(outcomes, fields, terms):
  reward, earned = score(*outcomes, **fields)
  assert earned == pytest.approx(terms)
  assert reward == pytest.approx(sum(terms.values()))


def test_a_flagged_rollout_earns_less_than_an_honest_failure():
  failed, _ = score('not_a_call', 'finish', judged=verdict(False))
  for passed in (True, False):
    reward, terms = score(
      'not_a_call',
      'finish',
      judged=verdict(passed),
      flags=('reads_cache',),
      options=dataclasses.replace(OPTIONS, flag_penalty=1.0),
    )
    assert terms['invalid'] == -0.1
    assert reward == pytest.approx(-1.1) and reward < failed


def test_a_guess_costs_more_than_it_brings():
  """A guess is paid with chance p; of the others, a share q is flagged.

  E = p - (1 - p) q is negative for q > p / (1 - p). A hidden test has at least
  two mutated copies, and values are compared at least three times, so p is at
  most 1/3: half of the failed guesses may go unseen.
  """
  price = dataclasses.replace(rewards.UNPRICED, flag_penalty=1.0)
  earned = {
    (passed, flags): rewards.score(
      verdict(passed), (), flags, price, num_sampled=0, open_todos=0
    )[0]
    for passed in (True, False)
    for flags in ((), ('canary_passed',))
  }
  assert rewards.RewardOptions().flag_penalty == price.flag_penalty
  for p in (0.01, 0.1, 0.2, 0.33):
    for q in (0.5, 1.0):
      chances = {
        (True, ()): p,
        (False, ('canary_passed',)): (1 - p) * q,
        (False, ()): (1 - p) * (1 - q),
      }
      expected = sum(chances[case] * earned[case] for case in chances)
      assert expected == pytest.approx(p - (1 - p) * q)
      assert expected < earned[False, ()] == 0


def test_effort_is_the_concave_penalty_of_tokens_and_turns():
  options = dataclasses.replace(
    rewards.UNPRICED,
    effort_coefficient=0.3,
    effort_scale=40.0,
    effort_q=0.5,
    effort_turn_tokens=7.0,
  )
  reward, terms = score('edit', 'summary', 'finish', options=options)
  x = 50 + 3 * 7
  want = 0.3 * rewards.concave(x, 1 / 40, 0.5) / 40
  assert terms['effort'] == pytest.approx(-want)
  assert reward == 1 - want


def test_no_prices_leave_the_success():
  free = rewards.UNPRICED
  assert score('not_a_call', 'finish', options=free)[0] == 1.0
  assert score('run', options=free, judged=verdict(False))[0] == 0.0


@pytest.mark.parametrize(
  'fields, message',
  [
    (
      {'invalid_penalty': -1.0},
      r'RewardOptions\.invalid_penalty must be .*; got -1\.0',
    ),
    (
      {'open_todo_penalty': float('nan')},
      'open_todo_penalty must be .*; got nan',
    ),
    ({'effort_q': -1.0}, r'effort_q must be .* at least 0; got -1\.0'),
    ({'effort_coefficient': -0.1}, r'effort_coefficient .*; got -0\.1'),
    ({'effort_turn_tokens': -1.0}, r'effort_turn_tokens .*; got -1\.0'),
    ({'effort_scale': 0.0}, 'effort_scale must be positive; got 0'),
    ({'version': -1}, 'version must be an integer of at least 0; got -1'),
    ({'version': 1.5}, r'version .*; got 1\.5'),
    (
      {'invalid_penalty': 'much'},
      "invalid_penalty .* number .*; got 'mu",
    ),
  ],
)
def test_impossible_prices_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    rewards.RewardOptions(**fields)


CASES = [(0.0, 0.5), (0.5, 0.01), (1.0, 0.2), (1.5, 0.1), (3.0, 2.0)]


@pytest.mark.parametrize(('q', 'k'), CASES)
def test_it_is_the_closed_form(q, k):
  for x in (0.0, 0.3, 10.0, 5000.0):
    if q == 1:
      expected = math.log(1 + k * x) / k
    else:
      expected = ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))
    assert rewards.concave(x, k, q) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(('q', 'k'), CASES)
def test_its_slope_is_a_power_that_only_falls(q, k):
  x = np.linspace(0.0, 20 / k, 201)
  values = np.array([rewards.concave(v, k, q) for v in x])
  middle = (x[1:] + x[:-1]) / 2
  h = 1e-3 / k
  slopes = [
    (rewards.concave(v + h, k, q) - rewards.concave(v - h, k, q)) / (2 * h)
    for v in middle
  ]
  np.testing.assert_allclose(slopes, (1 + k * middle) ** -q, rtol=1e-5)
  assert (np.diff(values) > 0).all()
  assert (np.diff(values, n=2) <= 1e-12 / k).all()


def test_it_is_continuous_at_the_logarithm():
  for q in (1 - 1e-9, 1 + 1e-9):
    near = rewards.concave(70.0, 0.02, q)
    assert near == pytest.approx(rewards.concave(70.0, 0.02, 1.0), rel=1e-7)


def test_it_saturates_above_q_1():
  assert rewards.concave(1e12, 0.5, 3.0) == pytest.approx(1 / (0.5 * 2))


def test_the_coefficient_is_the_price_of_one_scale_of_linear_effort():
  options = rewards.RewardOptions(
    effort_coefficient=0.2,
    effort_scale=50.0,
    effort_q=0.0,
    effort_turn_tokens=5.0,
  )
  # 30 sampled tokens and four turns are one scale.
  assert options.effort_penalty(30, 4) == pytest.approx(0.2)
  assert rewards.UNPRICED.effort_penalty(10**6, 10**6) == 0


@pytest.fixture
def switch(tmp_path):
  reports = []
  first = rewards.RewardOptions(invalid_penalty=0.1, effort_coefficient=0.2)
  return rewards.Switch(tmp_path / rewards.FILE, first, reports.append), reports


def write(tmp_path, fields):
  text = fields if isinstance(fields, str) else json.dumps(fields)
  (tmp_path / rewards.FILE).write_text(text)


def test_a_file_changes_the_prices_of_groups_that_begin_after_it(
  switch, tmp_path
):
  prices, reports = switch
  before = prices.of_group(0)
  assert (before.version, before.invalid_penalty) == (0, 0.1)
  write(tmp_path, {'version': 2, 'open_todo_penalty': 0.5})
  after = prices.of_group(1)
  assert after == dataclasses.replace(before, version=2, open_todo_penalty=0.5)
  # A member that begins late is paid as the others of its group.
  assert prices.of_group(0) == before and prices.of_group(1) == after
  assert len(reports) == 1 and 'version 2' in reports[0]
  # Fields that a file does not name are the config's, not an earlier file's.
  write(tmp_path, {'version': 3})
  assert prices.of_group(2) == dataclasses.replace(before, version=3)
  (tmp_path / rewards.FILE).unlink()
  assert prices.of_group(3).version == 3


@pytest.mark.parametrize(
  'fields, message',
  [
    ('{"version": 2', 'Expecting'),
    ({'invalid_penalty': 0.5}, 'names a "version"'),
    ([1], 'JSON object'),
    ({'version': 1}, r'version \(1\) must exceed the one in force \(1\)'),
    ({'version': 2, 'invalid': 0.5}, 'has no field invalid.*invalid_pen'),
    (
      {'version': 2, 'invalid_penalty': -1},
      'invalid_penalty .*; got -1',
    ),
    ({'version': '2'}, "version must be an integer .*; got '2'"),
  ],
)
def test_a_wrong_file_is_told_once_and_changes_nothing(
  switch, tmp_path, fields, message
):
  prices, reports = switch
  write(tmp_path, {'version': 1, 'invalid_penalty': 0.3})
  right = prices.of_group(0)
  write(tmp_path, fields)
  for group in (1, 2, 3):
    assert prices.of_group(group) == right
  assert len(reports) == 2
  with pytest.raises(ValueError, match=message):
    raise ValueError(reports[1])
