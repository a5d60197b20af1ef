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


def queue_full(num_open: int, asked: int, most: int, waiting: int) -> ApiError:
  return ApiError(
    429,
    f'{num_open} choices are open and this request asks for {asked}; the '
    f'server takes {most} ({waiting} of them waiting). Try again later.',
    code='queue_full',
  )


def session_busy() -> ApiError:
  return ApiError(
    409,
    'The session has a request under way; wait for its answer.',
    code='session_busy',
    param='session',
  )


def session_mismatch(said: int, held: int) -> ApiError:
  return ApiError(
    409,
    f'The session holds {held} tokens here and session_length says {said}; it '
    'may have been closed (idle sessions are). Send the whole context with '
    'session_length 0 under another name.',
    code='session_mismatch',
    param='session_length',
    details={'session_length': held},
  )


def rolled_back(version: int, older: int) -> ApiError:
  return ApiError(
    503,
    f'An operator rolled the policy back from version {version} to {older}, '
    'which ends every session; send the whole context again.',
    code='rolled_back',
    details={'policy_version': older},
  )


def not_served(version: int, served: int) -> ApiError:
  return ApiError(
    409,
    f'Policy version {served} is served, and not {version}, which was to be '
    'left.',
    code='policy_not_served',
    param='version',
    details={'policy_version': served},
  )


def no_rollback(reason: str) -> ApiError:
  return ApiError(409, reason, code='no_rollback', param='version')


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
