"""Finds Python files, their packages and their licences on this machine.

A source is a string:

  stdlib             the standard library of this interpreter, tests excluded
  pypi:NAME==VERSION a release, from a local archive or as installed
  PATH               a folder, a .py file, or a .tar.gz, .tgz, .zip or .whl

Nothing is downloaded and no archive is unpacked to disk. A list of sources may
pin each by its hash, so that figures can be repeated. The list `pinned` is
pinned.sources beside this file: pure Python that every installation by
constraints.txt has, in the same versions on every Python, so that all machines
read the same bytes whatever else they have. The standard library is not in it:
its files differ between patch releases of Python.
"""

import base64
import dataclasses
import email
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import sysconfig
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from composer_jax.core import files as core_files
from composer_jax.corpus import licences

ARCHIVES = ('.tar.gz', '.tgz', '.zip', '.whl')
_ARCHIVE_ERRORS = (
    OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError,
)  # fmt: skip
# Folders that hold tests, or code that is not the package's own.
_SKIPPED = frozenset({
    'test', 'tests', 'idle_test', 'testing', '__pycache__', '.git', '.venv',
    'venv', 'node_modules', 'build', 'dist', '.tox', '.nox', '.eggs',
})  # fmt: skip
# lib2to3 holds Python 2 in data files, pydoc_data is prose, idlelib and
# turtledemo are programs, ensurepip bundles wheels.
_STDLIB_SKIPPED = frozenset({
    'site-packages', 'dist-packages', 'lib2to3', 'pydoc_data', 'idlelib',
    'turtledemo', 'ensurepip', '__phello__',
})  # fmt: skip
# Written by the interpreter's build or its packager: they differ between
# machines, which would defeat pinning a version.
_MACHINE = ('_sysconfigdata', 'sitecustomize')
# A run must never learn from the code that makes its own tasks.
OWN = 'composer-jax'
_HERE = pathlib.Path(__file__).resolve().parents[1]
PINNED = 'pinned'
PINNED_LIST = pathlib.Path(__file__).with_name('pinned.sources')
DIFFERENCES = ('stop', 'note')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class File:
  """A Python file that has not been read; held out with its whole package."""

  package: str
  path: str
  licence: str
  num_bytes: int
  read: Callable[[], bytes]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodeSource:
  """All Python files of one source.

  Attributes:
    version: version of the interpreter or the distribution; '' for others.
    files: files sorted by package and path.
    archive: path of the archive that the source names; None for other sources.
    recorded: digests in the RECORD of an installed release, by path.
  """

  name: str
  version: str
  files: tuple[File, ...]
  archive: pathlib.Path | None = None
  recorded: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def sha256(self) -> str:
    """Hashes an archive's bytes, or all names and contents."""
    if self.archive is not None:
      return core_files.sha256(self.archive.read_bytes())
    digest = hashlib.sha256()
    for file in self.files:
      inner = core_files.sha256(file.read())
      digest.update(f'{file.package}\0{file.path}\0{inner}\n'.encode())
    return digest.hexdigest()

  def changed(self) -> list[str]:
    """Paths of files that are not as they were installed."""
    digests = {f.path: hashlib.sha256(f.read()).digest() for f in self.files}
    return [
      path
      for path, recorded in self.recorded.items()
      if digests.get(path) != base64.urlsafe_b64decode(recorded + '=')
    ]


def find_all(
  names: Sequence[str],
  archives: str | os.PathLike | None = None,
  *,
  differences: str = 'stop',
  report: Callable[[str], None] = print,
) -> list[CodeSource]:
  """Finds the sources that are named, and compares them with their pins.

  'stop' refuses differences and names all; 'note' reports them, leaves out
  releases that are not here, and takes other versions or files as they are.
  `archives` is a folder with sdists and wheels for `pypi:` sources.
  """
  sources, lines, releases = [], [], []
  for name, sha256 in read_pins(names).items():
    source = find(name, archives)
    if source is not None:
      sources.append(source)
    if difference := _difference(name, source, sha256):
      lines.append(difference)
      releases += [name[5:]] if name.startswith('pypi:') else []
  if lines and differences == 'stop':
    cure = 'Put back what is pinned, or '
    if releases:
      cure = (
        'Install what is pinned: `pip install --force-reinstall --no-deps '
        f'{" ".join(releases)}` (of uv: `uv pip install --reinstall ...`), or '
        'put its archives into the folder data.archives. Or '
      )
    raise ValueError(
      f'The corpus is not what is pinned: {"; ".join(lines)}. {cure}set '
      '--config.data.differences=note to train on what is here.'
    )
  for difference in lines:
    report(f'corpus: not as pinned: {difference}')
  return sources


def find(
  name: str, archives: str | os.PathLike | None = None
) -> CodeSource | None:
  """Lists a source's files: of a release, those of the installed version.

  None is a release that is not here; any other lack is a ValueError.
  """
  if name == 'stdlib':
    source = _stdlib()
  elif name.startswith('pypi:'):
    source = _released(name, archives)
  else:
    source = _path(name)
  if source is not None and not source.files:
    raise ValueError(
      f'Source {name!r} holds no Python file outside tests; remove it from '
      'data.sources or point it at code.'
    )
  return source


