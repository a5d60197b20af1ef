"""Laws of the draw: hard tasks more often, solved ones last, none twice."""

import json

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.tasks import curriculum

PROMPTS = 3


def candidates(count, labels=('easy', 'hard')):
  return [
    curriculum.Candidate(task_id=f'task/{i}', labels=(labels[i % len(labels)],))
    for i in range(count)
  ]


def outcome(task_id='t', group=0, **fields):
  usual = {'judged': 4, 'passed': 2, 'turns': 8, 'tokens': 400}
  return curriculum.Outcome(group=group, task_id=task_id, **{**usual, **fields})


def known(**by_label):
  """Returns a Difficulty after (groups, outcome) of each label."""
  difficulty = curriculum.Difficulty()
  for label, (groups, seen) in by_label.items():
    for _ in range(groups):
      difficulty.add(seen, [label])
  return difficulty


def test_weight_is_relative_turns_times_relative_tokens():
  difficulty = known(
    easy=(2, outcome()), hard=(2, outcome(turns=24, tokens=800))
  )
  # The mean group has 16 turns and 600 tokens; four groups of it are assumed.
  easy = (4 + 2 * 8 / 16) / 6 * (4 + 2 * 400 / 600) / 6
  hard = (4 + 2 * 24 / 16) / 6 * (4 + 2 * 800 / 600) / 6
  assert difficulty.weight('easy') == pytest.approx(easy)
  assert difficulty.weight('hard') == pytest.approx(hard)
  assert difficulty.weight('unseen') == 1
  weight = difficulty.task_weight(['easy', 'hard'])
  assert weight == pytest.approx((easy * hard) ** 0.5)


def test_weight_rises_with_difficulty_and_stays_in_its_bounds():
  labels = {
    f'l{i}': (1000, outcome(turns=4**i, tokens=10 * 4**i)) for i in range(5)
  }
  difficulty = known(**labels)
  weights = [difficulty.weight(label) for label in labels]
  assert weights == sorted(weights)
  assert weights[0] == 1 / 4 and weights[-1] == 4


def test_a_label_is_solved_by_its_rate_and_only_once_it_was_seen_enough():
  solved = outcome(passed=4)
  assert not known(easy=(7, solved)).is_solved('easy')
  difficulty = known(easy=(8, solved), hard=(8, outcome(passed=3)))
  assert difficulty.solved == ['easy']
  assert difficulty.task_weight(['easy']) == 0
  # One unsolved label keeps the task.
  assert difficulty.task_weight(['easy', 'hard']) > 0


def test_a_group_that_no_sandbox_judged_says_nothing():
  broken = outcome(judged=0, passed=0, turns=0, tokens=0)
  difficulty = known(easy=(9, broken), hard=(8, outcome(passed=4)))
  assert difficulty.solved == ['hard'] and difficulty.weight('easy') == 1


def test_tasks_are_drawn_in_proportion_to_their_weights():
  pool, weights = candidates(4), [1.0, 2.0, 5.0, 0.0]
  count = 4000
  drawn = [
    curriculum.draw(pool, weights, 1, (0, i))[0].task_id for i in range(count)
  ]
  shares = [drawn.count(c.task_id) / count for c in pool]
  # Four standard deviations of the largest.
  np.testing.assert_allclose(shares, [1 / 8, 2 / 8, 5 / 8, 0], atol=0.031)


def test_the_solved_come_last_and_only_where_nothing_else_is_left():
  pool = candidates(6)
  drawn = curriculum.draw(pool, [0, 1, 0, 1, 0, 1], 5, (3,))
  assert {c.labels for c in drawn[:3]} == {('hard',)}
  assert {c.labels for c in drawn[3:]} == {('easy',)}
  with pytest.raises(ValueError, match='7 tasks are due and 6 are left'):
    curriculum.draw(pool, [1.0] * 6, 7, (3,))


def play(task_id, group):
  """Even tasks are easy and always solved, odd ones take long."""
  index = int(task_id.split('/')[1])
  hard = {'passed': 1, 'turns': 40, 'tokens': 4000}
  return outcome(task_id, group, **(hard if index % 2 else {'passed': 4}))


def begin(ledger, **fields):
  fields = {'lag': 1, 'seed': 5, **fields}
  return curriculum.DifficultyCurriculum(
    lambda step: candidates(120), ledger, prompts=PROMPTS, **fields
  )


