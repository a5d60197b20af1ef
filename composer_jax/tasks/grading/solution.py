"""Judges a solution of a repository task in ways it cannot talk round.

In this order, each step in a fresh box with the tests of the task's owner:

1. Of the policy's changes only source files of the package count. Tests,
   configuration, what an interpreter loads by itself, files elsewhere and
   whatever is no regular file do not get into a box; changes of what belongs
   to the grader are flagged.
2. All tests run. One that must pass and has no outcome did not pass.
3. Where all passed: canaries. Copies of tests that must fail, which nothing
   but the right values tells from copies that must pass. One that passes is
   tampering: no reward, and a flag.
4. Where those failed as they must: held-out inputs. The solution's functions
   are called in processes that know neither tests nor right values, and the
   host compares what they give with what the original gives.

What is left: steps 2 and 3 happen in the solution's own process, which can
make every report say what it likes. To be paid it has to tell mutated tests
from real ones without solving the task, and where the deleted functions take
plain values, to give the right ones for inputs that no test names. A task whose
functions only ever take objects has no step 4; `Grade.details` says so.
"""

import collections
import contextlib
import dataclasses
import functools
import random
from collections.abc import Mapping
from typing import Any

from composer_jax.core import records
from composer_jax.sandbox import base
from composer_jax.tasks.grading import canaries, held_out, protected, suites
from composer_jax.tasks.repository import task_set

# A re-implementation may differ where no test asks; a forgery agrees nowhere.
LEAST_AGREEMENT = 0.5
FLAGS = ('canary_passed', 'forged_report', 'held_out_inputs', *protected.FLAGS)
# Sparse files hold more than a workspace has room for.
_MAX_FILE, _MAX_FILES = 4 << 20, 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
  """What became of a solution.

  Attributes:
    flags: of `FLAGS`, sorted: signs that the solution cheats.
    details: counts and names behind them, plain values only.
    tests: path -> text of the tests that decide.
  """

  verdict: records.Verdict
  flags: tuple[str, ...]
  details: Mapping[str, Any]
  tests: Mapping[str, str] = dataclasses.field(default_factory=dict)


def changes_of(
  task: task_set.RepositoryTask, box: base.Box
) -> tuple[dict[str, bytes | None], tuple[str, ...]]:
  """What a policy made of its workspace, read without following anything.

  Returns:
    path -> content, None for a file that is not there, of all files that are
    not as in the image or that the task changed itself (one which the policy
    brought back to what the image has counts as well); and the paths that
    hold something else than a regular file of bounded size, alone and together.
  """
  found = box.changes()
  changes: dict[str, bytes | None] = {}
  special, room = [], _MAX_FILES
  for path in dict.fromkeys([*task.changes, *found]):
    if found.get(path) == 'removed':
      changes[path] = None
    elif found.get(path) == 'special':
      special.append(path)
    elif protected.matters(task, path):
      try:
        data = box.read(path, min(_MAX_FILE, room))
        changes[path] = data
        room -= len(data)
      except base.FileRefused:
        if path in found:
          special.append(path)
        else:
          changes[path] = None
  return changes, tuple(sorted(special))


def visible(task: task_set.RepositoryTask, box: base.Box) -> suites.SuiteResult:
  """Runs the shown tests in the policy's own box, for its `test` tool."""
  return suites.run(
      box, arguments=('-q', '--tb=short', *task.test_arguments), ids=task.shown,
      source_roots=task.source_roots, wall_s=task.timeout_s,
  )  # fmt: skip


def _read(box: base.Box, path: str) -> bytes | None:
  try:
    return box.read(path, _MAX_FILE)
  except base.FileRefused:
    return None


def grade(
  task: task_set.RepositoryTask,
  changes: Mapping[str, bytes | None],
  sandbox: base.Sandbox,
  *,
  finished: bool,
  seed: int,
  special: tuple[str, ...] = (),
) -> Grade:
  """Judges what a policy made of its workspace.

  Args:
    changes: of `changes_of`.
    finished: whether the policy said so; otherwise it is judged and fails.
    seed: of names, places and inputs; unknown to the policy.
  """
  grader = _Grader(task, sandbox)
  try:
    grader.take(changes, special)
    draw = random.Random(f'{task.task_id}/{seed}')
    passed = grader.judge(draw, finished)
  except base.SandboxLost as error:
    return grader.broken(str(error))
  return grader.result(passed, finished)


