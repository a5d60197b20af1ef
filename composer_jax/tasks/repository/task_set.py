"""Tasks on whole repositories, and folders that hold sets of them.

A set's folder holds

  images/NAME-VERSION/     a package as its sdist has it, leaks removed
  packages/NAME.json       what became of the package; written last
  tasks/NAME/*.json        one manifest per task

so that a set which is still being made, or whose making was killed, holds
exactly its finished packages. Nothing here runs code of a package.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from composer_jax.core import files

FAMILY = 'deletion'
# File systems allow twice that, names of temporary files included.
_MAX_NAME = 120
# From what is easiest to restore to what is hardest.
TIERS = ('body', 'symbol', 'class', 'file', 'closure')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deleted:
  """What was deleted: a dotted name within a file, or the whole file ('')."""

  path: str
  symbol: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryTask:
  """A package from which a tested feature is missing.

  Paths are relative to the workspace, with '/'. Tests are pytest node ids
  relative to it.

  Attributes:
    task_id: names the task for good.
    image: the package's folder, relative to the set's root.
    package, version: of the distribution, its name normalised.
    tier: one of `TIERS`.
    changes: path -> text, or None for a removed file: what makes the agent's
      view of the image, the removal of hidden tests included.
    solution: path -> original text of the source files that were changed.
    test_paths: tests and their configuration, which belong to the grader; the
      image holds them as they must be.
    fail_to_pass: tests that fail without the feature and pass with it.
    shown: those of them that the agent may see and run.
    pass_to_pass: tests that pass without the feature, and must not break.
    collateral: tests that fail only because their file imports what is gone;
      they must pass in the end, but say nothing of the feature.
    source_roots: folders from which the tests import the package.
    test_arguments: what pytest is given beside node ids.
    timeout_s: wall limit of one run of the suite.
    difficulty: estimate in [0, 1]; larger is harder.
    held_out: true when training must never see the task.
    provenance: where the package came from and how the task was made.
  """

  task_id: str
  family: str = FAMILY
  prompt: str
  image: str
  package: str
  version: str
  tier: str
  deleted: tuple[Deleted, ...]
  changes: Mapping[str, str | None]
  solution: Mapping[str, str]
  test_paths: tuple[str, ...]
  fail_to_pass: tuple[str, ...]
  shown: tuple[str, ...]
  pass_to_pass: tuple[str, ...]
  collateral: tuple[str, ...] = ()
  source_roots: tuple[str, ...] = ('.',)
  test_arguments: tuple[str, ...] = ()
  timeout_s: float
  difficulty: float
  held_out: bool
  licence: str
  provenance: Mapping[str, Any]

  def __post_init__(self):
    if self.tier not in TIERS:
      self._refuse(f'tier {self.tier!r} must be one of {TIERS}.')
    if not self.fail_to_pass or not self.deleted or not self.solution:
      self._refuse(
        f'it needs tests that fail ({len(self.fail_to_pass)}), deleted '
        f'features ({len(self.deleted)}) and a solution '
        f'({len(self.solution)} files).'
      )
    unknown = set(self.shown) - set(self.fail_to_pass)
    both = set(self.fail_to_pass) & set(self.guards)
    if unknown or both:
      self._refuse(
        f'shown tests must be among fail_to_pass (not {sorted(unknown)[:3]}), '
        f'and none of those a guard ({sorted(both)[:3]}).'
      )
    missing = set(self.solution) - set(self.changes)
    tests = set(self.solution) & set(self.test_paths)
    if missing or tests:
      self._refuse(
        'the solution must be of changed files that are no tests, not '
        f'{sorted(missing | tests)[:3]}.'
      )
    for path in (*self.changes, *self.test_paths, self.image):
      if not is_inside(path):
        self._refuse(f'path {path!r} must be relative and without "..".')

  def _refuse(self, reason: str) -> None:
    raise ValueError(f'Task {self.task_id!r}: {reason}')

  @property
  def guards(self) -> tuple[str, ...]:
    """Tests beside `fail_to_pass` that a solution must leave passing."""
    return (*self.pass_to_pass, *self.collateral)

  @property
  def hidden(self) -> tuple[str, ...]:
    """Tests that must pass and that the agent never sees."""
    shown = set(self.shown)
    return tuple(i for i in self.fail_to_pass if i not in shown)

  def view(self) -> dict[str, bytes | None]:
    """`changes` as a sandbox's `open` takes them."""
    return encoded(self.changes)

  def restored(self) -> dict[str, bytes | None]:
    """The agent's view with the solution written over it."""
    return encoded({**self.changes, **self.solution})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Package:
  """What became of a package.

  Attributes:
    name: normalised.
    version: '' for a folder without one.
    image: '' where none could be made.
    held_out: true when no task of it may be trained on.
    sha256: of the sdist, or of the folder's names and contents.
    refused: '' or why there is no task of it: 'no_tests', 'no_import', ....
    detail: one line of explanation where it was refused.
    facts: counts of tests and candidates; see `tasks.deletion.factory`.
  """

  name: str
  version: str
  image: str
  held_out: bool
  licence: str
  sha256: str
  refused: str = ''
  detail: str = ''
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskSet:
  """Finished packages of a folder and their tasks.

  Attributes:
    root: the folder; open a sandbox with `images=root`.
    tasks: sorted by id.
    packages: by name, refused ones included.
  """

  root: pathlib.Path
  tasks: tuple[RepositoryTask, ...]
  packages: Mapping[str, Package]

  def __post_init__(self):
    seen: set[str] = set()
    for task in self.tasks:
      package = self.packages.get(task.package)
      if package is None or package.held_out != task.held_out:
        raise ValueError(
          f'Task {task.task_id!r} in {self.root} says held_out='
          f'{task.held_out}; its package {task.package!r} '
          + (f'says {package.held_out}.' if package else 'is not in the set.')
        )
      if task.task_id in seen:
        raise ValueError(f'Two tasks in {self.root} are {task.task_id!r}.')
      seen.add(task.task_id)

  def split(self, held_out: bool) -> tuple[RepositoryTask, ...]:
    """The tasks of packages that are held out, or of all others."""
    return tuple(t for t in self.tasks if t.held_out == held_out)


