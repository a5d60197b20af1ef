"""What a place must offer to hold a store, and the directory that does.

Keys are relative paths. A backend knows nothing of what lies under them: names,
hashes and bounds are checked in `objects`, one floor up.

Files appear whole or not at all (`core.files`). The pointer is compared and
replaced under a lock that the kernel frees however its holder dies. On a
network file system that lock must work between hosts, as it does on NFS 4. Only
regular files are read: a pipe under the name of an object would hang a reader.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Protocol

from composer_jax.core import files

# No pointer is longer; backends compare as much of what lies there.
MAX_POINTER_BYTES = 4096
# Statuses that time may cure.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class Conflict(ValueError):
  """Another process moved the pointer first."""


class CutShort(ConnectionError):
  """Answers that ended early, as of a cache whose file was cut short."""


def refusal(
  doing: str, url: str, status: int | None, text: str, *, is_cut: bool = False
) -> OSError:
  """The error that tells of a request in vain.

  Args:
    doing: for the message: 'reading', 'writing'.
    url: what was asked for.
    status: status of the server's answer; None where there was none.
    text: what is known of the trouble.
    is_cut: whether an answer ended early.
  """
  if status == 404:
    return FileNotFoundError(errno.ENOENT, 'the store does not hold it', url)
  if status in (401, 403):
    profile = 'eval "$(aws configure export-credentials --format env)"'
    hint = f' (an AWS profile by {profile})' if url.startswith('s3') else ''
    return PermissionError(
      errno.EACCES,
      f'{doing} is not allowed: {text}. Give this process credentials in its '
      f'environment{hint}, or check the name of the store',
      url,
    )
  if status is None or status in PASSING:
    kind = CutShort if is_cut else ConnectionError
    return kind(
      errno.ETIMEDOUT,
      f'{doing} failed as often as it may be tried, at last with: {text}. '
      'Check that the server runs and can be reached from here, then start '
      'again: what is complete does not move twice',
      url,
    )
  return OSError(errno.EIO, f'{doing} failed: {text}', url)


class Traffic:
  """Bytes and requests that one store object has moved, for any thread.

  Attributes:
    bytes_read: bytes of content, as it came.
    bytes_written: bytes of content, without what was left alone as intact.
    requests: requests asked of the place, failed attempts included.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self.bytes_read = self.bytes_written = self.requests = 0

  def count(self, *, read: int = 0, written: int = 0, requests: int = 0):
    with self._lock:
      self.bytes_read += read
      self.bytes_written += written
      self.requests += requests


