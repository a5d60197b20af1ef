"""A place of write-once objects and one pointer for each run.

  objects/<sha256>     never changed: packs of blobs, manifests, indices
  refs/<run>/latest    the sealed pointer, replaced last and atomically
  parts/<run>/...      what the processes of one publisher hand to each other

Objects are named by what they hold, so any mirror may serve them, writing one
twice is harmless, and what was read is checked by its name. Nothing here trusts
the place, but for `get_range`, whose caller checks; and nothing here knows who
signed a pointer.

How the pointer moves without losing another's move: a local store compares
under a lock, the others write under a condition. A server like S3 that minds
none is found out: there it is a look and then a write, and one publisher must
be alone.
"""

import copy
import functools
import hashlib
import os
import re
from collections.abc import Iterable
from typing import Any

from composer_jax.delta import (
  checks,
  identity,
  store_backend,
  store_local,
  store_places,
)

MAX_POINTER_BYTES = 4096
# The most that `get` takes without a word: the longest manifest.
MAX_GET_BYTES = 2**28
# Younger objects are not deleted: a publisher may be about to point to them.
GRACE_S = 3600.0
_MOST_PART_BYTES = 2**36

Conflict = store_backend.Conflict
CutShort = store_backend.CutShort
Traffic = store_backend.Traffic

_PART = re.compile('[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*')


def _object(name: str) -> str:
  if not identity.is_hash(name):
    raise ValueError(f'object name {name!r} must be 64 lower hex digits.')
  return f'objects/{name}'


def _pointer(run_id: str) -> str:
  checks.run_id(run_id)
  return f'refs/{run_id}/latest'


def _most(length: int | None, limit: int | None) -> int:
  bounds = (length, limit, MAX_GET_BYTES)
  return next(bound for bound in bounds if bound is not None)


