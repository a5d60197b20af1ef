"""What bounds a server: every queue, every wait and every request."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
  """Limits of a server; those of its engine are EngineOptions.

  Attributes:
    max_queue: choices that may wait beyond the engine's slots; more are
      refused with 429.
    max_choices: of one request (`n`).
    max_body_bytes: of one request; more are refused with 413.
    default_max_tokens: sampled where a request does not say how many.
    request_timeout_s: of one request, from its first byte to its last.
    drain_s: after SIGTERM, until running requests are cancelled.
    session_idle_s: after which a kept session is closed.
    max_sessions: kept between requests of /v1/tokens; beyond it the one that
      has been idle longest is closed.
    stall_s: without a step of a working engine until /health says so.
    poll_s: between two looks at a bundle store.
  """

  max_queue: int
  max_choices: int
  max_body_bytes: int
  default_max_tokens: int
  request_timeout_s: float
  drain_s: float
  session_idle_s: float
  max_sessions: int
  stall_s: float
  poll_s: float

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      least = 0 if field.name in ('max_queue', 'max_sessions', 'drain_s') else 1
      is_number = isinstance(value, int | float) and value == value
      if field.type is int and (
        not isinstance(value, int) or isinstance(value, bool) or value < least
      ):
        raise ValueError(
          f'ServeOptions.{field.name} must be an integer of at least {least}, '
          f'not {value!r}.'
        )
      if not is_number or value < 0 or (value == 0 and least):
        raise ValueError(
          f'ServeOptions.{field.name} must be a positive number, not {value!r}.'
        )
