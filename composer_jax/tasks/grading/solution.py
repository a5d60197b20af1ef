"""Judges a solution of a repository task so that forging passes does not pay.

Each step uses a fresh box with the tests of the task's owner:

1. Only source files of the package count. Changed tests, configuration, files
   that an interpreter loads by itself, files elsewhere and everything that is
   no regular file do not get into a box; changes of the grader's files are
   flagged.
2. All tests run beside the solution. A required test without an outcome has
   not passed. This only refuses: the solution could have forged the reports.
3. If all passed, the solution's functions are called in processes that hold
   neither tests nor right values, and the host compares the values with those
   of the original: on the inputs of tests, and on variations of them.
4. The tests of the feature run against the values of the solution, in a box
   without its code (`grading.outside`), wherever functions of plain values
   allow it.
5. If a hidden test cannot run so: canaries, copies of tests that must fail,
   which only the right values tell from copies that must pass. A solution that
   makes one pass tampers with the tests.

If the shown tests pass and others do not, the calls are made too: a solution
that answers the inputs of shown tests and hardly any others is a table.

A solution is paid if all that can be asked from outside is right: step 4, or
enough calls of step 3. Where a task offers neither, nothing is paid
(`evidence`); the factory refuses such tasks.
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
from composer_jax.tasks.grading import (
  canaries,
  held_out,
  outside,
  protected,
  suites,
)
from composer_jax.tasks.repository import task_set

# A re-implementation may differ where no test asks.
LEAST_AGREEMENT = 0.9
FLAGS = (
  *('canary_passed', 'forged_report', 'held_out_inputs', 'skipped_tests'),
  *('table_of_answers', *protected.FLAGS),
)
# Sparse files can be larger than the room of a workspace.
_MAX_FILE, _MAX_FILES = 4 << 20, 32 << 20
_MAX_NEW = 2000  # of new files: more are left out, as none were there


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
  """The judgement of a solution.

  Attributes:
    verdict: tests passed, and whether the solution is paid.
    flags: signs of cheating, members of `FLAGS`, sorted.
    details: counts and names that explain both, plain values only.
  """

  verdict: records.Verdict
  flags: tuple[str, ...]
  details: Mapping[str, Any]


def changes_of(
  task: task_set.RepositoryTask, box: base.Box
) -> tuple[dict[str, bytes | None], tuple[str, ...]]:
  """Reads a policy's changes of its workspace; follows no link.

  Returns:
    Contents by path, None for a removed file, of all files that differ from
    the image or that the task changed (also if the policy restored them); and
    paths of what is no regular file, or too large alone or together.
  """
  changed = box.changes()
  contents: dict[str, bytes | None] = {}
  special, room, new = [], _MAX_FILES, 0
  for path in dict.fromkeys([*task.changes, *changed]):
    if changed.get(path) in ('added', 'special'):
      new += protected.matters(task, path)
      if new > _MAX_NEW:
        continue
    if changed.get(path) == 'removed':
      contents[path] = None
    elif changed.get(path) == 'special':
      special.append(path)
    elif protected.matters(task, path):
      data = _read(box, path, min(_MAX_FILE, room))
      if data is None and path in changed:
        special.append(path)
      else:
        contents[path] = data
        room -= len(data or b'')
  return contents, tuple(sorted(special))


def visible(task: task_set.RepositoryTask, box: base.Box) -> suites.SuiteResult:
  """Runs the shown tests in the policy's own box, for its `test` tool."""
  return suites.run(
      box, ids=task.shown, source_roots=task.source_roots,
      arguments=(
        '-q', '--tb=short', '--assert=rewrite', *task.test_arguments
      ), cpu_s=task.timeout_s,
  )  # fmt: skip


def _read(box: base.Box, path: str, max_bytes: int = _MAX_FILE) -> bytes | None:
  """The content of a file; None if there is none or it is refused."""
  try:
    return box.read(path, max_bytes)
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
  """Judges a policy's changes of its workspace.

  Args:
    task: the task.
    changes: contents of the changed files, from `changes_of`.
    sandbox: sandbox with the images of the task's set.
    finished: true if the policy said that it is done; otherwise it fails.
    seed: seed of names, places and inputs; unknown to the policy.
    special: paths that cannot be read, from `changes_of`.

  Raises:
    base.SandboxLost: the sandbox failed.
  """
  grader = _Grader(task, sandbox)
  grader.take(changes, special)
  is_paid = grader.judge(random.Random(f'{task.task_id}/{seed}'), finished)
  detail = f'{grader.num_passed} of {len(task.fail_to_pass)} tests passed'
  said = (detail, grader.compared, grader.reason)
  detail = '; '.join(filter(None, said))
  verdict = records.Verdict(
      passed=is_paid, num_passed=grader.num_passed, detail=detail,
      num_tests=len(task.fail_to_pass), sandbox_level=grader.level,
      status=records.GRADED if finished else records.UNFINISHED,
  )  # fmt: skip
  flags = tuple(sorted(grader.flags))
  return Grade(verdict=verdict, flags=flags, details=grader.details)