class Store:
  """Reads and writes one place; threads and processes may share it.

  Attributes:
    url: of the place, or the path of its directory.
    root: that directory as a path; None where the place is remote.
    traffic: counts of what this object has moved.
  """

  def __init__(
    self,
    url: str | os.PathLike,
    *,
    options: dict[str, Any] | None = None,
  ):
    """Opens a place; nothing is asked of it before the first use.

    Args:
      url: a directory, or file://, s3://, gs://, az://, memory://, or, to read
        alone, http(s)://.
      options: for a remote place, in the words of obstore: `retry_config`,
        `client_options`, and what else its class of store takes, such as
        `endpoint`.
    """
    self.url = store_places.clean(os.fspath(url))
    self.traffic = store_backend.Traffic()
    self._options = options or {}
    backend = store_places.open_backend(self.url, self.traffic, self._options)
    self._backend: Any = backend
    is_local = isinstance(backend, store_local.LocalBackend)
    self.root = backend.root if is_local else None

  def __repr__(self) -> str:
    return f'Store({self.url!r})'

  @property
  def is_local(self) -> bool:
    return self.root is not None

  @property
  def is_writable(self) -> bool:
    return self._backend.is_writable

  @functools.cached_property
  def past_caches(self) -> 'Store':
    """This place, read so that an HTTP cache on the way asks it anew.

    A cache may keep what came to it damaged, or its disk damages what it keeps.
    The store itself where no such cache can be.
    """
    if not self.url.startswith(('http://', 'https://')):
      return self
    client = self._options.get('client_options', {})
    headers = {**client.get('default_headers', {}), 'Cache-Control': 'no-cache'}
    options = {'client_options': {**client, 'default_headers': headers}}
    fresh = copy.copy(self)
    fresh._backend = store_places.open_backend(
      self.url, self.traffic, {**self._options, **options}
    )
    return fresh

  def _writer(self) -> Any:
    if not self.is_writable:
      raise ValueError(
        f'{self.url} can only be read; publish to the store behind it.'
      )
    return self._backend

  def _where(self, key: str) -> str:
    return f'{self.url}/{key}'

  # Objects.

  def put(self, data: bytes) -> str:
    """Writes an object unless it is there and intact; returns its name."""
    name = hashlib.sha256(data).hexdigest()
    self._writer().put(_object(name), data)
    return name

  def get(
    self, name: str, length: int | None = None, limit: int | None = None
  ) -> bytes:
    """Reads a whole object and verifies it.

    Args:
      name: its sha256.
      length: what it must be, if known.
      limit: the most that it may be.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is longer or damaged; the message names it.
    """
    key = _object(name)
    most = _most(length, limit)
    data = self._backend.read(key, 0, most + 1)
    if len(data) > most or (length is not None and len(data) != length):
      found = f'more than {most}' if len(data) > most else f'{len(data)}'
      raise ValueError(
        f'{self._where(key)}: has {found} bytes where '
        f'{most} are {"allowed" if length is None else "expected"}.'
      )
    if hashlib.sha256(data).hexdigest() != name:
      raise ValueError(
        f'{self._where(key)}: the object is damaged, its hash is wrong.'
      )
    return data

  def get_range(self, name: str, start: int, stop: int) -> bytes:
    """Reads bytes [start, stop) of an object, all of them but unverified."""
    if not 0 <= start <= stop:
      raise ValueError(f'the range {start} to {stop} of an object is empty.')
    key = _object(name)
    data = self._backend.read(key, start, stop) if start < stop else b''
    if len(data) != stop - start:
      raise ValueError(
        f'{self._where(key)}: has {len(data)} bytes from {start} to {stop}.'
      )
    return data

  def length(self, name: str) -> int:
    """Bytes of an object; FileNotFoundError when there is none."""
    return self._backend.stat(_object(name)).length

  def exists(self, name: str) -> bool:
    try:
      self.length(name)
    except FileNotFoundError:
      return False
    return True

  def sizes(self) -> dict[str, int]:
    """Bytes of every object, by name."""
    found = self._writer().find('objects')
    named = {key.removeprefix('objects/'): f for key, f in found.items()}
    return {n: f.length for n, f in named.items() if identity.is_hash(n)}

  def delete(
    self, names: Iterable[str], *, grace_s: float = GRACE_S
  ) -> list[str]:
    """Deletes objects, and half-written files whose writer died.

    Args:
      names: of the objects that no pointer needs.
      grace_s: younger ones stay. A publisher writes objects before anything
        points to them, and `put` makes an object it finds young again; so 0 is
        for a caller who knows that nobody publishes, to any run.

    Returns:
      Names of those that are gone.
    """
    backend = self._writer()
    gone = backend.delete([_object(name) for name in names], grace_s)
    return [key.removeprefix('objects/') for key in gone]

  def run_ids(self) -> list[str]:
    keys = [key.split('/') for key in self._writer().find('refs')]
    return sorted(k[1] for k in keys if len(k) == 3 and k[2] == 'latest')

  def read_pointer(self, run_id: str) -> tuple[bytes, str] | None:
    """Returns a run's pointer and its tag; None when nothing was published."""
    key = _pointer(run_id)
    found = self._backend.read_tagged(key, MAX_POINTER_BYTES + 1)
    if found is not None and len(found[0]) > MAX_POINTER_BYTES:
      raise ValueError(
        f'{self._where(key)}: a pointer exceeds {MAX_POINTER_BYTES} bytes.'
      )
    return found

  def move_pointer(self, run_id: str, data: bytes, tag: str | None) -> str:
    """Replaces the pointer that had this tag (None: that was not there).

    Returns:
      The tag of the new one.

    Raises:
      Conflict: the pointer is another one by now; nothing was written.
    """
    if len(data) > MAX_POINTER_BYTES:
      raise ValueError(
        f'a pointer of {len(data)} bytes exceeds {MAX_POINTER_BYTES}.'
      )
    key = _pointer(run_id)
    try:
      return self._writer().swap(key, data, tag)
    except Conflict as error:
      raise Conflict(
        f'{self._where(key)}: another publisher moved the pointer of this run. '
        'Two must not publish to one run: stop one, or give it another run_id.'
      ) from error

  # Parts.

  def put_part(self, run_id: str, key: str, data: bytes) -> None:
    """Leaves bytes for another process of the same publisher."""
    sealed = hashlib.sha256(data).digest() + data
    self._writer().put(self._part(run_id, key), sealed)

  def get_part(self, run_id: str, key: str) -> bytes | None:
    """Reads what `put_part` left, None if nothing; ValueError if damaged."""
    key = self._part(run_id, key)
    try:
      sealed = self._backend.read(key, 0, _MOST_PART_BYTES)
    except FileNotFoundError:
      return None
    if hashlib.sha256(sealed[32:]).digest() != sealed[:32]:
      raise ValueError(f'{self._where(key)}: this part is damaged.')
    return sealed[32:]

  def drop_parts(self, run_id: str, prefix: str = '') -> None:
    """Deletes a run's parts whose keys begin with `prefix`."""
    checks.run_id(run_id)
    folder = f'parts/{run_id}'
    backend = self._writer()
    keys = [
      key
      for key in backend.find(folder)
      if key.startswith(f'{folder}/{prefix}')
    ]
    backend.delete(keys, 0.0)

  def _part(self, run_id: str, key: str) -> str:
    if not _PART.fullmatch(key):
      raise ValueError(
        f'part {key!r} must be names of letters, digits, ".", "_" and "-" '
        'with "/" between them.'
      )
    checks.run_id(run_id)
    return f'parts/{run_id}/{key}'
