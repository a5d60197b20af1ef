"""Makes a set of tasks from many packages, and resumes after a kill.

The folder of a set (see `tasks.repository.task_set`) also holds settings.json,
the options and pins of the set, which may not change.

All code of a package runs in the sandbox; `proof` says which deletions become
tasks. No definition is deleted by two tasks, under any names. A package without
a task is refused with a reason and the set goes on.
Everything but measured seconds is a function of the packages, the options and
the seed.

A package is finished once packages/NAME.json exists. An unfinished one begins
again, and so does one that was refused for a passing reason (no network).
"""

import collections
import concurrent.futures
import dataclasses
import functools
import json
import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_jax.core import files
from composer_jax.sandbox import base
from composer_jax.tasks.deletion import (
  baseline,
  candidates,
  descriptions,
  proof,
  sdists,
  workspace,
)
from composer_jax.tasks.repository import task_set

# Reasons of refusals that say nothing about the package.
_PASSING = ('download', 'sandbox')
_VALID = 'valid'


def prepare(
  root: pathlib.Path,
  pin: sdists.Pin,
  archives: str | os.PathLike,
  licence_of: Callable[[Mapping[str, bytes]], str],
) -> workspace.Workspace:
  """Reads a package and writes its image.

  Raises:
    sdists.Refused: 'download', 'hash', 'archive', 'folder', 'no_tests' or
      'no_sources'.
  """
  everything, sha256 = sdists.read(pin, archives)
  kept, dropped = workspace.scrub(everything)
  layout = workspace.layout(kept)
  version = pin.version or 'folder'
  image = f'images/{pin.normal_name}-{version}'
  workspace.write_image(
    root / image,
    kept,
    (layout.source_roots[0], everything.get('PKG-INFO', b'')),
  )
  tests = [p for p in layout.test_paths if p.endswith('.py')]
  return workspace.Workspace(
      pin=pin, version=version, sha256=sha256, licence=licence_of(everything),
      image=image, files=kept, dropped=tuple(dropped), layout=layout,
      texts=workspace.texts(kept, layout.sources),
      tests=workspace.texts(kept, tests),
  )  # fmt: skip


def make(
  root: str | os.PathLike,
  pins: Sequence[sdists.Pin],
  options: workspace.Options,
  *,
  archives: str | os.PathLike,
  open_sandbox: Callable[[pathlib.Path, Sequence[str]], base.Sandbox],
  licence_of: Callable[[Mapping[str, bytes]], str],
  workers: int = 1,
  progress: Callable[[str], None] = print,
) -> task_set.TaskSet:
  """Makes the tasks of all packages that are not finished yet.

  Args:
    root: folder of the set.
    pins: packages to make tasks of.
    options: numbers and limits of the tasks.
    archives: folder of sdists; missing ones are downloaded into it.
    open_sandbox: opens a sandbox, given the root and the distributions that
      tests import.
    licence_of: licence of a package, given its files.
    workers: number of packages worked on at the same time.
    progress: called with lines for people to read.

  Raises:
    ValueError: the folder was begun with other options or pins, or no package
      could be finished.
  """
  root = pathlib.Path(root)
  printing = threading.Lock()

  def say(line: str) -> None:
    with printing:
      progress(line)

  with files.alone(root):
    _settle(root, pins, options)
    files.sweep(root)
    works = []
    for pin in pins:
      if (root / 'packages' / f'{pin.normal_name}.json').exists():
        say(f'{pin.name}: finished before')
        continue
      try:
        works.append(prepare(root, pin, archives, licence_of))
      except sdists.Refused as refused:
        _refuse(root, _package(pin), refused, say)
    if works:
      requires = sorted({r for work in works for r in work.pin.requires})
      sandbox = open_sandbox(root, ('pytest', *requires))
      make_one = functools.partial(_make_one, root, options, sandbox, say)
      threads = concurrent.futures.ThreadPoolExecutor(workers)
      try:
        for future in concurrent.futures.as_completed(
          [threads.submit(make_one, work) for work in works]
        ):
          future.result()
      finally:
        threads.shutdown(cancel_futures=True)
        sandbox.close()
    _unlike(root)
    return _hold_out(root, say)


def _unlike(root: pathlib.Path) -> None:
  """Removes tasks that ask for what others ask for; held-out ones stay."""
  used: set[str] = set()
  for task in sorted(task_set.load(root).tasks, key=lambda t: not t.held_out):
    shapes = candidates.shapes(task.deleted, task.solution)
    if shapes & used:
      task_set.task_path(root, task).unlink()
    used |= shapes


def _hold_out(
  root: pathlib.Path, say: Callable[[str], None]
) -> task_set.TaskSet:
  """Holds out a fifth of the tasks, by file, where no package is held out.

  No other task then deletes from those files. Of a single file tasks are taken
  one by one.
  """
  known = task_set.load(root)
  if known.split(True) or not known.tasks:
    return known
  by_file = collections.defaultdict[str, set[str]](set)
  for task in known.tasks:
    for path in task.solution:
      by_file[f'{task.package}: {path}'].add(task.task_id)
  if len(by_file) == 1:
    by_file = {task.task_id: {task.task_id} for task in known.tasks}
  number, held_out, named = len(known.tasks), set[str](), []
  for name in sorted(by_file, key=lambda n: files.sha256(n.encode())):
    more = held_out | by_file[name]
    if 5 * len(held_out) < number and 2 * len(more) <= number:
      held_out, named = more, [*named, name]
  for task in known.tasks:
    if task.task_id in held_out:
      task_set.save_task(root, dataclasses.replace(task, held_out=True))
  say(
    f'no package is held out, so {len(held_out)} of {number} tasks are, of '
    f'{", ".join(named) or "nothing: there are too few"}'
  )
  return task_set.load(root)


