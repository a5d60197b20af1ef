"""Limits of a server: of every queue, every wait and every request."""

import dataclasses

from composer_jax.core import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
  """Limits of a server; those of its engine are EngineOptions.

  Attributes:
    max_queue: choices that may wait beyond the engine's slots; more are
      refused with 429.
    max_choices: largest `n` of one request.
    max_body_bytes: largest body of a request; larger ones are refused with 413.
    default_max_tokens: tokens to sample where a request does not say how many.
    max_connections: connections at a time; more are refused with 503.
    head_timeout_s: time from the opening of a connection, or from the first
      byte of a later request, until its headers must have come.
    request_timeout_s: time of one request, from its first byte to its last.
    drain_s: time after SIGTERM until running requests are cancelled.
    session_idle_s: time after which an idle session is closed.
    max_sessions: sessions kept between requests of /v1/tokens; beyond it the
      one that has been idle longest is closed.
    stall_s: time without a step of a working engine until /health says so.
    poll_s: time between two looks at a bundle store.
  """

  max_queue: int
  max_choices: int
  max_body_bytes: int
  default_max_tokens: int
  max_connections: int
  head_timeout_s: float
  request_timeout_s: float
  drain_s: float
  session_idle_s: float
  max_sessions: int
  stall_s: float
  poll_s: float

  def __post_init__(self):
    checks.at_least(self, 0, 'max_queue', 'max_sessions')
    checks.at_least(
      self,
      1,
      'max_choices',
      'max_body_bytes',
      'default_max_tokens',
      'max_connections',
    )
    checks.number(self, 0, 'drain_s')
    checks.positive(
      self,
      'head_timeout_s',
      'request_timeout_s',
      'session_idle_s',
      'stall_s',
      'poll_s',
    )
