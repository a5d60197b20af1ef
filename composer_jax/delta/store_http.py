"""A store behind a web server or an HTTP cache, to be read alone.

The server is not trusted: no more is read of an answer than was asked for, and
nothing of one that tells of an error. That is why obstore does not read here:
it takes the text of an error whole, and a server that states a length of a
terabyte for it ends the process. Redirects are refused, too: headers that let
this process in are for one server.
"""

import errno
import hashlib
import logging
import random
import time
from typing import Any

from composer_jax.delta import store_backend

_PIECE_BYTES = 2**18
_log = logging.getLogger(__name__)


class HttpBackend:
  """Objects and pointers by GET; see `store_backend.Reader`."""

  is_writable = False

  def __init__(
    self, url: str, traffic: store_backend.Traffic, options: dict[str, Any]
  ):
    try:
      import urllib3
    except ImportError as error:
      raise store_backend.no_package(url, error) from error
    self.url = url
    self._traffic = traffic
    client = store_backend.CLIENT | options.get('client_options', {})
    self._retry = store_backend.RETRY | options.get('retry_config', {})
    self._headers = client.get('default_headers', {})
    self._network_error = urllib3.exceptions.HTTPError
    self._protocol_error = urllib3.exceptions.ProtocolError
    self._pool = urllib3.PoolManager(
      maxsize=store_backend.CONNECTIONS,
      retries=False,
      timeout=urllib3.Timeout(
        connect=client['connect_timeout'].total_seconds(),
        read=client['read_timeout'].total_seconds(),
      ),
    )

  def read(self, key: str, start: int, stop: int) -> bytes:
    return self._ask('GET', key, start, stop)

  def stat(self, key: str) -> store_backend.Found:
    length = self._ask('HEAD', key, 0, 0).decode()
    if not length.isdecimal():
      raise OSError(
        errno.EIO, 'the server does not tell its length', f'{self.url}/{key}'
      )
    return store_backend.Found(int(length), None)

  def read_tagged(self, key: str, limit: int) -> tuple[bytes, str] | None:
    try:
      data = self.read(key, 0, limit)
    except FileNotFoundError:
      return None
    return data, hashlib.sha256(data).hexdigest()

  def _ask(self, method: str, key: str, start: int, stop: int) -> bytes:
    """The answer to a GET, or the length that one to a HEAD states."""
    url, last = f'{self.url}/{key}', self._retry['max_retries']
    is_cut = False
    for attempt in range(last + 1):
      try:
        status, data = self._ask_once(method, url, start, stop)
        trouble = f'the server answered {status}'
      except (self._network_error, store_backend.CutShort) as error:
        status, data, trouble = None, b'', str(error)
        is_cut = isinstance(error, store_backend.CutShort)
      if status is not None and status not in store_backend.PASSING:
        break
      if attempt < last:
        _log.warning('%s: %s failed: %s; again soon', url, method, trouble)
        self._wait(attempt)
    if status in (200, 206, 416):
      return data
    raise store_backend.refusal(
      'reading', url, status, trouble, is_cut=is_cut and status is None
    )

  def _ask_once(
    self, method: str, url: str, start: int, stop: int
  ) -> tuple[int, bytes]:
    headers = {'Accept-Encoding': 'identity'} | self._headers
    if method == 'GET':
      headers['Range'] = f'bytes={start}-{stop - 1}'
    self._traffic.count(requests=1)
    answer = self._pool.request(
      method, url, headers=headers, preload_content=False, redirect=False
    )
    try:
      data = bytearray()
      if method == 'HEAD':
        data += answer.headers.get('Content-Length', '').encode()
      elif answer.status in (200, 206):
        # 200 is the whole of it: a server may know no ranges.
        skip = start if answer.status == 200 else 0
        while len(data) < stop - start:
          # Not unpacked, if it comes packed all the same: it may be a bomb.
          piece = answer.read(
            min(_PIECE_BYTES, skip + stop - start - len(data)),
            decode_content=False,
          )
          if not piece:
            break
          self._traffic.count(read=len(piece))
          data += piece[skip:]
          skip = max(0, skip - len(piece))
      return answer.status, bytes(data)
    except self._protocol_error as error:
      raise store_backend.CutShort(str(error)) from error
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
