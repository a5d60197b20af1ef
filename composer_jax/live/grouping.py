"""Groups and baselines of episodes that came one by one.

Users do not ask the same thing sixteen times. Episodes whose prompts are nearly
the same make a group, and its mean is their baseline as in any other group. An
episode that is like no other has the mean reward of the other episodes of its
domain: leaving out its own keeps the gradient without bias, since the baseline
then does not depend on what the policy sampled there.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from composer_jax.core import records
from composer_jax.live import pricing
from composer_jax.rl import advantage

_SHINGLE = 4  # tokens


def _prompt_of(rollout: records.Rollout) -> np.ndarray:
  """Returns the tokens before the first that the policy sampled."""
  first = rollout.trajectories[0]
  return first.tokens_T[: int(np.argmax(first.loss_mask_T))]


def _shingles(tokens_T: np.ndarray) -> frozenset[bytes]:
  count = max(1, len(tokens_T) - _SHINGLE + 1)
  return frozenset(tokens_T[i : i + _SHINGLE].tobytes() for i in range(count))


def similar(
  episodes: Sequence[pricing.JudgedRollout], least: float, most: int
) -> list[list[int]]:
  """Returns groups of indices whose prompts are alike, each at most `most`.

  Two prompts are alike if the sets of their runs of four tokens share `least`
  of what both have. An episode joins the first group of its domain whose first
  prompt is like its own; a user has one place in a group, so that no group is
  the taste of one user.
  """
  groups: list[list[int]] = []
  firsts: list[frozenset[bytes]] = []
  by_domain = collections.defaultdict[str, list[int]](list)
  for index, episode in enumerate(episodes):
    own = _shingles(_prompt_of(episode.rollout))
    for place in by_domain[episode.claim.domain]:
      group, other = groups[place], firsts[place]
      is_new = all(episodes[i].claim.user != episode.claim.user for i in group)
      is_alike = len(own & other) >= least * len(own | other)
      if len(group) < most and is_new and is_alike:
        group.append(index)
        break
    else:
      by_domain[episode.claim.domain].append(len(groups))
      groups.append([index])
      firsts.append(own)
  return groups


def baselines(domains: Sequence[str], rewards: Sequence[float]) -> np.ndarray:
  """Returns for each episode the mean reward of the others of its domain.

  An episode that is alone in its domain gets the mean of all others, and its
  own reward, which teaches nothing, if there is no other at all.
  """
  rewards_N, of_N = np.asarray(rewards, float), np.asarray(domains)
  made_N = rewards_N.copy()
  for i in range(len(rewards_N)):
    others_N = np.arange(len(rewards_N)) != i
    same_N = others_N & (of_N == of_N[i])
    among_N = same_N if same_N.any() else others_N
    if among_N.any():
      made_N[i] = rewards_N[among_N].mean()
  return made_N


def group_of(
  number: int, episodes: Sequence[pricing.JudgedRollout], task_id: str
) -> records.Group:
  """Returns episodes as a group for the trainer."""
  rollouts = tuple(
    dataclasses.replace(e.rollout, task_id=task_id, group=number, member=member)
    for member, e in enumerate(episodes)
  )
  policies: dict[int, str] = {}
  for episode in episodes:
    policies |= episode.policies
  return records.Group(
    group=number, task_id=task_id, rollouts=rollouts, policies=policies
  )


def advantages(
  baseline_of_group: Mapping[int, float],
) -> Callable[[records.Group, np.ndarray], np.ndarray]:
  """Returns the advantages of `rl.update` for groups and for single episodes.

  Args:
    baseline_of_group: baselines of the groups of one episode, by their number.
  """

  def compare(group: records.Group, rewards_R: np.ndarray) -> np.ndarray:
    if len(group.rollouts) > 1:
      return advantage.group_advantages(group, rewards_R)
    return (rewards_R - baseline_of_group[group.group]).astype(np.float32)

  return compare