class Backend(Protocol):
  """Values under keys, each written whole; without writing, reads alone."""

  @property
  def is_writable(self) -> bool: ...

  def read(self, key: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) as far as there are; FileNotFoundError for none."""

  def read_tagged(self, key: str) -> tuple[bytes, str] | None:
    """A pointer, or the start of what is too long for one, and its mark.

    What is there and cannot be a pointer, such as a folder, is b''.
    """

  def put(self, key: str, data: bytes) -> None:
    """Makes `key` hold `data`, and its modification time recent.

    What is there and intact is not written again.
    """

  def swap(self, key: str, data: bytes, tag: str | None) -> str:
    """Writes if the content is still the one marked `tag`, None for none.

    Returns:
      The mark of the new content.

    Raises:
      Conflict: the content is another one.
    """

  def find(self, folder: str) -> dict[str, int]:
    """Length by key of what lies below a folder, without the half-written."""

  def delete(self, keys: Iterable[str], older_than_s: float) -> list[str]:
    """Deletes keys that are old enough; returns those that are gone."""


# The directory.

# A live writer renames its temporary file long before.
TORN_S = 600.0
LOCK_WAIT_S = 60.0
_NO_FILE = b'', 'not a regular file'


class FolderBackend:
  """Keys are paths below `root`."""

  is_writable = True

  def __init__(self, root: pathlib.Path, traffic: Traffic):
    self.root, self._traffic = root, traffic
    # Shared by writers that find their object there, exclusive for deletion:
    # else it could go between their look and their pointer.
    self._lock = root / '.lock'

  def path(self, key: str) -> pathlib.Path:
    return self.root / key

  @contextlib.contextmanager
  def _open(self, key: str) -> Iterator[BinaryIO]:
    path = self.path(key)
    with open(path, 'rb', opener=_no_wait) as file:
      if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise OSError(errno.EINVAL, 'this is no regular file', str(path))
      yield file

  def read(self, key: str, start: int, stop: int) -> bytes:
    self._traffic.count(requests=1)
    with self._open(key) as file:
      # Not `stop`, which is a bound: a read takes memory for all it may get.
      length = os.fstat(file.fileno()).st_size
      file.seek(start)
      data = file.read(max(0, min(stop, length) - start))
    self._traffic.count(read=len(data))
    return data

  def read_tagged(self, key: str) -> tuple[bytes, str] | None:
    try:
      data = self.read(key, 0, MAX_POINTER_BYTES + 1)
    except FileNotFoundError:
      return None
    except OSError:
      # What is not there could not be read for another reason.
      if self.path(key).is_file() or not os.path.lexists(self.path(key)):
        raise
      return _NO_FILE
    return data, _mark(data)

  def put(self, key: str, data: bytes) -> None:
    self._traffic.count(requests=1)
    if not self._keep(key, data):
      files.write_atomic(self.path(key), data)
      self._traffic.count(written=len(data))

  def _keep(self, key: str, data: bytes) -> bool:
    """Whether the file is there and intact; then it counts as new."""
    path = self.path(key)
    if not path.exists():
      return False
    with _locked(self._lock, fcntl.LOCK_SH):
      try:
        with self._open(key) as file:
          if os.fstat(file.fileno()).st_size != len(data):
            return False
          if _mark(file.read(len(data) + 1)) != _mark(data):
            return False
        os.utime(path)
      except FileNotFoundError:
        return False
    return True

  def swap(self, key: str, data: bytes, tag: str | None) -> str:
    self._traffic.count(written=len(data))
    path = self.path(key)
    with _locked(path.with_name(f'.{path.name}.lock'), fcntl.LOCK_EX):
      found = self.read_tagged(key)
      if (found and found[1]) != tag:
        raise Conflict(f'{path} holds another value')
      if found == _NO_FILE:
        # Aside, under a name that is swept when it is old.
        aside = f'.{path.name}.{secrets.token_hex(8)}.tmp'
        os.rename(path, path.with_name(aside))
      files.write_atomic(path, data)
    return _mark(data)

  def find(self, folder: str) -> dict[str, int]:
    self._traffic.count(requests=1)
    found = {}
    # Not rglob, which fails when a folder goes meanwhile.
    for parent, _, names in os.walk(self.path(folder), onerror=_unless_gone):
      for path in (pathlib.Path(parent, n) for n in names if n[0] != '.'):
        with contextlib.suppress(FileNotFoundError):
          key = path.relative_to(self.root).as_posix()
          found[key] = path.stat().st_size
    return found

  def delete(self, keys: Iterable[str], older_than_s: float) -> list[str]:
    gone = []
    with _locked(self._lock, fcntl.LOCK_EX):
      for key in keys:
        path = self.path(key)
        try:
          age_s = max(0.0, time.time() - path.stat().st_mtime)
          if age_s < older_than_s:
            continue
          path.unlink()
          self._traffic.count(requests=1)
        except FileNotFoundError:
          pass
        gone.append(key)
        if key.startswith('messages/'):
          # A folder for each version of a long run would be many.
          _remove_empty(path.parent, self.path('messages'))
    for folder in ('objects', 'refs', 'messages'):
      files.sweep(self.path(folder), older_than_s=TORN_S)
    return gone


def _no_wait(path: str, flags: int) -> int:
  return os.open(path, flags | os.O_NONBLOCK)


def _mark(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()


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


def _remove_empty(folder: pathlib.Path, top: pathlib.Path) -> None:
  while folder != top:
    try:
      folder.rmdir()
    except OSError:  # not empty
      return
    folder = folder.parent


def _unless_gone(error: OSError) -> None:
  """Else a folder that cannot be read would look empty, and gc take all."""
  if not isinstance(error, FileNotFoundError):
    raise error
