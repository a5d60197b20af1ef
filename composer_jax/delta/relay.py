"""A cache between a store and the clusters that read it.

A relay asks its upstream for each object once, however many ask the relay;
its upstream may be another relay, and so the egress of the trainer's store is
about one bundle whatever the number of readers. Nobody has to trust it: it
holds no key, objects are checked by their names on the way in and before they
are served, and pointers are signed by someone else. But it serves whoever can
reach its port; weights that are secret need a network that is.

  Consumes: requests for objects and pointers (`relay_server` speaks HTTP).
  Waits for: the upstream, one flight for each object that is not here.
  Woken by: a pointer that has moved, to fetch its bundle before it is asked.
  Produces: files of the cache whose hashes were right.
"""

import collections
import concurrent.futures
import contextlib
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from composer_jax.core import files
from composer_jax.delta import checks, identity, manifest, store

# Less than a reader has, for the upstream of a relay: in a chain of them each
# multiplies the patience of those below.
UPSTREAM = {'retry_config': {'max_retries': 2}}
# A hostile upstream must not fill the disk with one object.
MAX_OBJECT_BYTES = 2**33
# Files are hashed again this long after they last were, against a disk that
# forgets.
RECHECK_S = 600.0
_MOST_RUNS = 1024
_TORN_S = 3600.0
_log = logging.getLogger(__name__)

_Identity = tuple[int, int, int]


def _identity(stat: os.stat_result) -> _Identity:
  return stat.st_ino, stat.st_size, stat.st_mtime_ns


