"""One engine thread, and the event loop that its tokens go to.

The engine is touched by one thread alone. The event loop sends it commands
through a queue and gets tokens back as they are sampled. Every wait ends:
commands by the thread's death, requests by their deadline.

  Consumes: SampleJobs, cancellations and new weights.
  Waits for: a command, while the engine has nothing to do.
  Woken by: `open`, leaving a SampleJob, newer weights (`policies`), `stop`.
  Produces: tokens, then one Completion for each request of a SampleJob, or an
    error.
"""

import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from composer_jax.core import records
from composer_jax.delta import transport as receivers
from composer_jax.rollout import engine as engines
from composer_jax.rollout import sessions
from composer_jax.serve import jobs, policies, recording
from composer_jax.serve import options as options_lib
from composer_jax.serve.api import errors

# Longest wait of the idle thread; sessions expire at this grain.
_IDLE_S = 0.2
# Between two copies of the engine's figures, which cost a few microseconds.
_STATS_S = 0.1

SERVING, FAILED, STOPPED = 'serving', 'failed', 'stopped'


@dataclasses.dataclass
class _Kept:
  """A session between two requests: its length and when it was last used."""

  length: int
  used: float


class EngineGuest(Protocol):
  """Uses the engine while no choice of a client is open, in its thread.

  Attributes:
    problem: why it no longer does; '' while it does.
  """

  problem: str

  def start(self, wake: Callable[[], None]) -> None:
    """Begins; `wake` ends the wait of the engine's thread."""

  def before_step(self, num_open: int) -> None:
    """Gives requests to the engine; only with `num_open` 0."""

  def take(self, outcome: records.Completion | records.Failure) -> bool:
    """Returns whether an outcome was its own."""


