"""Pinned source distributions, and what of them becomes a workspace.

Archives are read in memory: nothing of them is executed here and no member
names a path on this machine. They come straight from the index that pip is
configured with (`tasks.deletion.package_index`). Where that cannot be, pip
fetches them, which does execute the setup code of an sdist to learn its
metadata, outside of every sandbox; it does so after it has compared the hash.
Whoever trusts a list of pins less than that puts the archives in the folder
beforehand.
"""

import dataclasses
import hashlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping

from composer_jax.core import files as core_files
from composer_jax.tasks.deletion import package_index

_MAX_MEMBERS = 20_000
_MAX_BYTES = 256 << 20
_ENDINGS = ('.tar.gz', '.tgz', '.tar.bz2', '.tar.xz', '.zip')
_ARCHIVE_ERRORS = (
    OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError,
)  # fmt: skip


class Refused(ValueError):
  """A package of which no task can be made; `reason` is one word."""

  def __init__(self, reason: str, message: str):
    super().__init__(message)
    self.reason = reason


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
  """A release that tasks are made of.

  Attributes:
    sha256: of its sdist; '' to take whatever the index has.
    held_out: true when no task of it may be trained on.
    requires: installed distributions that its tests import.
    folder: a folder that holds the package, in place of an sdist.
  """

  name: str
  version: str = ''
  sha256: str = ''
  held_out: bool = False
  requires: tuple[str, ...] = ()
  folder: str = ''

  def __post_init__(self):
    if not self.folder and not self.version:
      raise ValueError(f'Package {self.name!r} needs a version or a folder.')

  @property
  def normal_name(self) -> str:
    return _normal(self.name)


def _normal(project: str) -> str:
  return re.sub(r'[-_.]+', '-', project).lower()


def fetch(pin: Pin, folder: str | os.PathLike) -> pathlib.Path:
  """Returns the sdist, downloaded unless the folder holds it.

  Raises:
    Refused: 'download' or 'hash'; the message says what to do.
  """
  folder = pathlib.Path(folder)
  path = _find(pin, folder)
  if path is None:
    _ask_index(pin, folder) or _download(pin, folder)
    path = _find(pin, folder)
  if path is None:
    raise Refused(
      'download',
      f'pip fetched no sdist of {pin.name}=={pin.version} into {folder}; the '
      'release may have wheels only.',
    )
  found = core_files.sha256(path.read_bytes())
  if pin.sha256 and found != pin.sha256:
    raise Refused(
      'hash',
      f'{path} has SHA-256 {found}; the list requires {pin.sha256}. Delete '
      'the file, or correct the list if you trust what it holds.',
    )
  return path


def _find(pin: Pin, folder: pathlib.Path) -> pathlib.Path | None:
  for path in sorted(folder.glob('*')) if folder.is_dir() else ():
    if _is_of(pin, path.name):
      return path
  return None


def _is_of(pin: Pin, name: str) -> bool:
  """Whether a file of this name is the sdist."""
  for ending in _ENDINGS:
    project, _, version = name.removesuffix(ending).rpartition('-')
    is_it = (_normal(project), version) == (pin.normal_name, pin.version)
    if name.endswith(ending) and is_it:
      return True
  return False


def _ask_index(pin: Pin, folder: pathlib.Path) -> bool:
  """Whether an index gave the sdist; nothing of it was executed."""
  found = package_index.fetch(
      pin.normal_name,
      lambda name: os.path.basename(name) == name and _is_of(pin, name),
      pin.sha256, package_index.settings(), _MAX_BYTES,
  )  # fmt: skip
  if found is None:
    return False
  name, data = found
  folder.mkdir(parents=True, exist_ok=True)
  core_files.write_atomic(folder / name, data)
  return True


