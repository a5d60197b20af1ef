"""The figures of a pass rate, counted by hand."""

import dataclasses

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.rl import evaluate


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
    # Says nothing about the policy, neither its calls nor its failure.
    *[episode(records.INFRASTRUCTURE, turns=100, invalid=100)] * 2,
  ]
  found = evaluate.pass_rate(episodes)
  assert found.rate == 0.5
  assert dataclasses.asdict(found) == {
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
  }


def test_no_judged_episode_is_no_division_by_zero():
  found = evaluate.pass_rate([episode(records.INFRASTRUCTURE)])
  assert (found.rate, found.episodes, found.infrastructure) == (0.0, 0, 1)
  assert (found.invalid_rate, found.unfinished_rate) == (0.0, 0.0)
