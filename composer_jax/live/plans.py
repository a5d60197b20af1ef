"""Which episodes a cycle trains on: fixed before it begins, and never again.

A plan names episodes by their random names and settles their rewards; it holds
nothing that a user wrote. Whatever became of a cycle, an episode of its plan is
in no later one: one that was interrupted goes on with the same plan, from the
weights that it began with. An episode whose consent is withdrawn after the plan
was made is left out when its step is read.
"""

import collections
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from composer_jax.core import files, records
from composer_jax.live import episodes as episodes_lib
from composer_jax.live import grouping, pricing
from composer_jax.live import options as options_lib
from composer_jax.tasks import scoring

_PLAN, _RESULT = 'plan.json', 'result.json'
# Why an episode that is ripe is not trained on.
UNJUDGED, VOID, OLD = 'unjudged', 'void', 'old'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclePlan:
  """What a cycle trains on.

  Attributes:
    cycle: number of the cycle, from 1.
    base: version of the weights that it begins with.
    steps: groups of each optimizer step, as names of episodes.
    terms: settled terms of the reward, by name of the episode.
    left_out: names of ripe episodes that teach nothing, by reason.
    satisfied: share of judged episodes with a positive reward.
    judge: identity of what judged follow-ups; '' for none.
  """

  cycle: int
  base: int
  steps: tuple[tuple[tuple[str, ...], ...], ...]
  terms: Mapping[str, Mapping[str, float]]
  left_out: Mapping[str, tuple[str, ...]]
  satisfied: float
  judge: str = ''

  @property
  def spent(self) -> set[str]:
    """Names of the episodes that no later cycle may use."""
    passed = (name for names in self.left_out.values() for name in names)
    return {*self.terms, *passed}


class Plans:
  """The plans of a run, one folder a cycle."""

  def __init__(self, folder: pathlib.Path):
    self._folder = folder

  def load(self, cycle: int) -> CyclePlan | None:
    path = self._folder / f'{cycle:04d}' / _PLAN
    if not path.exists():
      return None
    fields = files.read_json(path)
    steps = tuple(
      tuple(tuple(group) for group in step) for step in fields.pop('steps')
    )
    left_out = {k: tuple(v) for k, v in fields.pop('left_out').items()}
    return CyclePlan(steps=steps, left_out=left_out, **fields)

  def save(self, plan: CyclePlan) -> None:
    """Fixes a plan; a ValueError names episodes of an earlier one."""
    if again := plan.spent & self.spent():
      raise ValueError(
        f'The plan of cycle {plan.cycle} names {len(again)} episodes of '
        f'earlier plans, such as {min(again)}: nothing is trained twice.'
      )
    place = self._folder / f'{plan.cycle:04d}'
    place.mkdir(parents=True, exist_ok=True)
    files.write_json(place / _PLAN, dataclasses.asdict(plan))

  def spent(self) -> set[str]:
    """Returns the names of all episodes that some plan has."""
    names: set[str] = set()
    for path in self._folder.glob(f'*/{_PLAN}'):
      if (plan := self.load(int(path.parent.name))) is not None:
        names |= plan.spent
    return names

  def result(self, cycle: int) -> dict[str, Any] | None:
    """Returns what became of a cycle; None before its end."""
    with contextlib.suppress(FileNotFoundError):
      return files.read_json(self._folder / f'{cycle:04d}' / _RESULT)
    return None

  def finish(self, cycle: int, result: Mapping[str, Any]) -> None:
    files.write_json(self._folder / f'{cycle:04d}' / _RESULT, dict(result))


# Says why a group of an episode may not be trained on; '' where it may.
FaultOf = Callable[[records.Group], str]


def draw(
  episodes: episodes_lib.Episodes,
  known: Plans,
  options: options_lib.LiveOptions,
  *,
  cycle: int,
  base: int,
  size: int,
  now: float,
  fault_of: FaultOf,
  judge: scoring.Scorer | None = None,
) -> CyclePlan | None:
  """Plans a cycle of what is ripe; None if that is too little yet.

  Args:
    base: version of the weights that the cycle begins with.
    size: number of episodes of a step.
    fault_of: says that void or unknown weights sampled an episode.
  """
  spent = known.spent()
  judged: list[pricing.JudgedRollout] = []
  left_out = collections.defaultdict[str, list[str]](list)
  for claim in episodes.ripe(now, but=spent):
    episode = episodes.read(claim)
    if episode is None:
      continue  # Withdrawn this moment.
    made = pricing.judged(episode, options.prices, judge)
    rollout = made.rollout
    if judge and rollout.not_judged.startswith(pricing.FOLLOW_UP):
      continue  # The judge is out of reach: a later look asks it again.
    if not rollout.is_judged:
      left_out[UNJUDGED].append(claim.episode)
    elif fault_of(grouping.group_of(0, [made], claim.episode)):
      left_out[VOID].append(claim.episode)
    elif _oldest(episode) < base - options.max_age:
      left_out[OLD].append(claim.episode)
    else:
      judged.append(made)
  count = min(len(judged) // size, options.steps)
  if count < options.least_steps:
    return None
  # What does not fit waits for the next cycle.
  judged = judged[: count * size]
  groups = grouping.similar(judged, options.similarity, size)
  satisfied = sum(e.rollout.verdict.passed for e in judged) / len(judged)
  return CyclePlan(
    cycle=cycle,
    base=base,
    steps=_steps(
      [[judged[i].rollout.task_id for i in group] for group in groups], size
    ),
    terms={e.rollout.task_id: dict(e.rollout.reward_terms) for e in judged},
    left_out={reason: tuple(names) for reason, names in left_out.items()},
    satisfied=satisfied,
    judge=judge.identity if judge else '',
  )


def _oldest(episode: episodes_lib.LiveEpisode) -> int:
  return min(int(w.policy_version_T.min()) for w in episode.windows)


def _steps(
  groups: list[list[str]], size: int
) -> tuple[tuple[tuple[str, ...], ...], ...]:
  """Deals groups out to steps of `size` episodes; one may be cut in two."""
  steps: list[list[tuple[str, ...]]] = []
  room = 0
  for group in groups:
    rest = group
    while rest:
      if not room:
        steps.append([])
        room = size
      part, rest = rest[:room], rest[room:]
      room -= len(part)
      steps[-1].append(tuple(part))
  return tuple(map(tuple, steps))


def read_step(
  episodes: episodes_lib.Episodes,
  plan: CyclePlan,
  step: int,
  options: options_lib.LiveOptions,
) -> tuple[list[records.Group], dict[int, float]]:
  """Reads the groups of a step, without episodes that were withdrawn since.

  Returns:
    Groups, and the baselines of groups of one by their number, over what is
    left of the plan.
  """
  claims = {c.episode: c for c in episodes.claims() if c.episode in plan.terms}
  left = sorted(claims)
  rewards = [sum(plan.terms[name].values()) for name in left]
  domains = [claims[name].domain for name in left]
  baseline_of = dict(
    zip(left, grouping.baselines(domains, rewards), strict=True)
  )
  groups, baselines = [], {}
  for number, names in enumerate(plan.steps[step]):
    members = []
    for name in names:
      episode = episodes.read(claims[name]) if name in claims else None
      if episode is not None:
        by = {'settled': plan.terms[name], 'settled_by': plan.judge}
        members.append(pricing.judged(episode, options.prices, **by))
        baselines[number] = float(baseline_of[name])
    if members:
      groups.append(grouping.group_of(number, members, f'live/{names[0]}'))
  return groups, baselines
