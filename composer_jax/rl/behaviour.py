"""What the rollouts of a step did, beside passing or not: for its metrics."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.agent import rewards
from composer_jax.core import records, turns


def measure(rollouts: Sequence[records.Rollout]) -> dict[str, Any]:
  """Counts alarms and means of what the reward is made of.

  Returns:
    'flag_kinds' [kind, rollouts with that alarm] of those that occurred;
    'reward_TERM' of each of `rewards.TERMS`, mean over rollouts;
    'reward_version' the newest, and 'reward_versions' how many there are: more
    than one while groups that began before a change are trained on;
    'windows' and 'summaries' of a rollout; 'failed_edits' of all calls.
  """
  flags = collections.Counter(f for r in rollouts for f in r.flags)
  outcomes = collections.Counter(t.outcome for r in rollouts for t in r.turns)
  versions = {r.reward_version for r in rollouts}
  calls = sum(r.num_turns for r in rollouts)
  terms = {
    f'reward_{name}': float(
      np.mean([r.reward_terms.get(name, 0.0) for r in rollouts])
    )
    for name in rewards.TERMS
  }
  return {
    'flag_kinds': [list(item) for item in sorted(flags.items())],
    **terms,
    'reward_version': max(versions),
    'reward_versions': len(versions),
    'windows': float(np.mean([len(r.trajectories) for r in rollouts])),
    'summaries': outcomes[turns.SUMMARY] / len(rollouts),
    'failed_edits': outcomes[turns.FAILED_EDIT] / max(calls, 1),
  }
