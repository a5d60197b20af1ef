"""Files below a folder whose content untrusted code arranged.

No link is ever followed, no pipe or device opened in a way that waits, and no
more read than asked for. Standard library only: runs inside the sandbox.
"""

import contextlib
import os
import stat
from collections.abc import Iterator

MAX_DEPTH, MAX_PATH = 64, 1000
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEVER_WAITS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RefusedError(Exception):
  """The path or what lies there is not what may be used."""


def parts(path: str) -> list[str]:
  """Splits a relative path; '.' is the folder itself, an empty list.

  Raises:
    RefusedError: for one that leaves the folder or is no text.
  """
  names = [name for name in path.split('/') if name not in ('', '.')]
  if path.startswith('/') or '..' in names or '\0' in path:
    raise RefusedError(f'{path!r} must be relative and stay in the workspace')
  try:
    size = len(os.fsencode(path))
  except UnicodeEncodeError as error:  # half a surrogate pair
    raise RefusedError(f'{path[:80]!r} can be the name of no file') from error
  if len(names) > MAX_DEPTH or size > MAX_PATH:
    raise RefusedError(
      f'{path[:80]!r}... must be at most {MAX_DEPTH} names and {MAX_PATH} bytes'
    )
  return names


@contextlib.contextmanager
def parent_of(
  top: str, path: str, owner: int | None = None, make: bool = False
) -> Iterator[tuple[int, str]]:
  """Opens the folder that holds the path, name by name.

  Args:
    top: the folder that nothing leaves.
    owner: of folders that are made.
    make: whether missing folders are.

  Yields:
    The descriptor and the last name.

  Raises:
    RefusedError: for links on the way, missing names, any other failure.
  """
  names = parts(path)
  if not names:
    raise RefusedError(f'{path!r} names no file')
  try:
    folder = os.open(top, FOLDER)
    try:
      for name in names[:-1]:
        if make:
          with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=folder)
            give(owner, name, folder)
        below = os.open(name, FOLDER, dir_fd=folder)
        os.close(folder)
        folder = below
      yield folder, names[-1]
    finally:
      os.close(folder)
  except (OSError, ValueError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise RefusedError(f'{path!r}: {reason}') from error


def give(owner: int | None, name: str, folder: int) -> None:
  if owner is not None:
    os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)


def _regular(descriptor: int, path: str, one_name: bool) -> os.stat_result:
  """Status of an open file, if it is one that may be used."""
  status = os.fstat(descriptor)
  if not stat.S_ISREG(status.st_mode):
    raise RefusedError(f'{path!r} is no regular file')
  if one_name and status.st_nlink > 1:
    raise RefusedError(f'{path!r} has hard links')
  return status


def read(top: str, path: str, max_bytes: int, one_name: bool) -> bytes:
  """Reads a regular file.

  Args:
    max_bytes: what it may hold; counted while reading.
    one_name: refuse files with hard links, which may lead out of a folder that
      shares its file system with others.
  """
  with parent_of(top, path) as (folder, name):
    descriptor = os.open(name, os.O_RDONLY | _NEVER_WAITS, dir_fd=folder)
    with os.fdopen(descriptor, 'rb', buffering=0) as file:
      status = _regular(descriptor, path, one_name)
      if status.st_size > max_bytes:
        raise RefusedError(
          f'{path!r} holds {status.st_size} bytes, more than {max_bytes}'
        )
      pieces, left = [], max_bytes + 1
      while left > 0 and (piece := file.read(min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
  if left <= 0:
    raise RefusedError(f'{path!r} holds more than {max_bytes} bytes')
  return b''.join(pieces)


def write(
  top: str,
  path: str,
  data: bytes | memoryview,
  owner: int | None,
  mode: int | None = None,
  one_name: bool = False,
) -> None:
  """Writes a regular file, the folders above it included; args as `read`."""
  with parent_of(top, path, owner, make=True) as (folder, name):
    flags = os.O_WRONLY | os.O_CREAT | _NEVER_WAITS
    descriptor = os.open(name, flags, 0o644, dir_fd=folder)
    with os.fdopen(descriptor, 'wb', buffering=0) as file:
      status = _regular(descriptor, path, one_name)
      os.ftruncate(descriptor, 0)
      view = memoryview(data)
      while view:
        view = view[file.write(view) :]
      if owner is not None and status.st_uid != owner:
        os.fchown(descriptor, owner, owner)
      if mode is not None:
        os.fchmod(descriptor, mode & 0o777)


def remove(top: str, path: str) -> None:
  with parent_of(top, path) as (folder, name):
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
      raise RefusedError(f'{path!r} is no regular file')
    os.unlink(name, dir_fd=folder)


def kind_of(mode: int) -> str:
  for kind, test in (
    ('file', stat.S_ISREG),
    ('folder', stat.S_ISDIR),
    ('link', stat.S_ISLNK),
    ('pipe', stat.S_ISFIFO),
  ):
    if test(mode):
      return kind
  return 'device'


def walk(top: str, start: str = '') -> Iterator[tuple[str, os.stat_result]]:
  """Everything below a folder, parents first, names sorted.

  Nothing may change meanwhile. What lies too deep to be named is left out, and
  so is what a folder without rights holds.
  """
  stack = [start]
  while stack:
    folder = stack.pop()
    try:
      with os.scandir(os.path.join(top, folder)) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    except PermissionError:
      continue
    below = []
    for entry in entries:
      path = f'{folder}/{entry.name}' if folder else entry.name
      status = entry.stat(follow_symlinks=False)
      yield path, status
      if stat.S_ISDIR(status.st_mode) and is_short(path):
        below.append(path)
    stack += reversed(below)


def is_short(path: str) -> bool:
  """Whether what lies in this folder can be named."""
  size = len(os.fsencode(path))
  return path.count('/') < MAX_DEPTH - 1 and size < MAX_PATH - 300


def is_text(path: str) -> bool:
  """Whether the name is UTF-8, as all that leaves the sandbox must be."""
  try:
    path.encode()
  except UnicodeEncodeError:
    return False
  return True