def _settle(
  root: pathlib.Path, pins: Sequence[sdists.Pin], options: workspace.Options
) -> None:
  """Checks and writes the settings; packages may be added, nothing changed."""
  path = root / 'settings.json'
  wanted = {
    'options': dataclasses.asdict(options),
    'pins': {
      pin.normal_name: json.loads(json.dumps(dataclasses.asdict(pin)))
      for pin in pins
    },
  }
  if path.exists():
    begun = files.read_json(path)
    differ = [
      name
      for name, fields in wanted['pins'].items()
      if begun['pins'].get(name, fields) != fields
    ]
    if begun['options'] != wanted['options']:
      differ.append('options')
    if differ:
      raise ValueError(
        f'{root} was begun with other values of {differ} (settings.json); '
        'choose another --out, or go back to those values.'
      )
    wanted['pins'] = {**begun['pins'], **wanted['pins']}
  files.write_json(path, wanted)


def _package(
  pin: sdists.Pin, work: workspace.Workspace | None = None
) -> task_set.Package:
  """The record of a package; `work` is None for one that was not read."""
  return task_set.Package(
      name=pin.normal_name, version=pin.version, held_out=pin.held_out,
      image=work.image if work else '', licence=work.licence if work else '',
      sha256=work.sha256 if work else pin.sha256,
  )  # fmt: skip


def _refuse(
  root: pathlib.Path,
  package: task_set.Package,
  refused: sdists.Refused,
  say: Callable[[str], None],
) -> None:
  say(f'{package.name}: refused, {refused.reason}: {refused}')
  if refused.reason not in _PASSING:
    package = dataclasses.replace(
      package, refused=refused.reason, detail=str(refused)
    )
    task_set.save_package(root, package)


def _make_one(
  root: pathlib.Path,
  options: workspace.Options,
  sandbox: base.Sandbox,
  say: Callable[[str], None],
  work: workspace.Workspace,
) -> None:
  """Makes the tasks of a package and marks it as finished."""
  package = _package(work.pin, work)
  start = time.monotonic()
  shutil.rmtree(root / 'tasks' / package.name, ignore_errors=True)
  try:
    facts = _make_tasks(
        sandbox, work, options, lambda task: task_set.save_task(root, task),
        lambda line: say(f'{package.name}: {line}'),
    )  # fmt: skip
  except sdists.Refused as refused:
    _refuse(root, package, refused, say)
    return
  except base.SandboxLost as error:
    logging.warning('%s: the sandbox was lost: %s', package.name, error)
    _refuse(root, package, sdists.Refused('sandbox', str(error)), say)
    return
  package = dataclasses.replace(package, version=work.version, facts=facts)
  task_set.save_package(root, package)
  tasks = sum(c.get(_VALID, 0) for c in facts['candidates'].values())
  say(f'{package.name}: {tasks} tasks, {time.monotonic() - start:.0f} s')


def _make_tasks(
  sandbox: base.Sandbox,
  work: workspace.Workspace,
  options: workspace.Options,
  save: Callable[[task_set.RepositoryTask], None],
  say: Callable[[str], None],
) -> dict[str, Any]:
  """Makes the tasks of a package.

  Args:
    sandbox: sandbox with the images of the set.
    work: the package.
    options: numbers and limits of the tasks.
    save: stores a task.
    say: called with a line of progress.

  Returns:
    Counts of the package's tests, and of outcomes by tier.

  Raises:
    sdists.Refused: the package cannot have a task; see `baseline`.
  """
  before = baseline.baseline(sandbox, work, options)
  say(
    '{tests} tests, {unstable} unstable, {hashed} that change with hashes or '
    'days, {failing} that never pass'.format(**before.counts)
    + f', {before.seconds:.1f} s a run'
  )
  counts_by_tier: dict[str, dict[str, int]] = {}
  used: set[str] = set()
  # A definition serves one task; tiers with few candidates choose first.
  for tier in ('class', 'file', 'closure', 'symbol', 'body'):
    wanted = options.wanted(tier)
    counts: collections.Counter[str] = collections.Counter()
    deletions = candidates.candidates(
        work.texts, before.mapped, tier, max_share=options.max_share,
        seed=f'{options.seed}/{work.pin.normal_name}',
        lines=range(options.min_lines, options.max_lines + 1),
    )  # fmt: skip
    described = [
      d
      for d in deletions
      if not options.examples
      or descriptions.describe(work, d.deleted, d.touched, options.examples).by
    ]
    counts['undescribed'] = len(deletions) - len(described)
    tries = round(wanted * options.tries)
    for deletion in described:
      # Where hardly anything can be proved, the rest is not worth its time.
      is_hopeless = counts['unproven'] > 9 * (1 + counts[_VALID])
      if counts[_VALID] >= wanted or not tries or is_hopeless:
        break
      shapes = candidates.shapes(deletion.deleted, work.texts)
      if shapes & used:
        counts['alike'] += 1
        continue
      tries -= 1
      try:
        save(proof.attempt(sandbox, work, before, deletion, options))
        used |= shapes
        counts[_VALID] += 1
      except proof.Rejected as rejected:
        counts[rejected.args[0]] += 1
    counts_by_tier[tier] = dict(counts)
    say(f'{tier}: {counts[_VALID]} of {counts.total()} tried, {dict(counts)}')
  return {
    **before.counts,
    'dropped_files': len(work.dropped),
    'requires': work.pin.requires,
    'candidates': counts_by_tier,
  }
