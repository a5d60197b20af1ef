"""One request and its answer, ended by whatever comes first.

An endpoint is a coroutine that gets an `Exchange`. It is cancelled when the
client leaves or the time is up, and an error of its own becomes an object in
OpenAI's form: as the answer, or as the last event of a stream that has begun.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any
from urllib import parse

from starlette import requests, responses, types

from composer_jax.serve import options as options_lib
from composer_jax.serve.api import errors

# Time to send an error to a client that may not be reading.
_ERROR_S = 1.0
# Status of a client that left before an answer, as nginx counts it.
LEFT = 499


class Exchange:
  """A request being answered; its status is 0 until the answer has begun."""

  def __init__(
    self, request: requests.Request, send: types.Send, max_body_bytes: int
  ):
    self.status, self.path_params = 0, request.path_params
    self._request, self._send = request, send
    self._max_body_bytes = max_body_bytes
    self._is_stream = False

  def authorize(self, token: str) -> None:
    """Raises errors.ApiError unless the request carries the token."""
    given = self._request.headers.get('authorization', '').encode('latin-1')
    # In constant time: how far a guess is right must not be measurable.
    if token and not hmac.compare_digest(given, f'Bearer {token}'.encode()):
      raise errors.ApiError(
        401,
        'This server wants its token: send "Authorization: Bearer TOKEN" (the '
        "api_key of OpenAI's clients).",
        code='invalid_api_key',
      )

  def check_host(self, hosts: Collection[str]) -> None:
    """Raises errors.ApiError unless the Host header is one of `hosts`.

    A web page may have its own name resolved to this machine, and then has the
    same origin as this server; only the name in Host tells them apart.
    """
    text = self._request.headers.get('host')
    if text is None:
      return  # No browser leaves it out.
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
    kind = self._request.headers.get('content-type', '')
    if kind.partition(';')[0].strip().lower() != 'application/json':
      # A page in a browser on this machine can send other types unasked.
      raise errors.ApiError(
        415,
        f'The Content-Type is {kind!r} and must be application/json (curl: -H '
        '"content-type: application/json").',
        code='unsupported_media_type',
      )
    declared = self._request.headers.get('content-length', '0')
    self._check_size(int(declared) if declared.isdecimal() else 0)
    data = bytearray()
    async for part in self._request.stream():
      data += part
      self._check_size(len(data))
    try:
      return json.loads(bytes(data), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
      raise errors.invalid(
        f'The body is not JSON ({error}).', None, 'invalid_json'
      ) from error

  def _check_size(self, size: int) -> None:
    if size > self._max_body_bytes:
      raise errors.ApiError(
        413,
        f'A body of {size} bytes or more exceeds the {self._max_body_bytes} '
        'that this server takes.',
        code='request_too_large',
      )

  async def until_left(self) -> None:
    """Returns when the client is gone; the body must have been read."""
    while (await self._request.receive())['type'] != 'http.disconnect':
      pass

  async def answer(
    self,
    body: Any,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    content_type: str = 'application/json',
  ) -> None:
    """Sends the whole answer: bytes as they are, anything else as JSON."""
    self.status = status
    if not isinstance(body, bytes):
      # ASCII: text of clients may hold lone surrogates, which UTF-8 has not.
      body = json.dumps(body, allow_nan=False)
    response = responses.Response(body, status, headers, content_type)
    await response(self._request.scope, self._request.receive, self._send)

  async def begin_events(self) -> None:
    """Begins a stream of server-sent events."""
    self.status, self._is_stream = 200, True
    fields = {
      'content-type': 'text/event-stream; charset=utf-8',
      'cache-control': 'no-store',
      'x-accel-buffering': 'no',
    }
    await self._send(
      {
        'type': 'http.response.start',
        'status': 200,
        'headers': [(k.encode(), v.encode()) for k, v in fields.items()],
      }
    )

  async def event(
    self, body: Any, name: str = '', *, more: bool = True
  ) -> None:
    await self._event(json.dumps(body, allow_nan=False), more, name)

  async def end_events(self) -> None:
    await self._event('[DONE]', more=False)

  async def fail(self, error: errors.ApiError) -> None:
    """Sends an error as the answer, or as the last event of a stream."""
    if not self.status:
      await self.answer(error.body(), error.status, error.headers())
    elif self._is_stream:
      await self._event(json.dumps(error.body()), more=False)

  async def _event(self, data: str, more: bool, name: str = '') -> None:
    head = f'event: {name}\n' if name else ''
    body = f'{head}data: {data}\n\n'.encode()
    await self._send(
      {'type': 'http.response.body', 'body': body, 'more_body': more}
    )


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is no value of JSON')


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpRoute:
  """An ASGI application of one route.

  Attributes:
    respond: (exchange, body) -> None, answers the request.
    route: name of the route in metrics.
    token: bearer token that a request must carry; '' asks for none.
    hosts: Host names that a request may use; None allows any.
    reads: true if the request has a body.
    count: (route, status) -> None, called once at the end.
  """

  respond: Callable[[Exchange, Any], Awaitable[None]]
  route: str
  options: options_lib.ServeOptions
  token: str
  hosts: Collection[str] | None
  reads: bool
  count: Callable[[str, int], None]

  async def __call__(
    self, scope: types.Scope, receive: types.Receive, send: types.Send
  ) -> None:
    request = requests.Request(scope, receive)
    exchange = Exchange(request, send, self.options.max_body_bytes)
    status, failure = LEFT, None
    try:
      await self._answer(exchange)
      status = exchange.status or LEFT
    except errors.ApiError as error:
      failure = error
    except (ConnectionResetError, requests.ClientDisconnect):
      pass  # The client left; it is counted as such.
    except asyncio.CancelledError:
      failure = errors.draining()  # By uvicorn, whose time to drain is up.
    except Exception:
      # A bug: the log has the traceback, the client a number to find it by.
      number = secrets.token_hex(6)
      logging.exception('Request %s to %s failed:', number, self.route)
      text = f'The server failed; its log tells why under {number}.'
      failure = errors.ApiError(500, text, code='internal_error')
    finally:
      self.count(self.route, failure.status if failure else status)
    if failure:
      with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_ERROR_S):
          await exchange.fail(failure)

  async def _answer(self, exchange: Exchange) -> None:
    if self.hosts is not None:
      exchange.check_host(self.hosts)
    exchange.authorize(self.token)
    limit_s = self.options.request_timeout_s
    try:
      async with asyncio.timeout(limit_s):
        body = await exchange.json() if self.reads else None
        answering = asyncio.ensure_future(self.respond(exchange, body))
        leaving = asyncio.ensure_future(exchange.until_left())
        tasks = (answering, leaving)
        try:
          await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
          for task in tasks:
            task.cancel()
          await asyncio.gather(*tasks, return_exceptions=True)
        if answering.cancelled():
          raise ConnectionResetError('the client left before its answer')
        answering.result()
    except TimeoutError as error:
      raise errors.ApiError(
        504,
        f'The request took longer than the {limit_s:g} s that this server '
        'allows, queueing included; ask for fewer tokens or try again when it '
        'is less busy.',
        code='timeout',
      ) from error
