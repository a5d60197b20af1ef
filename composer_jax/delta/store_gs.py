"""A store in Google Cloud Storage, whose generations make the pointer safe.

Written after the documentation of its JSON API and tried by hand against an
imitation of it; it has never met the service itself, nor does a test run it.
"""

import base64
import hashlib
from typing import Any

from composer_jax.delta import store_backend, store_remote


class GsBackend(store_remote.RemoteBackend):
  """Bucket and prefix of `gs://bucket/prefix`."""

  def _split(self, key: str) -> tuple[str, str]:
    bucket, _, prefix = self.url.partition('://')[2].partition('/')
    return bucket, f'{prefix}/{key}' if prefix else key

  def _info(self, key: str) -> dict[str, Any]:
    # Not `fs.info`, which lists folders where there is no such object.
    bucket, name = self._split(key)
    info = self._ask(
      'looking',
      key,
      self.fs.call,
      'GET',
      'b/{}/o/{}',
      bucket,
      name,
      json_out=True,
    )
    return self.fs._process_object(bucket, info)

  def stat(self, key: str) -> store_backend.Found:
    return self._found(self._info(key))

  def put(self, key: str, data: bytes) -> None:
    try:
      info = self._info(key)
    except FileNotFoundError:
      info = {}
    md5 = hashlib.md5(data, usedforsecurity=False).digest()
    # Only a young one is left alone: clean-up spares those.
    if info.get('md5Hash') == base64.b64encode(
      md5
    ).decode() and store_remote.is_young(self._found(info)):
      return
    super().put(key, data)

  def read_tagged(self, key: str, limit: int) -> tuple[bytes, str] | None:
    bucket, name = self._split(key)
    try:
      headers, data = self._ask(
        'reading',
        key,
        self.fs.call,
        'GET',
        'b/{}/o/{}',
        bucket,
        name,
        alt='media',
        headers={'Range': f'bytes=0-{limit - 1}'},
      )
    except FileNotFoundError:
      return None
    self._traffic.count(read=len(data))
    return data, headers['X-Goog-Generation']

  def swap(self, key: str, data: bytes, tag: str | None) -> str:
    bucket, name = self._split(key)

    def write() -> str:
      return self.fs.call(
        'POST',
        f'{self.fs._location}/upload/storage/v1/b/{bucket}/o',
        uploadType='media',
        name=name,
        # No generation at all is 0.
        ifGenerationMatch=tag or '0',
        headers={'Content-Type': 'application/octet-stream'},
        data=data,
        json_out=True,
      )['generation']

    try:
      moved = self._ask('writing', key, write)
    except OSError as error:
      # gcsfs tells of a 412 so.
      if not isinstance(error, FileExistsError):
        raise
      moved = self._who_won(key, data, error)
    self._traffic.count(written=len(data))
    return moved
