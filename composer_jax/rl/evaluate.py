"""Pass rates of a policy on held-out tasks, with their interval."""

import dataclasses

from composer_jax.core import records
from composer_jax.telemetry import intervals


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassRate:
  """Share of judged episodes that passed.

  Attributes:
    passed: episodes.
    episodes: judged ones; infrastructure failures are counted apart.
    infrastructure: episodes whose sandbox failed.
    low, high: 95 % Wilson interval of the rate.
    invalid_rate: invalid calls over all calls.
    unfinished_rate: episodes that never called finish.
    valid_episodes: episodes without any invalid call that finished.
    passed_valid: of those, the ones that passed.
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

  @property
  def rate(self) -> float:
    return self.passed / max(self.episodes, 1)


def passed(rollout: records.Rollout) -> bool:
  """Whether it counts as solved: what a monitor flagged solved only tests."""
  return rollout.verdict.passed and not rollout.flags


def pass_rate(rollouts: list[records.Rollout]) -> PassRate:
  """Summarises finished rollouts."""
  judged = [r for r in rollouts if r.verdict.status != records.INFRASTRUCTURE]
  num_passed = sum(passed(r) for r in judged)
  low, high = intervals.wilson(num_passed, len(judged))
  turns = sum(r.num_turns for r in judged)
  unfinished = sum(r.verdict.status == records.UNFINISHED for r in judged)
  valid = [
    r
    for r in judged
    if r.num_invalid == 0 and r.verdict.status == records.GRADED
  ]
  return PassRate(
    passed=num_passed,
    episodes=len(judged),
    infrastructure=len(rollouts) - len(judged),
    low=low,
    high=high,
    invalid_rate=sum(r.num_invalid for r in judged) / max(turns, 1),
    unfinished_rate=unfinished / max(len(judged), 1),
    valid_episodes=len(valid),
    passed_valid=sum(passed(r) for r in valid),
  )