def split_root(path: str, roots: Iterable[str]) -> tuple[str, str]:
  """The source root that a path lies in, '' or with '/', and the rest of it."""
  for root in sorted(roots, key=len, reverse=True):
    if root != '.' and path.startswith(f'{root}/'):
      return f'{root}/', path[len(root) + 1 :]
  return '', path


def is_inside(path: str) -> bool:
  """True for a path that stays in the folder it is relative to."""
  parts = path.split('/')
  return (
    bool(path) and '..' not in parts and '' not in parts and '\0' not in path
  )


def task_path(root: str | os.PathLike, task: RepositoryTask) -> pathlib.Path:
  name = re.sub(r'[^\w.+-]+', '_', task.task_id.removeprefix(f'{FAMILY}/'))
  if len(name) > _MAX_NAME:
    digest = files.sha256(task.task_id.encode())[:16]
    name = f'{name[:_MAX_NAME]}-{digest}'
  return pathlib.Path(root, 'tasks', task.package, f'{name}.json')


def save_task(root: str | os.PathLike, task: RepositoryTask) -> None:
  files.write_json(task_path(root, task), dataclasses.asdict(task))


def save_package(root: str | os.PathLike, package: Package) -> None:
  """Marks the package as finished: its tasks must have been saved."""
  path = pathlib.Path(root, 'packages', f'{package.name}.json')
  files.write_json(path, dataclasses.asdict(package))


def load(root: str | os.PathLike) -> TaskSet:
  """Reads the finished packages of a folder.

  Raises:
    ValueError: there is none, or a manifest is damaged; names the file.
  """
  root = pathlib.Path(root)
  paths = sorted((root / 'packages').glob('*.json'))
  if not paths:
    raise ValueError(
      f'{root} holds no finished package (packages/*.json); make a set with '
      '`python -m experiments.make_tasks --out=FOLDER`.'
    )
  packages = [_read(Package, path) for path in paths]
  tasks = [
    _read(RepositoryTask, path)
    for package in packages
    for path in sorted((root / 'tasks' / package.name).glob('*.json'))
  ]
  return TaskSet(
    root=root.resolve(),
    tasks=tuple(sorted(tasks, key=lambda task: task.task_id)),
    packages={package.name: package for package in packages},
  )


def _read(record: type, path: pathlib.Path) -> Any:
  fields = files.read_json(path)
  try:
    if record is RepositoryTask:
      fields['deleted'] = tuple(Deleted(**d) for d in fields['deleted'])
    for name, value in fields.items():
      if isinstance(value, list):
        fields[name] = tuple(value)
    return record(**fields)
  except (TypeError, KeyError) as error:
    raise ValueError(
      f'{path} is no manifest of a {record.__name__} ({error}).'
    ) from error


def encoded(changes: Mapping[str, str | None]) -> dict[str, bytes | None]:
  return {
    path: None if text is None else text.encode()
    for path, text in changes.items()
  }
