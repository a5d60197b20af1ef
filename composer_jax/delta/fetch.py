"""Moves parts of objects, several at once, checked before anyone sees them.

A piece is a run of blobs that lie side by side in one object. Its bytes leave
here only when each blob has the hash that the manifest names. With a cache,
verified pieces are kept on disk until the weights they belong to are held, so
a receiver that was killed moves only what it does not have.
"""

import collections
import contextlib
import hashlib
import itertools
import logging
import os
import pathlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import NamedTuple, TypeVar

from composer_jax.delta import identity
from composer_jax.delta import store as store_lib

# What one request asks for, more only if a single blob is larger.
PIECE_BYTES = 8 * 2**20
# Requests on their way at once: enough to fill 10 Gbit/s at a round trip of
# 200 ms, and a quarter of a GiB of memory at most.
IN_FLIGHT: int = 32

# What another way through the same store will hardly cure.
UNREACHED = (ConnectionError, TimeoutError)

_log = logging.getLogger(__name__)
_T = TypeVar('_T')


class Blob(NamedTuple):
  """One encoded chunk and where it lies in its object."""

  tensor: str
  number: int
  start: int
  stop: int
  short_hash: bytes


class _DamagedBlob(ValueError):
  pass


class Piece(NamedTuple):
  """Blobs of one object without gaps between them."""

  name: str
  blobs: tuple[Blob, ...]

  @property
  def start(self) -> int:
    return self.blobs[0].start

  @property
  def stop(self) -> int:
    return self.blobs[-1].stop


def pieces(blobs: Iterable[tuple[str, Blob]]) -> list[Piece]:
  """Joins neighbours to pieces; other bytes are never asked for.

  Args:
    blobs: (object, blob), the blobs of an object by ascending start.
  """
  found: list[Piece] = []
  name, group = '', []
  for other, blob in blobs:
    if group and (
      other != name
      or blob.start != group[-1].stop
      or blob.stop - group[0].start > PIECE_BYTES
    ):
      found.append(Piece(name, tuple(group)))
      group = []
    name = other
    group.append(blob)
  if group:
    found.append(Piece(name, tuple(group)))
  return found


class Cache:
  """Verified bytes on disk: <folder>/<object>/<start>-<stop>, or .../whole.

  Belongs to one receiver. It is an aid: what cannot be written is not kept,
  and what was read is verified again by the reader.
  """

  def __init__(self, folder: str | os.PathLike):
    self.folder = pathlib.Path(folder)
    self._broken = False
    # Left there by a receiver that was killed.
    for torn in self.folder.glob('*/.*.tmp'):
      torn.unlink(missing_ok=True)

  def read(self, name: str, part: str, most: int) -> bytes | None:
    """Returns at most so many bytes, None where nothing is kept."""
    path = self.folder / name / part
    try:
      with path.open('rb') as file:
        data = file.read(most)
      os.utime(path)  # `trim` deletes what was of no use for longest.
    except OSError:
      return None
    return data

  def write(self, name: str, part: str, data: bytes) -> None:
    if self._broken:
      return
    path = self.folder / name / part
    temporary = path.with_name(f'.{part}.{secrets.token_hex(8)}.tmp')
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      # Not synced: a file that a power cut tears is noticed when it is read.
      temporary.write_bytes(data)
      os.replace(temporary, path)
    except OSError as error:
      self._broken = True
      _log.warning('%s: nothing more is kept for a restart: %s', path, error)
      with contextlib.suppress(OSError):
        temporary.unlink()

  def forget(self, name: str, part: str) -> None:
    (self.folder / name / part).unlink(missing_ok=True)

  def trim(self, limit: int) -> None:
    """Deletes the oldest files beyond `limit` bytes."""
    self._broken = False
    kept = []
    for path in self.folder.glob('*/*'):
      # Requests that the last way left may be under way: one finishes a file,
      # another finds one damaged.
      if path.name.endswith('.tmp'):
        continue
      with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        kept.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
      if total <= limit:
        break
      path.unlink(missing_ok=True)
      total -= size

  def clear(self) -> None:
    shutil.rmtree(self.folder, ignore_errors=True)


class Tally:
  """Counts what moved; threads share it.

  Attributes:
    bytes: read from the store; what the cache had is not in it.
    fetch_s: seconds of reading, summed over the requests.
    decode_s: seconds of decoding and hashing, summed over the threads.
    steps: the bundles applied, such as 'delta 3-4'.
  """

  def __init__(self):
    self.steps: list[str] = []
    self.bytes = 0
    self.fetch_s = self.decode_s = 0.0
    self._lock = threading.Lock()

  def add(self, *, moved: int = 0, fetch_s: float = 0, decode_s: float = 0):
    with self._lock:
      self.bytes += moved
      self.fetch_s += fetch_s
      self.decode_s += decode_s