def read_pins(sources: Sequence[str]) -> dict[str, str | None]:
  """Returns {source: required SHA-256 or None}, in order.

  An entry that ends in `.sources` is the path of a list with one source per
  line, optionally followed by `sha256=...`; '#' begins a comment. The list
  'pinned' is that of this package.
  """
  if isinstance(sources, str):
    raise ValueError(f'sources must be a list of strings, not {sources!r}.')
  if not sources:
    raise ValueError("No sources are given; name one, such as 'stdlib'.")
  pins: dict[str, str | None] = {}
  for name in sources:
    if name != PINNED and not name.endswith('.sources'):
      pins[name] = None
      continue
    path = pathlib.Path(name).expanduser() if name != PINNED else PINNED_LIST
    if not path.is_file():
      raise ValueError(f'The list of sources {name!r} does not exist.')
    for line in path.read_text().splitlines():
      words = line.split('#')[0].split()
      if not words:
        continue
      if len(words) > 2 or not all(
        re.fullmatch('sha256=[0-9a-f]{64}', w) for w in words[1:]
      ):
        raise ValueError(
          f"{name}: {line!r} must read 'SOURCE' or 'SOURCE sha256=HEX'."
        )
      pins[words[0]] = words[1][7:] if words[1:] else None
  return pins


def _difference(
  name: str, source: CodeSource | None, sha256: str | None
) -> str:
  """Says how a source differs from its name and its pin; '' if not at all."""
  if source is None:
    return f'{name} is not installed, or without a RECORD of its files'
  if name.startswith('pypi:') and name.partition('==')[2] != source.version:
    return f'{name} is installed in version {source.version}'
  if sha256 is None or (actual := source.sha256()) == sha256:
    return ''
  changed = ', '.join(source.changed()[:3])
  edited = f'; since it was installed, {changed} changed' if changed else ''
  return f'{name} has SHA-256 {actual}, not {sha256}{edited}'


def normalise(package: str) -> str:
  """Returns the name as package indexes compare it (PEP 503)."""
  return re.sub(r'[-_.]+', '-', package).lower()


def names(file: File) -> set[str]:
  """Returns all names that the package of a file may have.

  These are the folders and the module on its path, versions cut off: an sdist
  has `foo-1.2/src/bank/x.py`.
  """
  parts = file.path.removesuffix('.py').split('/')
  return {normalise(re.split(r'-\d', x)[0]) for x in parts} | {file.package}


def _wanted(parts: Iterable[str], skipped: frozenset = frozenset()) -> bool:
  """True for a .py file outside tests and skipped folders."""
  *folders, name = parts
  if any(f in _SKIPPED or f in skipped for f in folders):
    return False
  is_test = name.startswith('test_') or name.endswith('_test.py')
  return name.endswith('.py') and not is_test and name != 'conftest.py'


def _walk(root: pathlib.Path, skipped: frozenset) -> list[pathlib.Path]:
  """Returns wanted files below a folder; ValueError if one cannot be listed."""

  def refuse(error: OSError) -> None:
    raise ValueError(
      f'Cannot list {error.filename} ({error.strerror}) of source {root}.'
    )

  paths = []
  for folder, folders, names in os.walk(root, onerror=refuse):
    drop = _SKIPPED | (skipped if pathlib.Path(folder) == root else frozenset())
    folders[:] = sorted(f for f in folders if f not in drop)
    paths += [pathlib.Path(folder, n) for n in sorted(names) if _wanted([n])]
  return [p for p in paths if p.is_file()]


def _file(path: pathlib.Path, root: pathlib.Path, package: str, licence: str):
  return File(
      package=normalise(package), path=path.relative_to(root).as_posix(),
      licence=licence, num_bytes=path.stat().st_size, read=path.read_bytes,
  )  # fmt: skip


def _sorted(files: Iterable[File]) -> tuple[File, ...]:
  return tuple(sorted(files, key=lambda file: (file.package, file.path)))


def _stdlib() -> CodeSource:
  root = pathlib.Path(sysconfig.get_path('stdlib'))
  skipped = _STDLIB_SKIPPED | {
    p.name for p in root.glob('config-*') if p.is_dir()
  }
  files = [
    _file(p, root, p.relative_to(root).parts[0].removesuffix('.py'), 'PSF-2.0')
    for p in _walk(root, skipped)
    if not p.name.startswith(_MACHINE)
  ]
  return CodeSource(
    name='stdlib', version=platform.python_version(), files=_sorted(files)
  )


