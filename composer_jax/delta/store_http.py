"""A store behind a web server, to be read alone: a relay, or a public bucket.

The server is not trusted: no more is read of an answer than was asked for.
"""

import hashlib
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from composer_jax.delta import retries, store_backend, store_remote

_PIECE_BYTES = 2**18


class HttpBackend(store_remote.RemoteBackend):
  """Objects and pointers by GET, with ranges; nothing can be listed."""

  is_writable = False

  def __init__(
    self,
    url: str,
    traffic: store_backend.Traffic,
    policy: retries.Policy,
    sleep: Callable[[float], None],
    options: dict[str, Any],
  ):
    super().__init__(url, traffic, policy, sleep, options)
    import aiohttp  # an extra, of whose absence the line above tells

    self._timeout = aiohttp.ClientTimeout(
      total=None,
      sock_connect=store_remote.CONNECT_S,
      sock_read=store_remote.SILENCE_S,
    )

  async def _fetch(self, url: str, start: int, stop: int) -> bytes:
    session = await self.fs.set_session()
    headers = {
      'Range': f'bytes={start}-{stop - 1}',
      'Accept-Encoding': 'identity',
    }
    async with session.get(
      self.fs.encode_url(url),
      headers=headers,
      timeout=self._timeout,
      # A server that compresses all the same would have us unpack a bomb.
      auto_decompress=False,
    ) as response:
      if response.status == 416:
        return b''
      response.raise_for_status()
      # 200 is the whole of it: a server may know no ranges.
      skip = start if response.status == 200 else 0
      data = bytearray()
      async for piece in response.content.iter_chunked(_PIECE_BYTES):
        self._traffic.count(read=len(piece))
        data += piece[skip:]
        skip = max(0, skip - len(piece))
        if len(data) >= stop - start:
          break
      return bytes(data[: stop - start])

  async def _head(self, url: str) -> int:
    session = await self.fs.set_session()
    async with session.head(
      self.fs.encode_url(url),
      headers={'Accept-Encoding': 'identity'},
      timeout=self._timeout,
      allow_redirects=True,
    ) as response:
      response.raise_for_status()
      length = response.headers.get('Content-Length', '')
      if not length.isdecimal():
        raise OSError(f'{url}: the server does not tell its length')
      return int(length)

  def read(self, key: str, start: int, stop: int) -> bytes:
    return self._await(
      'reading', key, self._fetch, self._path(key), start, stop
    )

  def stat(self, key: str) -> store_backend.Found:
    length = self._await('looking', key, self._head, self._path(key))
    return store_backend.Found(length, None)

  def read_tagged(self, key: str, limit: int) -> tuple[bytes, str] | None:
    try:
      data = self.read(key, 0, limit)
    except FileNotFoundError:
      return None
    return data, hashlib.sha256(data).hexdigest()

  def _refuse(self) -> ValueError:
    return ValueError(
      f'{self.url} can only be read, by name; publish to, list and clean up '
      'the store behind it.'
    )

  def put(self, key: str, data: bytes) -> None:
    raise self._refuse()

  def put_file(
    self, key: str, path: pathlib.Path, digest: str, give: bool
  ) -> None:
    raise self._refuse()

  def swap(self, key: str, data: bytes, tag: str | None) -> str:
    raise self._refuse()

  def find(self, folder: str) -> dict[str, store_backend.Found]:
    raise self._refuse()

  def delete(self, keys: Iterable[str], older_than_s: float) -> list[str]:
    raise self._refuse()
