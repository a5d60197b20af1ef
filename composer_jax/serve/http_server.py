"""uvicorn around the application, with a drain that answers.

uvicorn closes its port at SIGTERM. This server goes on while requests are
running: new ones get 503, so that a balancer sends them elsewhere, and the
others the rest of their streams, until `drain_s` cancels them with an error.
"""

import logging
import socket
import threading
import time
from types import FrameType

import uvicorn
from starlette import types

from composer_jax.serve import service

# Time for connections to close after the drain.
_CLOSE_S = 5.0
_LOOPBACK = ('localhost', '127.0.0.1', '::1')
_log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
  """Serves until a signal, or `drain`, and until nothing runs any more."""

  def __init__(self, app: types.ASGIApp, served: service.Service):
    super().__init__(
      uvicorn.Config(
        app,
        log_level='warning',
        lifespan='off',
        # It bounds headers; uvicorn prefers other parsers if installed.
        http='h11',
        ws='none',
        server_header=False,
        timeout_graceful_shutdown=int(_CLOSE_S),
        # Bounds half-sent headers; bodies have limits of their own.
        h11_max_incomplete_event_size=64 * 1024,
      )
    )
    self._served = served
    self._asked = threading.Event()
    self._deadline = 0.0
    self._aborted = False

  def drain(self) -> None:
    """Ends the server once nothing runs; from any thread or signal handler."""
    self._asked.set()

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    del sig, frame
    # Not uvicorn's own, which raises the signal again once all is over.
    self.force_exit = self.should_exit  # The third signal.
    self.should_exit = self._asked.is_set()  # The second: ends at once.
    self.drain()

  async def on_tick(self, counter: int) -> bool:
    if await super().on_tick(counter):
      self._served.abort()
      return True
    if not self._asked.is_set():
      return False
    now = time.monotonic()
    if not self._deadline:
      self._served.begin_drain()
      self._deadline = now + self._served.options.drain_s
      _log.warning(
        'Draining %d open choices for at most %g s.',
        self._served.num_open,
        self._served.options.drain_s,
      )
    if now > self._deadline and not self._aborted:
      self._aborted = True
      self._served.abort()
    # An engine that hangs frees nothing.
    return not self._served.num_open or now > self._deadline + _CLOSE_S


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
  """Takes an address, without listening on it yet; port 0 takes a free port.

  Raises:
    ValueError: the address cannot be taken.
  """
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
