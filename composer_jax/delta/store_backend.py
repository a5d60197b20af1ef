"""What a place must offer to hold a store, and the counts of its traffic.

Keys are relative paths. A backend knows nothing of what lies under them: names,
hashes and bounds are checked in `store`, one floor up.
"""

import datetime
import errno
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

# What remote stores begin with, in the words of obstore. The silence of
# `read_timeout` is that between two pieces of an answer, not all of it.
CONNECTIONS = 32
CLIENT: dict[str, Any] = {
  'allow_http': True,
  'connect_timeout': datetime.timedelta(seconds=10),
  'read_timeout': datetime.timedelta(seconds=60),
  'timeout': datetime.timedelta(hours=1),
}
RETRY: dict[str, Any] = {
  'max_retries': 5,
  'retry_timeout': datetime.timedelta(minutes=2),
  'backoff': {
    'init_backoff': datetime.timedelta(seconds=0.25),
    'max_backoff': datetime.timedelta(seconds=20),
  },
}
# Statuses that time may cure.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class Conflict(ValueError):
  """Another process moved the pointer first."""


class CutShort(ConnectionError):
  """Answers that ended early, as of a cache whose file was cut short."""


def no_package(url: str, error: ImportError) -> ValueError:
  return ValueError(
    f'{url}: stores elsewhere need a package that is not installed '
    f"({error.name}): pip install -e '.[stores]' in the checkout."
  )


def refusal(
  doing: str, url: str, status: int | None, text: str, *, is_cut: bool = False
) -> OSError:
  """The error that tells of a request in vain.

  Args:
    doing: for the message: 'reading', 'writing'.
    url: what was asked for.
    status: of the server's answer; None where there was none.
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


class Found(NamedTuple):
  """One key of a listing; `modified` is in unix seconds, None if unknown."""

  length: int
  modified: float | None


class Traffic:
  """Bytes and requests that one store object has moved, for any thread.

  Attributes:
    bytes_read: of content, as it came.
    bytes_written: of content, without what was left alone as intact.
    requests: asked of the place, failed attempts included.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self.bytes_read = 0
    self.bytes_written = 0
    self.requests = 0

  def count(self, *, read: int = 0, written: int = 0, requests: int = 0):
    with self._lock:
      self.bytes_read += read
      self.bytes_written += written
      self.requests += requests

  def __repr__(self) -> str:
    return (
      f'Traffic(bytes_read={self.bytes_read}, '
      f'bytes_written={self.bytes_written}, requests={self.requests})'
    )


class Reader(Protocol):
  """Reads values under keys."""

  @property
  def is_writable(self) -> bool: ...

  def read(self, key: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) as far as there are; FileNotFoundError for no key."""
    ...

  def stat(self, key: str) -> Found:
    """FileNotFoundError for no key."""
    ...

  def read_tagged(self, key: str, limit: int) -> tuple[bytes, str] | None:
    """At most `limit` bytes and the mark of this content; None for no key."""
    ...


class Backend(Reader, Protocol):
  """Also writes whole values, each atomically."""

  def put(self, key: str, data: bytes) -> None:
    """Makes `key` hold `data`, and its modification time recent.

    What is there and intact is not written again.
    """
    ...

  def swap(self, key: str, data: bytes, tag: str | None) -> str:
    """Writes if the content is still the one marked `tag`, None for none.

    Returns:
      The mark of the new content.

    Raises:
      Conflict: the content is another one.
    """
    ...

  def find(self, folder: str) -> dict[str, Found]:
    """Keys below a folder, without the half-written."""
    ...

  def delete(self, keys: Iterable[str], older_than_s: float) -> list[str]:
    """Deletes keys that are old enough; returns those that are gone."""
    ...