class Relay:
  """Fetches from `upstream` into `cache`; threads may share it.

  Attributes:
    upstream: a store, with its own patience and traffic counters.
  """

  def __init__(
    self,
    upstream: store.Store,
    cache: str | os.PathLike,
    *,
    poll_s: float = 1.0,
    max_bytes: int | None = None,
    prefetch: bool = True,
    threads: int = 32,
  ):
    """Opens a cache, which may hold objects from an earlier life.

    Args:
      upstream: what to fetch from; open it with UPSTREAM_RETRIES.
      cache: directory of this relay alone.
      poll_s: a pointer is asked for at most this often.
      max_bytes: of the cache; those not used for longest go first. The last one
        fetched stays, whatever its size. None for no bound.
      prefetch: fetches what a new pointer names before anyone asks.
      threads: fetches at a time; so many packs must cover what is under way on
        a line that is both long and wide.
    """
    self.upstream = upstream
    self._folder = pathlib.Path(cache) / 'objects'
    self._folder.mkdir(parents=True, exist_ok=True)
    self._poll_s = poll_s
    self._max_bytes = max_bytes
    self._prefetch = prefetch
    self._lock = threading.Lock()
    self._objects = concurrent.futures.ThreadPoolExecutor(threads, 'objects')
    # Of their own: a pointer must not wait behind long objects.
    self._pointers = concurrent.futures.ThreadPoolExecutor(2, 'pointers')
    self._flights: dict[str, concurrent.futures.Future] = {}
    # Least recently used first; when and as what file each was last verified.
    self._verified: collections.OrderedDict[str, tuple[_Identity, float]]
    self._verified = collections.OrderedDict()
    self._runs: collections.OrderedDict[str, tuple[bytes | None, float]]
    self._runs = collections.OrderedDict()
    files.sweep(self._folder, older_than_s=_TORN_S)
    self._evict()

  def close(self) -> None:
    """Ends what has not begun, waits for what has."""
    self._objects.shutdown(cancel_futures=True)
    self._pointers.shutdown(cancel_futures=True)

  # Objects.

  def open(self, name: str) -> BinaryIO | None:
    """An object that is here and verified; None where `fetch` must come first.

    Whoever has it open may read on when it is deleted or replaced.
    """
    try:
      file = (self._folder / name).open('rb')
    except FileNotFoundError:
      return None
    with self._lock:
      found, at = self._verified.get(name, (None, 0.0))
      if (
        found == _identity(os.fstat(file.fileno()))
        and time.monotonic() - at < RECHECK_S
      ):
        self._verified.move_to_end(name)
        return file
    file.close()
    return None

  def fetch(self, name: str) -> concurrent.futures.Future:
    """Starts, or joins, the flight that brings an object here.

    Its result is the object's length; it raises what `store.get_file` does.
    """
    return self._join(name, self._objects, self._land)

  def _join(
    self,
    key: str,
    pool: concurrent.futures.Executor,
    operation: Callable[[str], Any],
  ) -> concurrent.futures.Future:
    with self._lock:
      flight = self._flights.get(key)
      if flight is not None:
        return flight
      flight = self._flights[key] = pool.submit(operation, key)
    # Outside of the lock: it runs here and now if the flight has landed.
    flight.add_done_callback(lambda _: self._forget(key))
    return flight

  def _forget(self, key: str) -> None:
    with self._lock:
      del self._flights[key]

  def _land(self, name: str) -> int:
    path = self._folder / name
    # Hashes a file that is here, and replaces it if that is not its name.
    length = self.upstream.get_file(name, None, path, limit=MAX_OBJECT_BYTES)
    with self._lock:
      self._verified[name] = _identity(path.stat()), time.monotonic()
      self._verified.move_to_end(name)
    self._evict()
    return length

  def _evict(self) -> None:
    """Deletes what was not used for longest, down to the bound.

    But for what is landing: others' flights may do so before it is verified.
    """
    if self._max_bytes is None:
      return
    with self._lock:
      found = []
      for path in self._folder.iterdir():
        if not path.name.startswith('.'):
          with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            found.append((path.name, stat.st_size, stat.st_mtime))
      order = {name: at for at, name in enumerate(self._verified)}
      # What no one asked for in this life goes before what someone did.
      found.sort(key=lambda f: (order.get(f[0], -1), f[2]))
      total = sum(size for _, size, _ in found)
      for name, size, _ in found:
        if total <= self._max_bytes:
          break
        if name not in self._flights:
          # Whoever is reading it has it open.
          (self._folder / name).unlink(missing_ok=True)
          self._verified.pop(name, None)
          total -= size

  # Pointers.

  def pointer(self, run_id: str) -> concurrent.futures.Future:
    """The run's sealed pointer, or None: the last one seen, or a flight.

    An upstream that fails leaves the last one standing: its signature and its
    expiry are the reader's to judge.
    """
    checks.run_id(run_id)
    with self._lock:
      if run_id in self._runs:
        data, at = self._runs[run_id]
        if time.monotonic() - at < self._poll_s:
          done: concurrent.futures.Future = concurrent.futures.Future()
          done.set_result(data)
          return done
    # No object has such a name.
    return self._join(f'run {run_id}', self._pointers, self._look)

  def _look(self, key: str) -> bytes | None:
    run_id = key.removeprefix('run ')
    with self._lock:
      known = self._runs.get(run_id)
    try:
      found = self.upstream.read_pointer(run_id)
      data = found and found[0]
    except (OSError, ValueError) as error:
      if known is None:
        raise
      _log.warning('%s: %s; the last pointer stands', self.upstream, error)
      data = known[0]
    with self._lock:
      self._runs[run_id] = data, time.monotonic()
      self._runs.move_to_end(run_id)
      while len(self._runs) > _MOST_RUNS:
        self._runs.popitem(last=False)
    if self._prefetch and data and (known is None or known[0] != data):
      threading.Thread(
        target=self._fetch_bundle, args=(data,), daemon=True, name='prefetch'
      ).start()
    return data

  def _fetch_bundle(self, data: bytes) -> None:
    """Fetches what a pointer names; it is a guess, so trouble is only told."""
    try:
      names = _named_by(data)
      flights = [self.fetch(name) for name in names]
      length = flights[0].result()
      if length > manifest.MAX_MANIFEST_BYTES:
        raise ValueError(f'a manifest of {length} bytes')
      found = (self._folder / names[0]).read_bytes()
      bundle = manifest.Manifest.from_bytes(found)
      # A keyframe is for joiners; it goes nowhere unasked.
      if bundle.kind == manifest.DELTA:
        for pack, _ in bundle.packs:
          self.fetch(pack)
    except (OSError, ValueError, concurrent.futures.CancelledError) as error:
      _log.warning('%s: cannot fetch ahead: %s', self.upstream, error)
    except RuntimeError as error:  # of a pool that is closed
      _log.info('no more fetching ahead: %s', error)


def _named_by(pointer: bytes) -> list[str]:
  """Manifest and index of a pointer whose signature nobody here can check."""
  body = json.loads(pointer.partition(b'\n')[2])
  names = []
  if isinstance(body, dict):
    names = [body.get('manifest'), body.get('index')]
  if not names or not all(map(identity.is_hash, names)):
    raise ValueError('a pointer that names no manifest and index')
  return [str(name) for name in names]


@contextlib.contextmanager
def running(
  relay: Relay, host: str = '127.0.0.1', port: int = 0
) -> Iterator[str]:
  """Serves from a thread while the block runs; gives the URL."""
  with _server().in_thread(relay, host, port) as url:
    yield url


def serve(
  relay: Relay, host: str, port: int, say: Callable[[str], None] = _log.info
) -> None:
  """Serves until a signal says to end; `say` is told the URL."""
  _server().run(relay, host, port, say)


def _server():
  try:
    from composer_jax.delta import relay_server
  except ImportError as error:
    raise ValueError(
      f'A relay needs a package that is not installed ({error.name}): '
      'pip install "composer_jax[relay]"'
    ) from error
  return relay_server
