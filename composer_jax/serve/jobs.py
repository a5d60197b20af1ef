"""Requests that one client waits for, and how their tokens reach it."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.core import records
from composer_jax.rollout import sessions
from composer_jax.serve.api import errors

# None: the engine took all requests.
Event = sessions.SampledTokens | records.Completion | errors.ApiError | None


class SampleJob:
  """Requests that one client waits for together; an async context manager.

  Leaving it cancels what is unfinished, for whatever reason it is left.
  """

  def __init__(
    self,
    requests: Sequence[records.SampleRequest],
    leave: Callable[['SampleJob', Sequence[int]], None],
    *,
    keep: bool,
    session_length: int | None,
  ):
    """Makes a SampleJob in the event loop that will read it.

    Args:
      requests: of sessions of their own, but for a kept one.
      leave: (job, indices) -> None, frees what these requests still hold;
        harmless if that is nothing.
      keep: leaves the session open for a later request.
      session_length: tokens that the client takes its session to hold; None
        where there is none.
    """
    self.requests = tuple(requests)
    self.keep, self.session_length = keep, session_length
    self.opened = time.monotonic()
    self.unfinished = set(range(len(requests)))
    self._leave = leave
    self._loop = asyncio.get_running_loop()
    self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

  def put(self, index: int, event: Event) -> None:
    """Called in the engine's thread: hands an event to the event loop."""
    # RuntimeError: the loop has ended, and with it whoever would read.
    with contextlib.suppress(RuntimeError):
      self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

  async def __aenter__(self) -> 'SampleJob':
    """Waits until the engine has taken or refused all requests."""
    try:
      await self.next()
    except BaseException:
      self._leave(self, range(len(self.requests)))
      raise
    return self

  async def __aexit__(self, *_: Any) -> None:
    self._leave(self, range(len(self.requests)))

  def leave(self, index: int) -> None:
    """Frees what one of the requests holds."""
    self._leave(self, (index,))

  async def next(
    self,
  ) -> tuple[int, sessions.SampledTokens | records.Completion]:
    """Returns (index of the request, tokens or the end of it).

    Raises:
      errors.ApiError: the request was refused or failed.
    """
    index, event = await self._events.get()
    if isinstance(event, errors.ApiError):
      raise event
    return index, event  # pyrefly: ignore
