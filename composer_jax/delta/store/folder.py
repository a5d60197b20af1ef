"""The directory that holds a store, and what any place that does must offer.

Keys are relative paths. A backend knows nothing of what lies under them: names,
hashes and bounds are checked in `objects`. It has

  is_writable               whether it has more than the first two of these
  read(key, start, stop)    bytes as far as there are; FileNotFoundError for
                            none; `fresh` asks past HTTP caches
  read_tagged(key, most)    a pointer, or the start of what is too long for one,
                            and the mark of this content; None for none, and
                            b'' for what is no file
  put(key, data)            makes the key hold this, and young
  swap(key, data, tag, most)  writes if the content is still the one marked so
                            (None: there is none), else Conflict; the new mark
  find(folder)              length by key of what lies below
  delete(keys, age)         deletes those that are old enough; returns those
                            that are gone

Files appear whole or not at all (`core.files`). The pointer is replaced under a
lock that the kernel frees however its holder dies, and that a network file
system must offer between hosts, as NFS 4 does. Only regular files are read: a
pipe under the name of an object would hang a reader.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import secrets
import stat
import time
from collections.abc import Iterable, Iterator

from composer_jax.core import files

# No pointer is longer; backends compare as much of what lies there.
MAX_POINTER_BYTES = 4096
# A live writer renames its temporary file long before.
TORN_S = 600.0
LOCK_WAIT_S = 60.0
_NO_FILE = b'', 'not a regular file'
_no_lock = contextlib.nullcontext


class Conflict(ValueError):
  """Another process moved the pointer first."""


class FolderBackend:
  """Keys are paths below `root`."""

  is_writable = True

  def __init__(self, root: pathlib.Path):
    self.root = root
    # Shared by writers whose object is there, exclusive for deletion: else it
    # could take what was just written again.
    self._lock = root / '.lock'

  def read(
    self, key: str, start: int, stop: int, *, fresh: bool = False
  ) -> bytes:
    del fresh
    path = self.root / key
    with open(path, 'rb', opener=_no_wait) as file:
      status = os.fstat(file.fileno())
      if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, 'this is no regular file', str(path))
      file.seek(start)
      # Not `stop`, which is a bound: a read takes memory for all it may get.
      return file.read(max(0, min(stop, status.st_size) - start))

  def read_tagged(
    self, key: str, most: int = MAX_POINTER_BYTES
  ) -> tuple[bytes, str] | None:
    try:
      data = self.read(key, 0, most + 1)
    except FileNotFoundError:
      return None
    except OSError:
      # What is not there could not be read for another reason.
      path = self.root / key
      if path.is_file() or not os.path.lexists(path):
        raise
      return _NO_FILE
    return data, files.sha256(data)

  def put(self, key: str, data: bytes) -> None:
    path = self.root / key
    # What is old may be about to be deleted, and is made young.
    is_there = path.exists()
    with _locked(self._lock, fcntl.LOCK_SH) if is_there else _no_lock():
      files.write_atomic(path, data)

  def swap(
    self, key: str, data: bytes, tag: str | None, most: int = MAX_POINTER_BYTES
  ) -> str:
    path = self.root / key
    with _locked(path.with_name(f'.{path.name}.lock'), fcntl.LOCK_EX):
      found = self.read_tagged(key, most)
      if (found and found[1]) != tag:
        raise Conflict(f'{path} holds another value')
      if found == _NO_FILE:
        # Aside, under a name that is swept when it is old.
        aside = f'.{path.name}.{secrets.token_hex(8)}.tmp'
        os.rename(path, path.with_name(aside))
      files.write_atomic(path, data)
    return files.sha256(data)

  def find(self, folder: str) -> dict[str, int]:
    found = {}
    # Not rglob, which fails when a folder goes meanwhile.
    for parent, _, names in os.walk(self.root / folder, onerror=_unless_gone):
      for path in (pathlib.Path(parent, n) for n in names if n[0] != '.'):
        with contextlib.suppress(FileNotFoundError):
          key = path.relative_to(self.root).as_posix()
          found[key] = path.stat().st_size
    return found

  def delete(self, keys: Iterable[str], older_than_s: float) -> list[str]:
    gone = []
    with _locked(self._lock, fcntl.LOCK_EX):
      for key in keys:
        path = self.root / key
        with contextlib.suppress(FileNotFoundError):
          age_s = max(0.0, time.time() - path.stat().st_mtime)
          if age_s < older_than_s:
            continue
          path.unlink()
        gone.append(key)
    for folder in ('objects', 'refs', 'messages', 'fleet'):
      files.sweep(self.root / folder, older_than_s=TORN_S)
    return gone


def _no_wait(path: str, flags: int) -> int:
  return os.open(path, flags | os.O_NONBLOCK)


@contextlib.contextmanager
def _locked(path: pathlib.Path, kind: int) -> Iterator[None]:
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('a') as file:
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
      try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() > give_up:
          raise TimeoutError(
            errno.ETIMEDOUT,
            f'another process has held this lock for {LOCK_WAIT_S:.0f} s; stop '
            'it if it hangs',
            str(path),
          ) from None
        time.sleep(0.01)
    yield


def _unless_gone(error: OSError) -> None:
  """Else a folder that cannot be read would look empty, and gc take all."""
  if not isinstance(error, FileNotFoundError):
    raise error