class Service:
  """Owns an engine and the thread that steps it.

  Attributes:
    state: SERVING, FAILED or STOPPED.
    num_open: number of choices running or waiting.
  """

  def __init__(
    self,
    engine: engines.Engine,
    options: options_lib.ServeOptions,
    receiver: receivers.Receiver | None = None,
    *,
    target_id: str = '',
    guest: EngineGuest | None = None,
  ):
    """Wraps an engine that nothing else touches, but through its guest.

    `target_id` is the identity of its weights.
    """
    self.options = options
    self.engine_options, self.config = engine.options, engine.config
    self.state, self.num_open = SERVING, 0
    self._engine, self._guest = engine, guest
    self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self._lock = threading.RLock()
    self._failure: BaseException | None = None
    self._jobs: set[jobs.SampleJob] = set()
    self._stopping = threading.Event()
    self._alive = time.monotonic()
    self._stats: dict[str, float] = dataclasses.asdict(engine.stats())
    self._stats_at = 0.0
    # Only the engine's thread touches these two.
    self._places: dict[str, tuple[jobs.SampleJob, int]] = {}
    self._kept: dict[str, _Kept] = {}
    # A device that hangs must not keep the process from ending.
    thread = threading.Thread(target=self._run, name='engine', daemon=True)
    self._policies = policies.Policies(
      engine,
      receiver,
      options.poll_s,
      lambda: self._inbox.put(self._policies.serve_newest),
      target_id,
    )
    self._threads = [thread, *self._policies.threads]

  # ---- from any thread ----

  @property
  def capacity(self) -> int:
    """Choices that may be open, running or waiting."""
    return self.engine_options.num_slots + self.options.max_queue

  @property
  def version(self) -> int:
    """Policy version of the next step."""
    return self._engine.version

  @property
  def problem(self) -> str:
    """Reason why newer weights are not served, or nothing is lent; or ''."""
    return self._policies.problem or (
      self._guest.problem if self._guest else ''
    )

  @property
  def stats(self) -> dict[str, float]:
    """Figures of the engine, at most a fraction of a second old."""
    return {**self._stats, 'kept_sessions': len(self._kept)}

  def unhealthy(self) -> str:
    """Returns why the engine does not serve; '' if it does."""
    if self._failure is not None:
      return f'the engine failed: {self._failure}'
    if self.state == STOPPED or not self._threads[0].is_alive():
      return 'the engine is not running'
    idle = time.monotonic() - self._alive
    if self.num_open and idle > self.options.stall_s:
      return f'the engine has made no step for {idle:.0f} s'
    return ''

  def start(self) -> None:
    self._threads[0].start()
    self._policies.start()
    if self._guest is not None:
      self._guest.start(lambda: self._inbox.put(lambda: None))

  def open(
    self,
    requests: Sequence[records.SampleRequest],
    *,
    guides: Sequence[sessions.Guide | None] = (),
    keep: bool = False,
    session_length: int | None = None,
    on_end: recording.OnEnd | None = None,
  ) -> jobs.SampleJob:
    """Queues requests for a SampleJob to await, or raises 429, 500 or 503."""
    job = jobs.SampleJob(
      requests,
      self._leave,
      guides=guides,
      keep=keep,
      session_length=session_length,
      on_end=on_end,
    )
    self._queue(job, lambda: self._submit(job))
    return job

  def _queue(self, job: jobs.SampleJob, command: Callable[[], None]) -> None:
    with self._lock:
      self.check_room(len(job.requests))
      self.num_open += len(job.requests)
      self._jobs.add(job)
      self._inbox.put(command)

  def check_room(self, num: int) -> None:
    """Raises what `open` of `num` requests would, before they are made."""
    with self._lock:
      if self._failure is not None:
        raise errors.engine_failed(self._failure)
      if self.state != SERVING:
        raise errors.draining()
      if self.num_open + num > self.capacity:
        raise errors.ApiError(
          429,
          f'{self.num_open} choices are open and this request asks for {num}; '
          f'the server takes {self.capacity} ({self.options.max_queue} of them '
          'waiting). Try again later.',
          code='queue_full',
        )

  def _leave(self, job: jobs.SampleJob, indices: Sequence[int]) -> None:
    self._inbox.put(lambda: self._cancel(job, indices))

  async def close_session(self, name: str, missing: errors.ApiError) -> None:
    """Closes a session, or raises `missing` if it is not kept or is in use."""
    await self._ask(lambda: self._close(name, missing))

  async def _ask(self, command: Callable[[], errors.ApiError | None]) -> None:
    """Waits until the engine's thread has run a command; raises its error."""
    # A job without requests, so that the engine's end reaches this wait, too.
    job = jobs.SampleJob((), self._leave)

    def run() -> None:
      error = command()
      with self._lock:
        self._jobs.discard(job)
      job.put(0, error)

    self._queue(job, run)
    await job.next()

  def stop(self, timeout_s: float = 30.0) -> bool:
    """Ends threads and requests; false if a step hangs, which nothing ends."""
    with self._lock:
      if self.state == SERVING:
        self.state = STOPPED
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
        if self._guest is not None:
          self._guest.before_step(self.num_open)
        for outcome in self._engine.step():
          if not (self._guest and self._guest.take(outcome)):
            self._finish(outcome)
        self._alive = time.monotonic()
        self._expire()
        if self._alive - self._stats_at > _STATS_S or not self._places:
          self._stats = dataclasses.asdict(self._engine.stats())
          self._stats_at = self._alive
      self._take_commands(wait=False)
      self._drop(*self._kept)
      self._stats = dataclasses.asdict(self._engine.stats())
      self._end(STOPPED, errors.draining())
    except BaseException as error:
      # Passed on, not handled: without it every client would wait for ever.
      logging.exception('The engine failed:')
      self._failure = error
      self._policies.stop()
      self._end(FAILED, errors.engine_failed(error))

  def _end(self, state: str, error: errors.ApiError) -> None:
    with self._lock:
      self.state = state
      ended, self._jobs, self.num_open = self._jobs, set(), 0
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
    self, name: str, missing: errors.ApiError
  ) -> errors.ApiError | None:
    if name not in self._kept or name in self._places:
      return missing
    self._drop(name)
    return None

  def _refuse(self, job: jobs.SampleJob, reason: errors.ApiError) -> None:
    job.put(0, reason)
    self._cancel(job, range(len(job.requests)))

  def _submit(self, job: jobs.SampleJob) -> None:
    if job not in self._jobs:
      return  # Left before its turn came.
    try:
      for index, request in enumerate(job.requests):
        self._check_session(job, request.session)
        on_tokens = functools.partial(job.put, index)
        guide = job.guides[index]
        self._engine.submit(request, on_tokens, guide, is_first=True)
        self._places[request.session] = (job, index)
    except ValueError as error:
      self._refuse(job, errors.invalid(str(error), None))
    except errors.ApiError as error:
      self._refuse(job, error)
    else:
      job.put(0, None)

  def _check_session(self, job: jobs.SampleJob, name: str) -> None:
    if job.session_length is None:
      return
    if name in self._places:
      raise errors.ApiError(
        409,
        'The session has a request under way; wait for its answer.',
        code='session_busy',
        param='session',
      )
    held = self._kept[name].length if name in self._kept else 0
    if held != job.session_length:
      raise errors.ApiError(
        409,
        f'The session holds {held} tokens here and session_length says '
        f'{job.session_length}; it may have been closed (idle sessions are). '
        'Send the whole context with session_length 0 under another name.',
        code='session_mismatch',
        param='session_length',
        details={'session_length': held},
      )

  def _finish(self, outcome: records.Completion | records.Failure) -> None:
    name = outcome.session
    job, index = self._places.pop(name, (None, 0))
    if job and job.keep and isinstance(outcome, records.Completion):
      kept = self._kept.setdefault(name, _Kept(0, 0.0))
      kept.length += len(job.requests[index].context_T) + len(outcome.tokens_T)
      kept.used = time.monotonic()
    else:
      self._drop(name)
    if job is None:
      return
    if isinstance(outcome, records.Completion):
      event: jobs.Event = outcome
      if job.on_end is not None:
        seconds = time.monotonic() - job.opened
        known = self._policies.identities
        job.on_end(job.requests[index], outcome, seconds, known)
    else:
      event = errors.ApiError(
        500,
        f'Sampling failed at position {outcome.position} with policy version '
        f'{outcome.version}: {outcome.reason}',
        code='sampling_failed',
        details={'position': outcome.position, 'version': outcome.version},
      )
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
      self.num_open -= 1
      if not job.unfinished:
        self._jobs.discard(job)

  def _drop(self, *names: str) -> None:
    for name in names:
      self._kept.pop(name, None)
      self._engine.close(name)

  def _expire(self) -> None:
    now, limit = time.monotonic(), self.options.session_idle_s
    idle = sorted(
      (kept.used, name)
      for name, kept in self._kept.items()
      if name not in self._places
    )
    excess = len(self._kept) - self.options.max_sessions
    for i, (used, name) in enumerate(idle):
      if i < excess or now - used > limit:
        self._drop(name)
