"""The reward of an episode: its success, less penalties for its behaviour.

A rollout that a monitor flagged earns nothing for its success and pays for the
attempt: a guess that is caught must cost more than an honest failure. It stays
in its group: dropping the sample would teach that hacking is free. An invalid
call is penalised, not dropped, for the same reason.

Effort x is priced by the concave length penalty of Composer 2 (report, section
4), whose constants are not published:

  C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)),   C'(x) = (1 + k x)^-q

The first tokens cost most: easy tasks are done quickly, hard ones may still
take long. Here x is the number of sampled tokens, summaries included, plus a
price in tokens for each turn.

A rubric may add its share of `judged_reward` (`tasks.rubrics`).

The prices may change during a run (`Switch`): a person may at any time replace
`rewards.json` in the workdir by one of a higher version.
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
# Terms whose sum is the reward; all but the first two are negative.
TERMS = (
  *('success', 'judged', 'flagged', 'invalid', 'effort', 'failed_edit'),
  *('open_todo', 'unfinished', 'shell_only'),
)
# Tools that no shell command can replace.
_CLOSING_TOOLS = ('finish', 'todo')
# Fewest calls of `run` that count as avoiding the other tools.
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
  """Prices of an episode, in units of the reward for success.

  Without a price on effort, a wrong edit that is mended later earns as much as
  a right one, and RL unlearns to get edits right at once.

  Attributes:
    version: number of this price list, recorded in every rollout; it must grow
      with each change during a run.
    judged_reward: reward for a full score by the rubric of the run.
    flag_penalty: reward lost by a flagged rollout, beside what it earned.
    invalid_penalty: reward lost per invalid call.
    failed_edit_penalty: reward lost per edit that changed nothing.
    open_todo_penalty: reward lost per to-do that is open at the end.
    unfinished_penalty: reward lost by an episode that never called `finish`.
    shell_only_penalty: reward lost by an episode that worked by `run` alone.
    effort_coefficient: reward that effort_scale tokens would cost at a linear
      price; 0 makes effort free.
    effort_scale: 1 / k in sampled tokens, about the effort of a usual episode.
    effort_q: exponent by which the price of one more token falls; 0 is linear.
    effort_turn_tokens: price of a turn, in sampled tokens.
  """

  version: int = 0
  judged_reward: float = 0.0
  flag_penalty: float = 1.0
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
    # A negative price would pay for the fault.
    checks.number(self, 0, *prices)
    checks.positive(self, 'effort_scale')

  def effort_penalty(self, num_sampled: int, num_turns: int) -> float:
    """Returns the reward lost by an episode's tokens and turns."""
    if not self.effort_coefficient:
      return 0.0
    effort = num_sampled + self.effort_turn_tokens * num_turns
    cost = concave(effort, 1 / self.effort_scale, self.effort_q)
    return self.effort_coefficient * cost / self.effort_scale


# An episode earns 1 if it passed, else 0.
UNPRICED = RewardOptions(
  flag_penalty=0.0, invalid_penalty=0.0, effort_coefficient=0.0
)


def score(
  verdict: records.Verdict,
  played: Sequence[turns.Turn],
  flags: Sequence[str],
  options: RewardOptions,
  *,
  num_sampled: int,
  open_todos: int,
  judged: float = 0.0,
) -> tuple[float, dict[str, float]]:
  """Returns the reward of an episode and its terms by name.

  Args:
    played: turns in order; summaries count as effort, but are no calls.
    num_sampled: tokens that the policy sampled, summaries included.
    judged: score by a rubric, from 0 to 1; a broken episode earns none.
  """
  calls = [t for t in played if t.outcome != turns.SUMMARY]
  failed_edits = (t.outcome == turns.FAILED_EDIT for t in calls)
  is_unfinished = verdict.status == records.UNFINISHED
  success = float(verdict.passed if verdict.score is None else verdict.score)
  style = options.judged_reward * judged
  if verdict.status == records.INFRASTRUCTURE:
    style = 0.0
  lost = {
    'flagged': success + style + options.flag_penalty if flags else 0.0,
    'invalid': options.invalid_penalty * sum(not t.is_valid for t in calls),
    'effort': options.effort_penalty(num_sampled, len(played)),
    'failed_edit': options.failed_edit_penalty * sum(failed_edits),
    'open_todo': options.open_todo_penalty * open_todos,
    'unfinished': options.unfinished_penalty * is_unfinished,
    'shell_only': options.shell_only_penalty * _used_shell_alone(calls),
  }
  terms = {'success': success}
  if style:
    terms['judged'] = style
  terms |= {name: -value for name, value in lost.items() if value}
  return success + style - sum(lost.values()), terms


def rescored(
  rollout: records.Rollout, options: RewardOptions, judged: float = 0.0
) -> records.Rollout:
  """Returns a rollout with the reward that other prices give; plays nothing."""
  reward, terms = score(
    rollout.verdict,
    rollout.turns,
    rollout.flags,
    options,
    num_sampled=rollout.num_sampled,
    open_todos=rollout.open_todos,
    judged=judged,
  )
  return dataclasses.replace(
    rollout, reward=reward, reward_terms=terms, reward_version=options.version
  )


def _used_shell_alone(calls: Sequence[turns.Turn]) -> bool:
  tools = [t.tool for t in calls if t.tool and t.tool not in _CLOSING_TOOLS]
  return len(tools) >= _MIN_SHELL_CALLS and set(tools) == {'run'}


class Switch:
  """The prices in force, which a file may change during a run.

  All members of a group have the same prices, or their mean would be no
  baseline: those in force when the trainer admits it.

  Consumes: `rewards.json`, read when a group is admitted; it names a version
    higher than every one before, and the fields that differ from the config.
  Produces: RewardOptions; one sentence per file that was taken or refused.
  """

  def __init__(
    self,
    path: pathlib.Path,
    first: RewardOptions,
    report: Callable[[str], None],
  ):
    """Begins with the config's prices, `first`."""
    self._path = path
    self._first = self._current = first
    self._report = report
    self._last_read: bytes | None = None
    self._of_group: dict[int, RewardOptions] = {}
    self._lock = threading.Lock()

  def of_group(self, group: int) -> RewardOptions:
    with self._lock:
      if group not in self._of_group:
        self._read()
        self._of_group[group] = self._current
      return self._of_group[group]

  def _read(self) -> None:
    """Takes the file's prices if there is a file and its version is newer."""
    try:
      data = self._path.read_bytes()
    except FileNotFoundError:
      return
    if data == self._last_read:
      return
    self._last_read = data
    current = self._current.version
    try:
      prices = _parse(data, self._first)
      if prices.version <= current:
        raise ValueError(
          f'its version ({prices.version}) must exceed the one in force '
          f'({current})'
        )
    except ValueError as error:
      # A typing error must not end a run, nor change some of the prices.
      self._report(
        f'{self._path} is refused, version {current} stays in force: {error}'
      )
      return
    self._report(f'rewards of version {prices.version} are in force')
    self._current = prices


def _parse(data: bytes, first: RewardOptions) -> RewardOptions:
  """Returns `first` with the fields that a JSON object names."""
  fields: Any = json.loads(data)
  if not isinstance(fields, dict) or 'version' not in fields:
    raise ValueError('it must be a JSON object that names a "version"')
  known = {f.name for f in dataclasses.fields(RewardOptions)}
  for name in fields:
    checks.known_name(name, known, FILE)
  return dataclasses.replace(first, **fields)