def train(plan, ledger, first, steps):
  """Draws and trains steps; returns the task ids of all groups."""
  ids = []
  for step in range(first, steps):
    groups = range(step * PROMPTS, (step + 1) * PROMPTS)
    ids += [plan.task_of(g) for g in groups]
    ledger.put(step, [play(plan.task_of(g), g) for g in groups])
  return ids


@pytest.fixture
def ledger(tmp_path):
  return curriculum.Ledger(tmp_path / 'curriculum')


def test_no_task_is_drawn_twice_and_hard_ones_take_over(ledger):
  ids = train(begin(ledger), ledger, 0, 20)
  assert len(set(ids)) == len(ids) == 60
  hard = [int(i.split('/')[1]) % 2 for i in ids]
  assert 0 < sum(hard[:6]) < 6
  # After eight groups the easy label is solved: later tasks are hard.
  assert len(hard) - sum(hard) >= 8 and all(hard[36:])


def test_a_killed_run_draws_what_it_would_have_drawn(ledger):
  untouched = train(begin(ledger), ledger, 0, 12)
  # No checkpoint holds the steps from the seventh on.
  ledger.truncate(7)
  assert not ledger.path(7).exists() and ledger.path(6).exists()
  again = train(begin(ledger), ledger, 7, 12)
  assert again == untouched[7 * PROMPTS :]


def test_writing_a_step_again_counts_it_once(ledger):
  once = train(begin(ledger), ledger, 0, 6)
  rows = ledger.get(3)
  ledger.put(3, reversed(rows))
  assert ledger.get(3) == rows
  assert [begin(ledger).task_of(g) for g in range(18)] == once


def test_what_is_drawn_depends_on_no_step_within_the_staleness_bound(ledger):
  """Groups of a step start while the steps before it are untrained."""
  plan = begin(ledger)
  train(plan, ledger, 0, 5)
  ahead = [plan.task_of(g) for g in range(6 * PROMPTS, 7 * PROMPTS - 1)]
  assert len(ahead) == PROMPTS - 1  # The ledger lacks step 5.
  with pytest.raises(ValueError, match=r'000005\.json is missing.*step 5'):
    plan.task_of(7 * PROMPTS)


def test_a_ledger_of_another_run_is_refused(ledger):
  train(begin(ledger), ledger, 0, 4)
  with pytest.raises(ValueError, match='of another run'):
    begin(ledger, seed=6).task_of(3 * PROMPTS)
  ledger.path(1).write_text(json.dumps([{'grp': 1}]))
  with pytest.raises(ValueError, match=r'000001\.json is damaged'):
    begin(ledger).task_of(4 * PROMPTS)


def test_weights_of_a_step_are_those_of_its_draw(ledger):
  plan = begin(ledger)
  train(plan, ledger, 0, 14)
  assert plan.measure(0)['difficulty'] == 1
  metrics = plan.measure(13)
  assert metrics['solved_labels'] == 1 and metrics['difficulty'] > 1


def rollout(member, passed, flags=(), status=records.GRADED):
  trajectory = records.Trajectory(
    tokens_T=np.arange(5, dtype=np.int32),
    loss_mask_T=np.array([False, True, False, True, True]),
    logprobs_T=np.zeros(5, np.float32),
    expert_ids_TMA=np.zeros((5, 1, 1), np.uint16),
    policy_version_T=np.zeros(5, np.int32),
    context_version_T=np.zeros(5, np.int32),
    consumed_version_T=np.zeros(5, np.int32),
    temperature=1.0,
  )
  verdict = records.Verdict(
    passed=passed,
    num_passed=int(passed),
    num_tests=1,
    status=status,
    sandbox_level='none',
  )
  return records.Rollout(
    task_id='t',
    group=7,
    member=member,
    trajectories=(trajectory, trajectory),
    verdict=verdict,
    reward=0.0,
    num_turns=4,
    num_invalid=0,
    flags=flags,
  )


def test_an_outcome_counts_all_windows_and_no_hack(ledger):
  group = records.Group(
    group=7,
    task_id='t',
    rollouts=(
      rollout(0, True),
      rollout(1, True, flags=('reads_cache',)),
      rollout(2, False, status=records.INFRASTRUCTURE),
    ),
  )
  counted = curriculum.outcome_of(group)
  assert counted == outcome(group=7, judged=2, passed=1, turns=8, tokens=12)
  begin(ledger).record(2, [group])
  assert ledger.get(2) == [counted]


def test_impossible_options_are_named():
  with pytest.raises(ValueError, match=r'Options\.candidates must .* got 0'):
    curriculum.CurriculumOptions(candidates=0)
