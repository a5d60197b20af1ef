"""Which of a policy's changes are a solution, and which touch the judgement.

Only source files of the package are ever graded. Everything here looks at
names and bytes; nothing is executed or followed.
"""

import dataclasses
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence

from composer_jax.tasks.repository import task_set

FLAGS = ('protected_file', 'special_file')

# Loaded by Python or pytest without being asked to, or obeyed by them.
_CONFIGURATION = frozenset({
  'conftest.py', 'pytest.ini', '.pytest.ini', 'pytest.toml', '.pytest.toml',
  'tox.ini', 'setup.cfg', 'pyproject.toml', 'setup.py', 'sitecustomize.py',
  'usercustomize.py', '.coveragerc', 'pyvenv.cfg',
})  # fmt: skip
_LIBRARIES = ('pytest', '_pytest', 'pluggy', 'unittest', 'iniconfig')
_LOADERS = ('.pth', '.egg-link')
_ENTRY_POINTS, _PLUGIN = 'entry_points.txt', b'pytest11'
_TEST_FILE = re.compile(r'(test_[^/]*|[^/]*_test)\.py')
_CODE = ('.py', '.pyi')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sorted:
  """A policy's changes.

  Attributes:
    taken: path -> content of the solution.
  """

  taken: Mapping[str, bytes | None]
  flags: tuple[str, ...]
  offending: tuple[str, ...]


def matters(task: task_set.RepositoryTask, path: str) -> bool:
  """Whether a file is source of the package or belongs to the grader."""
  return is_source(task, path) or is_protected(task, path)


def is_protected(task: task_set.RepositoryTask, path: str) -> bool:
  """Whether a file decides what tests do or how they are reported."""
  name = posixpath.basename(path)
  return (
    path in task.test_paths
    or name in _CONFIGURATION
    or name == _ENTRY_POINTS
    or name.endswith(_LOADERS)
    or _top(task, path) in _LIBRARIES
  )


def is_source(task: task_set.RepositoryTask, path: str) -> bool:
  """Whether a file is code of the package, and not of its tests."""
  name = posixpath.basename(path)
  parts = path.split('/')
  if is_protected(task, path) or not name.endswith(_CODE):
    return False
  if any(p.startswith('.') or p == '__pycache__' for p in parts):
    return False
  if path in task.changes:
    return True
  if _TEST_FILE.fullmatch(name) or {'tests', 'test'} & set(parts[:-1]):
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
  """Takes what is a solution; names what touches the judgement.

  Args:
    changes: path -> content, None for a file that is gone.
    special: paths that hold a link, a pipe, a device or too much.
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
    # What neither has, no workspace can be begun without.
    if is_source(task, path) and (path in view or image(path) is not None):
      taken[path] = None
    if matters(task, path):
      flags.add('special_file')
      offending.add(path)
  return Sorted(
    taken=taken, flags=tuple(sorted(flags)), offending=tuple(sorted(offending))
  )


def _offends(path: str, before: bytes | None, after: bytes | None) -> bool:
  name = posixpath.basename(path)
  if before == after or (
    name == _ENTRY_POINTS and _PLUGIN not in (after or b'')
  ):
    return False
  # Tests that the view leaves out may be written anew: nobody can know that
  # they exist.
  return before is not None or not _TEST_FILE.fullmatch(name)
