"""Turns the files of a package into a workspace that tasks are made of."""

import dataclasses
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping

from composer_jax.core import checks
from composer_jax.tasks.deletion import edit, sdists
from composer_jax.tasks.repository import task_set

# Folders that may hold a copy of deleted code, or data derived from it.
_LEAKING_FOLDERS = frozenset({
    '.git', '.hg', '.svn', '.bzr', '__pycache__', '.mypy_cache', '.ruff_cache',
    '.pytest_cache', '.pytype', '.hypothesis', '.tox', '.nox', '.eggs', '.venv',
    'venv', 'site-packages', 'node_modules', 'htmlcov', '.idea', '.vscode',
    '.github', '.cache',
})  # fmt: skip
# Only at the top: packages have modules with these names.
_LEAKING_TOP = frozenset({'build', 'dist', 'docs', 'doc', '_build', 'wheels'})
_LEAKING_FILES = re.compile(
    r'.*\.(py[co]|class|jar|whl|egg|so|pyd|dll|o|a|orig|rej|bak|sw[op]|patch|'
    r'diff)|.*~|\.coverage.*|tags|TAGS|cscope\.out|.*\.prof'
)  # fmt: skip
_NOT_SOURCES = frozenset({
    'test', 'tests', 'testing', 'doc', 'docs', 'example', 'examples', 'bench',
    'benchmark', 'benchmarks', 'tools', 'scripts', 'typetests', 'src',
})  # fmt: skip
_NOT_MODULES = re.compile(
  r'(setup|conftest|noxfile|tasks|versioneer|_?tests?|test_.*|.*_tests?)\.py'
)
_TEST_FILE = re.compile(r'(tests?|test_.*|.*_test)\.py')
_TEST_FOLDERS = frozenset({'test', 'tests'})
_CONFIGURATION = frozenset({
    'pytest.ini', '.pytest.ini', 'pyproject.toml', 'tox.ini', 'setup.cfg',
    'conftest.py',
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackageLayout:
  """The roles of the files of a workspace.

  Attributes:
    source_roots: folders that tests import from.
    sources: Python files of the package itself, without its tests.
    tests: test files, from which pytest collects.
    test_paths: files of the grader: tests, their data and configuration.
  """

  source_roots: tuple[str, ...]
  sources: tuple[str, ...]
  tests: tuple[str, ...]
  test_paths: tuple[str, ...]

  def module(self, path: str) -> str:
    """The dotted name of a source file."""
    return task_set.module_of(path, self.source_roots)


def scrub(files: Mapping[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
  """Leaves out files that may hold copies of the code or derive from it.

  Returns:
    The files that stay, and the paths of the others.
  """
  kept, dropped = {}, []
  for path, data in sorted(files.items()):
    *folders, name = path.split('/')
    leaks = (
      any(f in _LEAKING_FOLDERS or f.endswith('.egg-info') for f in folders)
      or bool(folders and folders[0] in _LEAKING_TOP)
      or bool(_LEAKING_FILES.fullmatch(name))
    )
    if leaks:
      dropped.append(path)
    else:
      kept[path] = data
  return kept, dropped


def layout(files: Mapping[str, bytes]) -> PackageLayout:
  """Tells sources from tests.

  Raises:
    sdists.Refused: 'no_tests' or 'no_sources'.
  """
  tests = tuple(sorted(p for p in files if _is_test_file(p)))
  if not tests:
    raise sdists.Refused(
      'no_tests',
      f'None of {len(files)} files is a test (test_*.py, *_test.py). Many '
      'sdists leave tests out; use a folder of the repository instead.',
    )
  has_src = any(
    re.fullmatch(r'src/([^/]+/__init__|[^/]+)\.py', p) for p in files
  )
  prefix = 'src/' if has_src else ''
  inner = {p: p.removeprefix(prefix) for p in files if p.startswith(prefix)}
  packages = {
    name.split('/')[0]
    for name in inner.values()
    if re.fullmatch(r'[^/]+/__init__\.py', name)
  } - _NOT_SOURCES
  sources = [
    path
    for path, name in inner.items()
    if path.endswith('.py')
    and not _is_grader_owned(path)
    and (
      name.split('/')[0] in packages
      or ('/' not in name and not _NOT_MODULES.fullmatch(name))
    )
  ]
  if not sources:
    raise sdists.Refused('no_sources', 'No Python package or module was found.')
  return PackageLayout(
      source_roots=('src' if has_src else '.',),
      sources=tuple(sorted(sources)), tests=tests,
      test_paths=tuple(sorted(p for p in files if _is_grader_owned(p))),
  )  # fmt: skip


def _is_test_file(path: str) -> bool:
  *folders, name = path.split('/')
  return bool(_TEST_FILE.fullmatch(name)) and not set(folders) & {
      'benchmark', 'benchmarks', 'examples', 'typetests',
  }  # fmt: skip


def _is_grader_owned(path: str) -> bool:
  *folders, name = path.split('/')
  in_folder = any(f in _TEST_FOLDERS for f in folders)
  return in_folder or name in _CONFIGURATION or _is_test_file(path)


def write_image(
  folder: pathlib.Path, files: Mapping[str, bytes], metadata: tuple[str, bytes]
) -> None:
  """Writes a workspace as a folder that is whole or absent.

  Args:
    folder: folder to write; one that exists is left as it is.
    files: contents of the workspace, by path.
    metadata: source root, and the PKG-INFO from which `importlib.metadata`
      tells packages their own version.
  """
  if folder.is_dir():
    return
  root, text = metadata
  if text:
    path = f'{root}/{folder.name}.dist-info/METADATA'
    files = {**files, path: text}
  # A name that `core.files.sweep` deletes after a kill.
  scratch = folder.with_name(f'.{folder.name}.{secrets.token_hex(8)}.tmp')
  try:
    scratch.mkdir(parents=True)
    for path, data in files.items():
      (scratch / path).parent.mkdir(parents=True, exist_ok=True)
      (scratch / path).write_bytes(data)
    # Programs in a sandbox run as another user.
    for parent, _, names in os.walk(scratch):
      os.chmod(parent, 0o755)
      for name in names:
        os.chmod(os.path.join(parent, name), 0o644)
    os.rename(scratch, folder)
  except BaseException:
    shutil.rmtree(scratch, ignore_errors=True)
    raise


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
  """How many tasks to make of a package, and the limits of what is accepted.

  Attributes:
    seed: seed of all choices.
    body, symbol, class_, file, closure: wanted number of valid tasks per tier.
    min_lines, max_lines: lines of code that a deleted body or symbol may have.
    tries: candidates of a tier to try for each wanted task.
    max_share: largest share of the tests that may fail without a feature.
    min_tests: smallest number of stable tests of an accepted package.
    max_unstable: largest accepted share of tests that change with their order.
    hidden_share: share of the failing test functions that the agent never sees.
    max_guards: largest number of tests of a task beside those that touch or
      mention the feature; of each of these there are at most twice as many.
    examples: shown tests that describe what no prose does; 0 asks for nothing.
    suite_s: processor seconds of a run of the whole suite, at most.
    timeout_s: processor seconds of a run of a task's tests by an agent or a
      grader, at most.
  """

  seed: int = 0
  body: int = 8
  symbol: int = 8
  class_: int = 4
  file: int = 3
  closure: int = 6
  min_lines: int = 3
  max_lines: int = 10_000
  tries: float = 3.0
  max_share: float = 0.6
  min_tests: int = 10
  max_unstable: float = 0.02
  hidden_share: float = 0.25
  max_guards: int = 120
  examples: int = 3
  suite_s: float = 60.0
  timeout_s: float = 60.0

  def __post_init__(self):
    checks.at_least(self, 0, 'body', 'symbol', 'class_', 'file', 'closure')
    checks.at_least(self, 0, 'seed', 'examples')
    checks.at_least(self, 1, 'min_tests', 'max_guards', 'min_lines')
    checks.at_least(self, self.min_lines, 'max_lines')
    checks.number(self, 0, 'max_share', 'max_unstable', 'hidden_share')
    checks.number(self, 1, 'tries', 'suite_s', 'timeout_s')

  def wanted(self, tier: str) -> int:
    return getattr(self, 'class_' if tier == 'class' else tier)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
  """A package that was read, and its image.

  Attributes:
    pin: the pin of the package.
    version: version of the release; 'folder' for a folder.
    sha256: hash of the sdist or folder.
    licence: licence of the package.
    image: folder of the image, relative to the set's root.
    files: contents of the image, by path.
    dropped: paths of the files that the image leaves out.
    layout: roles of the files.
    texts: texts of the modules that can be edited, by path.
    tests: texts of the test files that can be edited, by path.
  """

  pin: sdists.Pin
  version: str
  sha256: str
  licence: str
  image: str
  files: Mapping[str, bytes]
  dropped: tuple[str, ...]
  layout: PackageLayout
  texts: Mapping[str, str]
  tests: Mapping[str, str]


def texts(files: Mapping[str, bytes], paths: Iterable[str]) -> dict[str, str]:
  """Texts of the files that parse and are UTF-8 with '\\n' between lines."""
  editable = {}
  for path in paths:
    try:
      text = files[path].decode()
      edit.symbols(path, text)
    except ValueError:
      continue
    if '\r' not in text and '\f' not in text:
      editable[path] = text
  return editable
