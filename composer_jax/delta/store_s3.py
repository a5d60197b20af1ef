"""A store in S3, or in a server that speaks like it.

The pointer moves by conditional writes (If-Match, If-None-Match). An object
that is there is known to be intact by its ETag, which is an MD5 of what the
server received; that is good enough against damage, and against malice readers
have the object's name. Under SSE-KMS the ETag is no MD5: there, what exists is
sent again.
"""

import concurrent.futures
import contextlib
import hashlib
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from composer_jax.delta import retries, store_backend, store_remote

UPLOAD_THREADS = 4
_MOST_PARTS = 10_000
_COPY_BYTES = 5 * 2**30  # the longest that S3 copies by itself
_BULK = 1000
_log = logging.getLogger(__name__)


def _md5(data: bytes) -> 'hashlib._Hash':
  return hashlib.md5(data, usedforsecurity=False)


class S3Backend(store_remote.RemoteBackend):
  """Bucket and prefix of `s3://bucket/prefix`."""

  def __init__(
    self,
    url: str,
    traffic: store_backend.Traffic,
    policy: retries.Policy,
    sleep: Callable[[float], None],
    options: dict[str, Any],
  ):
    # One attempt each: `retries` counts them, and tells.
    config = {
      'retries': {'max_attempts': 0},
      'max_pool_connections': 32,
      'connect_timeout': store_remote.CONNECT_S,
      'read_timeout': store_remote.SILENCE_S,
    }
    config |= options.get('config_kwargs', {})
    options = options | {'config_kwargs': config}
    super().__init__(url, traffic, policy, sleep, options)
    self.fs.retries = 1
    self._bucket, _, prefix = url.partition('://')[2].partition('/')
    self._prefix = f'{prefix}/' if prefix else ''
    self._conditions: bool | None = None
    self._conditions_lock = threading.Lock()

  def _call(self, doing: str, key: str, method: str, **kwargs) -> dict:
    return self._ask(
      doing,
      key,
      self.fs.call_s3,
      method,
      Bucket=self._bucket,
      Key=self._prefix + key,
      **kwargs,
    )

  def _head(self, key: str) -> dict | None:
    try:
      return self._call('looking', key, 'head_object')
    except FileNotFoundError:
      return None

  def stat(self, key: str) -> store_backend.Found:
    head = self._call('looking', key, 'head_object')
    return store_backend.Found(
      head['ContentLength'], head['LastModified'].timestamp()
    )

  # Objects.

  def put(self, key: str, data: bytes) -> None:
    head = self._head(key)
    if head and self._keep(
      key, head, len(data), lambda: {_md5(data).hexdigest()}
    ):
      return
    self._call('writing', key, 'put_object', Body=data)
    self._traffic.count(written=len(data))

  def put_file(
    self, key: str, path: pathlib.Path, digest: str, give: bool
  ) -> None:
    del digest, give
    length = path.stat().st_size
    step = max(store_backend.PIECE_BYTES, -(-length // _MOST_PARTS))
    head = self._head(key)
    if head and self._keep(key, head, length, lambda: _etags(path, step)):
      return
    if length <= step:
      self._call('writing', key, 'put_object', Body=path.read_bytes())
    else:
      self._put_parts(key, path, length, step)
    self._traffic.count(written=length)

  def _keep(
    self, key: str, head: dict, length: int, etags: Callable[[], set[str]]
  ) -> bool:
    """Whether the object is intact; an old one is then made young."""
    if (
      head['ContentLength'] != length or head['ETag'].strip('"') not in etags()
    ):
      return False
    modified = head['LastModified'].timestamp()
    if store_remote.is_young(store_backend.Found(0, modified)):
      return True
    if head['ContentLength'] > _COPY_BYTES:
      return False
    source = {'Bucket': self._bucket, 'Key': self._prefix + key}
    try:
      # The server copies it onto itself; nothing travels.
      self._call(
        'renewing',
        key,
        'copy_object',
        CopySource=source,
        MetadataDirective='REPLACE',
      )
    except FileNotFoundError:
      return False  # deleted since the look
    return True

  def _put_parts(
    self, key: str, path: pathlib.Path, length: int, step: int
  ) -> None:
    """Sends a long file in parts, each of which is retried alone."""
    upload = self._call('writing', key, 'create_multipart_upload')['UploadId']

    def send(number: int) -> dict[str, Any]:
      with open(path, 'rb') as file:
        file.seek((number - 1) * step)
        data = file.read(step)
      answer = self._call(
        'writing',
        key,
        'upload_part',
        UploadId=upload,
        PartNumber=number,
        Body=data,
      )
      return {'PartNumber': number, 'ETag': answer['ETag']}

    numbers = range(1, -(-length // step) + 1)
    try:
      with concurrent.futures.ThreadPoolExecutor(UPLOAD_THREADS) as pool:
        parts = list(pool.map(send, numbers))
      self._complete(key, upload, parts, length)
    except BaseException:
      # Unfinished parts are stored, and paid for, until someone says so; who
      # cannot say it now, leaves that to `delete`. What went wrong is told.
      with contextlib.suppress(OSError):
        self._call('giving up', key, 'abort_multipart_upload', UploadId=upload)
      raise

  def _complete(
    self, key: str, upload: str, parts: list[dict], length: int
  ) -> None:
    try:
      self._call(
        'writing',
        key,
        'complete_multipart_upload',
        UploadId=upload,
        MultipartUpload={'Parts': parts},
      )
    except FileNotFoundError:
      # An earlier attempt was done, and its answer lost.
      head = self._head(key)
      if not head or head['ContentLength'] != length:
        raise

  # Pointers.

  def read_tagged(self, key: str, limit: int) -> tuple[bytes, str] | None:
    async def fetch() -> tuple[bytes, str]:
      answer = await self.fs._call_s3(
        'get_object', Bucket=self._bucket, Key=self._prefix + key
      )
      data = b''
      async with answer['Body'] as body:
        while len(data) < limit and (more := await body.read(limit)):
          data += more
      return data[:limit], answer['ETag']

    try:
      data, tag = self._await('reading', key, fetch)
    except FileNotFoundError:
      return None
    self._traffic.count(read=len(data))
    return data, tag

  def swap(self, key: str, data: bytes, tag: str | None) -> str:
    if not self._has_conditions():
      return super().swap(key, data, tag)
    condition = {'IfNoneMatch': '*'} if tag is None else {'IfMatch': tag}

    def write() -> str:
      return self.fs.call_s3(
        'put_object',
        Bucket=self._bucket,
        Key=self._prefix + key,
        Body=data,
        **condition,
      )['ETag']

    try:
      moved = self._ask('writing', key, write)
    except OSError as error:
      if retries.status(error) not in (404, 412):
        raise
      moved = self._who_won(key, data, error)
    self._traffic.count(written=len(data))
    return moved

  def _has_conditions(self) -> bool:
    """Whether the client sends conditions and the server minds them.

    One that does not would silently let two publishers overwrite each other, so
    it is put to the test once, beside the pointers.
    """
    with self._conditions_lock:
      if self._conditions is None:
        self._conditions = self._try_conditions()
        if not self._conditions:
          _log.warning(
            '%s does not mind If-Match: nothing stops two publishers of one '
            'run from overwriting each other; run only one.',
            self.url,
          )
      return self._conditions

  def _try_conditions(self) -> bool:
    key = 'refs/.conditions'
    self._call('writing', key, 'put_object', Body=b'1')
    try:
      self._call('writing', key, 'put_object', Body=b'2', IfMatch='"0"')
    except OSError as error:
      answered = retries.status(error)
      # Some say that they do not know it, others just write.
      if answered in (400, 501):
        return False
      if answered == 412:
        return True
      raise
    return False

  # Upkeep.

  def delete(self, keys: Iterable[str], older_than_s: float) -> list[str]:
    old = self._old_enough(keys, older_than_s)
    for at in range(0, len(old), _BULK):
      names = [{'Key': self._prefix + key} for key in old[at : at + _BULK]]
      answer = self._ask(
        'deleting',
        '',
        self.fs.call_s3,
        'delete_objects',
        Bucket=self._bucket,
        Delete={'Objects': names, 'Quiet': True},
      )
      for error in answer.get('Errors', []):
        raise OSError(
          f'{self.url}: {error.get("Key")} cannot be deleted: '
          f'{error.get("Message", error.get("Code"))}'
        )
    try:
      self._sweep(older_than_s)
    except OSError as error:
      # A permission of its own; and what had to go is gone.
      _log.warning('Unfinished uploads stay: %s', error)
    return old

  def _sweep(self, older_than_s: float) -> None:
    """Ends uploads in parts whose publisher died."""
    answer = self._ask(
      'listing',
      '',
      self.fs.call_s3,
      'list_multipart_uploads',
      Bucket=self._bucket,
      # Other programs may upload to the same bucket.
      Prefix=f'{self._prefix}objects/',
    )
    for upload in answer.get('Uploads', []):
      if time.time() - upload['Initiated'].timestamp() >= older_than_s:
        key = upload['Key'].removeprefix(self._prefix)
        self._call(
          'giving up',
          key,
          'abort_multipart_upload',
          UploadId=upload['UploadId'],
        )


def _etags(path: pathlib.Path, step: int) -> set[str]:
  """What S3 calls this content, sent at once or in parts."""
  whole, parts = _md5(b''), []
  with open(path, 'rb') as file:
    while data := file.read(step):
      whole.update(data)
      parts.append(_md5(data).digest())
  joined = f'{_md5(b"".join(parts)).hexdigest()}-{len(parts)}'
  return {whole.hexdigest(), joined}
