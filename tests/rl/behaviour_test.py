"""Metrics of rollouts, flagged ones among them, and a pass rate by hand."""

import dataclasses

import numpy as np
import pytest

from composer_jax.core import records, turns
from composer_jax.rl import behaviour
from tests.rl import advantage_test


def rollout(member, **fields):
  base = advantage_test.make_rollout(member, fields.pop('reward', 0.0))
  return dataclasses.replace(base, **fields)


def turn(outcome):
  return turns.Turn(trajectory=0, start=1, stop=2, tool='', outcome=outcome)


def test_terms_versions_alarms_and_windows_are_of_all_rollouts():
  first_rollout = rollout(0)
  rollouts = (
    dataclasses.replace(
      first_rollout,
      trajectories=first_rollout.trajectories * 2,
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
  group = records.Group(
    group=first_rollout.group, task_id=first_rollout.task_id, rollouts=rollouts
  )
  metrics = behaviour.measure([group], [np.zeros(4)], 0)
  assert metrics['flag_kinds'] == [['canary_passed', 1], ['reads_cache', 2]]
  assert (
    metrics['reward_success'] == 0.25 and metrics['reward_flagged'] == -0.25
  )
  assert metrics['reward_invalid'] == -0.125 and metrics['reward_effort'] == 0
  assert (metrics['reward_version'], metrics['reward_versions']) == (2, 3)
  assert (metrics['windows'], metrics['summaries']) == (1.25, 0.25)
  assert metrics['failed_edits'] == 1 / 6
  # Five windows of two sampled tokens, two of them in one rollout.
  assert metrics['ages'] == [[0, 5]]
  assert metrics['lengths'] == [[2, 3], [4, 1]]


def test_a_flagged_rollout_is_counted_and_never_passes():
  """It counts in every total, as a failed episode."""
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
  rate = behaviour.pass_rate(rollouts)
  assert (rate.passed, rate.episodes, rate.passed_valid) == (1, 3, 1)


def episode(status, *, passed=False, turns=4, invalid=0):
  return records.Rollout(
    task_id='t',
    group=0,
    member=0,
    trajectories=(
      records.Trajectory(
        tokens_T=np.zeros(1, np.int32),
        loss_mask_T=np.ones(1, bool),
        logprobs_T=np.zeros(1, np.float32),
        expert_ids_TMA=np.zeros((1, 1, 1), np.uint16),
        policy_version_T=np.zeros(1, np.int32),
        context_version_T=np.zeros(1, np.int32),
        consumed_version_T=np.zeros(1, np.int32),
        temperature=1.0,
      ),
    ),
    verdict=records.Verdict(
      passed=passed,
      num_passed=2 if passed else 1,
      num_tests=2,
      status=status,
      sandbox_level='static',
    ),
    reward=float(passed),
    num_turns=turns,
    num_invalid=invalid,
  )


def test_every_figure_of_ten_episodes():
  episodes = [
    *[episode(records.GRADED, passed=True)] * 3,
    episode(records.GRADED, passed=True, turns=6, invalid=2),
    *[episode(records.GRADED)] * 2,
    episode(records.GRADED, turns=5, invalid=1),
    episode(records.UNFINISHED, turns=10, invalid=10),
    # An infrastructure failure counts neither its calls nor its result.
    *[episode(records.INFRASTRUCTURE, turns=100, invalid=100)] * 2,
  ]
  rate = behaviour.pass_rate(episodes)
  assert rate.rate == 0.5
  assert dataclasses.asdict(rate) == {
    'passed': 4,
    'episodes': 8,
    'infrastructure': 2,
    # Wilson, z = 1.96: 0.5 -+ 1.96 / (2 sqrt(8 + 1.96^2)).
    'low': pytest.approx(0.21521, abs=1e-4),
    'high': pytest.approx(0.78479, abs=1e-4),
    'invalid_rate': 13 / 41,
    'unfinished_rate': 1 / 8,
    'valid_episodes': 5,
    'passed_valid': 3,
    'first_edit_rate': None,
  }
  firsts = [True, False, True, *[False] * 5]
  found = behaviour.pass_rate(episodes[:8], firsts)
  assert found.first_edit_rate == 2 / 8
  assert behaviour.pass_rate(episodes, [None] * 10).first_edit_rate is None


def test_no_judged_episode_is_no_division_by_zero():
  rate = behaviour.pass_rate([episode(records.INFRASTRUCTURE)])
  assert (rate.rate, rate.episodes, rate.infrastructure) == (0.0, 0, 1)
  assert (rate.invalid_rate, rate.unfinished_rate) == (0.0, 0.0)
