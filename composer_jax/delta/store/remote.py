"""Stores elsewhere: buckets by obstore, and HTTP servers to be read alone.

obstore does the requests to S3 and servers like it, Google Cloud and Azure, and
repeats them. Credentials, endpoint and region come from the
environment under the names that it documents (AWS_ENDPOINT_URL,
AWS_SKIP_SIGNATURE=true, AZURE_STORAGE_ACCOUNT_NAME, ...) or from `options`.

A web server or cache is not trusted: no more is read of an answer than was
asked for, and nothing of one that tells of an error, of which obstore takes the
whole text, however long (0.12.1: 777 MB within 6 s). So it does not read there.
"""

import contextlib
import datetime
import errno
import hashlib
import logging
import random
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from composer_jax.delta.store import folder

# In the words of obstore. The silence of `read_timeout` is that between two
# reads of an answer, not all of it.
_time = lambda seconds: datetime.timedelta(seconds=seconds)
CLIENT: dict[str, Any] = {
  'allow_http': True,
  'connect_timeout': _time(10),
  'read_timeout': _time(60),
  'timeout': _time(3600),
}
RETRY: dict[str, Any] = {
  'max_retries': 5,
  'retry_timeout': _time(120),
  'backoff': {'init_backoff': _time(0.25), 'max_backoff': _time(20)},
}
# Class of obstore, and what marks a content for a conditional write.
KINDS = {
  's3': ('S3Store', 'e_tag'),
  'gs': ('GCSStore', 'version'),
  'az': ('AzureStore', 'e_tag'),
}
# Statuses that time may cure.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
# Where a machine in a cloud says who it is.
_METADATA = re.compile(
  '/latest/(api|meta-data)/|/computeMetadata/|/metadata/identity'
)
_CONNECTIONS = 32
_READ_BYTES = 2**18
_log = logging.getLogger(__name__)


def _refusal(doing: str, url: str, status: int | None, text: str) -> OSError:
  """The error that tells of a request in vain; None is no answer."""
  if status == 404:
    return FileNotFoundError(errno.ENOENT, 'the store does not hold it', url)
  if status in (401, 403):
    return PermissionError(
      errno.EACCES,
      f'{doing} is not allowed: {text}. Give this process credentials in its '
      'environment (docs/concepts/bundles.md), or check the name of the store',
      url,
    )
  if status is None or status in _PASSING:
    return ConnectionError(
      errno.ETIMEDOUT,
      f'{doing} failed as often as it may be tried, at last with: {text}. '
      'Check that the server runs and can be reached from here, then start '
      'again: what is complete does not move twice',
      url,
    )
  return OSError(errno.EIO, f'{doing} failed: {text}', url)


def _no_package(url: str, error: ImportError) -> ValueError:
  return ValueError(
    f'{url}: stores elsewhere need a package that is not installed '
    f"({error.name}): pip install -e '.[stores]' in the checkout."
  )


class BucketBackend:
  """Bucket and prefix of a URL; see `folder`."""

  is_writable = True

  def __init__(self, url: str, options: dict[str, Any]):
    try:
      import obstore
      import obstore.store
    except ImportError as error:
      raise _no_package(url, error) from error
    self._url, self._obstore = url, obstore
    protocol, _, path = url.partition('://')
    kind, self._mark = KINDS[protocol]
    bucket, _, prefix = path.partition('/')
    options = options | {
      'client_options': CLIENT | options.get('client_options', {}),
      'retry_config': RETRY | options.get('retry_config', {}),
    }
    try:
      make = getattr(obstore.store, kind)
      self.store = make(bucket, prefix=prefix or None, **options)
    except (obstore.exceptions.BaseError, ValueError) as error:
      raise ValueError(
        f'{url}: this store cannot be opened: {_text(error)}. Set the '
        'variables of the environment by which obstore knows account and '
        'credentials.'
      ) from error

  @contextlib.contextmanager
  def _asking(self, doing: str, key: str) -> Iterator[Any]:
    """Gives obstore; its errors become built-in ones that name the URL."""
    try:
      yield self._obstore
    except (FileNotFoundError, self._obstore.exceptions.BaseError) as error:
      raise _named(error, doing, f'{self._url}/{key}') from error

  def read(
    self, key: str, start: int, stop: int, *, fresh: bool = False
  ) -> bytes:
    del fresh
    return self._read(key, stop - start, range=(start, stop))[0]

  def _read(self, key: str, limit: int, **options) -> tuple[bytes, str]:
    """At most `limit` bytes, whatever the server sends, and their mark."""
    with self._asking('reading', key) as obstore:
      try:
        answer = obstore.get(self.store, key, options=options)
      except obstore.exceptions.GenericError as error:
        if _status(error) == 416 or 'Wanted range starting' in str(error):
          return b'', ''  # nothing of it begins so late
        raise
      data = next(answer.stream(min_chunk_size=limit), b'')[:limit]
    return data, answer.meta[self._mark] or ''

  def read_tagged(
    self, key: str, most: int = folder.MAX_POINTER_BYTES
  ) -> tuple[bytes, str] | None:
    try:
      return self._read(key, most + 1)
    except FileNotFoundError:
      return None

  def put(self, key: str, data: bytes) -> None:
    self._write(key, data, 'overwrite')

  def _write(self, key: str, data: bytes, mode: Any) -> str:
    with self._asking('writing', key) as obstore:
      put = obstore.put(self.store, key, data, mode=mode, use_multipart=False)
    return put[self._mark] or ''

  def swap(self, key: str, data: bytes, tag: str | None, most: int = 0) -> str:
    del most  # The server compares the whole.
    mode = 'create' if tag is None else {self._mark: tag}
    return self._write(key, data, mode)

  def find(self, top: str) -> dict[str, int]:
    return {meta['path']: meta['size'] for meta in self._list(top)}

  def _list(self, top: str) -> Iterator[Any]:
    with self._asking('listing', top) as obstore:
      for page in obstore.list(self.store, top, chunk_size=1000):
        yield from page

  def delete(self, keys: Iterable[str], older_than_s: float) -> list[str]:
    keys = list(keys)
    if older_than_s > 0:
      newest = time.time() - older_than_s
      young = {
        meta['path']
        for top in {key.split('/')[0] for key in keys}
        for meta in self._list(top)
        if meta['last_modified'].timestamp() > newest
      }
      keys = [key for key in keys if key not in young]
    if not keys:
      return []
    with self._asking('deleting', keys[0]) as obstore:
      try:
        obstore.delete(self.store, keys)
      except FileNotFoundError:  # S3 does not tell, others do
        for key in keys:
          with contextlib.suppress(FileNotFoundError):
            obstore.delete(self.store, key)
    return keys


