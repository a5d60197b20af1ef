"""What a step's metrics say of its rollouts, hacks among them."""

import dataclasses

import numpy as np

from composer_jax.core import records, turns
from composer_jax.rl import behaviour, evaluate
from tests.rl import advantage_test


def rollout(member, **fields):
  made = advantage_test.make_rollout(member, fields.pop('reward', 0.0))
  return dataclasses.replace(made, **fields)


def turn(outcome):
  return turns.Turn(trajectory=0, start=1, stop=2, tool='', outcome=outcome)


def test_terms_versions_alarms_and_windows_are_of_all_rollouts():
  one = rollout(0)
  rollouts = (
    dataclasses.replace(
      one,
      trajectories=one.trajectories * 2,
      turns=(turn(turns.SUMMARY), turn(turns.FAILED_EDIT)),
      reward_terms={'success': 1.0, 'flagged': -1.0},
      flags=('canary_passed', 'reads_cache'),
      reward_version=2,
      num_turns=3,
    ),
    rollout(1, reward_terms={'success': 0.0, 'invalid': -0.5}),
    rollout(2, flags=('reads_cache',), reward_version=1),
    rollout(3),
  )
  group = records.Group(group=one.group, task_id=one.task_id, rollouts=rollouts)
  found = behaviour.measure([group], [np.zeros(4)], 0)
  assert found['flag_kinds'] == [['canary_passed', 1], ['reads_cache', 2]]
  assert found['reward_success'] == 0.25 and found['reward_flagged'] == -0.25
  assert found['reward_invalid'] == -0.125 and found['reward_effort'] == 0
  assert (found['reward_version'], found['reward_versions']) == (2, 3)
  assert (found['windows'], found['summaries']) == (1.25, 0.25)
  assert found['failed_edits'] == 1 / 6


def test_a_flagged_rollout_is_counted_and_never_passes():
  """It stays in every total, as one that failed."""
  rollouts = [
    rollout(0, reward=1.0),
    rollout(1, reward=1.0, flags=('reads_cache',)),
    rollout(2),
  ]
  assert all(r.verdict.passed for r in rollouts[:2])
  counts = behaviour.verdict_counts(rollouts)
  assert (counts['passed'], counts['failed']) == (1, 2)
  assert sum(counts.values()) == 3
  assert counts[records.UNFINISHED] == counts[records.INFRASTRUCTURE] == 0
  found = evaluate.pass_rate(rollouts)
  assert (found.passed, found.episodes, found.passed_valid) == (1, 3, 1)
