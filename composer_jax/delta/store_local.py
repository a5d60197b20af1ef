"""A store in a directory, safe under crashes and other processes.

Files appear whole or not at all (`core.files`). The pointer is compared and
replaced under a lock that the kernel frees however its holder dies. On a
network file system that lock must work between hosts, as it does on NFS 4. What
a disk refuses is told at once and not tried again.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import time
from collections.abc import Iterable, Iterator

from composer_jax.core import files
from composer_jax.delta import store_backend

# A live writer renames its temporary file long before.
TORN_S = 600.0
LOCK_WAIT_S = 60.0


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


class LocalBackend:
  """Keys are paths below `root`."""

  is_writable = True

  def __init__(self, root: pathlib.Path, traffic: store_backend.Traffic):
    self.root = root
    self._traffic = traffic
    # Shared by writers that find their object there, exclusive for deletion:
    # else it could go between their look and their pointer.
    self._lock = root / '.lock'

  def path(self, key: str) -> pathlib.Path:
    return self.root / key

  def read(self, key: str, start: int, stop: int) -> bytes:
    self._traffic.count(requests=1)
    with open(self.path(key), 'rb') as file:
      # Not `stop`, which is a bound: a read takes memory for all it may get.
      length = os.fstat(file.fileno()).st_size
      file.seek(start)
      data = file.read(max(0, min(stop, length) - start))
    self._traffic.count(read=len(data))
    return data

  def _keep(self, path: pathlib.Path, length: int, digest: str) -> bool:
    """Whether the file is there and intact; then it counts as new."""
    if not path.exists():
      return False
    with _locked(self._lock, fcntl.LOCK_SH):
      try:
        if path.stat().st_size != length or hash_file(path) != digest:
          return False
        os.utime(path)
      except FileNotFoundError:
        return False
    return True

  def put(self, key: str, data: bytes) -> None:
    self._traffic.count(requests=1)
    path = self.path(key)
    if not self._keep(path, len(data), _mark(data)):
      files.write_atomic(path, data)
      self._traffic.count(written=len(data))

  def read_tagged(self, key: str, limit: int) -> tuple[bytes, str] | None:
    try:
      data = self.read(key, 0, limit)
    except FileNotFoundError:
      return None
    return data, _mark(data)

  def stat(self, key: str) -> store_backend.Found:
    self._traffic.count(requests=1)
    stat = self.path(key).stat()
    return store_backend.Found(stat.st_size, stat.st_mtime)

  def swap(self, key: str, data: bytes, tag: str | None) -> str:
    self._traffic.count(requests=1, written=len(data))
    path = self.path(key)
    with _locked(path.with_name(f'.{path.name}.lock'), fcntl.LOCK_EX):
      found = _mark(path.read_bytes()) if path.exists() else None
      if found != tag:
        raise store_backend.Conflict(f'{path} holds another value')
      files.write_atomic(path, data)
    return _mark(data)

  def find(self, folder: str) -> dict[str, store_backend.Found]:
    self._traffic.count(requests=1)
    found = {}
    # Not rglob, which fails when a folder goes meanwhile.
    for parent, _, names in os.walk(self.path(folder), onerror=_unless_gone):
      for path in (pathlib.Path(parent, n) for n in names if n[0] != '.'):
        with contextlib.suppress(FileNotFoundError):
          stat = path.stat()
          key = path.relative_to(self.root).as_posix()
          found[key] = store_backend.Found(stat.st_size, stat.st_mtime)
    return found

  def delete(self, keys: Iterable[str], older_than_s: float) -> list[str]:
    gone = []
    with _locked(self._lock, fcntl.LOCK_EX):
      for key in keys:
        path = self.path(key)
        try:
          if _age_s(path) < older_than_s:
            continue
          path.unlink()
          self._traffic.count(requests=1)
        except FileNotFoundError:
          pass
        gone.append(key)
        if key.startswith('parts/'):
          # A folder for each version of a long run would be many.
          _remove_empty(path.parent, self.path('parts'))
    self._sweep()
    return gone

  def _sweep(self) -> None:
    for folder in ('objects', 'refs', 'parts'):
      files.sweep(self.path(folder), older_than_s=TORN_S)


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


def _age_s(path: pathlib.Path) -> float:
  return max(0.0, time.time() - path.stat().st_mtime)


def hash_file(path: pathlib.Path) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
