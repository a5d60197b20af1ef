"""Brings an object into a file, in pieces that outlive who fetched them."""

import contextlib
import fcntl
import hashlib
import io
import os
import pathlib
from collections.abc import Callable

from composer_jax.core import files
from composer_jax.delta import store_backend

Read = Callable[[int, int], bytes]


def to_file(
  read: Read, name: str, length: int | None, most: int, path: pathlib.Path
) -> bool:
  """Fills `path`, which appears when it is whole and verified.

  Args:
    read: bytes [start, stop) of the object, as far as there are.
    name: the sha256 that it must have.
    length: the bytes that it must have, None for any up to `most`.
    most: bound of its bytes.
    path: of the file; pieces of an earlier attempt lie beside it.

  Returns:
    Whether it is there; false if its length or hash is wrong.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as stack:
    # A name that `core.files.sweep` knows for half-written, too.
    partial = path.with_name(f'.{path.name}.{name[:16]}.tmp')
    file = stack.enter_context(open(partial, 'ab+'))
    is_shared = _is_mine(file, partial)
    if not is_shared:
      # Another thread or process is at it; each fetches its own.
      partial = path.with_name(f'.{path.name}.{os.urandom(8).hex()}.tmp')
      file = stack.enter_context(open(partial, 'xb+'))
    resumed = file.seek(0, os.SEEK_END)
    try:
      found = _fill(file, read, length, most)
      if found != name and resumed:
        # What was left over may itself have been damaged.
        file.truncate(0)
        found = _fill(file, read, length, most)
    except BaseException:
      # Nobody would continue it; of objects that are nowhere, anyone who asks
      # a relay for them would leave such files without end.
      if not is_shared or not os.fstat(file.fileno()).st_size:
        partial.unlink(missing_ok=True)
      raise
    if found != name:
      partial.unlink(missing_ok=True)
      return False
    os.fsync(file.fileno())
    os.replace(partial, path)
  files.fsync_directory(path.parent)
  return True


def _is_mine(file: io.BufferedRandom, path: pathlib.Path) -> bool:
  """Takes the lock of a file that is still what stands at `path`."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return os.path.samestat(os.fstat(file.fileno()), path.stat())
  except (BlockingIOError, FileNotFoundError):
    return False


def _fill(
  file: io.BufferedRandom, read: Read, length: int | None, most: int
) -> str:
  """Appends what is missing; returns the hash of the whole, if it fits."""
  file.seek(0)
  hashed = hashlib.file_digest(file, 'sha256')
  at = file.seek(0, os.SEEK_END)
  while at <= most and at != length:
    stop = min(at + store_backend.PIECE_BYTES, most + 1)
    data = read(at, stop)
    file.write(data)
    # Kept by the system if this process is killed, not in its own buffer.
    file.flush()
    hashed.update(data)
    at += len(data)
    if at < stop:
      break
  fits = at <= most if length is None else at == length
  return hashed.hexdigest() if fits else ''
