"""Pass rates of a policy on held-out tasks, with their interval."""

import dataclasses
import math
from collections.abc import Callable

from composer_jax.core import records
from composer_jax.rl import collect
from composer_jax.rollout import engine as engines
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


def pass_at_k(samples: int, passed: int, k: int) -> float:
  """Chance that one of k samples passes, without bias (Chen et al. 2021).

  1 - C(n - c, k) / C(n, k) for `passed` = c of `samples` = n of one task.
  """
  if not 0 <= passed <= samples or not 1 <= k <= samples:
    raise ValueError(
      f'passed ({passed}) must lie in 0..samples ({samples}), and k ({k}) in '
      '1..samples.'
    )
  return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def evaluate(
  collector: collect.Collector,
  engine: engines.Engine,
  episodes: int,
  on_progress: Callable[[int], None] = lambda done: None,
) -> tuple[PassRate, list[records.Rollout]]:
  """Plays `episodes` held-out episodes, one per task, and summarises them.

  Args:
    collector: with one rollout per group, over held-out tasks.
    engine: holding the policy to judge.
    episodes: groups 0..episodes-1 of the collector.
    on_progress: told how many episodes have ended.
  """
  groups = collect.groups(collector, engine, range(episodes), on_progress)
  rollouts = [r for g in groups for r in g.rollouts]
  return pass_rate(rollouts), rollouts
