"""Carries one deletion out and proves that it makes a task.

The package must still import, the tests of the feature must fail, others pass,
the original pass all of them, and no copy of the deleted code be left in what
the agent sees.
"""

import contextlib
import random
from collections.abc import Collection, Mapping

from composer_jax.sandbox import base
from composer_jax.tasks.deletion import (
  baseline,
  candidates,
  edit,
  leaks,
  prompt,
  workspace,
)
from composer_jax.tasks.grading import suites
from composer_jax.tasks.repository import task_set

# Boilerplate is alike everywhere.
_MAX_COPIED = 0.2
_FAILED = ('failed', 'error')


class Rejected(Exception):
  """A candidate that makes no task; the first argument is one word."""


def attempt(
  sandbox: base.Sandbox,
  work: workspace.Workspace,
  found: baseline.Baseline,
  candidate: candidates.Deletion,
  options: workspace.Options,
) -> task_set.RepositoryTask:
  """Makes a task of a candidate.

  Raises:
    Rejected: with the reason.
  """
  texts = work.texts
  try:
    changes, lost = candidates.edit(texts, work.layout, candidate)
  except edit.CannotEdit as error:
    raise Rejected('edit') from error
  deleted = _deleted(texts, changes, candidate)
  left = [t for t in {**texts, **changes}.values() if t is not None]
  left += work.tests.values()
  if leaks.copied_share(deleted, left) > _MAX_COPIED:
    raise Rejected('copy')
  wall_s = min(options.suite_s, 5 + 5 * found.seconds)
  ids = _chosen(work, found, candidate, lost, options)
  failing, collateral, passing = _effect(
    sandbox, work, found, changes, lost, ids, wall_s
  )
  functions = {test.partition('[')[0] for test in failing}
  if len(functions) < 2:
    raise Rejected('few_fail')
  if len(failing) > options.max_share * len(found.stable):
    raise Rejected('many_fail')
  if len(passing) + len(collateral) < 0.1 * len(ids):
    raise Rejected('few_pass')
  task_id = f'{task_set.FAMILY}/{work.pin.normal_name}/{candidate.key}'
  shown, cut = prompt.hide(
      failing, work.tests, share=options.hidden_share,
      seed=f'{options.seed}/{task_id}',
  )  # fmt: skip
  if not cut:
    raise Rejected('not_hidden')
  view = {**changes, **cut}
  _check_leaks(work, view, deleted)
  graded = (*failing, *collateral, *passing)
  restored = baseline.run(sandbox, work, {}, ids=graded, wall_s=wall_s)
  if restored.passed(graded) != len(graded):
    raise Rejected('restore')
  visible = baseline.run(sandbox, work, cut, ids=shown, wall_s=wall_s)
  if visible.passed(shown) != len(shown):
    raise Rejected('cut')
  symbols = [
    s for path, text in texts.items() for s in edit.symbols(path, text)
  ]
  gone = [s for s in symbols if _is_gone(s, candidate)]
  num_lines = sum(s.num_lines for s in gone)
  return task_set.RepositoryTask(
    task_id=task_id,
    prompt=prompt.prompt(
      work.pin.name, work.version, candidate.tier, candidate.deleted, texts
    ),
    image=work.image,
    package=work.pin.normal_name,
    version=work.version,
    tier=candidate.tier,
    deleted=candidate.deleted,
    changes=view,
    solution={path: texts[path] for path in changes},
    test_paths=work.layout.test_paths,
    fail_to_pass=failing,
    shown=shown,
    pass_to_pass=passing,
    collateral=collateral,
    source_roots=work.layout.source_roots,
    timeout_s=options.timeout_s,
    difficulty=prompt.difficulty(
      candidate.tier, num_lines, len(candidate.deleted), len(failing)
    ),
    held_out=work.pin.held_out,
    licence=work.licence,
    provenance={
      'source': work.pin.folder or f'pypi:{work.pin.name}=={work.version}',
      'sha256': work.sha256,
      'seed': options.seed,
      'sandbox': restored.level,
      'deleted_lines': num_lines,
    },
  )


def _is_gone(symbol: edit.Symbol, candidate: candidates.Deletion) -> bool:
  if symbol.kind == 'method' and candidate.tier in ('class', 'file', 'closure'):
    return False  # counted with its class
  return any(
    symbol.path == item.path and item.symbol in ('', symbol.name)
    for item in candidate.deleted
  )


