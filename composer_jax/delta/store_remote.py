"""A store in any file system that fsspec knows, and what all remote ones share.

Every request is retried alone (`retries`), so that a long transfer does not
begin again for one lost connection. Below that, aiohttp repeats a request once,
at once and unseen, when a connection is lost; and gcsfs has retries of its own.
"""

import contextlib
import datetime
import hashlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import fsspec
import fsspec.asyn

from composer_jax.delta import retries, store_backend

T = TypeVar('T')

EXTRAS = {
  's3': 's3',
  's3a': 's3',
  'gs': 'gs',
  'gcs': 'gs',
  'http': 'relay',
  'https': 'relay',
}
# An object found older than this is made young again; well below any grace.
RENEW_S = 600.0
# Then an attempt has failed; the silence is that between two pieces of an
# answer, not all of it.
CONNECT_S, SILENCE_S = 10.0, 60.0
# The only order among the threads of this process, where the place has none.
_one_at_a_time = threading.Lock()


def file_system(url: str, options: dict[str, Any]) -> Any:
  """The fsspec file system of a URL, not shared with other users of it."""
  protocol = url.partition('://')[0]
  try:
    return fsspec.filesystem(
      protocol, skip_instance_cache=True, use_listings_cache=False, **options
    )
  except ImportError as error:
    extra = EXTRAS.get(protocol)
    cure = f'pip install "composer_jax[{extra}]"' if extra else str(error)
    raise ValueError(
      f'{url}: stores of {protocol}:// need a package that is not installed '
      f'({error.name or error}): {cure}'
    ) from error
  except ValueError as error:
    raise ValueError(
      f'{url}: no store has this protocol; take a directory or one of s3://, '
      f'gs://, http://, https://, memory:// ({error}).'
    ) from error


def seconds(value: Any) -> float | None:
  """A time of a listing, in whatever form its file system gives it."""
  if isinstance(value, datetime.datetime):
    return value.timestamp()
  return float(value) if isinstance(value, int | float) else None


def is_young(found: store_backend.Found) -> bool:
  """Whether clean-up will spare it for long enough without a renewal."""
  return found.modified is not None and time.time() - found.modified < RENEW_S


class RemoteBackend:
  """Reads, writes and lists through fsspec; see `store_backend.Backend`.

  The pointer moves by a look and a write, in one process under a lock: in
  memory:// that is a compare-and-swap, elsewhere one publisher must be alone.
  """

  is_writable = True

  def __init__(
    self,
    url: str,
    traffic: store_backend.Traffic,
    policy: retries.Policy,
    sleep: Callable[[float], None],
    options: dict[str, Any],
  ):
    self.url = url
    self.fs = file_system(url, options)
    self._traffic = traffic
    self._policy = policy
    self._sleep = sleep

  def _path(self, key: str) -> str:
    return f'{self.url}/{key}'

  def _ask(
    self, doing: str, key: str, operation: Callable[..., T], *args, **kwargs
  ) -> T:
    """One request, with patience."""

    def attempt() -> T:
      self._traffic.count(requests=1)
      return operation(*args, **kwargs)

    return retries.call(
      attempt,
      doing=doing,
      url=self._path(key),
      policy=self._policy,
      sleep=self._sleep,
    )

  def _await(
    self, doing: str, key: str, operation: Callable[..., Any], *args
  ) -> Any:
    """The same of a coroutine, on the loop of the file system."""
    return self._ask(
      doing, key, fsspec.asyn.sync, self.fs.loop, operation, *args
    )

  def read(self, key: str, start: int, stop: int) -> bytes:
    try:
      data = self._ask(
        'reading', key, self.fs.cat_file, self._path(key), start=start, end=stop
      )
    except OSError as error:
      if retries.status(error) == 416:  # nothing of it begins so late
        return b''
      raise
    self._traffic.count(read=len(data))
    return data

  def stat(self, key: str) -> store_backend.Found:
    return self._found(self._ask('looking', key, self.fs.info, self._path(key)))

  def _found(self, info: dict[str, Any]) -> store_backend.Found:
    names = ('LastModified', 'mtime', 'updated', 'created')
    times = (seconds(info.get(name)) for name in names)
    modified = next((t for t in times if t is not None), None)
    return store_backend.Found(int(info['size']), modified)

  def put(self, key: str, data: bytes) -> None:
    # Unconditionally: nothing cheaper than writing tells that it is intact.
    self._ask('writing', key, self.fs.pipe_file, self._path(key), data)
    self._traffic.count(written=len(data))

  def put_file(
    self, key: str, path: pathlib.Path, digest: str, give: bool
  ) -> None:
    del digest, give
    self._ask('writing', key, self.fs.put_file, str(path), self._path(key))
    self._traffic.count(written=path.stat().st_size)

  def read_tagged(self, key: str, limit: int) -> tuple[bytes, str] | None:
    try:
      data = self.read(key, 0, limit)
    except FileNotFoundError:
      return None
    return data, hashlib.sha256(data).hexdigest()

  def swap(self, key: str, data: bytes, tag: str | None) -> str:
    with _one_at_a_time:
      found = self.read_tagged(key, 2**20)
      if (found and found[1]) != tag:
        raise store_backend.Conflict(f'{self._path(key)} holds another value')
      self.put(key, data)
      moved = self.read_tagged(key, 2**20)
    if moved is None or moved[0] != data:
      raise store_backend.Conflict(f'{self._path(key)} was changed meanwhile')
    return moved[1]

  def _who_won(self, key: str, data: bytes, error: OSError) -> str:
    """Returns the tag of a conditional write that was refused but was ours.

    Raises:
      Conflict: another's value stands there.
    """
    found = self.read_tagged(key, len(data) + 1)
    # An attempt whose answer was lost may have been the one that won; not all
    # attempts are ours to count, as HTTP clients repeat some unseen.
    if found is None or found[0] != data:
      raise store_backend.Conflict(
        f'{self._path(key)} holds another value'
      ) from error
    return found[1]

  def find(self, folder: str) -> dict[str, store_backend.Found]:
    root = self.fs._strip_protocol(self.url)
    found = self._ask(
      'listing', folder, self.fs.find, self._path(folder), detail=True
    )
    return {
      path[len(root) :].lstrip('/'): self._found(info)
      for path, info in found.items()
    }

  def delete(self, keys: Iterable[str], older_than_s: float) -> list[str]:
    gone = []
    for key in self._old_enough(keys, older_than_s):
      with contextlib.suppress(FileNotFoundError):
        self._ask('deleting', key, self.fs.rm_file, self._path(key))
      gone.append(key)
    return gone

  def _old_enough(self, keys: Iterable[str], older_than_s: float) -> list[str]:
    keys = list(keys)
    if older_than_s <= 0 or not keys:
      return keys
    found: dict[str, store_backend.Found] = {}
    for folder in {key.split('/')[0] for key in keys}:
      found |= self.find(folder)
    newest = time.time() - older_than_s

    def is_old(key: str) -> bool:
      if key not in found:
        return True
      modified = found[key].modified
      # Of unknown age: it may be young.
      return modified is not None and modified <= newest

    return [key for key in keys if is_old(key)]
