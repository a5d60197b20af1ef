"""A place of write-once objects and one pointer for each run.

  objects/<sha256>     never changed: packs of blobs, and manifests
  refs/<run>/latest    the sealed pointer, replaced last and atomically
  messages/<run>/...   what the processes of one publisher tell each other
  fleet/<run>/...      leases and groups of its rollout workers (`fleet.leases`)

Objects are named by what they hold, so any mirror may serve them, writing one
twice is harmless, and what was read is checked by its name, but for `get_range`
and pointers, which callers verify.

The pointer moves without losing another's move: a folder compares under a lock,
a bucket writes under a condition, which servers like S3 must mind.
"""

import hashlib
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from composer_jax.delta.format import identity, manifest
from composer_jax.delta.store import folder, remote

# The most that `get` takes without a word: the longest manifest.
MAX_GET_BYTES = 2**28
# Younger objects are not deleted: a publisher may be about to point to them.
GRACE_S = 3600.0
_MOST_MESSAGE_BYTES = 2**36

Conflict = folder.Conflict

# A query would end up in the middle of each object's address.
_URL = re.compile(
  '(file|local)://.*[^/].*|https?://[^/?#]+(/[^/?#]+)*/*'
  f'|({"|".join(remote.KINDS)})://[^/]+(/[^/]+)*/*'
)
# What was meant as a URL must not become a folder of that name.
_MEANT_AS_URL = re.compile('(s3a?|gc?s|az|https?|file|direct):|.*://')


def _object(name: str) -> str:
  if not identity.is_hash(name):
    raise ValueError(f'object name {name!r} must be 64 lower hex digits.')
  return f'objects/{name}'


def _pointer(run_id: str) -> str:
  manifest.check_run_id(run_id)
  return f'refs/{run_id}/latest'