def _chosen(
  work: workspace.Workspace,
  found: baseline.Baseline,
  candidate: candidates.Deletion,
  lost: Mapping[str, Collection[str]],
  options: workspace.Options,
) -> tuple[str, ...]:
  """The tests that may change, and some that should not."""
  names = {name for names in lost.values() for name in names}
  names |= {d.symbol.rpartition('.')[2] for d in candidate.deleted} - {''}
  names |= {
    work.layout.module(d.path).rpartition('.')[2] for d in candidate.deleted
  }
  mentioning = {
    path
    for path, text in work.tests.items()
    if candidate.tier != 'body' and any(name in text for name in names)
  }
  affected = {
    test
    for test in found.stable
    if test in candidate.touched or test.partition('::')[0] in mentioning
  }
  others = [test for test in found.stable if test not in affected]
  draw = random.Random(f'{options.seed}/{candidate.key}/guards')
  others = draw.sample(others, min(options.max_guards, len(others)))
  # Those that touch the feature all count; of the rest of their files, some.
  rest = sorted(affected - candidate.touched)
  if len(rest) > 2 * options.max_guards:
    rest = draw.sample(rest, 2 * options.max_guards)
  return tuple(sorted({*candidate.touched, *rest, *others}))


def _effect(
  sandbox: base.Sandbox,
  work: workspace.Workspace,
  found: baseline.Baseline,
  changes: Mapping[str, str | None],
  lost: Mapping[str, Collection[str]],
  ids: tuple[str, ...],
  wall_s: float,
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
  """Tests that fail for want of the feature, of an import, and not at all."""
  removed = {work.layout.module(p) for p, t in changes.items() if t is None}
  wanted = [name for name in found.importable if name not in removed]
  with contextlib.closing(
    sandbox.open(work.image, task_set.encoded(changes))
  ) as box:
    importable, _ = baseline.import_all(box, work, wanted, wall_s)
    if len(importable) < len(wanted):
      raise Rejected('import')
  result = baseline.run(sandbox, work, changes, ids=ids, wall_s=wall_s)
  if result.status != 'ok':
    raise Rejected(result.status)
  outcome = {i: _outcome(result, i) for i in ids}
  down = {i for i, what in outcome.items() if what in _FAILED}
  passing = tuple(i for i in ids if outcome[i] == 'passed')
  names = {path: names for path, names in lost.items() if names}
  if not names:
    return tuple(sorted(down)), (), passing
  shimmed = candidates.shimmed(work.texts, changes, names)
  mapped = baseline.run(sandbox, work, shimmed, ids=ids, wall_s=wall_s)
  if mapped.status != 'ok':
    raise Rejected(mapped.status)
  failing = {i for i in down if _outcome(mapped, i) in _FAILED}
  return tuple(sorted(failing)), tuple(sorted(down - failing)), passing


def _outcome(result: suites.SuiteResult, test: str) -> str:
  """What became of a test; one of a file that cannot be collected failed."""
  if test in result.outcomes:
    return result.outcomes[test]
  return result.outcomes.get(test.partition('::')[0], 'missing')


def _check_leaks(
  work: workspace.Workspace, view: Mapping[str, str | None], deleted: list[str]
) -> None:
  visible: dict[str, bytes] = {**work.files}
  for path, text in view.items():
    visible.pop(path, None)
    if text is not None:
      visible[path] = text.encode()
  left = [
    data.decode('utf-8', 'replace')
    for path, data in visible.items()
    if path.endswith('.py')
  ]
  found = leaks.scan(visible, leaks.marks_of(deleted, left))
  if found:
    raise Rejected('leak')


def _deleted(
  texts: Mapping[str, str],
  changes: Mapping[str, str | None],
  candidate: candidates.Deletion,
) -> list[str]:
  """The source that is no longer there."""
  pieces = []
  for item in candidate.deleted:
    before = texts[item.path].split('\n')
    if not item.symbol:
      pieces.append(texts[item.path])
    elif candidate.tier == 'body':
      pieces.append(_difference(before, (changes[item.path] or '').split('\n')))
    else:
      found = edit.symbols(item.path, texts[item.path])
      symbol = next(s for s in found if s.name == item.symbol)
      pieces.append('\n'.join(before[symbol.start - 1 : symbol.stop]))
  return pieces


def _difference(before: list[str], after: list[str]) -> str:
  """What stands between the lines that both begin and end with."""
  shorter = min(len(before), len(after))
  start = 0
  while start < shorter and before[start] == after[start]:
    start += 1
  stop = 0
  while stop < shorter - start and before[-1 - stop] == after[-1 - stop]:
    stop += 1
  return '\n'.join(before[start : len(before) - stop])
