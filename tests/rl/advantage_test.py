"""Advantages, the KL penalty in the reward, and group records."""

import dataclasses

import numpy as np
import pytest

from composer_jax.core import group_bytes, records
from composer_jax.rl import advantage


def make_rollout(member, reward, *, length=3, status=records.GRADED, gap=0.0):
  trajectory = records.Trajectory(
    tokens_T=np.arange(length, dtype=np.int32),
    loss_mask_T=np.array([False] + [True] * (length - 1)),
    logprobs_T=np.full(length, gap - 1.0, np.float32),
    expert_ids_TMA=np.zeros((length, 1, 1), np.uint16),
    policy_version_T=np.zeros(length, np.int32),
    context_version_T=np.zeros(length, np.int32),
    consumed_version_T=np.zeros(length, np.int32),
    temperature=1.0,
  )
  passed = status == records.GRADED and reward > 0.5
  return records.Rollout(
    task_id='t',
    group=3,
    member=member,
    trajectories=(trajectory,),
    verdict=records.Verdict(
      passed=passed,
      num_passed=2 * passed,
      num_tests=2,
      status=status,
      sandbox_level='unshare',
    ),
    reward=reward,
    num_turns=1,
    num_invalid=0,
  )


def make_group(rewards, **kwargs):
  rollouts = tuple(make_rollout(i, r, **kwargs) for i, r in enumerate(rewards))
  return records.Group(group=3, task_id='t', rollouts=rollouts)


def test_advantage_is_reward_minus_mean():
  group = make_group([1.0, 0.0, 0.0, 1.0])
  advantages = advantage.group_advantages(group, np.array([1.0, 0.0, 0.0, 1.0]))
  np.testing.assert_array_equal(advantages, [0.5, -0.5, -0.5, 0.5])


@pytest.mark.parametrize('count,reward', [(5, 0.7), (7, 0.8)])
def test_equal_rewards_give_advantages_of_exactly_zero(count, reward):
  """Also where rounding makes the mean differ from the rewards."""
  group = make_group([reward] * count)
  advantages = advantage.group_advantages(group, np.full(count, reward))
  np.testing.assert_array_equal(advantages, np.zeros(count))
  # A rollout that was not judged does not change the others.
  group = with_unjudged(group, member=1)
  rewards_R = np.where(np.arange(count) == 1, 0.0, reward)
  advantages = advantage.group_advantages(group, rewards_R)
  np.testing.assert_array_equal(advantages, np.zeros(count))


def with_unjudged(group, member):
  rollouts = list(group.rollouts)
  rollouts[member] = make_rollout(member, 0.0, status=records.INFRASTRUCTURE)
  return dataclasses.replace(group, rollouts=tuple(rollouts))


def test_advantage_scales_with_the_reward_and_not_with_its_deviation():
  group = make_group([1.0, 0.0])
  unit = advantage.group_advantages(group, np.array([1.0, 0.0]))
  tenth = advantage.group_advantages(group, np.array([0.1, 0.0]))
  np.testing.assert_allclose(unit, 10 * tenth, rtol=1e-6)


def test_a_failed_sandbox_is_not_a_failed_policy():
  broken = with_unjudged(make_group([1.0, 0.0, 0.0]), member=2)
  advantages = advantage.group_advantages(broken, np.array([1.0, 0.0, 0.0]))
  np.testing.assert_array_equal(advantages, [0.5, -0.5, 0.0])


def test_kl_penalty_is_k1_summed_over_sampled_tokens():
  group = make_group([1.0, 0.0], length=4, gap=0.25)
  reference = [np.full(4, -1.0), np.full(4, -1.0)]
  rewards = advantage.kl_penalized_rewards(group, reference, 0.1)
  np.testing.assert_allclose(rewards, [1 - 0.1 * 0.75, -0.1 * 0.75], rtol=1e-6)


def test_shuffled_rewards_keep_their_multiset_and_change_their_places():
  rewards = [float(i) for i in range(16)]
  group = make_group(rewards)
  shuffled = advantage.shuffled_rewards(group, seed=0)
  assert sorted(shuffled) == rewards
  assert list(shuffled) != rewards
  np.testing.assert_array_equal(
    shuffled, advantage.shuffled_rewards(group, seed=0)
  )


def test_shuffling_leaves_what_was_not_judged_in_its_place():
  rewards = [float(i) for i in range(1, 17)]
  group = with_unjudged(make_group(rewards), member=5)
  shuffled = advantage.shuffled_rewards(group, seed=0)
  assert shuffled[5] == 0
  judged = sorted(rewards[:5] + rewards[6:])
  assert sorted(np.delete(shuffled, 5)) == judged
  # So mean and spread of the advantages stay those of the real rewards.
  real = np.array([r.reward for r in group.rollouts])
  np.testing.assert_array_equal(
    *(np.sort(advantage.group_advantages(group, r)) for r in (shuffled, real))
  )


def test_group_refuses_a_missing_member_by_number():
  rollouts = (make_rollout(0, 1.0), make_rollout(2, 0.0))
  with pytest.raises(
    ValueError, match=r'consecutive members in order.*\[0, 2\]'
  ):
    records.Group(group=3, task_id='t', rollouts=rollouts)


def test_group_survives_its_bytes():
  group = make_group([1.0, 0.25])
  again = group_bytes.from_bytes(group_bytes.to_bytes(group))
  assert again.group == group.group and again.task_id == group.task_id
  for before, after in zip(group.rollouts, again.rollouts, strict=True):
    assert before.verdict == after.verdict and before.reward == after.reward
    for name in ('tokens_T', 'logprobs_T', 'expert_ids_TMA', 'loss_mask_T'):
      array = getattr(before.trajectories[0], name)
      decoded = getattr(after.trajectories[0], name)
      assert array.dtype == decoded.dtype
      np.testing.assert_array_equal(array, decoded)
