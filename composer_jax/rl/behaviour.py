"""Pass rates of rollouts, and those metrics of a step that need no device."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from composer_jax.agent import rewards
from composer_jax.core import records, turns
from composer_jax.telemetry import intervals


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassRate:
  """Share of judged episodes that passed.

  Attributes:
    passed: judged episodes that passed and that no monitor flagged.
    episodes: judged episodes.
    infrastructure: episodes whose sandbox failed, not among `episodes`.
    low, high: 95 % Wilson interval of the rate.
    invalid_rate: share of tool calls that are invalid.
    unfinished_rate: share of episodes that never called finish.
    valid_episodes: episodes that finished without any invalid call.
    passed_valid: passed episodes among `valid_episodes`.
    first_edit_rate: share of all whose first edit was right; None if unknown.
  """

  passed: int
  episodes: int
  infrastructure: int
  low: float
  high: float
  invalid_rate: float
  unfinished_rate: float
  valid_episodes: int
  passed_valid: int
  first_edit_rate: float | None = None

  @property
  def rate(self) -> float:
    return self.passed / max(self.episodes, 1)


def passed(rollout: records.Rollout) -> bool:
  """True if tests passed and no monitor flagged the rollout as cheating."""
  return rollout.verdict.passed and not rollout.flags


def pass_rate(
  rollouts: list[records.Rollout], firsts: Sequence[bool | None] = ()
) -> PassRate:
  """Counts what rollouts did; `firsts` says whose first edit was right."""
  judged = [r for r in rollouts if r.is_judged]
  counts = verdict_counts(judged)
  low, high = intervals.wilson(counts['passed'], len(judged))
  num_calls = sum(r.num_turns for r in judged)
  valid = [
    r
    for r in judged
    if r.num_invalid == 0 and r.verdict.status == records.GRADED
  ]
  known = [first for first in firsts if first is not None]
  return PassRate(
    passed=counts['passed'],
    episodes=len(judged),
    infrastructure=len(rollouts) - len(judged),
    low=low,
    high=high,
    invalid_rate=sum(r.num_invalid for r in judged) / max(num_calls, 1),
    unfinished_rate=counts[records.UNFINISHED] / max(len(judged), 1),
    valid_episodes=len(valid),
    passed_valid=sum(passed(r) for r in valid),
    first_edit_rate=sum(known) / len(known) if known else None,
  )


def verdict_counts(rollouts: Sequence[records.Rollout]) -> dict[str, int]:
  """Counts passed, failed, unfinished and infrastructure, one per rollout.

  A rollout that a monitor flagged did not pass, whatever its tests say.
  """
  judged = [r for r in rollouts if r.is_judged]
  statuses = [r.verdict.status for r in judged]
  num_passed = sum(map(passed, judged))
  return {
    'passed': num_passed,
    'failed': statuses.count(records.GRADED) - num_passed,
    records.UNFINISHED: statuses.count(records.UNFINISHED),
    records.INFRASTRUCTURE: len(rollouts) - len(judged),
  }


def _histogram(values: Iterable[int]) -> list[list[int]]:
  return [list(item) for item in sorted(collections.Counter(values).items())]


def measure(
  groups: Sequence[records.Group],
  advantages: Sequence[np.ndarray],
  version: int,
) -> dict[str, Any]:
  """Rewards and their terms, verdicts, flags, calls and staleness of a step.

  Most are means over rollouts. 'reward_versions' counts versions of the reward
  options: more than one while groups that began before a change are trained on.
  `advantages` are advantages_R of each group, all 0 if it is not informative;
  `version` is that of the trained policy.
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
    'ages': _histogram(ages),
    'lengths': _histogram(
      1 << max(r.num_sampled - 1, 0).bit_length() for r in rollouts
    ),
    'invalid_rate': sum(r.num_invalid for r in rollouts) / max(calls, 1),
    'turns': calls / len(rollouts),
    'tokens': mean(lambda r: sum(len(t) for t in r.trajectories)),
    'flags': sum(bool(r.flags) for r in rollouts),
    'flag_kinds': [list(item) for item in sorted(flags.items())],
    **{
      f'reward_{name}': mean(lambda r, name=name: r.reward_terms.get(name, 0.0))
      for name in rewards.TERMS
    },
    'scores': [
      [
        name,
        float(np.mean([r.scores[name] for r in rollouts if name in r.scores])),
      ]
      for name in sorted({n for r in rollouts for n in r.scores})
    ],
    'reward_version': max(versions),
    'reward_versions': len(versions),
    'windows': mean(lambda r: len(r.trajectories)),
    'summaries': outcomes[turns.SUMMARY] / len(rollouts),
    'failed_edits': outcomes[turns.FAILED_EDIT] / max(calls, 1),
    'informative_groups': float(np.mean([np.any(a) for a in advantages])),
    'sandbox_ms': 1e3 * mean(lambda r: r.sandbox_seconds),
    'groups': [g.group for g in groups],
  }
