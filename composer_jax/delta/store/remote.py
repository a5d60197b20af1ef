"""Stores elsewhere: buckets by obstore, and HTTP servers to be read alone.

obstore does the requests to S3 and servers like it, Google Cloud, Azure and
memory, and repeats them. Credentials, endpoint and region come from the
environment under the names that it documents (AWS_ENDPOINT_URL,
AWS_SKIP_SIGNATURE=true, AZURE_STORAGE_ACCOUNT_NAME, ...) or from `options`.

A web server or cache is not trusted: no more is read of an answer than was
asked for, and nothing of one that tells of an error. That is why obstore does
not read there: it takes the text of an error whole, and a server that states a
length of a terabyte for it ends the process.
"""

import contextlib
import datetime
import functools
import hashlib
import logging
import random
import re
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from composer_jax.delta.store import folder

CONNECTIONS = 32
# In the words of obstore. The silence of `read_timeout` is that between two
# pieces of an answer, not all of it.
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
# An object found older than this is written again, which makes it young; well
# below any grace.
RENEW_S = 600.0
# Class of obstore, and what marks a content for a conditional write.
KINDS = {
  's3': ('S3Store', 'e_tag'),
  's3a': ('S3Store', 'e_tag'),
  'gs': ('GCSStore', 'version'),
  'gcs': ('GCSStore', 'version'),
  'az': ('AzureStore', 'e_tag'),
  'memory': ('MemoryStore', 'e_tag'),
}
# Where a machine in a cloud says who it is.
_METADATA = re.compile(
  '/latest/(api|meta-data)/|/computeMetadata/|/metadata/identity'
)
_READ_BYTES = 2**18
_POINTER_STOP = folder.MAX_POINTER_BYTES + 1
_memory: dict[str, Any] = {}
# The only order among publishers where the server has none.
_one_at_a_time = threading.Lock()
_log = logging.getLogger(__name__)


def _no_package(url: str, error: ImportError) -> ValueError:
  return ValueError(
    f'{url}: stores elsewhere need a package that is not installed '
    f"({error.name}): pip install -e '.[stores]' in the checkout."
  )


def _open(url: str, options: dict[str, Any]) -> Any:
  """obstore's store of a URL; all of one memory:// URL are one."""
  try:
    import obstore
    import obstore.store
  except ImportError as error:
    raise _no_package(url, error) from error
  protocol, _, path = url.partition('://')
  if protocol == 'memory':
    return _memory.setdefault(url, obstore.store.MemoryStore())
  bucket, _, prefix = path.partition('/')
  options = options | {
    'client_options': CLIENT | options.get('client_options', {}),
    'retry_config': RETRY | options.get('retry_config', {}),
  }
  kind = getattr(obstore.store, KINDS[protocol][0])
  try:
    return kind(bucket, prefix=prefix or None, **options)
  except (obstore.exceptions.BaseError, ValueError) as error:
    raise ValueError(
      f'{url}: this store cannot be opened: {_text(error)}. Set the variables '
      'of the environment by which obstore knows account and credentials.'
    ) from error


