"""Reads pinned source distributions.

Archives are read in memory: nothing of them is executed here and none of their
members names a path on this machine. Missing ones are downloaded from the index
that pip is configured with (`tasks.deletion.package_index`).
"""

import dataclasses
import hashlib
import io
import os
import pathlib
import re
import tarfile
import zipfile
import zlib
from collections.abc import Collection, Iterable, Mapping

from composer_jax.core import files as core_files
from composer_jax.tasks.deletion import package_index

_MAX_MEMBERS = 20_000
_MAX_BYTES = 256 << 20
_ARCHIVE_ERRORS = (
    OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError,
)  # fmt: skip


class Refused(ValueError):
  """A package that no task can be made of.

  Attributes:
    reason: the reason in one word.
  """

  def __init__(self, reason: str, message: str):
    super().__init__(message)
    self.reason = reason


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
  """A release that tasks are made of.

  Attributes:
    name: name of the distribution.
    version: version of the sdist; '' for a folder.
    sha256: hash of the sdist; '' to take whatever the index has.
    held_out: true when no task of it may be trained on.
    requires: installed distributions that its tests import.
    folder: folder that holds the package, used in place of an sdist.
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

  def is_sdist(self, name: str) -> bool:
    """True if a file of this name is the sdist."""
    match = re.fullmatch(r'([^/]+)-([^/-]+)\.(tar\.(gz|bz2|xz)|tgz|zip)', name)
    return match is not None and (
      (_normal(match[1]), match[2]) == (self.normal_name, self.version)
    )


def _normal(project: str) -> str:
  return re.sub(r'[-_.]+', '-', project).lower()


def fetch(pin: Pin, folder: str | os.PathLike) -> pathlib.Path:
  """Returns the sdist, downloaded unless the folder holds it.

  Raises:
    Refused: 'download' or 'hash'; the message says what to do.
  """
  folder = pathlib.Path(folder)
  paths = sorted(p for p in folder.glob('*') if pin.is_sdist(p.name))
  if paths:
    path, data = paths[0], paths[0].read_bytes()
  else:
    try:
      name, data = package_index.fetch(
          pin.normal_name, pin.is_sdist, pin.sha256, package_index.settings(),
          _MAX_BYTES,
      )  # fmt: skip
    except LookupError as error:
      raise Refused(
        'download',
        f'No sdist of {pin.name}=={pin.version} was found: {error}. Put it '
        f'into {folder} by hand, or take the package off the list.',
      ) from error
    path = folder / name
    core_files.write_atomic(path, data)
  digest = core_files.sha256(data)
  if pin.sha256 and digest != pin.sha256:
    raise Refused(
      'hash',
      f'{path} has SHA-256 {digest}; the list requires {pin.sha256}. Delete '
      'the file, or correct the list if you trust what it holds.',
    )
  return path


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
    raise Refused('folder', f'{pin.folder!r} of {pin.name} is not a folder.')
  files = {
    path.relative_to(root).as_posix(): path.read_bytes()
    for path in root.rglob('*')
    if path.is_file()
    and not path.is_symlink()
    and '.git' not in path.relative_to(root).parts
  }
  digest = hashlib.sha256()
  for name in sorted(files):
    digest.update(f'{name}\0{core_files.sha256(files[name])}\n'.encode())
  return files, digest.hexdigest()


def unpack(path: pathlib.Path) -> dict[str, bytes]:
  """Returns an archive's regular files, without the folder around them.

  Links, devices and names that lead outside are left out.

  Raises:
    Refused: 'archive'; it is damaged or larger than the limits.
  """
  try:
    files = _members(path)
  except _ARCHIVE_ERRORS as error:
    raise Refused('archive', f'{path} cannot be unpacked ({error}).') from error
  tops = {name.split('/')[0] for name in files}
  if len(tops) == 1 and all('/' in name for name in files):
    files = {name.split('/', 1)[1]: data for name, data in files.items()}
  parents = {str(p) for name in files for p in pathlib.PurePath(name).parents}
  for name in parents & files.keys():
    raise Refused(
      'archive', f'{path} holds {name!r} as a file and as a folder.'
    )
  return files


def _is_safe(path: str) -> bool:
  """True for a path inside the archive that file systems can hold."""
  # Lone surrogates, which are no UTF-8, become question marks.
  encoded = path.encode('utf-8', 'replace')
  return encoded.decode() == path and all(
    0 < len(part) <= 255 and part != b'..' and b'\0' not in part
    for part in encoded.split(b'/')
  )


def _members(path: pathlib.Path) -> dict[str, bytes]:
  files: dict[str, bytes] = {}
  room = _MAX_BYTES

  def keep(name: str, stream) -> None:
    nonlocal room
    name = name.removeprefix('./')
    if not _is_safe(name):
      return
    data = stream.read(room + 1)
    room -= len(data)
    if room < 0 or len(files) >= _MAX_MEMBERS:
      raise Refused(
        'archive',
        f'{path} holds more than {_MAX_BYTES} bytes or {_MAX_MEMBERS} files.',
      )
    files[name] = data

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
  return files


def of_folders(
  items: Iterable[str], held_out: Collection[str]
) -> dict[str, dict]:
  """Returns fields of `Pin` for folders given as PATH or NAME=PATH, by name.

  Raises:
    ValueError: a name of `held_out` is that of no folder.
  """
  packages = {}
  for item in items:
    name, _, path = item.rpartition('=')
    name = name or pathlib.Path(path).resolve().name
    packages[name] = {'folder': path, 'held_out': name in held_out}
  if unknown := {*held_out} - {*packages}:
    raise ValueError(
      f'--held_out names {sorted(unknown)}; the folders are {[*packages]}.'
    )
  return packages


def pins_of(packages: Mapping[str, Mapping], only: Iterable[str]) -> list[Pin]:
  """Reads pins from a config.

  Args:
    packages: fields of `Pin` by name of the package.
    only: names of the wanted packages; () for all.

  Raises:
    ValueError: a name or a field is unknown.
  """
  unknown = set(only) - set(packages)
  if unknown:
    raise ValueError(
      f'Packages {sorted(unknown)} are not among {sorted(packages)}.'
    )
  pins = []
  for name in only or packages:
    fields = dict(packages[name])
    fields['requires'] = tuple(fields.get('requires', ()))
    try:
      pins.append(Pin(name=name, **fields))
    except TypeError as error:
      raise ValueError(f'Package {name!r} of the config: {error}.') from error
  return pins
