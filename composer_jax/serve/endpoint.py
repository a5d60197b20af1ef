"""An endpoint of OpenAI's form, asked until it answers or patience ends.

OpenAI's client makes the requests. They are repeated here, since the client
itself neither repeats a stream that breaks off nor keeps to a time limit, and
its threads do not know when another one was asked to wait.
"""

import dataclasses
import email.utils
import functools
import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from composer_jax.core import checks
from composer_jax.tasks.practice import conversation

_log = logging.getLogger(__name__)
_Value = TypeVar('_Value')

# Answers of a server that may take the same request later, beside 5xx.
_BUSY = (408, 409, 429)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0


@dataclasses.dataclass(kw_only=True)
class Endpoint:
  """The address of a policy; threads share it.

  Attributes:
    url: URL of the API with its version, such as http://host:8000/v1.
    model: name of the model there; '' for the only one.
    api_key: bearer token to send; '' for none.
    timeout_s: longest wait for the next bytes of an answer.
    patience_s: longest time for which a failing request is repeated; over at
      once for the others where none was answered for so long.
    requests_per_minute: most requests that are begun in a minute; 0 for any.
    clock: `time`, or a substitute with its `monotonic` and `sleep`.
  """

  url: str
  model: str = ''
  # Not shown: representations end up in logs.
  api_key: str = dataclasses.field(default='', repr=False)
  timeout_s: float = 600.0
  patience_s: float = 600.0
  requests_per_minute: float = 0.0
  clock: Any = dataclasses.field(default=time, repr=False)

  def __post_init__(self):
    if not self.url.startswith(('http://', 'https://')):
      raise ValueError(
        f'url {self.url!r} must begin with http:// or https://, such as '
        'http://localhost:8000/v1.'
      )
    checks.positive(self, 'timeout_s')
    checks.number(self, 0, 'patience_s', 'requests_per_minute')
    self._lock = threading.Lock()
    self._next_request = 0.0
    self._failing_since: float | None = None

  @functools.cached_property
  def client(self) -> Any:
    """OpenAI's client, which sends each request once."""
    try:
      import openai  # An extra.
    except ModuleNotFoundError as error:
      raise ValueError(
        "A policy behind an endpoint needs the package 'openai': pip install "
        "-e '.[judge]' in the checkout."
      ) from error
    return openai.OpenAI(
      base_url=self.url,
      # The client takes no empty one.
      api_key=self.api_key or 'none',
      timeout=self.timeout_s,
      max_retries=0,
    )

  def send(
    self, path: str, body: Mapping[str, Any] | None, method: str = 'POST'
  ) -> Any:
    """Returns the JSON that the endpoint answers; an EndpointError if none."""
    send = self.client.delete if method == 'DELETE' else self.client.post
    more = {} if body is None else {'body': body}
    return self.repeat(path, lambda: send(path, cast_to=object, **more))[0]

  def repeat(self, path: str, once: Callable[[], _Value]) -> tuple[_Value, int]:
    """Returns the value of `once`, and the number of attempts that it took.

    Args:
      once: makes one request; a ValueError stands for an answer that no
        endpoint of this form gives, as from a proxy.

    Raises:
      EndpointError: the endpoint refused, or failed until patience ended.
    """
    import openai

    first_failure = math.inf
    for attempt in itertools.count(1):
      self._await_turn()
      try:
        value = once()
      except (openai.OpenAIError, ValueError, RecursionError) as error:
        now, wait_s = self.clock.monotonic(), _wait_s(error, attempt)
        status = getattr(error, 'status_code', None)
        if is_refused := wait_s == math.inf:
          self._failing_since = None
        else:
          self._failing_since = self._failing_since or now
          first_failure = min(first_failure, self._failing_since)
        if is_refused or now + wait_s > first_failure + self.patience_s:
          raise conversation.EndpointError(
            f'{self.url}{path}: {error} (attempt {attempt})',
            code=str(getattr(error, 'code', None) or ''),
            status=status,
          ) from error
        _log.warning('%s%s: %s; waiting %.1f s', self.url, path, error, wait_s)
        if status == 429:  # For every thread.
          with self._lock:
            self._next_request = max(self._next_request, now + wait_s)
        else:
          self.clock.sleep(wait_s)
      else:
        self._failing_since = None
        return value, attempt
    raise AssertionError

  def _await_turn(self) -> None:
    """Waits until the rate and a busy server allow a request."""
    with self._lock:
      now = self.clock.monotonic()
      begin = max(now, self._next_request)
      if self.requests_per_minute:
        self._next_request = begin + 60 / self.requests_per_minute
    if begin > now:
      self.clock.sleep(begin - now)


def _wait_s(error: Exception, attempt: int) -> float:
  """Returns the wait before the next attempt; inf for a refusal."""
  response = getattr(error, 'response', None)
  if response is not None:
    status, wish = response.status_code, response.headers.get('x-should-retry')
    is_busy = status in _BUSY or status >= 500
    if wish == 'false' or not is_busy and wish != 'true':
      return math.inf
    if told_s := _told_s(response.headers):
      # Never sooner, and not all threads at once.
      return told_s * random.uniform(1.0, 1.1)
  longest_s = min(_FIRST_WAIT_S * 2.0 ** min(attempt, 30), _LONGEST_WAIT_S)
  return longest_s * random.uniform(0.5, 1.0)


def _told_s(headers: Mapping[str, str]) -> float:
  """Returns the seconds of `Retry-After`, a number or a date; else 0."""
  value = headers.get('retry-after', '')
  try:
    told_s = float(value)
  except ValueError:
    try:
      date = email.utils.parsedate_to_datetime(value)
      told_s = date.timestamp() - time.time()
    except (ValueError, OverflowError):
      return 0.0
  return told_s if 0 < told_s < math.inf else 0.0