class BucketBackend:
  """Bucket and prefix of a URL; see `folder.Backend`.

  An object is known to be intact by an ETag that is the MD5 of its content:
  good enough against damage, and against malice readers have the object's name.
  Where the ETag is something else (Azure, SSE-KMS), what exists is sent again.
  """

  is_writable = True

  def __init__(
    self, url: str, traffic: folder.Traffic, options: dict[str, Any]
  ):
    self.url = url
    self.store = _open(url, options)
    self._traffic = traffic
    self._mark = KINDS[url.partition('://')[0]][1]

  @contextlib.contextmanager
  def _asking(self, doing: str, key: str) -> Iterator[Any]:
    """Gives obstore; its errors become built-in ones that name the URL."""
    import obstore

    self._traffic.count(requests=1)
    try:
      yield obstore
    except (FileNotFoundError, obstore.exceptions.BaseError) as error:
      raise _named(error, doing, f'{self.url}/{key}') from error

  def read(self, key: str, start: int, stop: int) -> bytes:
    return self._read(key, {'range': (start, stop)}, stop - start)[0]

  def _read(
    self, key: str, options: dict[str, Any], limit: int
  ) -> tuple[bytes, str]:
    """At most `limit` bytes, whatever the server sends, and their mark."""
    with self._asking('reading', key) as obstore:
      try:
        answer = obstore.get(self.store, key, options=options)
      except obstore.exceptions.GenericError as error:
        if _status(error) == 416 or 'Wanted range starting' in str(error):
          return b'', ''  # nothing of it begins so late
        raise
      data = next(answer.stream(min_chunk_size=limit), b'')[:limit]
    self._traffic.count(read=len(data))
    return data, answer.meta[self._mark] or ''

  def put(self, key: str, data: bytes) -> None:
    if not self._is_intact(key, data):
      self._write(key, data)

  def _write(self, key: str, data: bytes, mode: Any = None) -> str:
    with self._asking('writing', key) as obstore:
      # In one request: a pack is one, and conditions are for one.
      put = obstore.put(self.store, key, data, mode=mode, use_multipart=False)
    self._traffic.count(written=len(data))
    return put[self._mark] or ''

  def _is_intact(self, key: str, data: bytes) -> bool:
    """Returns true if the object is there, intact and young."""
    try:
      with self._asking('looking', key) as obstore:
        meta = obstore.head(self.store, key)
    except FileNotFoundError:
      return False
    age_s = time.time() - meta['last_modified'].timestamp()
    if age_s >= RENEW_S or meta['size'] != len(data) or not meta['e_tag']:
      return False
    # S3's mark of a content that came in one request.
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return meta['e_tag'].strip('"') == md5

  def read_tagged(self, key: str) -> tuple[bytes, str] | None:
    try:
      return self._read(key, {}, _POINTER_STOP)
    except FileNotFoundError:
      return None

  def swap(self, key: str, data: bytes, tag: str | None) -> str:
    mode = 'create' if tag is None else {self._mark: tag}
    if not self._minds_conditions:
      with _one_at_a_time:
        found = self.read_tagged(key)
        if (found and found[1]) != tag:
          raise folder.Conflict(f'{self.url}/{key} holds another value')
        return self._write(key, data)
    for is_last in (False, False, True):
      try:
        return self._write(key, data, mode)
      except (folder.Conflict, ConnectionError) as error:
        found = self.read_tagged(key)
        # An attempt whose answer was lost may have been the one that won.
        if found is not None and found[0] == data:
          return found[1]
        is_refused = isinstance(error, folder.Conflict)
        if is_last or not is_refused or (found and found[1]) != tag:
          raise
        # Two writers at one key: the server asks the loser to send again.
    raise AssertionError('unreachable')

  @functools.cached_property
  def _minds_conditions(self) -> bool:
    """Whether the server minds conditions, put to the test once.

    One like S3 that does not would silently let two publishers overwrite each
    other.
    """
    if not self.url.startswith('s3'):
      return True
    key = 'refs/.conditions'  # beside the pointers
    self._write(key, b'1')
    try:
      self._write(key, b'2', {'e_tag': '"0"'})
    except folder.Conflict:
      return True
    except OSError as error:
      # Some say that they do not know it, others just write.
      if _status(error.__cause__) not in (400, 501):
        raise
    _log.warning(
      '%s does not mind If-Match: nothing stops two publishers of one run from '
      'overwriting each other; run only one.',
      self.url,
    )
    return False

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
      tops = {key.split('/')[0] for key in keys}
      found = [meta for top in tops for meta in self._list(top)]
      young = {
        m['path'] for m in found if m['last_modified'].timestamp() > newest
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
  return folder.refusal(doing, url, status, text)


def _text(error: Exception) -> str:
  return ' '.join(str(error).partition('Debug source')[0].split())[:500]


def _status(error: BaseException | None) -> int | None:
  """Status of the server's answer, None where it did not answer."""
  answered = re.search(r'status code: (\d+)', str(error))
  return int(answered[1]) if answered else None


class WebBackend:
  """Objects and pointers by GET; see `folder.Backend`.

  Redirects are refused: headers that let this process in are for one server.
  """

  is_writable = False

  def __init__(
    self, url: str, traffic: folder.Traffic, options: dict[str, Any]
  ):
    try:
      import urllib3
    except ImportError as error:
      raise _no_package(url, error) from error
    self.url, self._traffic = url, traffic
    client = CLIENT | options.get('client_options', {})
    self._retry = RETRY | options.get('retry_config', {})
    self._headers = client.get('default_headers', {})
    self._network_error = urllib3.exceptions.HTTPError
    self._protocol_error = urllib3.exceptions.ProtocolError
    self._pool = urllib3.PoolManager(
      maxsize=CONNECTIONS,
      retries=False,
      timeout=urllib3.Timeout(
        connect=client['connect_timeout'].total_seconds(),
        read=client['read_timeout'].total_seconds(),
      ),
    )

  def read_tagged(self, key: str) -> tuple[bytes, str] | None:
    try:
      data = self.read(key, 0, _POINTER_STOP)
    except FileNotFoundError:
      return None
    return data, hashlib.sha256(data).hexdigest()

  def read(self, key: str, start: int, stop: int) -> bytes:
    url, last = f'{self.url}/{key}', self._retry['max_retries']
    is_cut = False
    for attempt in range(last + 1):
      try:
        status, data = self._ask(url, start, stop)
        trouble = f'the server answered {status}'
      except (self._network_error, folder.CutShort) as error:
        status, data, trouble = None, b'', str(error)
        is_cut = isinstance(error, folder.CutShort)
      if status is not None and status not in folder.PASSING:
        break
      if attempt < last:
        _log.warning('%s: GET failed: %s; again soon', url, trouble)
        self._wait(attempt)
    if status in (200, 206, 416):
      return data
    raise folder.refusal(
      'reading', url, status, trouble, is_cut=is_cut and status is None
    )

  def _ask(self, url: str, start: int, stop: int) -> tuple[int, bytes]:
    span = {'Accept-Encoding': 'identity', 'Range': f'bytes={start}-{stop - 1}'}
    headers = span | self._headers
    self._traffic.count(requests=1)
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
          self._traffic.count(read=len(more))
          data += more[skip:]
          skip = max(0, skip - len(more))
      return answer.status, bytes(data)
    except self._protocol_error as error:
      raise folder.CutShort(str(error)) from error
    finally:
      answer.close()  # what was read to its end is another request's already

  def _wait(self, failed: int) -> None:
    backoff = self._retry['backoff']
    longest_s = min(
      backoff['init_backoff'].total_seconds() * 2**failed,
      backoff['max_backoff'].total_seconds(),
    )
    # At random: a fleet that failed together does not return together.
    time.sleep(longest_s * random.uniform(0.5, 1))
