"""What an episode earns: its success, less what its behaviour costs.

A rollout that a monitor flagged earns nothing for its success; it keeps its
penalties and is counted like any other, since a sample that is dropped teaches
that hacking is free. An invalid call costs for the same reason.

The terms may change while a run goes on: `Switch` reads `rewards.json` of the
workdir, which a person may replace at any time by one of a higher version.
"""

import dataclasses
import json
import math
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.agent import effort
from composer_jax.core import records, turns

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RewardOptions:
  """Prices of an episode, in units of its success, which earns 1.

  Attributes:
    version: grows with every change during a run; every sample names it.
    invalid_penalty: lost per call that no tool could carry out.
    failed_edit_penalty: lost per edit that changed nothing.
    open_todo_penalty: lost per to-do that is still open at the end.
    unfinished_penalty: lost by an episode that never called finish.
    shell_only_penalty: lost by an episode that did everything by `run`.
    effort_coefficient: and the next four, see `effort.EffortOptions`.
  """

  version: int = 0
  invalid_penalty: float = 0.0
  failed_edit_penalty: float = 0.0
  open_todo_penalty: float = 0.0
  unfinished_penalty: float = 0.0
  shell_only_penalty: float = 0.0
  effort_coefficient: float = 0.0
  effort_scale: float = 100.0
  effort_q: float = 0.5
  effort_turn_tokens: float = 0.0
  effort_answer_weight: float = 0.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(
          f'rewards.{field.name} must be a number, not {value!r}.'
        )
      if field.name.endswith('_penalty') and not 0 <= value < math.inf:
        raise ValueError(
          f'{field.name} ({value}) must not be negative: what it is the price '
          'of would pay.'
        )
    if not isinstance(self.version, int) or self.version < 0:
      raise ValueError(
        f'rewards.version ({self.version!r}) must be a whole number of at '
        'least 0.'
      )
    self.effort()

  def effort(self) -> effort.EffortOptions:
    return effort.EffortOptions(
      coefficient=self.effort_coefficient,
      scale=self.effort_scale,
      q=self.effort_q,
      turn_tokens=self.effort_turn_tokens,
      answer_weight=self.effort_answer_weight,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
  """What an episode did beside its turns.

  Attributes:
    num_sampled: tokens that the policy sampled, in all windows.
    num_answered: tokens of what tools answered.
    open_todos: at the end.
  """

  num_sampled: int
  num_answered: int = 0
  open_todos: int = 0


def score(
  verdict: records.Verdict,
  played: Sequence[turns.Turn],
  facts: Facts,
  flags: Sequence[str],
  options: RewardOptions,
) -> tuple[float, dict[str, float]]:
  """Returns the reward of an episode, and what each of its terms added.

  Args:
    verdict: of the final state.
    played: its turns in order; summaries are neither calls nor free.
    facts: beside them.
    flags: alarms of monitors.
    options: the prices.
  """
  calls = [t for t in played if t.outcome != turns.SUMMARY]
  success = float(verdict.passed)
  lost = {
    'flagged': success if flags else 0.0,
    'invalid': options.invalid_penalty * sum(not t.is_valid for t in calls),
    'effort': options.effort().penalty(
      facts.num_sampled, len(played), facts.num_answered
    ),
    'failed_edit': options.failed_edit_penalty
    * sum(t.outcome == turns.FAILED_EDIT for t in calls),
    'open_todo': options.open_todo_penalty * facts.open_todos,
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
    config's, and a version higher than every one before.
  Waits for: nothing.
  Woken by: a group that begins.
  Produces: RewardOptions; one report per file that was taken or refused.
  """

  def __init__(
    self,
    path: str | pathlib.Path,
    first: RewardOptions,
    report: Callable[[str], None],
  ):
    """Begins with the config's prices.

    Args:
      path: of the file, which need not exist.
      first: the prices of the config.
      report: told what was taken, and why a file was not.
    """
    self._path = pathlib.Path(path)
    self._first = self._current = first
    self._report = report
    self._seen: bytes | None = None
    self._of_group: dict[int, RewardOptions] = {}
    self._lock = threading.Lock()

  def of_group(self, group: int) -> RewardOptions:
    """The prices of a group, the same for each of its members."""
    with self._lock:
      if group not in self._of_group:
        self._of_group[group] = self._read()
      return self._of_group[group]

  def _read(self) -> RewardOptions:
    try:
      data = self._path.read_bytes()
    except FileNotFoundError:
      return self._current
    if data == self._seen:
      return self._current
    self._seen = data
    try:
      found = parse(data, self._first)
      if found.version <= self._current.version:
        raise ValueError(
          f'its version ({found.version}) must exceed the one in force '
          f'({self._current.version})'
        )
    except ValueError as error:
      # A run must not end, or train on half a change, for a typing error.
      self._report(
        f'{self._path} is not taken, version {self._current.version} stays in '
        f'force: {error}'
      )
      return self._current
    self._report(f'rewards of version {found.version} are in force')
    self._current = found
    return found


def parse(data: bytes, first: RewardOptions) -> RewardOptions:
  """Returns `first` with the fields that a JSON object names.

  Raises:
    ValueError: no object, an unknown field, no version, or a wrong value.
  """
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