class Store:
  """Reads and writes one place; threads and processes may share it.

  Attributes:
    url: URL of the place, or the path of its directory.
    root: path of that directory; None where the place is remote.
  """

  def __init__(
    self, url: str | os.PathLike, *, options: dict[str, Any] | None = None
  ):
    """Opens a place, of which nothing is asked before the first use.

    Args:
      url: a directory, or file://, s3://, gs://, az://, or, to read alone,
        http(s)://.
      options: arguments of a remote store in the words of obstore, such as
        `retry_config`, `client_options` and `endpoint`.
    """
    text = os.fspath(url)
    if not text or (_MEANT_AS_URL.match(text) and not _URL.fullmatch(text)):
      raise ValueError(
        f'{text!r} names no store; take a directory, s3://BUCKET/PREFIX, '
        'gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or, to read, '
        'http://HOST:PORT.'
      )
    self.url = text.rstrip('/') or '/'
    self.root: pathlib.Path | None = None
    protocol, mark, path = self.url.partition('://')
    if mark and protocol in ('http', 'https', *remote.KINDS):
      is_web = protocol not in remote.KINDS
      make = remote.WebBackend if is_web else remote.BucketBackend
      self._backend: Any = make(self.url, options or {})
    else:
      self.root = pathlib.Path(path if mark else self.url)
      self._backend = folder.FolderBackend(self.root)

  @property
  def is_writable(self) -> bool:
    return self._backend.is_writable

  def check_writable(self) -> None:
    if not self.is_writable:
      raise ValueError(
        f'{self.url} can only be read; publish to the store behind it.'
      )

  def _writer(self) -> Any:
    self.check_writable()
    return self._backend

  # Objects.

  def put(self, data: bytes) -> str:
    """Writes an object; returns its name."""
    name = hashlib.sha256(data).hexdigest()
    self._writer().put(_object(name), data)
    return name

  def get(self, name: str, length: int | None = None) -> bytes:
    """Reads a whole object, of this length if it is known, and verifies it.

    What comes damaged is asked for once more, past caches.
    """
    key, most = _object(name), MAX_GET_BYTES if length is None else length
    for fresh in (False, True):
      data = self._backend.read(key, 0, most + 1, fresh=fresh)
      if len(data) > most or (length is not None and len(data) != length):
        found = f'more than {most}' if len(data) > most else f'{len(data)}'
        problem = f'has {found} bytes where {most} are expected'
      elif hashlib.sha256(data).hexdigest() != name:
        problem = 'the object is damaged, its hash is wrong'
      else:
        return data
    raise ValueError(f'{self.url}/{key}: {problem}.')

  def get_range(
    self, name: str, start: int, stop: int, *, fresh: bool = False
  ) -> bytes:
    """Reads bytes [start, stop) of an object, all of them but unverified.

    If `fresh`, caches on the way ask the store anew.
    """
    if not 0 <= start < stop:
      raise ValueError(f'the range {start} to {stop} of an object is empty.')
    key = _object(name)
    data = self._backend.read(key, start, stop, fresh=fresh)
    if len(data) != stop - start:
      raise ValueError(
        f'{self.url}/{key}: has {len(data)} bytes from {start} to {stop}.'
      )
    return data

  def sizes(self) -> dict[str, int]:
    """Bytes of every object, by name."""
    found = self._writer().find('objects')
    named = {key.removeprefix('objects/'): n for key, n in found.items()}
    return {name: n for name, n in named.items() if identity.is_hash(name)}

  def delete(
    self, names: Iterable[str], *, grace_s: float = GRACE_S
  ) -> list[str]:
    """Deletes objects, and half-written files whose writer died.

    Objects younger than `grace_s` stay: a publisher writes them before anything
    points to them, and `put` makes one that it finds young again. Returns the
    names of those that are gone.
    """
    gone = self._writer().delete([_object(name) for name in names], grace_s)
    return [key.removeprefix('objects/') for key in gone]

  # Pointers.

  def run_ids(self) -> list[str]:
    keys = [key.split('/') for key in self._writer().find('refs')]
    return sorted(k[1] for k in keys if len(k) == 3 and k[2] == 'latest')

  def read_pointer(self, run_id: str) -> tuple[bytes, str] | None:
    """Returns what lies where a run's pointer does, and its tag; None if none.

    What is too long for a pointer is cut, and what is no file is b''; unsealing
    refuses both.
    """
    return self._backend.read_tagged(_pointer(run_id))

  def move_pointer(self, run_id: str, data: bytes, tag: str | None) -> str:
    """Replaces the pointer of this tag (None: of none); returns the new tag.

    A Conflict says that the pointer is another one by now.
    """
    key = _pointer(run_id)
    try:
      return self._writer().swap(key, data, tag)
    except Conflict as error:
      raise Conflict(
        f'{self.url}/{key}: another publisher moved the pointer of this run. '
        'Two must not publish to one run: stop one, or give it another run_id.'
      ) from error

  # Messages.

  def put_message(self, run_id: str, name: str, data: bytes) -> None:
    """Leaves bytes for another process of the same publisher."""
    sealed = hashlib.sha256(data).digest() + data
    self._writer().put(f'messages/{run_id}/{name}', sealed)

  def get_message(self, run_id: str, name: str) -> bytes | None:
    """Reads what `put_message` left, None if nothing; ValueError if damaged."""
    key = f'messages/{run_id}/{name}'
    try:
      sealed = self._backend.read(key, 0, _MOST_MESSAGE_BYTES)
    except FileNotFoundError:
      return None
    if hashlib.sha256(sealed[32:]).digest() != sealed[:32]:
      raise ValueError(f'{self.url}/{key}: this message is damaged.')
    return sealed[32:]

  def drop_messages(self, run_id: str, but: str = '/') -> None:
    """Deletes a run's messages, except those whose names begin with `but`."""
    top, writer = f'messages/{run_id}/', self._writer()
    found = [key for key in writer.find(top) if not key.startswith(top + but)]
    writer.delete(found, 0.0)
