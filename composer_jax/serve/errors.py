"""Errors as OpenAI's API tells them: a status, and one JSON object.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from typing import Any

# Seconds after which a client may try again where the server is only busy.
_RETRY_S = 1


class ApiError(Exception):
  """Ends a request; the message is for whoever sent it.

  Attributes:
    status: of HTTP.
    param: the parameter at fault, None where there is none.
    code: a word for programs.
    details: further fields of the error object.
  """

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
    error = {
      'message': str(self),
      'type': _type(self.status),
      'param': self.param,
      'code': self.code,
    }
    return {'error': {**error, **self.details}}

  def headers(self) -> dict[str, str]:
    if self.status == 401:
      return {'www-authenticate': 'Bearer'}
    if self.status in (429, 503):
      return {'retry-after': str(_RETRY_S)}
    if self.status == 504:
      # OpenAI's clients would ask for the same twice more.
      return {'x-should-retry': 'false'}
    return {}


def _type(status: int) -> str:
  if status == 401:
    return 'authentication_error'
  if status == 429:
    return 'rate_limit_error'
  return 'invalid_request_error' if status < 500 else 'server_error'


def invalid(
  message: str, param: str | None, code: str = 'invalid_value'
) -> ApiError:
  return ApiError(400, message, code=code, param=param)


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


def timed_out(seconds: float) -> ApiError:
  return ApiError(
    504,
    f'The request took longer than the {seconds:g} s that this server allows, '
    'queueing included; ask for fewer tokens or try again when it is less '
    'busy.',
    code='timeout',
  )
