"""One engine thread, and the event loop that its tokens go to.

The engine is touched by one thread alone. The event loop sends it commands
through a queue and gets tokens back as they are sampled. Every wait ends:
commands by the thread's death, requests by their deadline.

  Consumes: Jobs, cancellations and new weights.
  Waits for: a command, while the engine has nothing to do.
  Woken by: `open`, leaving a SampleJob, newer weights (`policies`), `stop`.
  Produces: Tokens, then one Completion for each request of a SampleJob, or an
    error.
"""

import asyncio
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.core import records
from composer_jax.rollout import engine as engines
from composer_jax.rollout import placing
from composer_jax.serve import jobs, policies
from composer_jax.serve import options as options_lib
from composer_jax.serve.api import errors

# How long the idle thread sleeps at most; sessions expire at this grain.
_IDLE_S = 0.2
# Between two copies of the engine's figures, which cost a few microseconds.
_STATS_S = 0.1

SERVING, DRAINING, FAILED, STOPPED = 'serving', 'draining', 'failed', 'stopped'


@dataclasses.dataclass
class _Kept:
  """A session between two requests."""

  length: int
  used: float


class Service:
  """Owns an engine and the thread that steps it."""

  def __init__(
    self,
    engine: engines.Engine,
    options: options_lib.ServeOptions,
    source: policies.Source | None = None,
  ):
    """Wraps an engine that nothing else touches.

    Args:
      engine: started and stopped with the service.
      options: limits.
      source: of newer weights; None serves what the engine has.
    """
    self.options = options
    self.engine_options, self.config = engine.options, engine.config
    self._engine = engine
    self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self._lock = threading.RLock()
    self._state = SERVING
    self._failure: BaseException | None = None
    self._jobs: set[jobs.SampleJob] = set()
    self._num_open = 0
    self._stopping = threading.Event()
    self._alive = time.monotonic()
    self._stats: dict[str, float] = dataclasses.asdict(engine.stats())
    self._stats_at = 0.0
    # Of the engine's thread alone.
    self._places: dict[str, tuple[jobs.SampleJob, int]] = {}
    self._kept: dict[str, _Kept] = {}
    # A device that hangs must not keep the process from ending.
    thread = threading.Thread(target=self._run, name='engine', daemon=True)
    self._policies = policies.Policies(
      engine,
      source,
      options.poll_s,
      lambda: self._inbox.put(self._policies.serve_newest),
    )
    self._threads = [thread, *self._policies.threads]

  # ---- from any thread ----

  @property
  def capacity(self) -> int:
    """Choices that may be open, running or waiting."""
    return self.engine_options.num_slots + self.options.max_queue

  @property
  def version(self) -> int:
    """Of the weights that the next step uses."""
    return self._policies.version

  @property
  def problem(self) -> str:
    """Why newer weights are not served; '' where none are known."""
    return self._policies.problem

  @property
  def state(self) -> str:
    return self._state

  @property
  def num_open(self) -> int:
    return self._num_open

  @property
  def stats(self) -> dict[str, float]:
    """Figures of the engine, at most a fraction of a second old."""
    return {**self._stats, 'kept_sessions': len(self._kept)}

  def unhealthy(self) -> str:
    """Why the engine does not serve; '' if it does."""
    if self._failure is not None:
      return f'the engine failed: {self._failure}'
    if self._state == STOPPED or not self._threads[0].is_alive():
      return 'the engine is not running'
    idle = time.monotonic() - self._alive
    if self._num_open and idle > self.options.stall_s:
      return f'the engine has made no step for {idle:.0f} s'
    return ''

  def start(self) -> None:
    for thread in self._threads:
      thread.start()

  def open(
    self,
    requests: Sequence[records.SampleRequest],
    *,
    keep: bool = False,
    session_length: int | None = None,
  ) -> jobs.SampleJob:
    """Queues requests; await the SampleJob's context to know them accepted.

    Args:
      requests: of sessions of their own, but for a kept one.
      keep: leaves the session open for a later request.
      session_length: tokens that the client takes its session to hold.

    Raises:
      errors.ApiError: 429, 503 or 500; nothing was queued.
    """
    job = jobs.SampleJob(
      requests, self._leave, keep=keep, session_length=session_length
    )
    with self._lock:
      self.check_room(len(requests))
      self._num_open += len(requests)
      self._jobs.add(job)
      self._inbox.put(functools.partial(self._submit, job))
    return job

  def check_room(self, num: int) -> None:
    """Raises what `open` of `num` requests would, before they are made."""
    with self._lock:
      if self._failure is not None:
        raise errors.engine_failed(self._failure)
      if self._state != SERVING:
        raise errors.draining()
      if self._num_open + num > self.capacity:
        raise errors.queue_full(
          self._num_open, num, self.capacity, self.options.max_queue
        )

  def _leave(self, job: jobs.SampleJob, indices: Sequence[int]) -> None:
    self._inbox.put(functools.partial(self._cancel, job, indices))

  async def close_session(self, name: str, missing: errors.ApiError) -> None:
    """Closes a kept session.

    Args:
      name: of it.
      missing: raised if it is not kept, or has a request under way.

    Raises:
      errors.ApiError: `missing`, 503 or 500.
    """
    await self._ask(self._close, name, missing)

  async def _ask(self, command: Callable[..., None], *args: Any) -> None:
    """Waits until the engine's thread has done something."""
    # Of no requests; so that the engine's end reaches this, too.
    job = jobs.SampleJob((), self._leave, keep=False, session_length=None)
    with self._lock:
      self.check_room(0)
      self._jobs.add(job)
      self._inbox.put(functools.partial(command, job, *args))
    await job.next()

  async def roll_back(self, version: int) -> int:
    """Serves the version before `version`, which it returns; sessions end.

    They hold tokens of the version that is left, after which none of an older
    one may come. Their requests get 503, and may be sent again.

    Raises:
      errors.ApiError: 409, 503 or 500; the same weights are served on.
    """
    if self.version != version:
      raise errors.not_served(version, self.version)
    try:
      placed = await asyncio.to_thread(self._policies.previous, version)
    except ValueError as error:
      raise errors.no_rollback(str(error)) from error
    await self._ask(self._roll_back, version, placed)
    return placed.version

  def begin_drain(self) -> None:
    """Takes no new requests from now on; running ones go on."""
    with self._lock:
      if self._state == SERVING:
        self._state = DRAINING

  def abort(self) -> None:
    """Cancels every open request; each is told that the server ends."""
    self.begin_drain()
    self._inbox.put(lambda: self._cancel_all(errors.draining()))

  def stop(self, timeout_s: float = 30.0) -> bool:
    """Ends the threads, and with them every open request.

    Returns:
      Whether they ended in time; a step that hangs cannot be interrupted.
    """
    self.abort()
    self._stopping.set()
    self._policies.stop()
    self._inbox.put(lambda: None)
    deadline = time.monotonic() + timeout_s
    for thread in self._threads:
      if thread.ident is not None:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in self._threads)

  # ---- in the engine's thread ----

  def _run(self) -> None:
    try:
      while not self._stopping.is_set():
        self._take_commands(wait=self._engine.num_unfinished == 0)
        for outcome in self._engine.step():
          self._finish(outcome)
        self._alive = time.monotonic()
        self._expire()
        self._copy_stats()
      self._take_commands(wait=False)
      for name in list(self._kept):
        self._drop(name)
      self._stats = dataclasses.asdict(self._engine.stats())
      self._end(STOPPED, errors.draining())
    except BaseException as error:
      # Not handled, only passed on: everyone who waits would wait for ever.
      logging.exception('The engine failed:')
      self._failure = error
      self._policies.stop()
      self._end(FAILED, errors.engine_failed(error))

  def _end(self, state: str, error: errors.ApiError) -> None:
    with self._lock:
      self._state = state
      ended, self._jobs, self._num_open = list(self._jobs), set(), 0
    for job in ended:
      job.put(0, error)

  def _take_commands(self, wait: bool) -> None:
    while True:
      try:
        command = self._inbox.get(wait, _IDLE_S)
      except queue.Empty:
        return
      command()
      wait = False

  def _close(
    self, job: jobs.SampleJob, name: str, missing: errors.ApiError
  ) -> None:
    there = name in self._kept and name not in self._places
    if there:
      self._drop(name)
    with self._lock:
      self._jobs.discard(job)
    job.put(0, None if there else missing)

  def _roll_back(
    self, job: jobs.SampleJob, version: int, placed: placing.PlacedWeights
  ) -> None:
    refusal = None
    if self.version != version:
      # A newer one came while the older was being placed.
      refusal = errors.not_served(version, self.version)
    else:
      self._cancel_all(errors.rolled_back(version, placed.version))
      for name in list(self._kept):
        self._drop(name)
      self._policies.serve(placed)
    with self._lock:
      self._jobs.discard(job)
    job.put(0, refusal)

  def _cancel_all(self, reason: errors.ApiError) -> None:
    # Others ask for something that is done or refused in its turn.
    for job in [j for j in self._jobs if j.requests]:
      job.put(0, reason)
      self._cancel(job, range(len(job.requests)))

  def _submit(self, job: jobs.SampleJob) -> None:
    if job not in self._jobs:
      return  # Left before its turn came.
    try:
      for index, request in enumerate(job.requests):
        self._check_session(job, request.session)
        self._engine.submit(request, functools.partial(job.put, index))
        self._places[request.session] = (job, index)
    except ValueError as error:
      job.put(0, errors.invalid(str(error), None))
      self._cancel(job, range(len(job.requests)))
    except errors.ApiError as error:
      job.put(0, error)
      self._cancel(job, range(len(job.requests)))
    else:
      job.put(0, None)

  def _check_session(self, job: jobs.SampleJob, name: str) -> None:
    if job.session_length is None:
      return
    if name in self._places:
      raise errors.session_busy()
    held = self._kept[name].length if name in self._kept else 0
    if held != job.session_length:
      raise errors.session_mismatch(job.session_length, held)

  def _finish(self, outcome: records.Completion | records.Failure) -> None:
    name = outcome.session
    place = self._places.pop(name, None)
    if isinstance(outcome, records.Failure):
      self._drop(name)
      event: jobs.Event = errors.ApiError(
        500,
        f'Sampling failed at position {outcome.position} with policy version '
        f'{outcome.version}: {outcome.reason}',
        code='sampling_failed',
        details={'position': outcome.position, 'version': outcome.version},
      )
    else:
      event = outcome
    if place is None:
      self._drop(name)
      return
    job, index = place
    if job.keep and isinstance(outcome, records.Completion):
      held = self._kept.setdefault(name, _Kept(0, 0.0))
      added = len(job.requests[index].context_T) + len(outcome.tokens_T)
      held.length, held.used = held.length + added, time.monotonic()
    else:
      self._drop(name)
    self._release(job, index)
    job.put(index, event)

  def _cancel(self, job: jobs.SampleJob, indices: Sequence[int]) -> None:
    for index in sorted(job.unfinished.intersection(indices)):
      name = job.requests[index].session
      if self._places.get(name, (None,))[0] is job:
        del self._places[name]
        self._drop(name)
      self._release(job, index)

  def _release(self, job: jobs.SampleJob, index: int) -> None:
    with self._lock:
      if job not in self._jobs:
        return
      job.unfinished.discard(index)
      self._num_open -= 1
      if not job.unfinished:
        self._jobs.discard(job)

  def _drop(self, name: str) -> None:
    self._kept.pop(name, None)
    self._engine.close(name)

  def _expire(self) -> None:
    now, limit = time.monotonic(), self.options.session_idle_s
    idle = sorted(
      (held.used, name)
      for name, held in list(self._kept.items())
      if name not in self._places
    )
    excess = len(self._kept) - self.options.max_sessions
    for i, (used, name) in enumerate(idle):
      if i < excess or now - used > limit:
        self._drop(name)

  def _copy_stats(self) -> None:
    now = time.monotonic()
    if now - self._stats_at > _STATS_S or not self._places:
      self._stats = dataclasses.asdict(self._engine.stats())
      self._stats_at = now
