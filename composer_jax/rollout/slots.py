"""Continuous batching as bookkeeping: which session sits where and needs what.

Pure Python and numpy, no device. A session is given a slot by its first
request and keeps it, with its KV cache, until it is closed; a request whose
session finds no free slot waits, first come first served. That cannot
deadlock: a waiting session holds nothing that a running one needs, and every
slot comes free as long as each session is closed in the end without waiting
for a session that is not open yet.
"""

import collections
import dataclasses

import numpy as np

from composer_jax.core import records
from composer_jax.rollout import sampling


@dataclasses.dataclass(kw_only=True)
class Work:
  """A request being served.

  Attributes:
    request: what was asked.
    pending_T: int32 tokens to consume before sampling.
    offset: how many of them are consumed.
    remaining: tokens still to sample at most.
    tokens, logprobs, versions: of the tokens sampled.
    routes: arrays [T, M, A] of the tokens consumed, in order.
    stopped: a stop token was sampled.
  """

  request: records.SampleRequest
  pending_T: np.ndarray
  remaining: int
  offset: int = 0
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  routes: list[np.ndarray] = dataclasses.field(default_factory=list)
  stopped: bool = False

  @property
  def needs_context(self) -> bool:
    return self.offset < len(self.pending_T)

  @property
  def done(self) -> bool:
    return self.stopped or self.remaining == 0

  def record(self, token: int, logprob: float, version: int) -> None:
    self.tokens.append(token)
    self.logprobs.append(logprob)
    self.versions.append(version)
    self.remaining -= 1
    self.stopped = token in self.request.stop_tokens

  def completion(self) -> records.Completion:
    return records.Completion(
      session=self.request.session,
      tokens_T=np.array(self.tokens, np.int32),
      logprobs_T=np.array(self.logprobs, np.float32),
      policy_version_T=np.array(self.versions, np.int32),
      consumed_expert_ids_TMA=np.concatenate(self.routes),
      stopped=self.stopped,
    )


@dataclasses.dataclass(kw_only=True)
class Session:
  """A context window in a slot.

  Attributes:
    name: as in the requests.
    slot: its row of the cache.
    consumed: tokens in the cache, hence the position of the next one.
    last_token: sampled but not consumed; None before the first completion.
    key_2, temperature: of the request at hand.
    work: the request at hand, None between requests.
    waiting: dispatches its context has been put off for.
  """

  name: str
  slot: int
  consumed: int = 0
  last_token: int | None = None
  key_2: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(2, np.uint32)
  )
  temperature: float = 1.0
  work: Work | None = None
  waiting: int = 0

  @property
  def at_work(self) -> Work:
    """The request at hand of a session that is known to have one."""
    assert self.work is not None
    return self.work


class Slots:
  """Sessions, their slots, and the requests that wait for one."""

  def __init__(self, num_slots: int, max_len: int):
    self.max_len = max_len
    self.sessions: dict[str, Session] = {}
    self._free = list(range(num_slots))[::-1]
    self._queue: collections.deque[records.SampleRequest] = collections.deque()

  @property
  def num_waiting(self) -> int:
    """Requests whose session has no slot yet."""
    return len(self._queue)

  @property
  def num_unfinished(self) -> int:
    working = sum(s.work is not None for s in self.sessions.values())
    return working + len(self._queue)

  def submit(self, request: records.SampleRequest) -> None:
    """Takes a request, or raises a ValueError that says why not."""
    session = self.sessions.get(request.session)
    if session is None:
      self._submit_first(request)
      return
    if session.work is not None:
      raise ValueError(
        f'Session {request.session!r} already has a request under way; wait '
        'for its completion before the next one.'
      )
    self._check_length(request, session.consumed, session.last_token)
    self._start(session, request)

  def _submit_first(self, request: records.SampleRequest) -> None:
    if any(r.session == request.session for r in self._queue):
      raise ValueError(
        f'Session {request.session!r} already has a request waiting for a '
        'slot; wait for its completion before the next one.'
      )
    self._check_length(request, 0, None)
    self._queue.append(request)
    self.admit()

  def _check_length(
    self,
    request: records.SampleRequest,
    consumed: int,
    last_token: int | None,
  ) -> None:
    pending = len(request.context_T) + (last_token is not None)
    if pending == 0:
      raise ValueError(
        f'The first request of session {request.session!r} has an empty '
        'context; give at least one token.'
      )
    if consumed + pending >= self.max_len:
      raise ValueError(
        f'Session {request.session!r} would hold {consumed + pending} tokens '
        f'({len(request.context_T)} of them new context), which leaves no '
        f'room to sample within max_len ({self.max_len}); shorten the '
        'context or raise max_len.'
      )

  def admit(self) -> None:
    """Gives free slots to the requests that wait, oldest first."""
    while self._free and self._queue:
      request = self._queue.popleft()
      session = Session(name=request.session, slot=self._free.pop())
      self.sessions[request.session] = session
      self._start(session, request)

  def _start(self, session: Session, request: records.SampleRequest) -> None:
    pending_T = request.context_T
    if session.last_token is not None:
      pending_T = np.concatenate(
        [np.array([session.last_token], np.int32), pending_T]
      )
    room = self.max_len - session.consumed - len(pending_T)
    session.key_2 = sampling.key_of(request.seed)
    session.temperature = request.temperature
    session.waiting = 0
    session.work = Work(
      request=request,
      pending_T=pending_T,
      remaining=min(request.max_new_tokens, room),
    )

  def is_open(self, name: str) -> bool:
    """Whether the session has a slot or waits for one."""
    return name in self.sessions or any(r.session == name for r in self._queue)

  def close(self, name: str) -> None:
    """Frees a session's slot; drops what it was still being served.

    Raises:
      ValueError: no such session is open or waiting.
    """
    session = self.sessions.pop(name, None)
    if session is not None:
      self._free.append(session.slot)
      self.admit()
      return
    kept = [r for r in self._queue if r.session != name]
    if len(kept) == len(self._queue):
      raise ValueError(
        f'Session {name!r} is not open; open are {sorted(self.sessions)[:8]}.'
      )
    self._queue = collections.deque(kept)

  def with_context(self) -> list[Session]:
    """Sessions with context to consume, those put off longest first."""
    pending = [
      s
      for s in self.sessions.values()
      if s.work is not None and s.work.needs_context
    ]
    return sorted(pending, key=lambda s: -s.waiting)

  def sampling(self) -> list[Session]:
    """Sessions whose next step is to sample another token."""
    return [
      s
      for s in self.sessions.values()
      if s.work is not None and not s.work.needs_context
    ]

  def take_finished(self) -> list[records.Completion]:
    """Completions of the requests that are done, which leave the table."""
    finished = []
    for session in self.sessions.values():
      if session.work is not None and session.work.done:
        finished.append(session.work.completion())
        session.work = None
    return finished
