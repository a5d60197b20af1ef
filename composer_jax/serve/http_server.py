"""uvicorn around the application, and the addresses that it may have.

At SIGTERM uvicorn closes its port and lets running requests end, until
`drain_s` cancels them.
"""

import logging
import math
import socket

import uvicorn
from starlette import types

_LOOPBACK = ('localhost', '127.0.0.1', '::1')
_log = logging.getLogger(__name__)


def server_of(app: types.ASGIApp, drain_s: float) -> uvicorn.Server:
  return uvicorn.Server(
    uvicorn.Config(
      app,
      log_level='warning',
      lifespan='off',
      # It bounds headers; uvicorn prefers other parsers if installed.
      http='h11',
      ws='none',
      server_header=False,
      timeout_graceful_shutdown=math.ceil(drain_s),
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
