"""A blocking Policy for many threads, over one engine's serving loop."""

import queue
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

from composer_jax.core import records
from composer_jax.rollout import engine as engines

# Seconds that an idle loop sleeps before it calls `done` and `before_step`.
_IDLE_S = 0.02


class EnginePolicy:
  """Implements the agent's Policy protocol over one engine.

  Episodes call `complete` from their threads and block; `serve` runs in one
  thread, batches their requests and wakes them. Every wait has a timeout, and
  an error that stops the loop is raised in every waiting thread.

  Consumes: requests and closings, from any thread.
  Waits for: a request, or unfinished work in the engine.
  Woken by: `complete`, `close`.
  Produces: Completions, each to the thread that asked.

  Attributes:
    wake: called from any thread when there is something to take.
  """

  def __init__(self, engine: engines.Engine, timeout_s: float = 600.0):
    """Takes over the engine, which nothing but `serve` may step from now on.

    Or another loop steps it, which calls `take_requests` and `hand_over`.
    `complete` waits for at most `timeout_s`, queueing for a slot included.
    """
    self.wake: Callable[[], None] = lambda: None
    self._engine = engine
    self._timeout_s = timeout_s
    # (request, future), or (session to forget, None).
    self._inbox: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    self._waiting: dict[str, futures.Future] = {}
    self._sessions: set[str] = set()
    self._lock = threading.Lock()
    self._failure: BaseException | None = None

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Extends `request.session`; blocks until sampling ended.

    Raises:
      ValueError: the engine refuses the request, or a trainer could not
        recompute the log-probabilities of such sampling.
      FloatingPointError: the model gave values that are not finite.
      TimeoutError: no completion came in time.
      RuntimeError: serving failed or ended; its cause is attached.
    """
    _check_trainable(request)
    future: futures.Future = futures.Future()
    with self._lock:
      if self._failure is not None:
        error = RuntimeError('The rollout engine has stopped serving.')
        raise error from self._failure
      self._inbox.put((request, future))
    self.wake()
    try:
      return future.result(self._timeout_s)
    except futures.TimeoutError as error:
      raise TimeoutError(
        f'Session {request.session!r} got no completion within '
        f'{self._timeout_s:g} s; is `serve` running? It works on '
        f'{self._engine.options.num_slots} requests at once.'
      ) from error

  def close(self, session: str | None = None) -> None:
    """Closes a session if it is open; with None, ends the policy.

    Ending it, allowed between two steps of the engine, makes every waiting or
    later `complete` raise RuntimeError and frees the pages of all its sessions.
    """
    if session is not None:
      self._inbox.put((session, None))
      self.wake()
      return
    self._fail(RuntimeError('The policy was closed.'))
    while self._sessions:
      self._engine.close(self._sessions.pop())

  def serve(
    self,
    done: Callable[[], bool],
    before_step: Callable[[], Any] = lambda: None,
  ) -> None:
    """Runs the engine until `done()`; only one thread at a time may.

    Both functions are called before every step and, without work, every few
    hundredths of a second; `before_step` may swap the engine's weights. An
    error of theirs or the engine's ends the loop and reaches all who wait.
    """
    try:
      while not done():
        before_step()
        self.take_requests(wait=self._engine.num_unfinished == 0)
        for outcome in self._engine.step():
          self.hand_over(outcome)
      # Sessions closed by the episodes that ended last.
      self.take_requests(wait=False)
    except BaseException as error:
      # Only passed on: without it the waiting threads would hang.
      self._fail(error)
      raise

  def hand_over(self, outcome: records.Completion | records.Failure) -> bool:
    """Wakes who waits for an outcome; returns whether anybody does."""
    # None if the session was closed while it sampled.
    future = self._waiting.pop(outcome.session, None)
    if future is None:
      return False
    if isinstance(outcome, records.Failure):
      self._sessions.discard(outcome.session)
      future.set_exception(FloatingPointError(outcome.reason))
    else:
      future.set_result(outcome)
    return True

  def take_requests(self, wait: bool) -> None:
    """Moves the inbox into the engine; may wait a moment for the first."""
    while True:
      try:
        item, future = self._inbox.get(wait, _IDLE_S)
      except queue.Empty:
        return
      wait = False
      if future is None:
        self._forget(item)
        continue
      try:
        self._engine.submit(item)
      except ValueError as error:
        future.set_exception(error)
      else:
        self._waiting[item.session] = future
        self._sessions.add(item.session)

  def _forget(self, session: str) -> None:
    self._sessions.discard(session)
    if future := self._waiting.pop(session, None):
      future.set_exception(
        RuntimeError(f'Session {session!r} was closed while it sampled.')
      )
    self._engine.close(session)

  def _fail(self, error: BaseException) -> None:
    with self._lock:
      self._failure = self._failure or error
      items = [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]
    waiting = [future for _, future in items if future is not None]
    waiting += self._waiting.values()
    self._waiting.clear()
    for future in waiting:
      failure = RuntimeError(f'The rollout engine stopped: {error}')
      failure.__cause__ = error
      future.set_exception(failure)


def _check_trainable(request: records.SampleRequest) -> None:
  """Refuses sampling whose log-probabilities the trainer does not compute."""
  if request.truncates or request.temperature == 0:
    raise ValueError(
      f'Session {request.session!r} has top_p {request.top_p:g}, top_k '
      f'{request.top_k}, min_p {request.min_p:g} and temperature '
      f'{request.temperature:g}; training needs 1, 0, 0 and a positive one, '
      'since the trainer divides logits by it and does not truncate. To serve '
      'without training, call the engine itself.'
    )
