"""uvicorn around the application, its connections and its addresses.

A connection that sends no whole head of a request in time is closed, however
slowly its bytes come, and beyond a number of connections new ones are refused.
At SIGTERM uvicorn closes its port and lets running requests end, until
`drain_s` cancels them.
"""

import asyncio
import logging
import math
import socket
from typing import Any

import uvicorn
from starlette import types
from uvicorn.protocols.http import h11_impl

from composer_jax.serve import options as options_lib

_LOOPBACK = ('localhost', '127.0.0.1', '::1')
_log = logging.getLogger(__name__)


_FULL = (
  b'HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n'
  b'retry-after: 1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s'
)
_FULL_BODY = (
  b'{"error": {"message": "This server has as many connections as it takes; '
  b'try again later, and reuse connections.", "type": "server_error", '
  b'"param": null, "code": "too_many_connections"}}'
)


class BoundedConnection(h11_impl.H11Protocol):
  """A connection with a time limit on the head of every request."""

  def __init__(
    self,
    *args: Any,
    limits: options_lib.ServeOptions,
    **kwargs: Any,
  ):
    super().__init__(*args, **kwargs)
    self._limits = limits
    self._late: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    if len(self.connections) > self._limits.max_connections:
      transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
      transport.close()
    else:
      self._watch()

  def connection_lost(self, exc: Exception | None) -> None:
    super().connection_lost(exc)
    self._unwatch()

  def handle_events(self) -> None:
    super().handle_events()
    # Between requests uvicorn waits for the first byte, and we for the last.
    if self.cycle is not None and not self.cycle.response_complete:
      self._unwatch()
    elif self._late is None and not self.transport.is_closing():
      self._watch()

  def _watch(self) -> None:
    loop = asyncio.get_running_loop()
    self._late = loop.call_later(self._limits.head_timeout_s, self._close)

  def _unwatch(self) -> None:
    if self._late is not None:
      self._late.cancel()
      self._late = None

  def _close(self) -> None:
    self._late = None
    self.timeout_keep_alive_handler()


def server_of(
  app: types.ASGIApp, limits: options_lib.ServeOptions
) -> uvicorn.Server:
  class Connection(BoundedConnection):
    """Has the limits of this server; uvicorn makes it of a class alone."""

    def __init__(self, *args: Any, **kwargs: Any):
      super().__init__(*args, limits=limits, **kwargs)

  return uvicorn.Server(
    uvicorn.Config(
      app,
      log_level='warning',
      lifespan='off',
      # Of h11, which bounds heads; uvicorn prefers other parsers if installed.
      http=Connection,
      ws='none',
      server_header=False,
      timeout_graceful_shutdown=math.ceil(limits.drain_s),
      # Bounds half-sent headers; bodies have limits of their own.
      h11_max_incomplete_event_size=64 * 1024,
    )
  )


def hosts_of(host: str, token: str) -> tuple[str, ...] | None:
  """Returns the Host names that requests may use; None allows any.

  A server for this machine alone that wants no token must not answer the web
  pages that a browser on this machine shows.
  """
  return _LOOPBACK if host in _LOOPBACK and not token else None


def url_of(sock: socket.socket) -> str:
  host, port = sock.getsockname()[:2]
  return f'http://{f"[{host}]" if ":" in host else host}:{port}'


def bind(host: str, port: int, token: str) -> socket.socket:
  """Takes an address without listening yet; a ValueError if it is taken."""
  if host not in _LOOPBACK and not token:
    _log.warning(
      'Listening on %s without a token: anyone who reaches this port can use '
      'the model. Give --token_file, or leave --host at 127.0.0.1.',
      host,
    )
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  sock = socket.socket(family, socket.SOCK_STREAM)
  try:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
  except (OSError, OverflowError) as error:
    sock.close()
    reason = getattr(error, 'strerror', None) or error
    raise ValueError(
      f'Cannot listen on {host}:{port} ({reason}); choose another --host or '
      '--port, or port 0 for a free one.'
    ) from error
  return sock