def _named(error: Exception, doing: str, url: str) -> Exception:
  """The built-in error for one of obstore's."""
  text, status = _text(error), _status(error)
  if re.search('NoSuchBucket|ContainerNotFound|bucket does not exist', text):
    # Not a FileNotFoundError, which would read as "nothing published yet".
    return ValueError(
      f'{url}: there is no such bucket; make it, or correct its name.'
    )
  if type(error).__name__ in ('AlreadyExistsError', 'PreconditionError'):
    return folder.Conflict(f'{url} holds another value')
  if isinstance(error, FileNotFoundError):
    status = 404
  elif _METADATA.search(text):
    # Who has no credentials is sent to ask the machine that it runs on.
    status = 401
  elif status is None and 'HTTP error' not in text:
    status = 400  # obstore's own refusal
  return _refusal(doing, url, status, text)


def _text(error: Exception) -> str:
  return ' '.join(str(error).partition('Debug source')[0].split())[:500]


def _status(error: BaseException) -> int | None:
  """Status of the server's answer, None where it did not answer."""
  answered = re.search(r'status code: (\d+)', str(error))
  return int(answered[1]) if answered else None


class WebBackend:
  """Objects and pointers by GET; see `folder`.

  Redirects are refused: headers that let this process in are for one server.
  """

  is_writable = False

  def __init__(self, url: str, options: dict[str, Any]):
    try:
      import urllib3
    except ImportError as error:
      raise _no_package(url, error) from error
    self._url = url
    client = CLIENT | options.get('client_options', {})
    self._retry = RETRY | options.get('retry_config', {})
    self._headers = client.get('default_headers', {})
    self._errors = urllib3.exceptions.HTTPError
    self._pool = urllib3.PoolManager(
      maxsize=_CONNECTIONS,
      retries=False,
      timeout=urllib3.Timeout(
        connect=client['connect_timeout'].total_seconds(),
        read=client['read_timeout'].total_seconds(),
      ),
    )

  def read_tagged(
    self, key: str, most: int = folder.MAX_POINTER_BYTES
  ) -> tuple[bytes, str] | None:
    try:
      data = self.read(key, 0, most + 1)
    except FileNotFoundError:
      return None
    return data, hashlib.sha256(data).hexdigest()

  def read(
    self, key: str, start: int, stop: int, *, fresh: bool = False
  ) -> bytes:
    url, backoff = f'{self._url}/{key}', self._retry['backoff']
    wait_s = backoff['init_backoff'].total_seconds()
    for left in range(self._retry['max_retries'], -1, -1):
      try:
        status, data = self._ask(url, start, stop, fresh)
        trouble = f'the server answered {status}'
      except self._errors as error:
        # What a cache cut short it would cut again.
        status, data, trouble, fresh = None, b'', str(error), True
      if status in (200, 206, 416):
        return data
      if not left or (status is not None and status not in _PASSING):
        break
      _log.warning('%s: GET failed: %s; again soon', url, trouble)
      # At random: a fleet that failed together does not return together.
      time.sleep(wait_s * random.uniform(0.5, 1))
      wait_s = min(2 * wait_s, backoff['max_backoff'].total_seconds())
    raise _refusal('reading', url, status, trouble)

  def _ask(self, url: str, start: int, stop: int, fresh: bool) -> tuple:
    headers = {'Accept-Encoding': 'identity', **self._headers}
    headers['Range'] = f'bytes={start}-{stop - 1}'
    if fresh:
      headers['Cache-Control'] = 'no-cache'
    answer = self._pool.request(
      'GET', url, headers=headers, preload_content=False, redirect=False
    )
    try:
      data = bytearray()
      if answer.status in (200, 206):
        # 200 is the whole of it: a server may know no ranges.
        skip = start if answer.status == 200 else 0
        while len(data) < stop - start:
          # Not unpacked, if it comes packed all the same: it may be a bomb.
          more = answer.read(
            min(_READ_BYTES, skip + stop - start - len(data)),
            decode_content=False,
          )
          if not more:
            break
          data += more[skip:]
          skip = max(0, skip - len(more))
      return answer.status, bytes(data)
    finally:
      answer.close()  # what was read to its end is another request's already
