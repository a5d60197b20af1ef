"""One request and its answer, ended by whatever comes first.

An endpoint is a coroutine that gets an `Exchange`. It is cancelled when the
client leaves or the time is up, and an error of its own becomes an object of
OpenAI's shape: as the answer, or as the last event of a stream that has begun.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any
from urllib import parse

from starlette import types

from composer_jax.serve.api import errors

# For the last words to a client that may not be reading.
_LAST_WORDS_S = 1.0
# Where a client left before an answer; nginx' number, only for the metrics.
LEFT = 499


class Exchange:
  """A request that is being answered.

  Attributes:
    status: of the answer; 0 until it has begun.
    path_params: of the route.
  """

  def __init__(
    self,
    scope: types.Scope,
    receive: types.Receive,
    send: types.Send,
    max_body_bytes: int,
  ):
    self.status = 0
    self.path_params: Mapping[str, Any] = scope.get('path_params', {})
    self._headers = {k.lower(): v for k, v in scope['headers']}
    self._receive, self._send = receive, send
    self._max_body_bytes = max_body_bytes
    self._is_stream = False

  def authorize(self, token: str) -> None:
    """Raises errors.ApiError unless the request carries the token."""
    given = self._headers.get(b'authorization', b'')
    wanted = f'Bearer {token}'.encode()
    # In constant time: how far a guess is right must not be measurable.
    if token and not hmac.compare_digest(given, wanted):
      raise errors.ApiError(
        401,
        'This server wants its token: send "Authorization: Bearer TOKEN" (the '
        "api_key of OpenAI's clients).",
        code='invalid_api_key',
      )

  def check_host(self, hosts: Collection[str]) -> None:
    """Raises errors.ApiError unless the server was meant by its name.

    A page of the web may have its own name resolved to this machine, and is
    then of one origin with this server; the name is all that tells.
    """
    given = self._headers.get(b'host')
    if given is None:
      return  # No browser leaves it out.
    text = given.decode('latin-1')
    try:
      name = parse.urlsplit(f'//{text}').hostname
    except ValueError:
      name = None
    if name not in hosts:
      raise errors.ApiError(
        403,
        f'The Host {text!r} is not one of {", ".join(hosts)}, under which a '
        'server without a token answers. Use one of them, or start the server '
        'with --token_file.',
        code='host_not_allowed',
      )

  async def json(self) -> Any:
    """Returns the body; it may be called once."""
    kind = self._headers.get(b'content-type', b'').decode('latin-1')
    if kind.partition(';')[0].strip().lower() != 'application/json':
      # Of other types, any page in a browser on this machine could send one.
      raise errors.ApiError(
        415,
        f'The Content-Type is {kind!r} and must be application/json (curl: -H '
        '"content-type: application/json").',
        code='unsupported_media_type',
      )
    declared = self._headers.get(b'content-length', b'0')
    data = bytearray()
    if declared.isdigit() and int(declared) > self._max_body_bytes:
      raise self._too_large(int(declared))
    while True:
      message = await self._receive()
      if message['type'] == 'http.disconnect':
        raise ConnectionResetError('the client left while it sent its request')
      data += message.get('body', b'')
      if len(data) > self._max_body_bytes:
        raise self._too_large(len(data))
      if not message.get('more_body'):
        break
    try:
      return json.loads(bytes(data), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
      raise errors.invalid(
        f'The body is not JSON ({error}).', None, 'invalid_json'
      ) from error

  def _too_large(self, size: int) -> errors.ApiError:
    return errors.ApiError(
      413,
      f'A body of {size} bytes or more exceeds the {self._max_body_bytes} that '
      'this server takes.',
      code='request_too_large',
    )

  async def until_left(self) -> None:
    """Returns when the client is gone; the body must have been read."""
    while (await self._receive())['type'] != 'http.disconnect':
      pass

  async def answer(
    self,
    body: Any,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
  ) -> None:
    # ASCII: what clients sent may hold lone surrogates, and comes back.
    data = json.dumps(body, allow_nan=False).encode()
    await self.answer_bytes(data, 'application/json', status, headers)

  async def answer_bytes(
    self,
    data: bytes,
    content_type: str,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
  ) -> None:
    fields = {'content-length': str(len(data)), **(headers or {})}
    await self._start(status, content_type, fields)
    await self._send({'type': 'http.response.body', 'body': data})

  async def begin_events(self) -> None:
    """Begins a stream of server-sent events."""
    self._is_stream = True
    fields = {'cache-control': 'no-store', 'x-accel-buffering': 'no'}
    await self._start(200, 'text/event-stream; charset=utf-8', fields)

  async def event(self, body: Any) -> None:
    data = json.dumps(body, allow_nan=False)
    await self._event(data, more=True)

  async def end_events(self) -> None:
    await self._event('[DONE]', more=False)

  async def fail(self, error: errors.ApiError) -> None:
    """Tells of an error, wherever the answer stands."""
    if not self.status:
      await self.answer(error.body(), error.status, error.headers())
    elif self._is_stream:
      await self._event(json.dumps(error.body()), more=False)

  async def _event(self, data: str, more: bool) -> None:
    body = f'data: {data}\n\n'.encode()
    await self._send(
      {'type': 'http.response.body', 'body': body, 'more_body': more}
    )

  async def _start(
    self, status: int, content_type: str, headers: Mapping[str, str]
  ) -> None:
    self.status = status
    fields = {'content-type': content_type, **headers}
    await self._send(
      {
        'type': 'http.response.start',
        'status': status,
        'headers': [(k.encode(), v.encode()) for k, v in fields.items()],
      }
    )


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is no value of JSON')


class HttpRoute:
  """An ASGI application of one route."""

  def __init__(
    self,
    respond: Callable[[Exchange, Any], Awaitable[None]],
    *,
    route: str,
    timeout_s: float,
    max_body_bytes: int,
    token: str,
    hosts: Collection[str] | None,
    reads: bool,
    count: Callable[[str, int], None],
  ):
    """Wraps a coroutine function.

    Args:
      respond: (exchange, body) -> None, answers the request.
      route: for the metrics.
      timeout_s: for all of it.
      max_body_bytes: of the request.
      token: that a request must carry; '' for none.
      hosts: names that a request may mean the server by; None for any.
      reads: whether there is a body.
      count: (route, status) -> None, called once at the end.
    """
    self._respond, self._route = respond, route
    self._timeout_s, self._max_body_bytes = timeout_s, max_body_bytes
    self._token, self._hosts = token, hosts
    self._reads, self._count = reads, count

  async def __call__(
    self, scope: types.Scope, receive: types.Receive, send: types.Send
  ) -> None:
    exchange = Exchange(scope, receive, send, self._max_body_bytes)
    status = LEFT
    try:
      await self._answer(exchange)
      status = exchange.status or LEFT
    except errors.ApiError as error:
      status = error.status
      await self._last_words(exchange, error)
    except ConnectionResetError:
      pass  # The client left; it is counted as such.
    except Exception:
      # A bug: told to the log whole, and to the client by a number only.
      number = secrets.token_hex(6)
      logging.exception('Request %s to %s failed:', number, self._route)
      text = f'The server failed; its log tells why under {number}.'
      error = errors.ApiError(500, text, code='internal_error')
      status = error.status
      await self._last_words(exchange, error)
    finally:
      self._count(self._route, status)

  async def _answer(self, exchange: Exchange) -> None:
    if self._hosts is not None:
      exchange.check_host(self._hosts)
    exchange.authorize(self._token)
    try:
      async with asyncio.timeout(self._timeout_s):
        body = await exchange.json() if self._reads else None
        answering = asyncio.ensure_future(self._respond(exchange, body))
        leaving = asyncio.ensure_future(exchange.until_left())
        tasks = (answering, leaving)
        try:
          await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
          for task in tasks:
            if not task.done():
              task.cancel()
          await asyncio.gather(*tasks, return_exceptions=True)
        if answering.cancelled():
          raise ConnectionResetError('the client left before its answer')
        answering.result()
    except TimeoutError as error:
      raise errors.timed_out(self._timeout_s) from error

  async def _last_words(
    self, exchange: Exchange, error: errors.ApiError
  ) -> None:
    with contextlib.suppress(OSError, TimeoutError):
      async with asyncio.timeout(_LAST_WORDS_S):
        await exchange.fail(error)