def evidence(task: task_set.RepositoryTask, sandbox: base.Sandbox) -> str:
  """'calls' or else 'tests' that prove a solution from outside; '' for none."""
  agreement = held_out.compare(task, {}, sandbox, random.Random(task.task_id))
  if agreement.proves and not agreement.disagrees(LEAST_AGREEMENT):
    return 'calls'
  provable = outside.reference(task, sandbox)
  return 'tests' if provable >= {*task.hidden} else ''


class _Grader:
  """The steps of one grading and their findings so far.

  Attributes:
    source: changes that turn the image into the solution.
    reason: why the solution failed; '' if tests or compared calls tell it.
    compared: how many held-out inputs agree; '' if none was asked.
  """

  def __init__(self, task: task_set.RepositoryTask, sandbox: base.Sandbox):
    self.task, self.sandbox = task, sandbox
    self.source: dict[str, bytes | None] = {}
    self.flags: set[str] = set()
    self.details: dict[str, Any] = {}
    self.num_passed = 0
    self.tests: dict[str, str] = {}
    self.reason = self.compared = ''
    self.level = sandbox.level

  def take(
    self, changes: Mapping[str, bytes | None], special: tuple[str, ...]
  ) -> None:
    """Step 1."""
    task = self.task
    with contextlib.closing(self.sandbox.open(task.image)) as box:
      read = functools.partial(_read, box)
      sorted_ = protected.sort(task, changes, special, read)
      paths = {i.partition('::')[0] for i in task.fail_to_pass}
      for path in sorted(paths & set(task.test_paths)):
        data = read(path)
        if data is not None:  # else it has no canaries
          self.tests[path] = data.decode('utf-8', 'replace')
    self.source = {**self._without_tests(task.view()), **sorted_.taken}
    self.flags.update(sorted_.flags)
    self.details['taken'] = sorted(sorted_.taken)
    if sorted_.offending:
      self.details['protected'] = sorted(sorted_.offending)

  def _without_tests(
    self, changes: Mapping[str, bytes | None]
  ) -> dict[str, bytes | None]:
    tests = set(self.task.test_paths)
    return {path: data for path, data in changes.items() if path not in tests}

  def judge(self, draw: random.Random, finished: bool) -> bool:
    """Steps 2 to 5; true if the solution is paid."""
    try:
      if self._run_tests(draw, finished):
        return finished and self._ask(draw)
      return False
    except base.FileRefused as error:
      # `take` could open the image, so the solution's files are at fault.
      self.num_passed, self.reason = 0, f'no workspace holds it: {error}'
      return False

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
        source_roots=task.source_roots, cpu_s=task.timeout_s, **options,
    )  # fmt: skip
    self.level = result.level or self.level
    return result

  def _run_tests(self, draw: random.Random, finished: bool) -> bool:
    """Step 2; true if every test passed."""
    task = self.task
    result = self._run(self.source, (*task.fail_to_pass, *task.guards))
    self.num_passed = result.passed(task.fail_to_pass)
    guards = result.passed(task.guards)
    self.details['guards'] = [guards, len(task.guards)]
    self.details['seconds'] = round(result.wall_s, 3)
    if result.status == 'forged':
      self.flags.add('forged_report')
    # With the original these tests are not skipped.
    if 'skipped' in map(result.outcomes.get, task.fail_to_pass):
      self.flags.add('skipped_tests')
    if result.status != 'ok':
      # A run that did not end proves nothing for the solution.
      self.num_passed = 0
      self.reason = f'{result.status}: {result.error}'
      return False
    if guards < len(task.guards):
      self.reason = f'{len(task.guards) - guards} other tests failed'
      return False
    if self.num_passed == len(task.fail_to_pass):
      return True
    if finished and result.passed(task.shown) == len(task.shown):
      agreement = held_out.compare(
        task, self.source, self.sandbox, draw, tests=task.shown
      )
      if agreement.knows and agreement.is_forged:
        self.flags.add('table_of_answers')
    return False

  def _run_canaries(self, draw: random.Random) -> bool:
    """Step 3; true if every copy passed or failed as it must."""
    task = self.task
    planted = canaries.plant(self.tests, task.hidden, task.shown, draw)
    deviating, status = self._deviating(planted, self.source, draw)
    self.details['canaries'] = len(planted.groups)
    if deviating:
      # A copy that deviates for the original, too, proves nothing.
      excused, _ = self._deviating(planted, {}, draw)
      deviating = {n: d for n, d in deviating.items() if n not in excused}
    if not deviating:
      return True
    passed = sorted(d for kind, d in deviating.values() if kind == 'passed')
    if status == 'forged':
      self.flags.add('forged_report')
    if passed:
      self.flags.add('canary_passed')
    self.num_passed = 0
    self.details['deviating'] = sorted(deviating)
    self.reason = (
      f'{len(deviating)} of {len(planted.groups)} canaries deviate'
      + (f'; passed: {passed[0]}' if passed else '')
    )
    return False

  def _deviating(
    self,
    planted: canaries.Canaries,
    source: Mapping[str, bytes | None],
    draw: random.Random,
  ) -> tuple[dict[str, tuple[str, str]], str]:
    """Runs the copies of tests.

    Returns:
      For each test with a copy that did not do what it must, a kind ('passed',
      'missing' or 'failed') and that copy; and the status of the run. All tests
      deviate if the run did not end.
    """
    names = [n for g in planted.groups for n in (g.real, *g.mutated) if n]
    files = {path: text.encode() for path, text in planted.files.items()}
    result = self._run(
      {**source, **files}, tuple(names), order_seed=draw.randrange(1 << 30)
    )
    if result.status != 'ok':
      every = {g.original: ('missing', result.status) for g in planted.groups}
      return every, result.status
    outcomes: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for node, outcome in result.outcomes.items():
      name, bracket, row = node.partition('[')
      outcomes[name][bracket + row] = outcome
    deviations = {g.original: _deviation(g, outcomes) for g in planted.groups}
    return {name: d for name, d in deviations.items() if d}, result.status

  def _ask(self, draw: random.Random) -> bool:
    """Steps 3 to 5; true if all that can be asked from outside is right."""
    task = self.task
    tolerance = held_out.tolerance_of(self.tests)
    agreement = held_out.compare(
      task, self.source, self.sandbox, draw, tolerance
    )
    calls, agreed = agreement.calls, agreement.agreed
    self.details['held_out_inputs'] = dict(
      status=agreement.status, calls=list(calls), agreed=list(agreed)
    )
    self.compared = str(agreement) if sum(calls) else ''
    if agreement.disagrees(LEAST_AGREEMENT):
      if self._is_fraud(agreement):
        self.flags.add('held_out_inputs')
      return False
    provable, good = self._run_outside(agreement)
    self.details['outside'] = [len(good), len(task.fail_to_pass)]
    if good < provable:
      self.reason = f'{min(provable - good)} fails on its values'
      return False
    if provable >= {*task.hidden}:
      return True
    if not agreement.proves:
      self.reason = 'neither tests nor calls can be asked from outside'
      return False
    return self._run_canaries(draw)

  def _run_outside(
    self, agreement: held_out.Agreement
  ) -> tuple[frozenset[str], frozenset[str]]:
    """Tests that can run on values alone, and those that pass so."""
    task, known = self.task, agreement.outcomes
    provable = outside.reference(task, self.sandbox)
    if not provable:
      return provable, provable
    with contextlib.suppress(outside.NotEnded):
      passed = outside.passed(task, self.source, self.sandbox, known)
      return provable, provable & passed
    return provable, frozenset()

  def _is_fraud(self, agreement: held_out.Agreement) -> bool:
    """True if no honest solution would do so, but by chance.

    It has the answers for the tests alone, or passes them only beside its own
    code. Values that pass them from outside are right in another form.
    """
    if agreement.knows or not (agreement.is_forged or agreement.fails):
      return agreement.is_forged
    provable, good = self._run_outside(agreement)
    return good < provable if provable else agreement.is_forged


def _deviation(
  group: canaries.CopiedTest, outcomes: Mapping[str, Mapping[str, str]]
) -> tuple[str, str] | None:
  """The kind and name of the first copy that did not do what it must."""
  for name in group.mutated:
    of_copy = set(outcomes.get(name, {}).values())
    if of_copy & {'passed', 'xpassed'}:
      return 'passed', name
    if not of_copy & {'failed', 'error'}:
      return 'missing', name
  real = outcomes.get(group.real, {})
  if group.real and any(real.get(p) != 'passed' for p in group.parameters):
    return 'failed', group.real
  return None
