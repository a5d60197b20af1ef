"""Measures how the tests of a package behave before anything is deleted.

All code of the package runs in the sandbox. A package that no task can be made
of is refused with a reason.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from composer_jax.sandbox import base
from composer_jax.tasks.deletion import candidates, sdists, workspace
from composer_jax.tasks.grading import suites
from composer_jax.tasks.repository import task_set


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
  """Behaviour of a package's suite with all its code in place.

  Attributes:
    stable: tests that passed in every order and under both hash seeds.
    counts: numbers of 'tests' that are stable, 'unstable' ones that passed in
      some orders only, 'hashed' ones of functions whose parameters or outcomes
      change with the hash seed or the day, and 'failing' or skipped ones.
    seconds: wall time of one run.
    importable: modules of the package that can be imported.
    mapped: stable tests by the functions that they enter.
  """

  stable: tuple[str, ...]
  counts: Mapping[str, int]
  seconds: float
  importable: tuple[str, ...]
  mapped: candidates.TestMap


def run(
  sandbox: base.Sandbox,
  work: workspace.Workspace,
  changes: Mapping[str, str | None],
  **options: Any,
) -> suites.SuiteResult:
  """Runs tests once in a new box; raises what `suites.run_fresh` raises."""
  return suites.run_fresh(
      sandbox, work.image, task_set.encoded(changes), work.pin.name,
      source_roots=work.layout.source_roots, **options,
  )  # fmt: skip


_PROBE = """
import importlib.util, json, os, sys
sys.path[:0] = [os.path.abspath(root) for root in {roots!r}]
done = []
for name in {names!r}:
    try:
        {statement}
    except BaseException as error:
        print(name, type(error).__name__, error, flush=True)
    else:
        done.append(name)
os.write(3, json.dumps(done).encode())
os._exit(0)
"""


def _probe(
  box: base.Box, names: Iterable[str], statement: str, roots: Sequence[str] = ()
) -> base.CommandResult:  # fmt: skip
  """Executes a statement for each name; reports the names without an error."""
  code = _PROBE.format(roots=roots, names=sorted(names), statement=statement)
  result = box.run(base.Command(argv=('-c', code), warm=True))
  if result.status == 'infrastructure':
    raise base.SandboxLost(result.error)
  return result


def import_all(
  box: base.Box, work: workspace.Workspace, names: Iterable[str]
) -> tuple[tuple[str, ...], str]:
  """Imports modules; gives those that can be, and the output of the others."""
  statement = 'importlib.import_module(name)'
  result = _probe(box, names, statement, work.layout.source_roots)
  try:
    imported = json.loads(result.report)
    return tuple(n for n in names if n in imported), result.output
  except (ValueError, TypeError):
    return (), result.error or result.output


def _check_absent(sandbox: base.Sandbox, names: Iterable[str]) -> None:
  """Refuses a package of which every sandbox already holds a copy."""
  tops = {name.partition('.')[0] for name in names}
  with contextlib.closing(sandbox.open('')) as box:
    result = _probe(box, tops, 'importlib.util.find_spec(name).name')
  if result.status != 'ok':
    raise sdists.Refused('sandbox', f'an empty box failed: {result.error}.')
  if result.report != b'[]':
    raise sdists.Refused(
      'in_sandbox',
      'modules of this name are installed in the sandbox: '
      f'{result.report.decode("utf-8", "replace")}.',
    )


def baseline(
  sandbox: base.Sandbox, work: workspace.Workspace, options: workspace.Options
) -> Baseline:
  """Runs the suite in several orders and hash seeds, then traces it.

  Raises:
    sdists.Refused: 'in_sandbox', 'no_import', 'no_tests', 'hangs', 'broken',
      'flaky', 'few_tests' or 'sandbox'.
  """
  names = sorted({work.layout.module(path) for path in work.layout.sources})
  _check_absent(sandbox, names)
  with contextlib.closing(sandbox.open(work.image)) as box:
    importable, output = import_all(box, work, names)
  if not importable:
    raise sdists.Refused('no_import', f'no module imports: {_last(output)}')

  def measure(**settings: Any) -> suites.SuiteResult:
    settings = {'cpu_s': options.suite_s, **settings}
    return _checked(
      run(sandbox, work, {}, arguments=work.layout.tests, **settings)
    )

  orders = (None, 2 * options.seed + 1, 2 * options.seed + 2)
  runs = [measure(order_seed=order) for order in orders]
  rehashed = measure(hash_seed=1)
  first = runs[0]
  passed = [
    {i for i, outcome in run.outcomes.items() if outcome == 'passed'}
    for run in runs
  ]
  if not passed[0]:
    output = next(iter(first.errors.values()), first.output)
    reason = 'no_import' if first.errors else 'no_tests'
    raise sdists.Refused(reason, f'no test passes: {_last(output)}')
  stable, ever = set.intersection(*passed), set.union(*passed)
  unstable = ever - stable
  if len(unstable) > options.max_unstable * len(ever):
    raise sdists.Refused(
      'flaky',
      f'{len(unstable)} of {len(ever)} tests pass in some orders only, such as '
      f'{min(unstable)}; at most a share of {options.max_unstable} may.',
    )
  changing = {
    _function(test)
    for test in {*first.outcomes, *rehashed.outcomes}
    if first.outcomes.get(test) != rehashed.outcomes.get(test)
    or _is_dated(test, time.time())
  }
  stable = {test for test in stable if _function(test) not in changing}
  if len(stable) < options.min_tests:
    raise sdists.Refused(
      'few_tests',
      f'{len(stable)} tests always pass ({len(changing)} functions that depend '
      f'on hashes or the day left out); at least {options.min_tests} must.',
    )
  folders = {p.rpartition('/')[0] or p for p in work.layout.sources}
  traced = measure(
    cpu_s=6 * options.suite_s,
    trace=suites.Trace(folders=tuple(sorted(folders))),
  )
  return Baseline(
    stable=tuple(sorted(stable)),
    counts={
      'tests': len(stable),
      'unstable': len(unstable),
      'hashed': sum(_function(test) in changing for test in ever),
      'failing': len(set(first.outcomes) - ever),
    },
    seconds=first.wall_s,
    importable=importable,
    mapped=candidates.test_map(traced.entered, stable),
  )


def _function(test: str) -> str:
  return test.partition('[')[0]


def _is_dated(test: str, now: float) -> bool:
  """True if a test's id holds the day: on another day there is no such test."""
  days = [time.gmtime(now + 86400 * shift) for shift in (-1, 0, 1)]
  forms = ('%Y-%m-%d', '%Y%m%d')
  return any(time.strftime(form, day) in test for day in days for form in forms)


def _checked(result: suites.SuiteResult) -> suites.SuiteResult:
  if result.status == 'timeout':
    raise sdists.Refused('hangs', f'the suite does not end: {result.error}')
  if result.status != 'ok':
    raise sdists.Refused(
      'broken', f'{result.status}: {result.error}; {_last(result.output)}'
    )
  return result


def _last(text: str) -> str:
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  return lines[-1][:300] if lines else 'no output'
