"""What the tests of a package do before anything is deleted from it.

All code of the package runs in the sandbox. A package that resists in whatever
way is refused by name.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from composer_jax.sandbox import base
from composer_jax.tasks.deletion import candidates, sdists, workspace
from composer_jax.tasks.grading import suites
from composer_jax.tasks.repository import task_set


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
  """What a suite does as it came.

  Attributes:
    stable: tests that passed in every order and with other hashes.
    unstable: that passed in some orders.
    hashed: tests whose names or outcomes depend on hashes, which is to say on
      the order of a set: of a function all tests, if of one.
    failing: that never did, skipped ones included.
    seconds: of one run.
    mapped: tests and what they enter.
  """

  stable: tuple[str, ...]
  unstable: tuple[str, ...]
  hashed: tuple[str, ...]
  failing: tuple[str, ...]
  seconds: float
  importable: tuple[str, ...]
  mapped: candidates.TestMap


def run(
  sandbox: base.Sandbox,
  work: workspace.Workspace,
  changes: Mapping[str, str | None],
  **options: Any,
) -> suites.SuiteResult:
  """One run of tests in a fresh workspace; raises as `suites.run_fresh`."""
  return suites.run_fresh(
      sandbox, work.image, task_set.encoded(changes), work.pin.name,
      source_roots=work.layout.source_roots, **options,
  )  # fmt: skip


_IMPORT = """
import importlib, json, os, sys
sys.path[:0] = [os.path.abspath(root) for root in {roots!r}]
done = []
for name in {names!r}:
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(name, type(error).__name__, error, flush=True)
    else:
        done.append(name)
os.write(3, json.dumps(done).encode())
os._exit(0)
"""


def import_all(
  box: base.Box, work: workspace.Workspace, names: Iterable[str], wall_s: float
) -> tuple[tuple[str, ...], str]:
  """Which of these modules can be imported, and what the others say."""
  code = _IMPORT.format(roots=work.layout.source_roots, names=sorted(names))
  result = box.run(base.Command(argv=('-c', code), warm=True, wall_s=wall_s))
  if result.status == 'infrastructure':
    raise base.SandboxLost(result.error)
  try:
    found = json.loads(result.report)
    return tuple(n for n in names if n in found), result.output
  except (ValueError, TypeError):
    return (), result.error or result.output


_FIND = """
import importlib.util, json, os
found = [n for n in {names!r} if importlib.util.find_spec(n) is not None]
os.write(3, json.dumps(found).encode())
os._exit(0)
"""


def _check_foreign(
  sandbox: base.Sandbox, names: Iterable[str], wall_s: float
) -> None:
  """Refuses a package of which every sandbox holds a copy anyway."""
  tops = sorted({name.partition('.')[0] for name in names})
  with contextlib.closing(sandbox.open('')) as box:
    result = box.run(
      base.Command(
        argv=('-c', _FIND.format(names=tops)), warm=True, wall_s=wall_s
      )
    )
  if result.status != 'ok' or result.report != b'[]':
    raise sdists.Refused(
      'in_sandbox' if result.status == 'ok' else 'sandbox',
      f'an empty sandbox has some of {tops} already: '
      f'{result.error or result.report.decode("utf-8", "replace")}.',
    )


def baseline(
  sandbox: base.Sandbox, work: workspace.Workspace, options: workspace.Options
) -> Baseline:
  """Runs the suite in order, in random orders, and hashed anew; maps it.

  Raises:
    sdists.Refused: 'in_sandbox', 'no_import', 'no_tests', 'hangs', 'broken',
      'flaky', 'few_tests' or 'sandbox'.
  """
  names = {work.layout.module(path) for path in work.layout.sources}
  _check_foreign(sandbox, names, options.suite_s)
  with contextlib.closing(sandbox.open(work.image)) as box:
    importable, said = import_all(box, work, sorted(names), options.suite_s)
  if not importable:
    raise sdists.Refused('no_import', f'no module imports: {_last(said)}')
  runs = []
  orders = (None, 2 * options.seed + 1, 2 * options.seed + 2)
  for order, hash_seed in (*zip(orders, (0, 0, 0)), (None, 1)):
    result = run(
      sandbox, work, {}, arguments=work.layout.tests, order_seed=order,
      hash_seed=hash_seed, wall_s=options.suite_s,
    )  # fmt: skip
    _check_run(result)
    runs.append(result)
  *runs, other_hashes = runs
  _check_passes(runs[0])
  passed = [
    {i for i, outcome in run.outcomes.items() if outcome == 'passed'}
    for run in runs
  ]
  stable = set.intersection(*passed)
  ever = set.union(*passed)
  unstable = ever - stable
  if len(unstable) > options.max_unstable * len(ever):
    raise sdists.Refused(
      'flaky',
      f'{len(unstable)} of {len(ever)} tests change with their order, such as '
      f'{min(unstable)}.',
    )
  hashed = _hashed(runs[0], other_hashes)
  stable = {test for test in stable if _function(test) not in hashed}
  if len(stable) < options.min_tests:
    raise sdists.Refused(
      'few_tests',
      f'{len(stable)} tests pass always, those of {len(hashed)} functions not '
      f'with other hashes; at least {options.min_tests} must.',
    )
  folders = tuple(
    sorted({p.rpartition('/')[0] or p for p in work.layout.sources})
  )
  traced = run(
    sandbox, work, {}, arguments=work.layout.tests,
    wall_s=6 * options.suite_s, trace=suites.Trace(folders=folders),
  )  # fmt: skip
  _check_run(traced)
  return Baseline(
      stable=tuple(sorted(stable)), unstable=tuple(sorted(unstable)),
      hashed=tuple(sorted(i for i in ever if _function(i) in hashed)),
      failing=tuple(sorted(set(runs[0].outcomes) - ever)),
      seconds=runs[0].wall_s, importable=importable,
      mapped=candidates.test_map(traced.entered, stable),
  )  # fmt: skip


def _hashed(one: suites.SuiteResult, other: suites.SuiteResult) -> set[str]:
  """Functions of which a test has another name or outcome in the other run."""
  tests = {*one.outcomes, *other.outcomes}
  return {
    _function(test)
    for test in tests
    if one.outcomes.get(test) != other.outcomes.get(test)
  }


def _function(test: str) -> str:
  return test.partition('[')[0]


def _check_run(result: suites.SuiteResult) -> None:
  if result.status == 'timeout':
    raise sdists.Refused('hangs', f'the suite does not end: {result.error}')
  if result.status != 'ok':
    raise sdists.Refused(
      'broken', f'{result.status}: {result.error}; {_last(result.output)}'
    )


def _check_passes(result: suites.SuiteResult) -> None:
  if not any(o == 'passed' for o in result.outcomes.values()):
    errors = list(result.errors.values()) or [result.output]
    reason = 'no_import' if result.errors else 'no_tests'
    raise sdists.Refused(reason, f'no test passes: {_last(errors[0])}')


def _last(text: str) -> str:
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  return lines[-1][:300] if lines else 'no output'
