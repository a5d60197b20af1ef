"""From the rewards of a group to one advantage per rollout.

Guided path, 5 of 10: between `rl.collect` and `rl.batching`.
Dr. GRPO (arXiv 2503.20783): reward minus the group's mean, divided by neither
the group's deviation (degenerate when all are equally right) nor the length.
The KL to a reference sits in the reward as the detached k1 estimator: its
gradient is unbiased there, while differentiated in the loss it is zero in
expectation (arXiv 2512.21852).
"""

import numpy as np

from composer_jax.core import records


def kl_penalized_rewards(
  group: records.Group,
  reference_logprobs: list[np.ndarray],
  coefficient: float,
) -> np.ndarray:
  """Subtracts `coefficient * sum_t (log p - log q)` from each reward.

  log p is the rollouts' `logprobs_T`; log q is `reference_logprobs`: for each
  rollout those of all tokens of its trajectories, concatenated.
  """
  rewards_R = np.array([r.reward for r in group.rollouts])
  for i, rollout in enumerate(group.rollouts):
    logprobs_T = np.concatenate([t.logprobs_T for t in rollout.trajectories])
    mask_T = np.concatenate([t.loss_mask_T for t in rollout.trajectories])
    k1_T = logprobs_T - reference_logprobs[i]
    rewards_R[i] -= coefficient * k1_T[mask_T].sum()
  return rewards_R


def _judged(group: records.Group) -> np.ndarray:
  return np.array([r.is_judged for r in group.rollouts])


def shuffled_rewards(group: records.Group, seed: int) -> np.ndarray:
  """Permutes judged rewards within the group: the control that must not learn.

  This keeps every statistic of the rewards but their link to the actions. A
  rollout that no sandbox judged keeps its reward, which no mean includes.
  """
  rewards_R = np.array([r.reward for r in group.rollouts])
  judged_R = _judged(group)
  rng = np.random.default_rng((seed, group.group))
  rewards_R[judged_R] = rng.permutation(rewards_R[judged_R])
  return rewards_R


def group_advantages(group: records.Group, rewards_R: np.ndarray) -> np.ndarray:
  """Returns float32 advantages_R: reward minus the mean over judged rollouts.

  A rollout whose sandbox failed says nothing about the policy: it is left out
  of the mean and gets advantage 0, but stays in the group and is counted.
  Where all judged rewards are equal, every advantage is exactly 0.
  """
  judged_R = _judged(group)
  # Also if none was judged. The float mean of seven times 0.8 is not 0.8.
  if len(set(rewards_R[judged_R])) < 2:
    return np.zeros(len(rewards_R), np.float32)
  advantages_R = rewards_R - rewards_R[judged_R].mean()
  return np.where(judged_R, advantages_R, 0).astype(np.float32)
