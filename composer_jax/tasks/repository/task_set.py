"""Tasks on whole repositories, and folders that hold sets of them.

A set's folder holds

  images/NAME-VERSION/     a package as in its sdist, leaks removed
  packages/NAME.json       outcome of the package; written last
  tasks/NAME/*.json        one manifest per task

so that a set whose making goes on, or was killed, holds exactly its finished
packages. Nothing here runs code of a package.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from composer_jax.core import files

FAMILY = 'deletion'
# File systems allow twice this length, names of temporary files included.
_MAX_NAME = 120
# Kinds of deletion, from the easiest to restore to the hardest.
TIERS = ('body', 'symbol', 'class', 'file', 'closure')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deleted:
  """A deleted feature: a dotted name within a file, or '' for a whole file."""

  path: str
  symbol: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryTask:
  """A package from which a tested feature is missing.

  Paths are relative to the workspace, with '/'. Tests are pytest node ids
  relative to it.

  Attributes:
    task_id: permanent name of the task.
    image: the package's folder, relative to the set's root.
    package, version: normalised name and version of the distribution.
    tier: one of `TIERS`.
    changes: path -> text, or None for a removed file; they turn the image into
      the agent's view, in which hidden tests are removed too.
    solution: path -> original text of the changed source files.
    test_paths: tests and their configuration, which belong to the grader; the
      image holds their right versions.
    fail_to_pass: tests that fail without the feature and pass with it.
    shown: tests of fail_to_pass that the agent may see and run.
    pass_to_pass: tests that pass without the feature, and must not break.
    collateral: tests that fail only because their file imports the feature;
      they must pass in the end, but do not test it.
    source_roots: folders from which the tests import the package.
    test_arguments: arguments of pytest beside node ids.
    timeout_s: most processor seconds of one run of the suite.
    difficulty: estimate in [0, 1]; larger is harder.
    held_out: true if training must never see the task.
    provenance: origin of the package and parameters of the task's making.
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
    fails = set(self.fail_to_pass)
    if wrong := (set(self.shown) - fails) | (fails & set(self.guards)):
      self._refuse(
        'shown tests must be among fail_to_pass, and none of those a guard; '
        f'got {sorted(wrong)[:3]}.'
      )
    files = set(self.solution)
    if wrong := (files - set(self.changes)) | (files & set(self.test_paths)):
      self._refuse(
        'the solution must be of changed files that are no tests; got '
        f'{sorted(wrong)[:3]}.'
      )
    for path in (*self.changes, *self.test_paths, self.image):
      # A path must stay in the folder that it is relative to.
      parts = path.split('/')
      if '..' in parts or '' in parts or '\0' in path:
        self._refuse(f'path {path!r} must be relative and without "..".')

  def _refuse(self, reason: str) -> None:
    raise ValueError(f'Task {self.task_id!r}: {reason}')

  @property
  def guards(self) -> tuple[str, ...]:
    """Tests beside `fail_to_pass` that must pass in the end."""
    return (*self.pass_to_pass, *self.collateral)

  @property
  def hidden(self) -> tuple[str, ...]:
    """Tests of `fail_to_pass` that the agent never sees."""
    shown = set(self.shown)
    return tuple(i for i in self.fail_to_pass if i not in shown)

  def view(self) -> dict[str, bytes | None]:
    """Returns `changes` for a sandbox's `open`."""
    return encoded(self.changes)

  def restored(self) -> dict[str, bytes | None]:
    """Returns `view` with the solution written over it."""
    return encoded({**self.changes, **self.solution})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Package:
  """The outcome of a package.

  Attributes:
    name: normalised name of the distribution.
    version: version of the distribution; '' for a folder without one.
    image: folder of the image; '' if none could be made.
    held_out: true if no task of the package may be trained on; of others some
      may be held out.
    sha256: hash of the sdist, or of the folder's names and contents.
    refused: reason why there is no task of it ('no_tests', 'no_import', ...);
      '' if there is none.
    detail: one line of explanation for a refused package.
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
  """The finished packages of a folder, and their tasks.

  Attributes:
    root: the folder; open a sandbox with `images=root`.
    tasks: tasks in the order of their ids.
    packages: packages by name, refused ones included.
  """

  root: pathlib.Path
  tasks: tuple[RepositoryTask, ...]
  packages: Mapping[str, Package]

  def __post_init__(self):
    ids = [task.task_id for task in self.tasks]
    if len(set(ids)) < len(ids):
      twice = {i for i in ids if ids.count(i) > 1}
      raise ValueError(f'Two tasks in {self.root} are {min(twice)!r}.')
    for task in self.tasks:
      package = self.packages.get(task.package)
      if package is None or package.held_out > task.held_out:
        raise ValueError(
          f'Task {task.task_id!r} in {self.root} says held_out='
          f'{task.held_out}; its package is {package or "not there"}.'
        )

  def split(self, held_out: bool) -> tuple[RepositoryTask, ...]:
    """Returns the held-out tasks, or all others."""
    return tuple(t for t in self.tasks if t.held_out == held_out)


def split_root(path: str, roots: Iterable[str]) -> tuple[str, str]:
  """Splits a path into its source root, '' or ending in '/', and the rest."""
  for root in sorted(roots, key=len, reverse=True):
    if root != '.' and path.startswith(f'{root}/'):
      return f'{root}/', path[len(root) + 1 :]
  return '', path


def module_of(path: str, roots: Iterable[str]) -> str:
  """Returns the dotted name under which a file is imported."""
  _, path = split_root(path, roots)
  return path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


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
    ValueError: there is no package, or a manifest is damaged; names the file.
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
      f'{path} is no manifest of a {record.__name__} ({error}); make the set '
      'again.'
    ) from error


def encoded(changes: Mapping[str, str | None]) -> dict[str, bytes | None]:
  return {p: None if t is None else t.encode() for p, t in changes.items()}
