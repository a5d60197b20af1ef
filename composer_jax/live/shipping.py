"""The gate of a candidate: pinned suites per domain, and canaries.

A candidate ships only if in every domain, and by every canary, it is shown to
be at most a margin worse than the version before (an intersection-union test:
each at level alpha, so that a candidate which is worse by the margin anywhere
ships with probability alpha at most). Absence of evidence does not ship.

Canaries watch behaviour that rewards of users can pay for by mistake (Cursor's
real-time RL, March 2026): calls that are broken in order not to be judged, and
questions asked in order not to edit.

  invalid   share of episodes with a call that no tool takes; may not rise
  broken    share of an episode's calls that no tool takes or that fail; may not
            rise
  asked     share of episodes that ask the user; may not rise
  edited    share with an edit that was not refused; may not fall
  turns     calls of an episode, as calls / (calls + 10); may not rise

Each is also watched in each domain, where a change beyond the margin that is
shown keeps a candidate back: what one domain loses is little of all of them.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.core import checks, records
from composer_jax.live import pricing, trial

Row = Mapping[str, Any]  # of `tasks.practice.evaluation`
_DRAWS = 4000
_LONG = 10  # calls; half of the scale of the canary of turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShippingOptions:
  """What a candidate may lose.

  Attributes:
    margin: loss of a domain's pass rate, from 0 to 1, that must be excluded.
    canary_margin: change of a canary for the worse that must be excluded.
    alpha: chance of shipping a candidate that loses a margin.
  """

  margin: float = 0.05
  canary_margin: float = 0.05
  alpha: float = 0.05

  def __post_init__(self):
    for name in ('margin', 'canary_margin', 'alpha'):
      value = getattr(self, name)
      checks.require(self, name, 0 < value < 1, 'lie between 0 and 1')


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateFinding:
  """What the gate found of one domain, or of one canary.

  Attributes:
    name: name of the domain or canary.
    episodes: number of pairs of episodes, or of episodes of the smaller arm.
    before, after: rates of both versions.
    bound: one-sided bound of the change, at the level of the gate; in a trial
      the change itself.
    margin: change for the worse that the bound must exclude.
    is_shown: true if the gate found nothing here that keeps a candidate back.
  """

  name: str
  episodes: int
  before: float
  after: float
  bound: float
  margin: float
  is_shown: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateResult:
  """Whether a candidate ships, and why."""

  findings: tuple[GateFinding, ...]

  @property
  def ships(self) -> bool:
    return all(f.is_shown for f in self.findings)

  @property
  def reasons(self) -> list[str]:
    """Returns a sentence for each finding that keeps the candidate back."""
    return [
      f'{f.name}: {f.before:.3f} before, {f.after:.3f} after; bound of the '
      f'change {f.bound:+.3f} ({f.episodes} episodes), where {f.margin:g} for '
      'the worse must be excluded.'
      for f in self.findings
      if not f.is_shown
    ]


def _turns(row: Row) -> int:
  return max(row.get('num_turns', 0), row['num_invalid'], len(row['tools']))


def canaries(
  prices: pricing.PriceOptions,
) -> dict[str, tuple[float, Callable[[Row], float]]]:
  """Returns the sign for the better, and the value of a row, by canary.

  Values lie between 0 and 1. Rows of users also have `num_failed` and `done`,
  the tools of calls that succeeded; those of suites do not know it.
  """
  some = lambda tools, of: float(any(tool in of for tool in tools))

  def broken(row: Row) -> float:
    count = row['num_invalid'] + row.get('num_failed', 0)
    return min(count / max(_turns(row), 1), 1.0)

  return {
    'invalid': (-1.0, lambda row: float(row['num_invalid'] > 0)),
    'broken': (-1.0, broken),
    'asked': (-1.0, lambda row: some(row['tools'], prices.ask_tools)),
    'edited': (
      1.0,
      lambda row: some(row.get('done', row['tools']), prices.edit_tools),
    ),
    'turns': (-1.0, lambda row: _turns(row) / (_turns(row) + _LONG)),
  }


def paired_bound(
  changes_by_task: Sequence[Sequence[float]], alpha: float
) -> float:
  """Returns the lower bound of a mean change, by a bootstrap over tasks.

  Samples of a task are not independent, so that tasks are drawn. A task that
  the candidate alone loses is added: without it no lost task in n would bound
  the loss by 0, and with it by about 3 / n, as the rule of three does.

  Args:
    changes_by_task: for each task the change of each sample, from -1 to 1.
    alpha: probability that the bound is above the true change.
  """
  if not changes_by_task:
    return -1.0
  sums_N = np.array([sum(c) for c in changes_by_task])
  sizes_N = np.array([len(c) for c in changes_by_task])
  sums_N = np.append(sums_N, -sizes_N.mean())
  sizes_N = np.append(sizes_N, sizes_N.mean())
  # Tasks with the same result are drawn together, as a number of draws.
  kinds_K2, counts_K = np.unique(
    np.stack([sums_N, sizes_N], axis=1), axis=0, return_counts=True
  )
  shares_K = counts_K / counts_K.sum()
  rng = np.random.default_rng(0)
  drawn_DK = rng.multinomial(len(sums_N), shares_K, size=_DRAWS)
  means_D = (drawn_DK @ kinds_K2[:, 0]) / (drawn_DK @ kinds_K2[:, 1])
  return float(np.quantile(means_D, alpha, method='lower'))


def _of_pairs(
  name: str,
  before: Sequence[Row],
  after: Sequence[Row],
  canary: tuple[float, Callable[[Row], float]],
  margin: float,
  alpha: float,
  *,
  unplayed: float | None = None,
  is_watched: bool = False,
) -> GateFinding:
  """Compares pairs of rows.

  Args:
    canary: sign for the better and value of a row, as in `canaries`.
    unplayed: value of a row after that is missing or has no verdict where the
      one before has one; None leaves the pair out.
    is_watched: a change for the worse must be shown to keep a candidate back;
      by default its absence must be, to ship.
  """
  sign, value = canary
  of = lambda rows: {
    (r['task_id'], r['sample']): value(r)
    for r in rows
    if r['status'] != records.INFRASTRUCTURE
  }
  old, new = of(before), of(after)
  if unplayed is not None:
    new = {key: new.get(key, unplayed) for key in old}
  both = [key for key in old if key in new]
  by_task = collections.defaultdict[str, list[float]](list)
  for key in sorted(both):
    by_task[key[0]].append(sign * (new[key] - old[key]))
  changes = list(by_task.values())
  bound = paired_bound(changes, alpha)
  is_shown = bound > -margin
  if is_watched:
    bound = -paired_bound([[-c for c in task] for task in changes], alpha)
    gained = sum(sum(task) for task in changes)
    is_shown = bound >= 0 or gained >= -margin * len(both)
  mean = lambda known: float(np.mean([known[k] for k in both])) if both else 0.0
  return GateFinding(
    name=name,
    episodes=len(both),
    before=mean(old),
    after=mean(new),
    bound=sign * bound,
    margin=margin,
    is_shown=is_shown,
  )


def _whole(rows: Mapping[str, Sequence[Row]]) -> list[Row]:
  """Returns the rows of all domains, with the domain in the name of a task."""
  return [
    {**row, 'task_id': f'{domain}/{row["task_id"]}'}
    for domain in sorted(rows)
    for row in rows[domain]
  ]


def judge(
  before: Mapping[str, Sequence[Row]],
  after: Mapping[str, Sequence[Row]],
  prices: pricing.PriceOptions,
  options: ShippingOptions,
) -> GateResult:
  """Judges a candidate by the rows of pinned suites.

  Args:
    before, after: rows of the version that is served and of the candidate, by
      domain; each domain is tested by itself, canaries on all of them.

  Raises:
    ValueError: the domains differ, or there is none.
  """
  if not before or before.keys() != after.keys():
    raise ValueError(
      'A gate compares the same domains, at least one; got '
      f'{sorted(before)} and {sorted(after)}.'
    )
  passed = (1.0, lambda row: float(row['passed']))
  watched, level = canaries(prices), options.alpha
  findings = [
    _of_pairs(
      name,
      before[name],
      after[name],
      passed,
      options.margin,
      level,
      # A candidate that breaks its sandbox has not passed.
      unplayed=0.0,
    )
    for name in sorted(before)
  ]
  whole_before, whole_after = _whole(before), _whole(after)
  findings += [
    _of_pairs(
      name, whole_before, whole_after, canary, options.canary_margin, level
    )
    for name, canary in watched.items()
  ]
  findings += [
    _of_pairs(
      f'{name} in {domain}',
      before[domain],
      after[domain],
      canary,
      options.canary_margin,
      level,
      is_watched=True,
    )
    for domain in sorted(before)
    for name, canary in watched.items()
    if len(before) > 1
  ]
  return GateResult(findings=tuple(findings))


def judge_arms(
  control: Sequence[Row],
  candidate: Sequence[Row],
  prices: pricing.PriceOptions,
  options: ShippingOptions,
) -> GateResult:
  """Watches a trial, by the first rows of users in order.

  A trial is too short to exclude a small change by itself, which the suites
  did. It is stopped by a canary, or by the satisfaction of users, that has
  changed for the worse by more than the margin, over all users or in a domain,
  if a bettor on that (see `trial`) has won. Of trials without a change at most
  the share alpha is stopped, however often one looks: half of it is for all
  users, a sixth for the first domain, a twelfth for the next, and so on.
  """
  watched = canaries(prices) | {'satisfied': (1.0, lambda r: r['satisfied'])}
  # In the order of the control, which what comes later does not change.
  domains = [*dict.fromkeys(row['domain'] for row in control)]
  parts = [('the trial', control, candidate)]
  if len(domains) > 1:
    parts += [
      (f'{d} of the trial', *([r for r in rows if r['domain'] == d]
                              for rows in (control, candidate)))
      for d in domains
    ]  # fmt: skip
  findings = []
  for place, (part, *arms) in enumerate(parts, 1):
    count = min(map(len, arms))
    limit = len(watched) * place * (place + 1) / options.alpha
    for name, (sign, value) in watched.items() if count else ():
      before_N, after_N = (
        np.array([value(row) for row in rows[:count]]) for rows in arms
      )
      change = float((after_N - before_N).mean())
      won = float(trial.capital(sign * (before_N - after_N)).max())
      is_worse = won >= limit and sign * change < -options.canary_margin
      findings.append(
        GateFinding(
          name=f'{name} in {part}',
          episodes=count,
          before=float(before_N.mean()),
          after=float(after_N.mean()),
          bound=change,
          margin=options.canary_margin,
          is_shown=not is_worse,
        )
      )
  return GateResult(findings=tuple(findings))
