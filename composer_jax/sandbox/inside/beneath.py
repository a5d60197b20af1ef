"""Reads and writes files below a folder that untrusted code filled.

No link is followed, no pipe or device can make an open wait, and no more is
read than requested. Standard library only: runs inside the sandbox.
"""

import contextlib
import os
import stat
from collections.abc import Iterator

MAX_DEPTH, MAX_PATH = 64, 1000
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEVER_WAITS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RefusedError(Exception):
  """The path, or the file at it, may not be used."""


def parts(path: str) -> list[str]:
  """Splits a relative path; '.', the folder itself, gives an empty list.

  Raises:
    RefusedError: the path leaves the folder, is no text, or is too long.
  """
  names = [name for name in path.split('/') if name not in ('', '.')]
  if path.startswith('/') or '..' in names or '\0' in path:
    raise RefusedError(f'{path!r} must be relative and stay in the workspace')
  try:
    size = len(os.fsencode(path))
  except UnicodeEncodeError as error:  # half a surrogate pair
    raise RefusedError(
      f'{path[:80]!r} cannot name a file: it is not valid Unicode'
    ) from error
  if len(names) > MAX_DEPTH or size > MAX_PATH:
    raise RefusedError(
      f'{path[:80]!r}... must be at most {MAX_DEPTH} names and {MAX_PATH} bytes'
    )
  return names


@contextlib.contextmanager
def parent_of(
  top: str, path: str, owner: int | None = None, make: bool = False
) -> Iterator[tuple[int, str]]:
  """Opens the folder above a path, name by name.

  Args:
    top: folder that the path is relative to.
    path: path of a file.
    owner: uid and gid of folders that are made; None for those of the process.
    make: true to make missing folders.

  Yields:
    The folder's descriptor and the last name of the path.

  Raises:
    RefusedError: a link is on the way, a name is missing, or any other failure.
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
  """Returns the status of an open file; RefusedError if it is not regular."""
  status = os.fstat(descriptor)
  if not stat.S_ISREG(status.st_mode):
    raise RefusedError(f'{path!r} is no regular file')
  if one_name and status.st_nlink > 1:
    raise RefusedError(f'{path!r} has hard links')
  return status


def read(top: str, path: str, max_bytes: int, one_name: bool) -> bytes:
  """Reads a regular file.

  Args:
    top: folder that the path is relative to.
    path: path of the file.
    max_bytes: most bytes that it may hold, counted while reading.
    one_name: true to refuse files with hard links, which lead out of a folder
      that shares its file system with others.
  """
  with parent_of(top, path) as (folder, name):
    descriptor = os.open(name, os.O_RDONLY | _NEVER_WAITS, dir_fd=folder)
    with os.fdopen(descriptor, 'rb', buffering=0) as file:
      status = _regular(descriptor, path, one_name)
      if status.st_size > max_bytes:
        raise RefusedError(
          f'{path!r} holds {status.st_size} bytes, more than {max_bytes}'
        )
      pieces, remaining = [], max_bytes + 1
      while remaining > 0 and (piece := file.read(min(remaining, 1 << 20))):
        pieces.append(piece)
        remaining -= len(piece)
  if remaining <= 0:
    raise RefusedError(f'{path!r} holds more than {max_bytes} bytes')
  return b''.join(pieces)


def write(
  top: str,
  path: str,
  data: bytes | memoryview,
  owner: int | None,
  one_name: bool = False,
) -> None:
  """Writes a regular file and makes the folders above it."""
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
  """Yields every path below a folder and its status, parents first, sorted.

  Nothing may change meanwhile. Left out are paths too deep to be named and the
  content of folders that may not be listed.
  """
  stack = [start]
  while stack:
    folder = stack.pop()
    try:
      with os.scandir(os.path.join(top, folder)) as unsorted:
        entries = sorted(unsorted, key=lambda entry: entry.name)
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
  """Returns true if files in this folder can be named."""
  size = len(os.fsencode(path))
  return path.count('/') < MAX_DEPTH - 1 and size < MAX_PATH - 300


def is_text(path: str) -> bool:
  """Returns true if a name is UTF-8, as names must be outside the sandbox."""
  try:
    path.encode()
  except UnicodeEncodeError:
    return False
  return True
