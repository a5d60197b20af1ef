"""Plants regressions and improvements before the gate and the trial.

The code that decides is that of a cycle. What it is given is drawn from what a
real run did on the pinned suites: each task passes with the frequency that it
had over the versions of the run, smoothed; both versions of a planted pair are
drawn anew, without common random numbers, which real pairs have. A regression
loses 1 to 3 margins of the pass rate in one domain, and its users do not see it
(the worst case: a trial that cannot help); an improvement gains 0.03 to 0.15 in
every domain, and its users are as much more satisfied.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.live import options as options_lib
from composer_jax.live import shipping, trial
from composer_jax.tasks.practice import evaluation

Rows = dict[str, list[dict[str, Any]]]


def rows_of(workdir: pathlib.Path) -> list[Rows]:
  """Returns the rows of each version that a run's gate has seen, by domain."""
  found = []
  for version in sorted((workdir / 'live' / 'suites').iterdir()):
    rows: Rows = collections.defaultdict(list)
    for suite in sorted(version.iterdir()):
      for row in evaluation.read(suite).values():
        rows[f'{suite.name} {row["package"]}'].append(row)
    found.append(dict(rows))
  return found


def chances(versions: Sequence[Rows]) -> dict[str, list[float]]:
  """Returns for each task how often it passes, by domain (Jeffreys' prior)."""
  made = {}
  for domain in versions[0]:
    passed = collections.defaultdict[str, list[bool]](list)
    for rows in versions:
      for row in rows[domain]:
        passed[row['task_id']].append(row['passed'])
    made[domain] = [(sum(p) + 0.5) / (len(p) + 1) for p in passed.values()]
  return made


def _drawn(
  draw: np.random.Generator,
  chances_of: Mapping[str, Sequence[float]],
  behaviour: Sequence[Mapping[str, Any]],
) -> Rows:
  """Draws a version's rows; how it behaves is drawn from real rows."""
  made: Rows = {}
  for domain, chances_N in chances_of.items():
    made[domain] = []
    for i, chance in enumerate(chances_N):
      real = behaviour[int(draw.integers(len(behaviour)))]
      made[domain].append(
        {
          'task_id': f'{domain}/{i}',
          'sample': 0,
          'status': 'graded',
          'passed': bool(draw.random() < chance),
          'num_invalid': real['num_invalid'],
          'tools': real['tools'],
        }
      )
  return made


def _changed(chances_N: Sequence[float], change: float) -> list[float]:
  """Returns chances whose mean is changed so much, and within 0..1."""
  old_N = np.asarray(chances_N)
  if change < 0:
    return list(old_N * (1 + change / old_N.mean()))
  free_N = 1 - old_N
  return list(old_N + free_N * min(1.0, change / free_N.mean()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedCase:
  """A planted version, and whether it shipped."""

  kind: str
  change: float
  passed_gate: bool
  shipped: bool


def plant(
  versions: Sequence[Rows],
  satisfied: float,
  options: options_lib.LiveOptions,
  *,
  kind: str,
  count: int,
  seed: int,
) -> list[PlantedCase]:
  """Plants so many versions of a kind, and has them judged.

  Args:
    versions: real rows of versions, the served one last.
    satisfied: share of satisfied users of the served version.
  """
  known = chances(versions)
  behaviour = [row for rows in versions[-1].values() for row in rows]
  cases = []
  for number in range(count):
    draw = np.random.default_rng((seed, number))
    if kind == 'regression':
      change = -options.gate.margin * draw.uniform(1, 3)
      hit = draw.choice(sorted(known))
      new = {
        d: _changed(c, change) if d == hit else c for d, c in known.items()
      }
      gain = 0.0
    else:
      change = gain = draw.uniform(0.03, 0.15)
      new = {d: _changed(c, change) for d, c in known.items()}
    result = shipping.judge(
      _drawn(draw, known, behaviour),
      _drawn(draw, new, behaviour),
      options.prices,
      options.gate,
    )
    most = options.trial.most_users
    users = draw.random((2, most))
    tried = trial.judge(
      (users[0] < satisfied).astype(float),
      (users[1] < min(1.0, satisfied + gain)).astype(float),
      options.trial,
    )
    cases.append(
      PlantedCase(
        kind=kind,
        change=float(change),
        passed_gate=result.ships,
        shipped=result.ships and tried.decision == trial.PROMOTE,
      )
    )
  return cases
