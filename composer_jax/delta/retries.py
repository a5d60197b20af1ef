"""Tries a request again while what stopped it may pass.

Only what time can cure is tried again: refused and lost connections, timeouts,
and the statuses with which servers ask for patience. A missing object, a
missing permission or a full disk is the same in a second, and is told at once.
"""

import dataclasses
import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar('T')

# Request timeout, too early, too many requests, and the server's own trouble.
_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
# By name, as their packages are extras that may be absent.
_TRANSIENT = frozenset(
  {
    'aiohttp.ClientConnectionError',
    'aiohttp.ClientPayloadError',
    'botocore.ConnectionError',
    'botocore.HTTPClientError',
    'botocore.IncompleteReadError',
    'botocore.ResponseParserError',
  }
)
_PERMANENT = frozenset({'aiohttp.ClientSSLError', 'botocore.SSLError'})
_FOREIGN = ('aiohttp', 'botocore', 'gcsfs', 'google', 'requests')
# Two writers at one key: S3 asks the loser of that race to send again.
_AGAIN = frozenset({'ConditionalRequestConflict', 'OperationAborted'})
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
  """How often and how patiently.

  Attributes:
    attempts: of one request, the first included.
    base_s: before the second attempt; it doubles for each further one.
    max_s: the longest wait.
    jitter: share of a wait that is drawn at random, so that a fleet which
      failed together does not return together.
  """

  attempts: int = 6
  base_s: float = 0.25
  max_s: float = 20.0
  jitter: float = 0.5

  def __post_init__(self):
    if self.attempts < 1:
      raise ValueError(f'attempts ({self.attempts}) must be at least 1.')
    if not 0 <= self.base_s <= self.max_s:
      raise ValueError(
        f'base_s ({self.base_s}) must lie between 0 and max_s ({self.max_s}).'
      )
    if not 0 <= self.jitter <= 1:
      raise ValueError(f'jitter ({self.jitter}) must lie between 0 and 1.')

  def wait_s(self, failed: int) -> float:
    """Seconds to wait after that many failed attempts."""
    longest = min(self.max_s, self.base_s * 2 ** min(failed - 1, 32))
    return longest * (1 - self.jitter * random.random())


class GaveUp(OSError):
  """What time might have cured, and did not within the attempts allowed."""


class Cancelled(OSError):
  """Someone ended the wait between two attempts."""


def until(stopped: threading.Event) -> Callable[[float], None]:
  """A `sleep` that ends, by raising `Cancelled`, when the event is set."""

  def sleep(seconds: float) -> None:
    if stopped.wait(seconds):
      raise Cancelled('stopped while waiting to try again')

  return sleep


def _chain(error: BaseException) -> Iterator[BaseException]:
  # Clients that translate errors keep the server's own as the cause.
  found: BaseException | None = error
  while found is not None:
    yield found
    found = found.__cause__


def _names(error: BaseException) -> set[str]:
  return {
    f'{kind.__module__.split(".")[0]}.{kind.__name__}'
    for kind in type(error).__mro__
  }


def _status(error: BaseException) -> int | None:
  response = getattr(error, 'response', None)
  if isinstance(response, dict):  # botocore
    value = response.get('ResponseMetadata', {}).get('HTTPStatusCode')
  else:  # aiohttp; gcsfs
    name = 'status' if hasattr(error, 'status') else 'code'
    value = getattr(error, name, None)
  return value if isinstance(value, int) else None


def status(error: BaseException) -> int | None:
  """Status of the server's answer, None where it did not answer."""
  return next((s for s in map(_status, _chain(error)) if s is not None), None)


def code(error: BaseException) -> str | None:
  """The word by which an S3 server names its error."""
  for found in _chain(error):
    response = getattr(found, 'response', None)
    if isinstance(response, dict):
      return response.get('Error', {}).get('Code')
  return None


def is_transient(error: BaseException) -> bool:
  """Whether the same request may well succeed a little later."""
  if code(error) in _AGAIN:
    return True
  # The outermost that is telling: aiohttp gives a status, and a wrong one, to
  # what lies below an answer that was cut off.
  for found in _chain(error):
    names = _names(found)
    if names & _PERMANENT:
      return False
    if isinstance(found, ConnectionError | TimeoutError) or names & _TRANSIENT:
      return True
    answered = _status(found)
    if answered is not None:
      return answered in _STATUSES
  return False


def _named(error: Exception, doing: str, url: str) -> Exception:
  """The same trouble as a built-in error that says where and what to do."""
  answered = status(error)
  if code(error) == 'NoSuchBucket':
    # Not a FileNotFoundError, which would read as "nothing published yet".
    return ValueError(
      f'{url}: there is no such bucket; make it, or correct its name.'
    )
  if isinstance(error, FileNotFoundError) or answered == 404:
    return FileNotFoundError(errno.ENOENT, 'the store does not hold it', url)
  if isinstance(error, PermissionError) or answered in (401, 403):
    return PermissionError(
      errno.EACCES,
      f'{doing} is not allowed ({error}); give this process credentials '
      'that may, or check the name of the store',
      url,
    )
  return OSError(
    getattr(error, 'errno', None) or errno.EIO, f'{doing} failed: {error}', url
  )


def call(
  operation: Callable[[], T],
  *,
  doing: str,
  url: str,
  policy: Policy,
  sleep: Callable[[float], None] = time.sleep,
) -> T:
  """Runs one request, again if need be.

  Args:
    operation: must be safe to repeat.
    doing: for messages: 'reading', 'writing'.
    url: what it is done to.
    policy: bounds of the patience.
    sleep: waits between attempts; what it raises ends them.

  Raises:
    GaveUp: it failed as often as the policy allows.
    OSError: for good, naming the url; a FileNotFoundError or PermissionError
      where it is one.
  """
  began = time.monotonic()
  for attempt in range(1, policy.attempts + 1):
    try:
      return operation()
    except Exception as error:
      if not is_transient(error):
        foreign = any(name.split('.')[0] in _FOREIGN for name in _names(error))
        # A cause that is foreign was translated without the url.
        if foreign or (isinstance(error, OSError) and error.__cause__):
          raise _named(error, doing, url) from error
        raise
      text = str(error) or type(error).__name__
      if attempt == policy.attempts:
        spent_s = time.monotonic() - began
        raise GaveUp(
          errno.ETIMEDOUT,
          f'{doing} failed {attempt} times in {spent_s:.1f} s, at last with: '
          f'{text}. Check that the server runs and can be reached from here, '
          'then start again: what is complete does not move twice',
          url,
        ) from error
      wait_s = policy.wait_s(attempt)
      _log.warning(
        '%s: %s failed (attempt %d of %d): %s; again in %.2f s',
        url,
        doing,
        attempt,
        policy.attempts,
        text,
        wait_s,
      )
    sleep(wait_s)
  raise AssertionError('unreachable')