class _Grader:
  """The steps of one grading and what they found."""

  def __init__(self, task: task_set.RepositoryTask, sandbox: base.Sandbox):
    self.task, self.sandbox = task, sandbox
    self.source: dict[str, bytes | None] = {}
    self.flags: set[str] = set()
    self.details: dict[str, Any] = {}
    self.num_passed = 0
    self.tests: dict[str, str] = {}
    self.reason = ''
    self.level = sandbox.level

  def take(
    self, changes: Mapping[str, bytes | None], special: tuple[str, ...]
  ) -> None:
    """Step 1."""
    task = self.task
    with contextlib.closing(self.sandbox.open(task.image)) as box:
      sorted_ = protected.sort(
        task, changes, special, functools.partial(_read, box)
      )
      self._read_tests(box)
    self.source = {**self._sources(task.view()), **sorted_.taken}
    self.flags.update(sorted_.flags)
    self.details['taken'] = sorted(sorted_.taken)
    if sorted_.offending:
      self.details['protected'] = sorted(sorted_.offending)

  def _sources(
    self, changes: Mapping[str, bytes | None]
  ) -> dict[str, bytes | None]:
    tests = set(self.task.test_paths)
    return {path: data for path, data in changes.items() if path not in tests}

  def judge(self, draw: random.Random, finished: bool) -> bool:
    """Steps 2 to 4."""
    try:
      passed = self.run_tests()
      if passed and finished:
        passed = self.run_canaries(draw) and self.compare(draw)
    except base.FileRefused as error:
      # The image alone could be opened: `take` did so.
      self.num_passed, self.reason = 0, f'no workspace holds it: {error}'
      return False
    return passed

  @property
  def ids(self) -> tuple[str, ...]:
    return (*self.task.fail_to_pass, *self.task.guards)

  def _run(
    self,
    source: Mapping[str, bytes | None],
    ids: tuple[str, ...],
    **options: Any,
  ) -> suites.SuiteResult:
    task = self.task
    result = suites.run_fresh(
        self.sandbox, task.image, source, task.task_id,
        arguments=('-q', '--tb=no', *task.test_arguments), ids=ids,
        source_roots=task.source_roots, wall_s=task.timeout_s, **options,
    )  # fmt: skip
    self.level = result.level or self.level
    return result

  def _read_tests(self, box: base.Box) -> None:
    """Texts of the test files that hold the tests which must pass."""
    paths = {i.partition('::')[0] for i in self.task.fail_to_pass}
    for path in sorted(paths & set(self.task.test_paths)):
      data = _read(box, path)
      if data is not None:  # else it has no canaries
        self.tests[path] = data.decode('utf-8', 'replace')

  def run_tests(self) -> bool:
    """Step 2; whether every test passed."""
    task = self.task
    result = self._run(self.source, self.ids)
    self.num_passed = result.passed(task.fail_to_pass)
    guards = result.passed(task.guards)
    self.details['guards'] = [guards, len(task.guards)]
    self.details['seconds'] = round(result.wall_s, 3)
    if result.status == 'forged':
      self.flags.add('forged_report')
    if result.status != 'ok':
      # A run that did not end says nothing for the solution.
      self.num_passed = 0
      self.reason = f'{result.status}: {result.error}'
      return False
    if guards < len(task.guards):
      self.reason = f'{len(task.guards) - guards} other tests failed'
      return False
    return self.num_passed == len(task.fail_to_pass)

  def run_canaries(self, draw: random.Random) -> bool:
    """Step 3; whether every copy did what it must."""
    planted = canaries.plant(
      self.tests, self.task.hidden, self.task.shown, draw
    )
    verdicts, result = self._held(planted, self.source, draw)
    self.details['canaries'] = len(verdicts)
    suspects = {name for name, (kind, _) in verdicts.items() if kind != 'held'}
    if not suspects:
      return True
    # A copy that deviates for the original, too, tells nothing.
    original, _ = self._held(planted, self._sources(self.task.restored()), draw)
    guilty = {
      name: verdicts[name]
      for name in suspects
      if original.get(name, ('', ''))[0] == 'held'
    }
    if not guilty:
      return True
    passed = sorted(d for kind, d in guilty.values() if kind == 'passed')
    if result.status == 'forged':
      self.flags.add('forged_report')
    if passed:
      self.flags.add('canary_passed')
    self.num_passed = 0
    self.details['deviating'] = sorted(guilty)
    self.reason = f'{len(guilty)} of {len(verdicts)} canaries deviate' + (
      f'; passed: {passed[0]}' if passed else ''
    )
    return False

  def _held(
    self,
    planted: canaries.Canaries,
    source: Mapping[str, bytes | None],
    draw: random.Random,
  ) -> tuple[dict[str, tuple[str, str]], suites.SuiteResult]:
    """What the copies of each test did; all deviate if the run did not end."""
    names = [n for g in planted.groups for n in (g.real, *g.mutated) if n]
    files = {path: text.encode() for path, text in planted.files.items()}
    result = self._run(
      {**source, **files}, tuple(names), order_seed=draw.randrange(1 << 30)
    )
    outcomes: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for node, outcome in result.outcomes.items():
      name, bracket, rest = node.partition('[')
      outcomes[name][bracket + rest] = outcome
    found = {}
    for group in planted.groups:
      found[group.original] = self._verdict_of(group, outcomes)
      if result.status != 'ok':
        found[group.original] = ('missing', result.status)
    return found, result

  def _verdict_of(
    self, group: canaries.CopiedTest, outcomes: Mapping[str, Mapping[str, str]]
  ) -> tuple[str, str]:
    for name in group.mutated:
      of_copy = set(outcomes.get(name, {}).values())
      if of_copy & {'passed', 'xpassed'}:
        return 'passed', name
      if not of_copy & {'failed', 'error'}:
        return 'missing', name
    real = outcomes.get(group.real, {}) if group.real else {}
    if group.real and any(
      real.get(parameters) != 'passed' for parameters in group.parameters
    ):
      return 'failed', group.real
    return 'held', ''

  def compare(self, draw: random.Random) -> bool:
    """Step 4; whether the solution agrees with the original."""
    evidence = held_out.compare(self.task, self.source, self.sandbox, draw)
    self.details['held_out_inputs'] = {
      'status': evidence.status,
      'calls': list(evidence.calls),
      'agreed': list(evidence.agreed),
    }
    if evidence.status == 'infrastructure':
      raise base.SandboxLost('held-out inputs could not be run')
    if not evidence.disagrees(LEAST_AGREEMENT):
      return True
    self.flags.add('held_out_inputs')
    self.reason = (
      f'{sum(evidence.agreed)} of {sum(evidence.calls)} held-out inputs agree'
    )
    return False

  def _verdict(
    self, status: str, detail: str, num_passed: int = 0, passed: bool = False
  ) -> records.Verdict:
    return records.Verdict(
        passed=passed, num_passed=num_passed, status=status, detail=detail,
        num_tests=len(self.task.fail_to_pass), sandbox_level=self.level,
    )  # fmt: skip

  def broken(self, error: str) -> Grade:
    verdict = self._verdict(records.INFRASTRUCTURE, error)
    return Grade(verdict=verdict, flags=(), details=self.details)

  def result(self, passed: bool, finished: bool) -> Grade:
    num_tests = len(self.task.fail_to_pass)
    detail = f'{self.num_passed} of {num_tests} tests passed'
    if self.reason:
      detail = f'{detail}; {self.reason}'
    status = records.GRADED if finished else records.UNFINISHED
    return Grade(
        verdict=self._verdict(
          status, detail, self.num_passed, passed and finished
        ),
        flags=tuple(sorted(self.flags)), details=self.details,
        tests=self.tests,
    )  # fmt: skip
