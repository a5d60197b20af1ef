"""Requests that one client waits for, and the queue that brings it tokens."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.core import records
from composer_jax.rollout import sessions
from composer_jax.serve import recording
from composer_jax.serve.api import errors

# None says that the engine took all requests.
Event = sessions.SampledTokens | records.Completion | errors.ApiError | None


class SampleJob:
  """Requests that one client waits for; the end of the context cancels them."""

  def __init__(
    self,
    requests: Sequence[records.SampleRequest],
    leave: Callable[['SampleJob', Sequence[int]], None],
    *,
    guides: Sequence[sessions.Guide | None] = (),
    keep: bool = False,
    session_length: int | None = None,
    on_end: recording.OnEnd | None = None,
  ):
    """Makes a SampleJob in the event loop that will read it.

    Args:
      requests: requests, each of a session of its own unless that is kept.
      leave: (job, indices) -> None, frees what these requests still hold; it
        may be called again.
      guides: the guide of each request, or None; () for none at all.
      keep: true leaves the session open for a later request.
      session_length: tokens that the client expects in its session; None
        without one.
      on_end: is told of each answer that ended; None for nobody.
    """
    self.requests = tuple(requests)
    self.guides = tuple(guides) or (None,) * len(self.requests)
    self.keep, self.session_length = keep, session_length
    self.on_end = on_end
    self.opened = time.monotonic()
    self.unfinished = set(range(len(requests)))
    self._leave = leave
    self._loop = asyncio.get_running_loop()
    self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

  def put(self, index: int, event: Event) -> None:
    """Hands an event to the event loop; called in the engine's thread."""
    # RuntimeError: the loop has ended, so nothing reads any more.
    with contextlib.suppress(RuntimeError):
      self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

  async def __aenter__(self) -> 'SampleJob':
    """Waits until the engine has taken or refused all requests."""
    try:
      await self.next()
    except BaseException:
      self.leave(*range(len(self.requests)))
      raise
    return self

  async def __aexit__(self, *_: Any) -> None:
    self.leave(*range(len(self.requests)))

  def leave(self, *indices: int) -> None:
    """Frees what these requests hold."""
    self._leave(self, indices)

  async def next(
    self,
  ) -> tuple[int, sessions.SampledTokens | records.Completion]:
    """Returns a request's index, and its next tokens or end; or an ApiError."""
    index, event = await self._events.get()
    if isinstance(event, errors.ApiError):
      raise event
    return index, event  # pyrefly: ignore