class Fetcher:
  """Reads verified bytes of a store, with threads of its own.

  Use it as a context; leaving it drops requests that did not start.
  """

  def __init__(
    self,
    store: store_lib.Store,
    cache: Cache | None = None,
    tally: Tally | None = None,
  ):
    self.tally = Tally() if tally is None else tally
    self._store = store
    self._cache = cache
    self._pool = futures.ThreadPoolExecutor(IN_FLIGHT, 'fetch')

  def __enter__(self) -> 'Fetcher':
    return self

  def __exit__(self, *_):
    self._pool.shutdown(cancel_futures=True)

  def trim(self, limit: int) -> None:
    if self._cache is not None:
      self._cache.trim(limit)

  def submit(self, read: Callable[..., _T], *args, **named) -> futures.Future:
    return self._pool.submit(read, *args, **named)

  def whole(self, name: str, limit: int, length: int | None = None) -> bytes:
    """Returns an object whose sha256 is its name.

    Args:
      name: of the object.
      limit: the most bytes that it may have.
      length: what it must have, if known.
    """
    if self._cache is not None:
      data = self._cache.read(name, 'whole', limit)
      if data is not None:
        if hashlib.sha256(data).hexdigest() == name:
          return data
        self._cache.forget(name, 'whole')
    data = self._twice(
      lambda store: self._moved(lambda: store.get(name, length, limit))
    )
    if self._cache is not None:
      self._cache.write(name, 'whole', data)
    return data

  def piece(self, piece: Piece) -> memoryview:
    """Returns the bytes of a piece, each blob verified.

    Raises:
      ValueError: a blob is damaged; names its tensor.
      OSError: the object cannot be read.
    """
    part = f'{piece.start}-{piece.stop}'
    if self._cache is not None:
      data = self._cache.read(piece.name, part, piece.stop - piece.start)
      if data is not None:
        if len(data) == piece.stop - piece.start and not _damaged(piece, data):
          return memoryview(data)
        self._cache.forget(piece.name, part)
    first = piece.blobs[0]
    try:
      data = self._twice(lambda store: self._part(piece, store))
    except _DamagedBlob:
      raise
    except (ValueError, OSError) as error:
      raise named(f'{first.tensor} (box {first.number})', error) from error
    if self._cache is not None:
      self._cache.write(piece.name, part, data)
    return memoryview(data)

  def stream(
    self, jobs: Iterable[_T], get: Callable[[_T], memoryview]
  ) -> Iterator[tuple[_T, memoryview]]:
    """Yields (job, get(job)) in order and works ahead of the reader.

    The first requests are on their way when this returns.
    """
    queue: collections.deque = collections.deque()
    rest = iter(jobs)

    def ask(count: int) -> None:
      for job in itertools.islice(rest, count):
        queue.append((job, self._pool.submit(get, job)))

    ask(IN_FLIGHT)

    def read():
      while queue:
        job, future = queue.popleft()
        data = future.result()
        ask(1)
        yield job, data

    return read()

  def _twice(self, read: Callable[[store_lib.Store], bytes]) -> bytes:
    """Reads; what comes damaged or cut once more, past caches on the way."""
    try:
      return read(self._store)
    except (ValueError, store_lib.CutShort) as error:
      # What a link or a cache damaged may arrive whole. Not after any failure:
      # past a cache that is slow, all its followers would ask the store.
      _log.warning('Asked for again: %s', error)
      return read(self._store.past_caches)

  def _part(self, piece: Piece, store: store_lib.Store) -> bytes:
    data = self._moved(
      lambda: store.get_range(piece.name, piece.start, piece.stop)
    )
    bad = _damaged(piece, data)
    if bad is not None:
      raise _DamagedBlob(
        f'{_where(piece, bad)}: its blob is damaged, the hash is wrong.'
      )
    return data

  def _moved(self, read: Callable[[], bytes]) -> bytes:
    begun = time.perf_counter()
    data = read()
    self.tally.add(moved=len(data), fetch_s=time.perf_counter() - begun)
    return data


def named(where: str, error: Exception) -> Exception:
  """Returns an error that says where; a store that is away stays one."""
  kind = type(error) if isinstance(error, UNREACHED) else ValueError
  return kind(f'{where}: {error}')


def _damaged(piece: Piece, data: bytes) -> Blob | None:
  view, start = memoryview(data), piece.start
  for blob in piece.blobs:
    found = identity.short_hash(view[blob.start - start : blob.stop - start])
    if found != blob.short_hash:
      return blob
  return None


def _where(piece: Piece, blob: Blob) -> str:
  return f'{blob.tensor} (box {blob.number}, object {piece.name[:12]})'
