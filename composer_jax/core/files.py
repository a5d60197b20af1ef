"""Files that are whole or absent, and hashes of what they hold."""

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any


def fsync_directory(path: pathlib.Path) -> None:
  """Makes a rename inside `path` survive a power cut."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_atomic(path: str | os.PathLike, data: bytes) -> None:
  """Writes a file that a reader sees whole or not at all.

  Args:
    path: parents are made when missing.
    data: the whole content.

  Raises:
    OSError: with the path and the number of bytes when the disk is full or
      refuses; what stood at `path` before is untouched.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  descriptor, temporary = tempfile.mkstemp(
    dir=path.parent, prefix=f'.{path.name}.', suffix='.tmp'
  )
  try:
    with os.fdopen(descriptor, 'wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except OSError as error:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(temporary)
    raise OSError(
      error.errno,
      f'Cannot write {len(data)} bytes ({error.strerror}); the previous '
      'content, if any, is untouched. Free space or choose another --workdir',
      str(path),
    ) from error
  fsync_directory(path.parent)


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes JSON with sorted keys, so that equal values give equal bytes."""
  text = json.dumps(value, indent=1, sort_keys=True) + '\n'
  write_atomic(path, text.encode())


def read_json(path: str | os.PathLike) -> Any:
  """Reads JSON; a damaged file is a ValueError that names it."""
  text = pathlib.Path(path).read_bytes()
  try:
    return json.loads(text)
  except ValueError as error:
    raise ValueError(f'{path} is not valid JSON ({error}).') from error


def sha256(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()