def _download(pin: Pin, folder: pathlib.Path) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix='composer-sdist-') as scratch:
    wanted = pathlib.Path(scratch, 'requirements.txt')
    hashed = f' --hash=sha256:{pin.sha256}' if pin.sha256 else ''
    wanted.write_text(f'{pin.name}=={pin.version}{hashed}\n')
    result = subprocess.run(
        [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps',
         '--no-binary', pin.name, '--dest', scratch, '-r', str(wanted)],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if result.returncode:
      lines = result.stderr.strip().splitlines()
      said = [line for line in lines if line.startswith('ERROR')] or lines
      raise Refused(
        'hash' if 'MATCH THE HASHES' in result.stderr else 'download',
        f'pip cannot fetch the sdist of {pin.name}=={pin.version} '
        f'({" ".join(said)[:400]}). Put it into {folder} by hand, or take '
        'the package off the list.',
      )
    for path in pathlib.Path(scratch).glob('*'):
      if path.name.endswith(_ENDINGS):
        # Whole or not at all, for a run that is killed meanwhile.
        core_files.write_atomic(folder / path.name, path.read_bytes())


def read(pin: Pin, folder: str | os.PathLike) -> tuple[dict[str, bytes], str]:
  """Returns the files of a package by path, and the hash of what was read.

  Raises:
    Refused: 'download', 'hash', 'archive' or 'folder'.
  """
  if not pin.folder:
    path = fetch(pin, folder)
    return unpack(path), core_files.sha256(path.read_bytes())
  root = pathlib.Path(pin.folder).expanduser()
  if not root.is_dir():
    raise Refused('folder', f'{pin.folder!r} of {pin.name} is no folder.')
  found = {}
  for parent, folders, names in os.walk(root):
    folders[:] = sorted(f for f in folders if f != '.git')
    for name in names:
      path = pathlib.Path(parent, name)
      if path.is_file() and not path.is_symlink():
        found[path.relative_to(root).as_posix()] = path.read_bytes()
  digest = hashlib.sha256()
  for name in sorted(found):
    digest.update(f'{name}\0{core_files.sha256(found[name])}\n'.encode())
  return found, digest.hexdigest()


def unpack(path: pathlib.Path) -> dict[str, bytes]:
  """Returns an archive's regular files, without the folder around them.

  Links, devices and names that lead outside are left out.

  Raises:
    Refused: 'archive'; not readable, or larger than what one may expect.
  """
  try:
    found = _members(path)
  except _ARCHIVE_ERRORS as error:
    raise Refused('archive', f'{path} cannot be unpacked ({error}).') from error
  tops = {name.split('/')[0] for name in found}
  if len(tops) == 1 and all('/' in name for name in found):
    found = {name.split('/', 1)[1]: data for name, data in found.items()}
  for name in found:
    above = name.rpartition('/')[0]
    while above:
      if above in found:
        raise Refused(
          'archive', f'{path} holds {above!r} as a file and as a folder.'
        )
      above = above.rpartition('/')[0]
  return found


def _is_name(path: str) -> bool:
  """Whether file systems, and manifests, can hold it."""
  try:
    parts = path.encode().split(b'/')
  except UnicodeEncodeError:
    return False
  return b'\0' not in path.encode() and max(map(len, parts)) <= 255


def _members(path: pathlib.Path) -> dict[str, bytes]:
  found: dict[str, bytes] = {}
  left = _MAX_BYTES

  def keep(name: str, stream) -> None:
    nonlocal left
    name = name.removeprefix('./')
    parts = name.split('/')
    if '..' in parts or '' in parts or not _is_name(name):
      return
    data = stream.read(left + 1)
    left -= len(data)
    if left < 0 or len(found) >= _MAX_MEMBERS:
      raise Refused(
        'archive',
        f'{path} holds more than {_MAX_BYTES} bytes or {_MAX_MEMBERS} files.',
      )
    found[name] = data

  if path.name.endswith('.zip'):
    with zipfile.ZipFile(path) as archive:
      for info in archive.infolist():
        if not info.is_dir():
          with archive.open(info) as stream:
            keep(info.filename, stream)
  else:
    with tarfile.open(path) as archive:
      for member in archive:
        if member.isreg():
          keep(member.name, archive.extractfile(member) or io.BytesIO())
  return found


def pins_of(packages: Mapping[str, Mapping], only: Iterable[str]) -> list[Pin]:
  """Pins out of a config; a wrong field is an error that names the package.

  Args:
    packages: name -> fields of `Pin`.
    only: names of those wanted; () for all.
  """
  unknown = set(only) - set(packages)
  if unknown:
    raise ValueError(
      f'packages {sorted(unknown)} are not among {sorted(packages)}.'
    )
  pins = []
  for name in only or packages:
    fields = dict(packages[name])
    fields['requires'] = tuple(fields.get('requires', ()))
    try:
      pins.append(Pin(name=name, **fields))
    except TypeError as error:
      raise ValueError(f'package {name!r} of the config: {error}.') from error
  return pins
