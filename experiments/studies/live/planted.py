"""Plants regressions and improvements before the gate and the trial.

The code that decides is that of a cycle, and what it is given are the rows of a
real run on the pinned suites. A planted version has the rows of a real one, of
which a share is drawn anew: as many as differ between two versions of the run,
which play with the same random numbers; or all of them, as if they did not. A
regression then loses 1 to 3 margins of the pass rate in one domain, and its
users do not see it (the worst case: a trial that cannot help). An improvement
mends as many failures as gain 0.03 to 0.1 in every domain, and its users are as
much more satisfied. A hack asks back in 1 to 3 margins more of the episodes of
one domain, beside a right edit: only canaries see it.
"""

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.delta import transport
from composer_jax.live import learning, shipping, trial
from composer_jax.live import options as options_lib
from composer_jax.tasks.practice import evaluation
from composer_jax.telemetry import writer

_CALLS = ('num_turns', 'num_invalid', 'tools')  # what canaries read
_LOOK = 32  # users of each arm between two looks
Rows = dict[str, list[dict[str, Any]]]


def rows_of(workdir: pathlib.Path) -> list[Rows]:
  """Returns the rows of the versions that a run's gate has seen, in order."""
  published = [
    row['target_id'][:24]
    for row in writer.read(workdir / 'live')
    if row['stage'] == transport.PUBLISHED
  ]
  found = []
  for name in dict.fromkeys(published):
    rows: Rows = collections.defaultdict(list)
    for suite in sorted((workdir / 'live' / 'suites' / name).glob('*')):
      for row in evaluation.read(suite).values():
        rows[f'{suite.name} {row["package"]}'].append(row)
    if rows:
      found.append({d: sorted(of, key=_task) for d, of in rows.items()})
  return found


def _task(row: Mapping[str, Any]) -> tuple[str, int]:
  return row['task_id'], row['sample']


def redrawn_share(versions: Sequence[Rows]) -> float:
  """Returns the share of rows that are drawn anew from version to version.

  It is the share whose verdict differs, over that of independent draws.
  """
  shares = []
  for old, new in itertools.pairwise(versions):
    for domain in old:
      before, after = (
        np.array([r['passed'] for r in of[domain]], float) for of in (old, new)
      )
      apart = before.mean() * (1 - after.mean())
      apart += after.mean() * (1 - before.mean())
      if apart:
        shares.append((before != after).mean() / apart)
  return float(np.clip(np.mean(shares), 0, 1)) if shares else 1.0


def changed(
  rows: Sequence[Mapping[str, Any]],
  change: float,
  share: float,
  draw: np.random.Generator,
) -> list[dict[str, Any]]:
  """Returns the rows of another version, whose pass rate is `change` higher.

  Args:
    share: share of rows that are drawn anew from all of them.
  """
  rate = float(np.mean([row['passed'] for row in rows]))
  made = []
  for row in rows:
    other = row
    if draw.random() < share:
      other = rows[int(draw.integers(len(rows)))]
    said = {k: other[k] for k in ('passed', *_CALLS)}
    if change < 0 and said['passed'] and draw.random() < -change / rate:
      said['passed'] = False
    if (
      change > 0 and not said['passed'] and draw.random() < change / (1 - rate)
    ):
      said = {
        'passed': True,
        'num_turns': 1,
        'num_invalid': 0,
        'tools': ['edit'],
      }
    made.append({**row, **said})
  return made


def asking(
  rows: Sequence[Mapping[str, Any]], share: float, draw: np.random.Generator
) -> list[dict[str, Any]]:
  """Returns rows of which a share asks the user, beside what they did."""
  return [
    {**row, 'tools': [*row['tools'], 'ask'], 'num_turns': row['num_turns'] + 1}
    if draw.random() < share
    else dict(row)
    for row in rows
  ]


def users_of(
  version: Rows, satisfied: float, count: int, draw: np.random.Generator
) -> list[dict[str, Any]]:
  """Returns the first rows of users of a version, who do as suites did."""
  rows = [
    {**row, 'domain': domain} for domain in version for row in version[domain]
  ]
  return [
    {**rows[i], 'satisfied': float(draw.random() < satisfied)}
    for i in draw.integers(len(rows), size=count)
  ]


def _tried(
  control: Sequence[Mapping[str, Any]],
  candidate: Sequence[Mapping[str, Any]],
  options: options_lib.LiveOptions,
) -> str:
  """Looks at a trial after every few users; returns its decision."""
  for count in range(_LOOK, len(control) + _LOOK, _LOOK):
    decision, _ = learning.look(control[:count], candidate[:count], options)
    if decision != trial.GO_ON:
      break
  return decision


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedCase:
  """A planted version, and whether it shipped."""

  change: float
  passed_gate: bool
  shipped: bool


def plant(
  versions: Sequence[Rows],
  satisfied: float,
  options: options_lib.LiveOptions,
  *,
  kind: str,
  share: float,
  count: int,
  seed: int,
) -> list[PlantedCase]:
  """Plants so many versions of a kind, and has them judged.

  Args:
    versions: real rows of versions, each of which is served in turn; of
      improvements those that fail a tenth or more in every domain.
    satisfied: share of satisfied users of the served version.
    share: share of rows that are drawn anew.
  """
  served = [
    rows
    for rows in versions
    if kind != 'improvement'
    or all(np.mean([r['passed'] for r in of]) <= 0.9 for of in rows.values())
  ]
  cases = []
  for number in range(count):
    draw = np.random.default_rng((seed, number))
    before = served[number % len(served)]
    change, gain, hit = draw.uniform(0.03, 0.1), 0.0, set(before)
    if kind == 'improvement':
      gain = change
    else:
      change = options.gate.margin * draw.uniform(1, 3)
      hit = {str(draw.choice(sorted(before)))}
    sign = {'regression': -1, 'improvement': 1, 'hack': 0}[kind]
    after = {
      domain: changed(of, sign * change * (domain in hit), share, draw)
      for domain, of in before.items()
    }
    if kind == 'hack':
      after |= {domain: asking(after[domain], change, draw) for domain in hit}
    result = shipping.judge(before, after, options.prices, options.gate)
    decision = trial.ROLL_BACK
    if result.ships:
      users = options.trial.most_users
      decision = _tried(
        users_of(before, satisfied, users, draw),
        users_of(after, min(1.0, satisfied + gain), users, draw),
        options,
      )
    cases.append(
      PlantedCase(
        change=float(change),
        passed_gate=result.ships,
        shipped=decision == trial.PROMOTE,
      )
    )
  return cases
