"""Errors in the form of OpenAI's API: a status, and one JSON object.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from typing import Any

_TYPES = {401: 'authentication_error', 429: 'rate_limit_error'}
# The server is only busy: a client may try again after a second.
_RETRY = {'retry-after': '1'}
_NO_RETRY = {'x-should-retry': 'false'}
_HEADERS = {
  401: {'www-authenticate': 'Bearer'},
  429: _RETRY,
  503: _RETRY,
  # OpenAI's clients would send the same request twice more.
  409: _NO_RETRY,
  504: _NO_RETRY,
}


class ApiError(Exception):
  """Ends a request with an error object; its message is for the client."""

  def __init__(
    self,
    status: int,
    message: str,
    *,
    code: str,
    param: str | None = None,
    details: dict[str, Any] | None = None,
  ):
    super().__init__(message)
    self.status, self.code, self.param = status, code, param
    self.details = details or {}

  def body(self) -> dict[str, Any]:
    default = 'invalid_request_error' if self.status < 500 else 'server_error'
    error = {
      'message': str(self),
      'type': _TYPES.get(self.status, default),
      'param': self.param,
      'code': self.code,
    }
    return {'error': {**error, **self.details}}

  def headers(self) -> dict[str, str]:
    return _HEADERS.get(self.status, {})


def invalid(
  message: str, param: str | None, code: str = 'invalid_value'
) -> ApiError:
  return ApiError(400, message, code=code, param=param)


def fields_of(body: Any) -> dict[str, Any]:
  """Returns a copy of the fields of a body that is a JSON object."""
  if not isinstance(body, dict):
    raise invalid('The body must be a JSON object.', None)
  return dict(body)


def draining() -> ApiError:
  return ApiError(
    503,
    'The server is shutting down and takes no new requests; send this one to '
    'another.',
    code='draining',
  )


def engine_failed(reason: object) -> ApiError:
  return ApiError(
    500,
    f'The engine of this server failed ({reason}); restart the server.',
    code='engine_failed',
  )
