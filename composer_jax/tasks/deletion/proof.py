"""Carries one deletion out and proves that it makes a task.

The package must still import, the tests of the feature must fail and others
pass, the original must pass all of them, and no copy of the deleted code may be
left in the agent's view.
"""

import contextlib
import dataclasses
import os
import random
from collections.abc import Collection, Mapping, Sequence

from composer_jax.sandbox import base
from composer_jax.tasks.deletion import (
  baseline,
  candidates,
  descriptions,
  edit,
  leaks,
  prompt,
  workspace,
)
from composer_jax.tasks.grading import outside, solution, suites
from composer_jax.tasks.repository import task_set

# Boilerplate is alike everywhere; more than this share is a copy.
_MAX_COPIED = 0.2
_FAILED = ('failed', 'error')


class Rejected(Exception):
  """A candidate that makes no task; the argument is the reason in one word."""


def attempt(
  sandbox: base.Sandbox,
  work: workspace.Workspace,
  before: baseline.Baseline,
  candidate: candidates.Deletion,
  options: workspace.Options,
) -> task_set.RepositoryTask:
  """Makes a task of a candidate.

  Raises:
    Rejected: the candidate makes no task.
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
  cpu_s = min(options.suite_s, 20 + 5 * before.seconds)
  ids = _chosen(work, before, candidate, lost, options)
  failing, collateral, passing = _effect(
    sandbox, work, before, changes, lost, ids, cpu_s
  )
  functions = {test.partition('[')[0] for test in failing}
  if len(functions) < 2:
    raise Rejected('few_fail')
  if len(failing) > options.max_share * len(before.stable):
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
  described = descriptions.describe(
    work, candidate.deleted, shown, options.examples
  )
  if options.examples and not described.by:
    raise Rejected('undescribed')
  num_lines = _num_lines(texts, candidate)
  tier, package = candidate.tier, work.pin.name
  task = task_set.RepositoryTask(
      task_id=task_id, image=work.image, package=work.pin.normal_name,
      version=work.version, tier=tier, deleted=candidate.deleted,
      prompt=prompt.prompt(
        package, work.version, tier, candidate.deleted, texts, described
      ),
      changes=view, solution={path: texts[path] for path in changes},
      test_paths=work.layout.test_paths, fail_to_pass=failing, shown=shown,
      pass_to_pass=passing, collateral=collateral,
      source_roots=work.layout.source_roots, timeout_s=options.timeout_s,
      difficulty=prompt.difficulty(
        tier, num_lines, len(candidate.deleted), len(failing)
      ),
      held_out=work.pin.held_out, licence=work.licence,
      provenance={
        'source': work.pin.folder or f'pypi:{package}=={work.version}',
        'sha256': work.sha256, 'seed': options.seed,
        'sandbox': sandbox.level, 'deleted_lines': num_lines,
        'described_by': described.by,
      },
  )  # fmt: skip
  try:
    evidence = solution.evidence(task, sandbox)
  except outside.NotEnded as error:
    raise Rejected('timeout') from error
  if not evidence:
    raise Rejected('unproven')
  graded = (*failing, *collateral, *passing)
  restored = _run(sandbox, work, {}, graded, cpu_s)
  if restored.passed(graded) != len(graded):
    raise Rejected('restore')
  visible = _run(sandbox, work, cut, shown, cpu_s)
  if visible.passed(shown) != len(shown):
    raise Rejected('cut')
  return dataclasses.replace(
    task, provenance={**task.provenance, 'proved_by': evidence}
  )


def _run(
  sandbox: base.Sandbox,
  work: workspace.Workspace,
  view: Mapping[str, str | None],
  ids: Sequence[str],
  cpu_s: float,
) -> suites.SuiteResult:
  """Runs tests without tracebacks, which take longer than tests that fail."""
  return baseline.run(
    sandbox, work, view, ids=ids, cpu_s=cpu_s, arguments=('-q', '--tb=no')
  )


def _num_lines(texts: Mapping[str, str], candidate: candidates.Deletion) -> int:
  """Lines of code of the deleted definitions."""
  counts_methods = candidate.tier in ('body', 'symbol')
  return sum(
    symbol.num_lines
    for symbol in candidates.definitions(candidate.deleted, texts)
    if counts_methods or symbol.kind != 'method'
  )


def _chosen(
  work: workspace.Workspace,
  before: baseline.Baseline,
  candidate: candidates.Deletion,
  lost: Mapping[str, Collection[str]],
  options: workspace.Options,
) -> tuple[str, ...]:
  """The tests that the deletion may affect, and some that it should not."""
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
    for test in before.stable
    if test in candidate.touched or test.partition('::')[0] in mentioning
  }
  draw = random.Random(f'{options.seed}/{candidate.key}/guards')
  others = [test for test in before.stable if test not in affected]
  # Whole files, since collecting a file costs more than most of its tests.
  order = {test.partition('::')[0]: draw.random() for test in others}
  others.sort(key=lambda test: order[test.partition('::')[0]])
  others = others[: options.max_guards]
  # A parser is touched by a thousand tests, which prove no more than some.
  touched = sorted(candidate.touched)
  beside = sorted(affected - candidate.touched)
  most = 2 * options.max_guards
  chosen = [draw.sample(t, min(most, len(t))) for t in (touched, beside)]
  return tuple(sorted({*chosen[0], *chosen[1], *others}))


def _effect(
  sandbox: base.Sandbox,
  work: workspace.Workspace,
  before: baseline.Baseline,
  changes: Mapping[str, str | None],
  lost: Mapping[str, Collection[str]],
  ids: tuple[str, ...],
  cpu_s: float,
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
  """Sorts tests by what the deletion does to them.

  Returns:
    Tests that fail without the feature, tests that fail only because an import
    of their file does, and tests that pass.
  """

  def outcomes(
    view: Mapping[str, str | None], ids: Sequence[str]
  ) -> dict[str, str]:
    result = _run(sandbox, work, view, ids, cpu_s)
    if result.status != 'ok':
      raise Rejected(result.status)
    # The outcome of a file that cannot be collected is that of its tests.
    files = {i: result.outcomes.get(i.partition('::')[0], '') for i in ids}
    return {i: result.outcomes.get(i, files[i]) for i in ids}

  removed = {work.layout.module(p) for p, t in changes.items() if t is None}
  wanted = [name for name in before.importable if name not in removed]
  with contextlib.closing(
    sandbox.open(work.image, task_set.encoded(changes))
  ) as box:
    if baseline.import_all(box, work, wanted)[0] != tuple(wanted):
      raise Rejected('import')
  outcome = outcomes(changes, ids)
  failing = sorted(i for i in ids if outcome[i] in _FAILED)
  passing = tuple(i for i in ids if outcome[i] == 'passed')
  if not lost or not failing:
    return tuple(failing), (), passing
  standing = {p: changes.get(p, work.texts[p]) or '' for p in lost}
  standing = {p: candidates.shim(t, lost[p]) for p, t in standing.items()}
  shimmed = outcomes({**changes, **standing}, failing)
  return (
    tuple(i for i in failing if shimmed[i] in _FAILED),
    tuple(i for i in failing if shimmed[i] not in _FAILED),
    passing,
  )


def _check_leaks(
  work: workspace.Workspace, view: Mapping[str, str | None], deleted: list[str]
) -> None:
  visible = {p: d for p, d in work.files.items() if p not in view}
  visible |= {p: t.encode() for p, t in view.items() if t is not None}
  left = [
    data.decode('utf-8', 'replace')
    for path, data in visible.items()
    if path.endswith('.py')
  ]
  if leaks.scan(visible, deleted, left):
    raise Rejected('leak')


def _deleted(
  texts: Mapping[str, str],
  changes: Mapping[str, str | None],
  candidate: candidates.Deletion,
) -> list[str]:
  """The pieces of source that the deletion took out."""
  pieces = []
  for item in candidate.deleted:
    before = texts[item.path].split('\n')
    if not item.symbol:
      pieces.append(texts[item.path])
    elif candidate.tier == 'body':
      pieces.append(_difference(before, (changes[item.path] or '').split('\n')))
    else:
      whole, *_ = candidates.definitions([item], texts)
      pieces.append(whole.code(texts[item.path]))
  return pieces


def _difference(before: list[str], after: list[str]) -> str:
  """The lines of the first text between the common start and the common end."""
  start = len(os.path.commonprefix([before, after]))
  backwards = [before[start:][::-1], after[start:][::-1]]
  stop = len(before) - len(os.path.commonprefix(backwards))
  return '\n'.join(before[start:stop])
