"""Makes a set of tasks of many packages, and goes on where it was killed.

Beside the set itself (see `tasks.repository.task_set`) its folder holds

  settings.json             what the set is made with; it may not change
  work/NAME/candidates.jsonl   what became of each candidate so far

A task is kept only if the package still imports, the tests of the feature
fail, others pass, the original passes all of them, and no copy of the deleted
code is left in what the agent sees. All code of the package runs in the
sandbox; a package that resists in whatever way is refused by name, and so the
making of a set goes on. Everything but seconds is a function of the package,
the options and the seed.

A package is finished when packages/NAME.json stands there; one that was
refused for a reason that may pass (no network) is tried again.
"""

import concurrent.futures
import dataclasses
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_jax.core import files
from composer_jax.sandbox import base
from composer_jax.tasks.deletion import (
  baseline,
  candidates,
  proof,
  sdists,
  workspace,
)
from composer_jax.tasks.repository import task_set

# Says nothing of the package.
_PASSING = ('download', 'sandbox')
VALID = 'valid'


class CandidateLog:
  """Outcomes of candidates, a line each; half a line is none."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._known: dict[str, str] = {}
    whole = b''
    if path.exists():
      whole = path.read_bytes().rpartition(b'\n')[0]
      for line in whole.splitlines():
        key, result = json.loads(line)
        self._known[key] = result
      files.write_atomic(path, whole + b'\n' if whole else b'')

  def get(self, key: str) -> str | None:
    return self._known.get(key)

  def add(self, key: str, result: str) -> None:
    self._path.parent.mkdir(parents=True, exist_ok=True)
    with self._path.open('ab') as file:
      file.write(json.dumps([key, result]).encode() + b'\n')
      file.flush()
      os.fsync(file.fileno())
    self._known[key] = result

  def __len__(self) -> int:
    return len(self._known)


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
  return workspace.Workspace(
    pin=pin,
    version=version,
    sha256=sha256,
    licence=licence_of(everything),
    image=image,
    files=kept,
    dropped=tuple(dropped),
    layout=layout,
    texts=workspace.texts(kept, layout.sources),
    tests=workspace.texts(
      kept, [p for p in layout.test_paths if p.endswith('.py')]
    ),
  )


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
  """Makes all tasks of all packages that are not finished yet.

  Args:
    archives: folder with sdists, to which missing ones are downloaded.
    open_sandbox: called with the root and the distributions that tests need.

  Raises:
    ValueError: the folder was begun with other options or pins, or no package
      could be finished.
  """
  root = pathlib.Path(root)
  with files.alone(root):
    _settle(root, pins, options)
    files.sweep(root)
    workspace.sweep(root / 'images')
    works = []
    for pin in pins:
      if (root / 'packages' / f'{pin.normal_name}.json').exists():
        progress(f'{pin.name}: finished before')
        continue
      try:
        works.append(prepare(root, pin, archives, licence_of))
      except sdists.Refused as refused:
        _refuse(root, pin, refused, progress)
    if works:
      requires = sorted({r for work in works for r in work.pin.requires})
      sandbox = open_sandbox(root, ('pytest', *requires))
      try:
        _make_all(root, works, options, sandbox, workers, progress)
      finally:
        sandbox.close()
  return task_set.load(root)


def _settle(
  root: pathlib.Path, pins: Sequence[sdists.Pin], options: workspace.Options
) -> None:
  """Packages may be added to a set; what one was made with stays."""
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


def _refuse(
  root: pathlib.Path,
  pin: sdists.Pin,
  refused: sdists.Refused,
  progress: Callable[[str], None],
  work: workspace.Workspace | None = None,
) -> None:
  progress(f'{pin.name}: refused, {refused.reason}: {refused}')
  if refused.reason in _PASSING:
    return
  package = task_set.Package(
      name=pin.normal_name, version=pin.version,
      image=work.image if work else '', held_out=pin.held_out,
      licence=work.licence if work else '',
      sha256=work.sha256 if work else pin.sha256, refused=refused.reason,
      detail=str(refused),
  )  # fmt: skip
  task_set.save_package(root, package)


def _make_all(
  root: pathlib.Path,
  works: Sequence[workspace.Workspace],
  options: workspace.Options,
  sandbox: base.Sandbox,
  workers: int,
  progress: Callable[[str], None],
) -> None:
  printing = threading.Lock()

  def say(line: str) -> None:
    with printing:
      progress(line)

  with concurrent.futures.ThreadPoolExecutor(workers) as threads:
    futures = [
      threads.submit(_make_one, root, work, options, sandbox, say)
      for work in works
    ]
    try:
      for future in concurrent.futures.as_completed(futures):
        future.result()
    except BaseException:
      threads.shutdown(wait=False, cancel_futures=True)
      raise


def _make_tasks(
  sandbox: base.Sandbox,
  work: workspace.Workspace,
  options: workspace.Options,
  log: CandidateLog,
  save: Callable[[task_set.RepositoryTask], None],
  progress: Callable[[str], None],
) -> dict[str, Any]:
  """Makes the tasks of a package.

  Args:
    sandbox: with images of the set's folder.
    save: called with each task before the log knows of it.
    progress: called with a line now and then.

  Returns:
    Facts of the package: tests, and what became of candidates by tier.

  Raises:
    sdists.Refused: there can be no task; see `baseline`.
  """
  found = baseline.baseline(sandbox, work, options)
  progress(
    f'{len(found.stable)} tests, {len(found.unstable)} unstable, '
    f'{len(found.hashed)} that depend on hashes, '
    f'{len(found.failing)} that never pass, {found.seconds:.1f} s a run'
  )
  results: dict[str, dict[str, int]] = {}
  for tier in task_set.TIERS:
    wanted = options.wanted(tier)
    counts: dict[str, int] = {}
    deletions = candidates.candidates(
        work.texts, found.mapped, tier, max_share=options.max_share,
        seed=f'{options.seed}/{work.pin.normal_name}',
    )  # fmt: skip
    for deletion in deletions[: round(wanted * options.tries)]:
      if counts.get(VALID, 0) >= wanted:
        break
      result = log.get(deletion.key)
      if result is None:
        result = VALID
        try:
          save(proof.attempt(sandbox, work, found, deletion, options))
        except proof.Rejected as rejected:
          result = rejected.args[0]
        log.add(deletion.key, result)
      counts[result] = counts.get(result, 0) + 1
    results[tier] = counts
    tried = sum(counts.values())
    progress(f'{tier}: {counts.get(VALID, 0)} of {tried} tried, {counts}')
  return {
      'tests': len(found.stable), 'unstable': len(found.unstable),
      'hashed': len(found.hashed), 'failing': len(found.failing),
      'dropped_files': len(work.dropped), 'candidates': results,
  }  # fmt: skip


def _make_one(
  root: pathlib.Path,
  work: workspace.Workspace,
  options: workspace.Options,
  sandbox: base.Sandbox,
  progress: Callable[[str], None],
) -> None:
  name = work.pin.normal_name
  start = time.monotonic()
  log = CandidateLog(root / 'work' / name / 'candidates.jsonl')
  if len(log):
    progress(f'{name}: goes on after {len(log)} candidates')
  try:
    facts = _make_tasks(
        sandbox, work, options, log,
        lambda task: task_set.save_task(root, task),
        lambda line: progress(f'{name}: {line}'),
    )  # fmt: skip
  except sdists.Refused as refused:
    _refuse(root, work.pin, refused, progress, work)
    return
  except base.SandboxLost as error:
    logging.warning('%s: the sandbox was lost: %s', name, error)
    _refuse(root, work.pin, sdists.Refused('sandbox', str(error)), progress)
    return
  package = task_set.Package(
      name=name, version=work.version, image=work.image,
      held_out=work.pin.held_out, licence=work.licence, sha256=work.sha256,
      facts=facts,
  )  # fmt: skip
  task_set.save_package(root, package)
  tasks = sum(c.get(VALID, 0) for c in facts['candidates'].values())
  progress(f'{name}: {tasks} tasks, {time.monotonic() - start:.0f} s')


def table(tasks: task_set.TaskSet) -> str:
  """The yield by package and tier, as a Markdown table."""
  tiers = task_set.TIERS
  lines = [
    '| package | tests | ' + ' | '.join(tiers) + ' | tasks |',
    '|' + '---|' * (len(tiers) + 3),
  ]
  total = {tier: [0, 0] for tier in tiers}
  for name, package in sorted(tasks.packages.items()):
    mark = ' (held out)' if package.held_out else ''
    if package.refused:
      lines.append(f'| {name}{mark} | refused: {package.refused} |')
      continue
    cells, made = [], 0
    for tier in tiers:
      counts = package.facts['candidates'].get(tier, {})
      valid, tried = counts.get(VALID, 0), sum(counts.values())
      cells.append(f'{valid}/{tried}')
      total[tier][0] += valid
      total[tier][1] += tried
      made += valid
    lines.append(
      f'| {name}{mark} | {package.facts["tests"]} | '
      + ' | '.join(cells)
      + f' | {made} |'
    )
  sums = ' | '.join(f'{valid}/{tried}' for valid, tried in total.values())
  lines.append(f'| all | | {sums} | {len(tasks.tasks)} |')
  return '\n'.join(lines)
