"""A relay over HTTP: what `Store('http://...')` reads, with ranges.

GET, HEAD /objects/<sha256>     404 where no upstream has it, 502 where one
                                fails or serves something else
GET, HEAD /refs/<run>/latest
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import BinaryIO

import uvicorn
from starlette import (
  applications,
  concurrency,
  requests,
  responses,
  routing,
)

from composer_jax.delta import identity
from composer_jax.delta import relay as relays

_PIECE_BYTES = 2**20
_RANGE = re.compile(r'bytes=(\d{1,15})-(\d{1,15})?')
# Deletion may come between a flight and the look at what it brought.
_LOOKS = 4
_START_S = 30.0
_log = logging.getLogger(__name__)


def application(relay: relays.Relay) -> applications.Starlette:
  """The routes of one relay."""

  async def get_object(request: requests.Request) -> responses.Response:
    name = request.path_params['name']
    if not identity.is_hash(name):
      return _text(404, 'objects are named by 64 lower hex digits')
    for _ in range(_LOOKS):
      file = relay.open(name)
      if file is not None:
        return _content(request, name, file)
      try:
        # Shielded: who hangs up must not cancel what others wait for.
        await asyncio.shield(asyncio.wrap_future(relay.fetch(name)))
      except FileNotFoundError:
        return _text(404, 'no upstream has this object')
      except (OSError, ValueError) as error:
        _log.warning('%s: %s', name, error)
        return _text(502, f'upstream: {error}')
    return _text(503, 'the cache is too small for what is asked of it')

  async def get_pointer(request: requests.Request) -> responses.Response:
    run_id = request.path_params['run_id']
    try:
      flight = relay.pointer(run_id)
    except ValueError as error:
      return _text(404, str(error))
    try:
      data = await asyncio.shield(asyncio.wrap_future(flight))
    except (OSError, ValueError) as error:
      _log.warning('%s: %s', run_id, error)
      return _text(502, f'upstream: {error}')
    if data is None:
      return _text(404, 'nothing was published')
    # Caches on the way know no `poll_s`.
    return responses.Response(data, headers={'Cache-Control': 'no-store'})

  return applications.Starlette(
    routes=[
      routing.Route('/objects/{name}', get_object),
      routing.Route('/refs/{run_id}/latest', get_pointer),
    ]
  )


def _text(status: int, text: str) -> responses.Response:
  return responses.PlainTextResponse(text, status)


def _content(
  request: requests.Request, name: str, file: BinaryIO
) -> responses.Response:
  """All of an open file, or the range that was asked for; closes it."""
  length = os.fstat(file.fileno()).st_size
  start, stop, status = 0, length, 200
  headers = {
    'Accept-Ranges': 'bytes',
    'ETag': f'"{name}"',
    'Cache-Control': 'public, max-age=31536000, immutable',
  }
  # Forms of ranges that no store asks for get the whole, as they may.
  asked = _RANGE.fullmatch(request.headers.get('range', ''))
  if asked:
    start = int(asked[1])
    stop = min(length, int(asked[2]) + 1) if asked[2] else length
    if start >= stop:
      file.close()
      headers['Content-Range'] = f'bytes */{length}'
      return responses.Response(status_code=416, headers=headers)
    status = 206
    headers['Content-Range'] = f'bytes {start}-{stop - 1}/{length}'
  headers['Content-Length'] = str(stop - start)
  if request.method == 'HEAD':
    file.close()
    return responses.Response(status_code=status, headers=headers)

  async def pieces() -> AsyncIterator[bytes]:
    at = start
    while at < stop:
      piece = await concurrency.run_in_threadpool(
        os.pread, file.fileno(), min(_PIECE_BYTES, stop - at), at
      )
      if not piece:
        return  # shorter than it was: the reader sees that it is cut
      at += len(piece)
      yield piece

  return _FileResponse(file, pieces(), status, headers)


class _FileResponse(responses.StreamingResponse):
  """Closes its file when the answer has ended, or its reader has gone."""

  media_type = 'application/octet-stream'

  def __init__(self, file: BinaryIO, *args):
    super().__init__(*args)
    self._file = file

  async def __call__(self, *args) -> None:
    with self._file:
      await super().__call__(*args)


def _server(app: applications.Starlette) -> uvicorn.Server:
  return uvicorn.Server(
    uvicorn.Config(
      app,
      log_level='warning',
      lifespan='off',
      http='h11',
      ws='none',
      server_header=False,
      # Longer than readers wait between two looks at the pointer.
      timeout_keep_alive=75,
      timeout_graceful_shutdown=5,
    )
  )


def run(
  relay: relays.Relay, host: str, port: int, say: Callable[[str], None]
) -> None:
  """Serves until a signal says to end."""
  with contextlib.closing(relay), _listen(host, port) as listening:
    bound, number = listening.getsockname()[:2]
    say(f'Relaying {relay.upstream.url} at http://{bound}:{number}')
    _server(application(relay)).run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
  try:
    return socket.create_server((host, port))
  except (OSError, OverflowError) as error:
    raise ValueError(
      f'A relay cannot listen at {host}:{port} ({error}); choose another '
      '--port, or the --host of an interface of this machine.'
    ) from error


@contextlib.contextmanager
def in_thread(relay: relays.Relay, host: str, port: int) -> Iterator[str]:
  """Serves from a thread while the block runs; gives the URL."""
  with _listen(host, port) as listening:
    server = _server(application(relay))
    thread = threading.Thread(
      target=server.run, kwargs={'sockets': [listening]}, daemon=True
    )
    thread.start()
    give_up = time.monotonic() + _START_S
    while not server.started:
      if not thread.is_alive() or time.monotonic() > give_up:
        raise RuntimeError(f'the relay of {relay.upstream} did not start')
      time.sleep(0.005)
    try:
      bound, number = listening.getsockname()[:2]
      yield f'http://{bound}:{number}'
    finally:
      server.should_exit = True
      thread.join()
      relay.close()
