"""Reads the files of a task directory that others wrote, within bounds.

No link is followed, so that nothing outside of the directory is read, and what
is no regular file is refused.
"""

import os
import pathlib
import stat

# Of one file, and of all files and names that are read of a directory.
MAX_FILE, MAX_FILES, MAX_BYTES, MAX_DEPTH = 16 << 20, 10_000, 64 << 20, 32
MAX_TEXT = 1 << 20


class TaskRefused(ValueError):
  """A task that is malformed, or needs what boxes do not have.

  Attributes:
    reason: one word for tables: 'malformed', 'build', 'compose', 'gpu',
      'network', 'image', 'service', 'os', 'secret' or 'too_large'.
  """

  def __init__(self, reason: str, message: str):
    super().__init__(message)
    self.reason = reason


def malformed(message: str) -> TaskRefused:
  return TaskRefused('malformed', message)


def read_bytes(path: pathlib.Path, most: int = MAX_FILE) -> bytes:
  """Reads a regular file; TaskRefused if it is none, or larger."""
  try:
    # A pipe would block, and a link lead elsewhere.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
  except OSError as error:
    raise malformed(f'{path} cannot be read: {error.strerror}.') from error
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise malformed(f'{path} is no regular file.')
  with os.fdopen(descriptor, 'rb') as file:
    data = file.read(most + 1)
  if len(data) > most:
    raise TaskRefused('too_large', f'{path} is larger than {most} bytes.')
  return data


def read_text(path: pathlib.Path, most: int = MAX_TEXT) -> str:
  try:
    return read_bytes(path, most).decode()
  except UnicodeDecodeError as error:
    raise malformed(f'{path} is not UTF-8 ({error}).') from error


def read_tree(folder: pathlib.Path) -> dict[str, bytes]:
  """Returns the files below a folder by relative path; {} if there is none.

  Raises:
    TaskRefused: there is a link, a device, or more than the bounds allow.
  """
  contents: dict[str, bytes] = {}
  due, room = [(folder, 0)], MAX_BYTES
  if not folder.is_dir() and not folder.is_symlink():
    return contents
  while due:
    place, depth = due.pop()
    if place.is_symlink() or depth > MAX_DEPTH:
      raise malformed(f'{place} is a link, or nested too deeply.')
    for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
      path = pathlib.Path(entry.path)
      if entry.is_dir(follow_symlinks=False):
        due.append((path, depth + 1))
        continue
      data = read_bytes(path)
      room -= len(data)
      contents[path.relative_to(folder).as_posix()] = data
      if room < 0 or len(contents) > MAX_FILES:
        raise TaskRefused(
          'too_large',
          f'{folder} holds more than {MAX_FILES} files or {MAX_BYTES} bytes.',
        )
  return contents


def inside(path: str, what: str) -> tuple[str, ...]:
  """Returns the parts of an absolute path within a box.

  Raises:
    TaskRefused: the path is relative, the root, or leaves its folder.
  """
  parts = tuple(part for part in path.split('/') if part not in ('', '.'))
  if not path.startswith('/') or '..' in parts or not parts or '\0' in path:
    raise malformed(
      f'{what} {path!r} must be an absolute path below the root, without "..".'
    )
  return parts
