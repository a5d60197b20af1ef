"""What the rollouts of a step did: its metrics that need no device."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.agent import rewards
from composer_jax.core import records, turns
from composer_jax.rl import evaluate


def verdict_counts(rollouts: Sequence[records.Rollout]) -> dict[str, int]:
  """Counts rollouts by what was found; each is one of the four.

  One that a monitor flagged did not pass, whatever its tests say.
  """
  statuses = [r.verdict.status for r in rollouts]
  passed = sum(map(evaluate.passed, rollouts))
  return {
    'passed': passed,
    'failed': statuses.count(records.GRADED) - passed,
    records.UNFINISHED: statuses.count(records.UNFINISHED),
    records.INFRASTRUCTURE: statuses.count(records.INFRASTRUCTURE),
  }


def measure(
  groups: Sequence[records.Group],
  advantages: Sequence[np.ndarray],
  version: int,
) -> dict[str, Any]:
  """Rewards and their terms, verdicts, alarms, calls and staleness.

  Most are means over rollouts. 'reward_versions' says how many versions of the
  prices there are: more than one while groups that began before a change are
  trained on.

  Args:
    groups: the step's.
    advantages: advantages_R of each group; a group without any that is not 0
      does not inform.
    version: policy version that is trained.
  """
  rollouts = [r for g in groups for r in g.rollouts]
  counts = verdict_counts(rollouts)
  num_judged = len(rollouts) - counts[records.INFRASTRUCTURE]
  flags = collections.Counter(f for r in rollouts for f in r.flags)
  outcomes = collections.Counter(t.outcome for r in rollouts for t in r.turns)
  versions = {r.reward_version for r in rollouts}
  calls = sum(r.num_turns for r in rollouts)
  ages = [
    version - int(t.policy_version_T[t.loss_mask_T].min())
    for r in rollouts
    for t in r.trajectories
    if t.loss_mask_T.any()
  ]

  def mean(value) -> float:
    return float(np.mean([value(r) for r in rollouts]))

  return {
    'reward': mean(lambda r: r.reward),
    'pass_rate': counts['passed'] / max(num_judged, 1),
    **counts,
    'staleness': max(ages, default=0),
    'staleness_mean': float(np.mean(ages)) if ages else 0.0,
    'invalid_rate': sum(r.num_invalid for r in rollouts) / max(calls, 1),
    'turns': calls / len(rollouts),
    'tokens': mean(lambda r: sum(len(t) for t in r.trajectories)),
    'flags': sum(bool(r.flags) for r in rollouts),
    'flag_kinds': [list(item) for item in sorted(flags.items())],
    **{
      f'reward_{name}': mean(lambda r, name=name: r.reward_terms.get(name, 0.0))
      for name in rewards.TERMS
    },
    'reward_version': max(versions),
    'reward_versions': len(versions),
    'windows': mean(lambda r: len(r.trajectories)),
    'summaries': outcomes[turns.SUMMARY] / len(rollouts),
    'failed_edits': outcomes[turns.FAILED_EDIT] / max(calls, 1),
    'informative_groups': float(np.mean([np.any(a) for a in advantages])),
    'sandbox_ms': 1e3 * mean(lambda r: r.sandbox_seconds),
    'groups': [g.group for g in groups],
  }