def _released(
  name: str, archives: str | os.PathLike | None
) -> CodeSource | None:
  match = re.fullmatch(r'pypi:([\w.-]+)==([\w.!+-]+)', name)
  if not match:
    raise ValueError(f'Source {name!r} must read pypi:NAME==VERSION.')
  package, version = normalise(match[1]), match[2]
  for path in sorted(pathlib.Path(archives).glob('*')) if archives else ():
    if _release(path.name) == (package, version):
      return _archive(name, path, package, version)
  try:
    dist = importlib.metadata.distribution(package)
  except importlib.metadata.PackageNotFoundError:
    return None
  if dist.files is None:
    return None
  licence = licences.of_metadata(dist.metadata)
  # '..' leads to scripts, which are generated.
  entries = [
    entry
    for entry in dist.files
    if '..' not in entry.parts and _wanted(entry.parts)
  ]
  root = pathlib.Path(str(dist.locate_file('')))
  return CodeSource(
    name=name,
    version=dist.version,
    files=_sorted(
      _file(root / entry, root, dist.metadata['Name'], licence)
      for entry in entries
      if (root / entry).is_file()
    ),
    recorded={e.as_posix(): e.hash.value for e in entries if e.hash},
  )


def _release(file_name: str) -> tuple[str, str] | None:
  """Returns the package and version in the name of an sdist or wheel."""
  for ending in ARCHIVES:
    if file_name.endswith(ending):
      stem = file_name.removesuffix(ending)
      parts = stem.split('-')[:2] if ending == '.whl' else stem.rsplit('-', 1)
      return (normalise(parts[0]), parts[1]) if len(parts) == 2 else None
  return None


def _path(name: str) -> CodeSource:
  path = pathlib.Path(name).expanduser()
  if path.resolve().is_relative_to(_HERE):
    raise ValueError(
      f'Source {name!r} is composer_jax itself, which makes the tasks of its '
      'runs; point data.sources at other code.'
    )
  if path.is_dir():
    return _folder(name, path)
  if not path.is_file():
    raise ValueError(
      f"Source {name!r} does not exist. Sources are 'pinned', 'stdlib', "
      "'pypi:NAME==VERSION', or the path of a folder, a .py file, a list "
      f'(.sources) or an archive ({", ".join(ARCHIVES)}).'
    )
  if path.name.endswith(ARCHIVES):
    return _archive(name, path, re.split(r'-\d', path.name)[0], '')
  if path.suffix != '.py':
    raise ValueError(
      f'Source {name!r} is neither Python nor an archive: its name must end in '
      f'.py or one of {ARCHIVES}.'
    )
  file = _file(path, path.parent, path.stem, licences.of_folder(path.parent))
  return CodeSource(name=name, version='', files=(file,))


def _folder(name: str, root: pathlib.Path) -> CodeSource:
  """A package if it has an `__init__.py`, else a folder of packages."""
  whole = (root / '__init__.py').exists()
  root_licence = licences.of_folder(root)
  by_child: dict[str, str] = {}
  files = []
  for path in _walk(root, frozenset()):
    child = path.relative_to(root).parts[0]
    if child not in by_child:
      below = root / child
      licence = licences.of_folder(below) if below.is_dir() else ''
      is_known = licence not in ('', licences.UNKNOWN)
      by_child[child] = licence if is_known else root_licence
    package = root.resolve().name if whole else child.removesuffix('.py')
    files.append(_file(path, root, package, by_child[child]))
  return CodeSource(name=name, version='', files=_sorted(files))


def _archive(
  name: str, path: pathlib.Path, package: str, version: str
) -> CodeSource:
  """Reads the members of an sdist or wheel into memory."""
  try:
    members = _members(path)
  except _ARCHIVE_ERRORS as error:
    raise ValueError(
      f'Source {name!r}: {path} is not a readable archive ({error}).'
    ) from error
  licence = licences.UNKNOWN
  for member, data in sorted(members.items()):
    if re.search(r'(^|/)(PKG-INFO|METADATA)$', member):
      parsed = email.message_from_bytes(data)
      licence = licences.of_metadata(parsed)
      version = version or parsed['Version'] or ''
      break
    if re.search(r'(^|/)(LICEN[CS]E|COPYING)[^/]*$', member, re.I):
      licence = licences.of_text(data.decode('utf-8', 'replace'))
  files = [
    File(
        package=normalise(package), path=member, licence=licence,
        num_bytes=len(data), read=functools.partial(bytes, data),
    )
    for member, data in members.items()
    if _wanted(member.split('/'))
  ]  # fmt: skip
  # A release pinned by version has one hash, whether installed or a wheel.
  return CodeSource(
      name=name, version=version, files=_sorted(files),
      archive=None if name.startswith('pypi:') else path,
  )  # fmt: skip


def _members(path: pathlib.Path) -> dict[str, bytes]:
  def wanted(name: str) -> bool:
    return bool(
        re.search(r'\.py$|(^|/)(PKG-INFO|METADATA|(?i:LICEN[CS]E|COPYING)[^/]*)$',
                  name)
    )  # fmt: skip

  if path.name.endswith(('.zip', '.whl')):
    with zipfile.ZipFile(path) as archive:
      return {n: archive.read(n) for n in archive.namelist() if wanted(n)}
  with tarfile.open(path) as archive:
    members = {}
    for member in archive:
      if member.isfile() and wanted(member.name):
        stream = archive.extractfile(member)
        assert stream is not None
        members[member.name] = stream.read()
    return members
