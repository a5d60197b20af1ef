"""Separates the solution from changes that touch the grader's files.

Only source files of the package are ever graded. Paths and bytes are compared;
nothing is executed and no link is followed.
"""

import dataclasses
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence

from composer_jax.tasks.repository import task_set

FLAGS = ('protected_file', 'special_file')

# Files that Python or pytest load or obey without being asked to.
_CONFIGURATION = frozenset({
  'conftest.py', 'pytest.ini', '.pytest.ini', 'pytest.toml', '.pytest.toml',
  'tox.ini', 'setup.cfg', 'pyproject.toml', 'setup.py', 'sitecustomize.py',
  'usercustomize.py', '.coveragerc', 'pyvenv.cfg',
})  # fmt: skip
_LIBRARIES = ('pytest', '_pytest', 'pluggy', 'unittest', 'iniconfig')
_ENTRY_POINTS, _PLUGIN = 'entry_points.txt', b'pytest11'
_LOADERS = (f'/{_ENTRY_POINTS}', '.pth', '.egg-link')
_TEST_FILE = re.compile(r'(test_[^/]*|[^/]*_test)\.py')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sorted:
  """A policy's changes, sorted.

  Attributes:
    taken: contents of the files of the solution by path, None for removed ones.
    flags: members of `FLAGS`, sorted.
    offending: paths of the changes that raised a flag.
  """

  taken: Mapping[str, bytes | None]
  flags: tuple[str, ...]
  offending: tuple[str, ...]


def matters(task: task_set.RepositoryTask, path: str) -> bool:
  """True for source files of the package and for files of the grader."""
  return is_source(task, path) or is_protected(task, path)


def is_protected(task: task_set.RepositoryTask, path: str) -> bool:
  """True for files that decide what tests do or how they are reported."""
  return (
    path in task.test_paths
    or posixpath.basename(path) in _CONFIGURATION
    or f'/{path}'.endswith(_LOADERS)
    or _top(task, path) in _LIBRARIES
  )


def is_source(task: task_set.RepositoryTask, path: str) -> bool:
  """True for code of the package that is not part of its tests."""
  *folders, name = path.split('/')
  if is_protected(task, path) or not name.endswith(('.py', '.pyi')):
    return False
  if any(p.startswith('.') or p == '__pycache__' for p in (*folders, name)):
    return False
  if path in task.changes:
    return True
  if _TEST_FILE.fullmatch(name) or {'tests', 'test'} & {*folders}:
    return False
  return _top(task, path) in {_top(task, p) for p in task.solution}


def _top(task: task_set.RepositoryTask, path: str) -> str:
  """The package or module that a file is imported as part of."""
  _, inner = task_set.split_root(path, task.source_roots)
  return inner.split('/')[0].removesuffix('.py')


def sort(
  task: task_set.RepositoryTask,
  changes: Mapping[str, bytes | None],
  special: Sequence[str],
  image: Callable[[str], bytes | None],
) -> Sorted:
  """Takes the solution, and flags changes of the grader's files.

  Args:
    task: the task.
    changes: contents of changed files by path, None for removed ones.
    special: paths of links, pipes, devices and files that are too large.
    image: reads a file of the image; None for one that it does not have.
  """
  taken: dict[str, bytes | None] = {}
  flags, offending = set(), set()
  view = task.view()
  for path, data in changes.items():
    if is_source(task, path):
      taken[path] = data
    elif is_protected(task, path):
      before = view[path] if path in view else image(path)
      if _offends(path, before, data):
        flags.add('protected_file')
        offending.add(path)
  for path in special:
    # A path can be removed only if the view or the image has it.
    if is_source(task, path) and (path in view or image(path) is not None):
      taken[path] = None
    if matters(task, path):
      flags.add('special_file')
      offending.add(path)
  return Sorted(
    taken=taken, flags=tuple(sorted(flags)), offending=tuple(sorted(offending))
  )


def _offends(path: str, before: bytes | None, after: bytes | None) -> bool:
  is_entry_points = posixpath.basename(path) == _ENTRY_POINTS
  if before == after or (is_entry_points and _PLUGIN not in (after or b'')):
    return False
  # Nobody can know that a hidden test file exists: one of its name is allowed.
  return before is not None or not _TEST_FILE.fullmatch(
    posixpath.basename(path)
  )
