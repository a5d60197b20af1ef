"""Continuous batching as bookkeeping: who works, who waits, who holds what.

Pure Python and numpy, no device. A request waits until there is a slot for it
and pages for the most tokens that it can come to; then it has both until it is
done, so nothing that has begun ever waits for pages. Between requests a session
holds its pages and no slot.

Requests are served first come first served, save that one whose prompt another
session is just consuming lets others pass: it will find the prompt cached. When
pages run short, prefixes that nobody uses go first, then the pages of sessions
that do nothing, longest idle first, then those of sessions that wait, last come
first (`holdings`). A session that lost its pages consumes its tokens anew. The
first in the queue thus gets its pages as soon as enough requests are done,
which need nothing more: there is no deadlock.
"""

import collections
from collections.abc import Iterable

import numpy as np

from composer_jax.core import records
from composer_jax.rollout import holdings as holdings_lib
from composer_jax.rollout import sessions as sessions_lib

Session = sessions_lib.Session
Work = sessions_lib.Work


class Slots:
  """Sessions, their pages and slots, and the requests that wait for some.

  Attributes:
    holdings: the pages.
    sessions: those open, by name.
    finished: completions and failures that nobody has taken yet.
    prefix_hit_tokens: tokens found cached, over all requests.
    sampled_tokens: over all requests.
    failures: requests that failed.
  """

  def __init__(
    self,
    *,
    num_slots: int,
    max_len: int,
    page_size: int,
    num_pages: int,
    version: int,
    route_shape: tuple[int, int],
    record_routes: bool = True,
    share_prefixes: bool = True,
    share_sampled: bool = False,
  ):
    """Starts with nothing open.

    Args:
      num_slots: requests served at once.
      max_len: of a session.
      page_size: tokens in a page.
      num_pages: at least those of one session of max_len.
      version: of the policy.
      route_shape: (MoE layers, active experts).
      record_routes: whether sessions keep routes.
      share_prefixes: whether equal prefixes are consumed once.
      share_sampled: whether those that decode consumed are shared too, which
        asks that it gives the same bits as extend.
    """
    self._num_slots = num_slots
    self._max_len = max_len
    self._version = version
    self._route_shape = route_shape
    self._record_routes = record_routes
    self._share_sampled = share_sampled
    self.holdings = holdings_lib.Holdings(
      num_pages, page_size, version, share_prefixes
    )
    self.sessions: dict[str, Session] = {}
    self._queue: collections.deque[Session] = collections.deque()
    self._running: dict[str, Session] = {}
    # Those that do nothing, longest idle first.
    self._idle: dict[str, Session] = {}
    # Found too few pages; it need not look again before something changed.
    self._refused: Session | None = None
    self.finished: list[records.Completion | records.Failure] = []
    self.prefix_hit_tokens = 0
    self.sampled_tokens = 0
    self.failures = 0

  @property
  def num_waiting(self) -> int:
    """Requests without a slot."""
    return len(self._queue)

  @property
  def num_running(self) -> int:
    return len(self._running)

  @property
  def num_unfinished(self) -> int:
    """Requests whose outcome has not been taken."""
    return len(self._queue) + len(self._running) + len(self.finished)

  def is_open(self, name: str) -> bool:
    return name in self.sessions

  def is_working(self, name: str) -> bool:
    """Whether the session is open and has a request under way."""
    session = self.sessions.get(name)
    return session is not None and session.work is not None

  def submit(
    self,
    request: records.SampleRequest,
    on_tokens: sessions_lib.OnTokens | None = None,
  ) -> None:
    """Takes a request, or raises a ValueError that says why not."""
    session = self.sessions.get(request.session)
    if self.is_working(request.session):
      raise ValueError(
        f'Session {request.session!r} already has a request under way; wait '
        'for its completion before the next one.'
      )
    known = session.length if session else 0
    first = known + len(request.context_T)
    self._check_length(request, known, first)
    if session is None:
      session = Session(
        name=request.session,
        route_shape=self._route_shape,
        tokens_T=np.zeros(0, np.int32),
        routes_TMA=np.zeros((0, *self._route_shape), np.uint16)
        if self._record_routes
        else None,
      )
      self.sessions[request.session] = session
    self._idle.pop(session.name, None)
    work = Work(
      request=request,
      on_tokens=on_tokens,
      first=first,
      remaining=min(request.max_new_tokens, self._max_len - first),
      routes_start=session.consumed,
    )
    session.start(request, work)
    self._queue.append(session)

  def _check_length(self, request, known: int, first: int) -> None:
    if first == 0:
      raise ValueError(
        f'The first request of session {request.session!r} has an empty '
        'context; give at least one token.'
      )
    if first >= self._max_len:
      raise ValueError(
        f'Session {request.session!r} would hold {first} tokens '
        f'({len(request.context_T)} of them new context), which leaves no '
        f'room to sample within max_len ({self._max_len}); shorten the '
        'context or raise max_len.'
      )

  def close(self, name: str) -> None:
    """Ends a session and drops what it was still being served.

    Raises:
      ValueError: no such session is open.
    """
    session = self.sessions.pop(name, None)
    if session is None:
      raise ValueError(
        f'Session {name!r} is not open; open are {sorted(self.sessions)[:8]}.'
      )
    self._idle.pop(name, None)
    self._running.pop(name, None)
    if session in self._queue:
      self._queue.remove(session)
    self.holdings.strip(session)
    session.work = self._refused = None

  def admit(self) -> None:
    """Gives slots and pages to the requests that can have them."""
    self.holdings.clear_stained()
    for session in list(self._queue):
      if len(self._running) == self._num_slots or session is self._refused:
        return
      if self.holdings.waits(session):
        continue
      if not self.holdings.find(session, self._running.values(), self._victims):
        self._refused = session
        return
      self._queue.remove(session)
      self._running[session.name] = session
      self.prefix_hit_tokens += session.at_work.num_cached
      if session.at_work.num_cached:
        session.at_work.context_version = self._version

  def _victims(self) -> list[Session]:
    return [*self._idle.values(), *list(self._queue)[::-1]]

  def prefilling(self) -> list[Session]:
    """Sessions with context to consume, those put off longest first."""
    pending = [s for s in self._running.values() if s.needs_context]
    return sorted(pending, key=lambda s: -s.at_work.waiting)

  def decoding(self) -> list[Session]:
    """Sessions whose next step is to sample another token."""
    return [s for s in self._running.values() if not s.needs_context]

  def extend(self, session: Session, count: int) -> None:
    """Counts context as consumed, once its pass is dispatched."""
    work = session.at_work
    work.waiting = 0
    if work.context_version is None:
      work.context_version = self._version
    if session.shareable == session.consumed:
      session.shareable = session.consumed + count
    session.consumed += count

  def extended(
    self,
    session: Session,
    work: Work,
    start: int,
    routes_TMA: np.ndarray | None,
    count: int,
  ) -> None:
    """Takes the report of a chunk of its request, whose values were finite."""
    if session.routes_TMA is not None:
      session.routes_TMA[start : start + count] = routes_TMA
    if work.keys is not None:
      end = start + count
      whole = end == session.length - 1
      self.holdings.share(session, work.keys, start, end, whole=whole)
      self._refused = None

  def sampled(
    self,
    rows: Iterable[tuple[Session, Work]],
    report: sessions_lib.Sampled,
  ) -> None:
    """Takes the report of a decode dispatch, row by row."""
    counts = (report.tokens_TB >= 0).sum(0).tolist()
    failed = (report.tokens_TB == sessions_lib.NOT_FINITE).any(0).tolist()
    for row, (session, work) in enumerate(rows):
      if session.work is not work:
        continue
      count = counts[row]
      if count:
        self._take_tokens(session, work, report, row, count)
      if failed[row]:
        self.fail(session, session.consumed, 1, report.version)
      elif work.done:
        self._finish(session)

  def _take_tokens(self, session, work, report, row, count) -> None:
    if self._share_sampled and session.shareable == session.consumed:
      session.shareable = session.consumed + count
    position = session.length
    work.pieces.append((report, row, count))
    session.consumed += count
    session.length += count
    work.remaining -= count
    work.refreshed = False
    self.sampled_tokens += count
    last = int(report.tokens_TB[count - 1, row])
    work.stopped = last in work.request.stop_tokens
    if len(work.pieces) == sessions_lib.MAX_PIECES:
      session.settle()
    if work.on_tokens is not None:
      work.on_tokens(report.tokens(session.name, position, row, count))

  def _finish(self, session: Session) -> None:
    session.settle()
    self.finished.append(session.completion())
    del self._running[session.name]
    self.holdings.stop_filling(session)
    self.holdings.trim(session)
    if self._share_sampled:
      self.holdings.share_all(session)
    session.work = self._refused = None
    self._idle[session.name] = session

  def fail(
    self, session: Session, position: int, count: int, version: int
  ) -> None:
    """Ends a session whose values are not finite; its pages are cleared."""
    self.finished.append(
      records.Failure(
        session=session.name,
        position=position,
        version=version,
        reason=(
          f'The pass over {count} tokens from {position} on of session '
          f'{session.name!r} gave values that are not finite, with the weights '
          f'of version {version}.'
        ),
      )
    )
    self.failures += 1
    self.holdings.condemn(session)
    self.close(session.name)

  def swap(self, version: int, *, refresh: bool) -> None:
    """Goes on with other weights; every report has been taken.

    Args:
      version: of the policy; no prefix computed with another is found again.
      refresh: whether sessions consume their tokens anew. One that runs does
        so once between two tokens that it samples, however many swaps come
        meanwhile: else a swap a step would let nobody sample.
    """
    self._version = version
    self._refused = None
    self.holdings.reset(version)
    for session in self.sessions.values():
      if session.work is not None:
        session.work.keys = session.work.waits_for = None
      if refresh and not (session.work and session.work.refreshed):
        if session.work is not None:
          session.settle()  # All its tokens are about to be consumed.
        self.holdings.strip(session)
      elif session.consumed:
        session.shareable = None
    if refresh:
      self._restart([s for s in self._running.values() if not s.pages])

  def _restart(self, stripped: list[Session]) -> None:
    """Puts sessions that lost their pages before all others that wait."""
    for session in stripped:
      del self._running[session.name]
      session.at_work.refreshed = True
    self._queue.extendleft(stripped[::-1])

  def take_finished(self) -> list[records.Completion | records.Failure]:
    """Returns outcomes since it was last asked."""
    finished, self.finished = self.finished, []
    return finished
