"""What an episode earns: its success, less what its behaviour costs.

A rollout that a monitor flagged earns nothing for its success; it keeps its
penalties and is counted like any other, since a sample that is dropped teaches
that hacking is free. An invalid call costs for the same reason.

Effort x costs by the concave length penalty of Composer 2 (report, section 4),

  C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)),   C'(x) = (1 + k x)^-q

The first tokens cost most, so that easy tasks are done quickly while hard ones
may still take long. Its constants are not published; x here is the sampled
tokens, summaries included, plus a price per turn, which stands for what a tool
call costs beside its tokens.

The prices may change while a run goes on (`Switch`): a person may replace
`rewards.json` of the workdir at any time by one of a higher version.
"""

import dataclasses
import json
import math
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.core import checks, records, turns

FILE = 'rewards.json'
# What a reward is the sum of; all but the first take away.
TERMS = (
  *('success', 'flagged', 'invalid', 'effort', 'failed_edit', 'open_todo'),
  *('unfinished', 'shell_only'),
)
# What even an episode of the shell alone has to call.
_CLOSING_TOOLS = ('finish', 'todo')
# Fewer calls than these are no habit.
_MIN_SHELL_CALLS = 3


def concave(x: float, k: float, q: float) -> float:
  """C(x), continuous in q: x at q = 0, log(1 + k x) / k at q = 1.

  Above q = 1 it is bounded by 1 / (k (q - 1)).
  """
  log = math.log1p(k * x)
  power = (1 - q) * log
  # expm1(p) / p is 1 in the limit, where the quotient is 0 / 0.
  return (math.expm1(power) / power if power else 1.0) * log / k


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RewardOptions:
  """Prices of an episode, in units of its success, which earns 1.

  Without a price on effort a wrong edit that is mended later earns as much as a
  right one, and RL unlearns to get it right at once.

  Attributes:
    version: number of these prices, which grows with every change during a run;
      every sample names it.
    invalid_penalty: lost per call that no tool could carry out.
    failed_edit_penalty: lost per edit that changed nothing.
    open_todo_penalty: lost per to-do that is still open at the end.
    unfinished_penalty: lost by an episode that never called finish.
    shell_only_penalty: lost by an episode that did everything by `run`.
    effort_coefficient: reward lost at effort_scale if the price were linear; 0
      makes effort free.
    effort_scale: 1 / k in sampled tokens, about the effort of a usual episode.
    effort_q: how fast the price of one more token falls; 0 is linear.
    effort_turn_tokens: price of a turn, in sampled tokens.
  """

  version: int = 0
  invalid_penalty: float = 0.1
  failed_edit_penalty: float = 0.0
  open_todo_penalty: float = 0.0
  unfinished_penalty: float = 0.0
  shell_only_penalty: float = 0.0
  effort_coefficient: float = 0.1
  effort_scale: float = 80.0
  effort_q: float = 0.5
  effort_turn_tokens: float = 8.0

  def __post_init__(self):
    checks.at_least(self, 0, 'version')
    prices = [f.name for f in dataclasses.fields(self) if f.name != 'version']
    # What a negative price is of would pay.
    checks.number(self, 0, *prices)
    checks.positive(self, 'effort_scale')

  def effort_penalty(self, num_sampled: int, num_turns: int) -> float:
    """Reward lost by an episode of so many tokens and turns."""
    if not self.effort_coefficient:
      return 0.0
    effort = num_sampled + self.effort_turn_tokens * num_turns
    cost = concave(effort, 1 / self.effort_scale, self.effort_q)
    return self.effort_coefficient * cost / self.effort_scale


# An episode earns 1 if it passed, else 0.
UNPRICED = RewardOptions(invalid_penalty=0.0, effort_coefficient=0.0)


def score(
  verdict: records.Verdict,
  played: Sequence[turns.Turn],
  flags: Sequence[str],
  options: RewardOptions,
  *,
  num_sampled: int,
  open_todos: int,
) -> tuple[float, dict[str, float]]:
  """Returns the reward of an episode, and what each of its terms added.

  Args:
    played: turns in order; summaries are neither calls nor free.
    flags: alarms of monitors.
    num_sampled: tokens of the policy, summaries included.
  """
  calls = [t for t in played if t.outcome != turns.SUMMARY]
  success = float(verdict.passed)
  lost = {
    'flagged': success if flags else 0.0,
    'invalid': options.invalid_penalty * sum(not t.is_valid for t in calls),
    'effort': options.effort_penalty(num_sampled, len(played)),
    'failed_edit': options.failed_edit_penalty
    * sum(t.outcome == turns.FAILED_EDIT for t in calls),
    'open_todo': options.open_todo_penalty * open_todos,
    'unfinished': options.unfinished_penalty
    * (verdict.status == records.UNFINISHED),
    'shell_only': options.shell_only_penalty * _used_shell_alone(calls),
  }
  terms = {'success': success}
  terms |= {name: -value for name, value in lost.items() if value}
  return success - sum(lost.values()), terms


def _used_shell_alone(calls: Sequence[turns.Turn]) -> bool:
  tools = [t.tool for t in calls if t.tool and t.tool not in _CLOSING_TOOLS]
  return len(tools) >= _MIN_SHELL_CALLS and set(tools) == {'run'}


class Switch:
  """The prices that are in force, which a file may change during a run.

  All members of a group are paid alike, or their mean would be no baseline:
  the prices of a group are those in force when its first member asks.

  Consumes: `rewards.json`, which names the fields that differ from the
    config's, and a version higher than every one before; read when a group
    begins.
  Produces: RewardOptions; one report per file that was taken or refused.
  """

  def __init__(
    self,
    path: pathlib.Path,
    first: RewardOptions,
    report: Callable[[str], None],
  ):
    """Begins with the config's prices."""
    self._path = path
    self._first = self._current = first
    self._report = report
    self._seen: bytes | None = None
    self._of_group: dict[int, RewardOptions] = {}
    self._lock = threading.Lock()

  def of_group(self, group: int) -> RewardOptions:
    with self._lock:
      if group not in self._of_group:
        self._read()
        self._of_group[group] = self._current
      return self._of_group[group]

  def _read(self) -> None:
    """Takes the file's prices, unless there is none or it is no newer one."""
    try:
      data = self._path.read_bytes()
    except FileNotFoundError:
      return
    if data == self._seen:
      return
    self._seen = data
    current = self._current.version
    try:
      prices = _parse(data, self._first)
      if prices.version <= current:
        raise ValueError(
          f'its version ({prices.version}) must exceed the one in force '
          f'({current})'
        )
    except ValueError as error:
      # A run must not end, or train on half a change, for a typing error.
      self._report(
        f'{self._path} is not taken, version {current} stays in force: {error}'
      )
      return
    self._report(f'rewards of version {prices.version} are in force')
    self._current = prices


def _parse(data: bytes, first: RewardOptions) -> RewardOptions:
  """Returns `first` with the fields that a JSON object names."""
  fields: Any = json.loads(data)
  if not isinstance(fields, dict) or 'version' not in fields:
    raise ValueError('it must be a JSON object with at least "version"')
  known = {f.name for f in dataclasses.fields(RewardOptions)}
  if unknown := sorted(set(fields) - known):
    raise ValueError(
      f'unknown fields {", ".join(unknown)}; there are '
      f'{", ".join(sorted(known))}'
    )
  return dataclasses.replace(first, **fields)
