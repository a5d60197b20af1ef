"""Scheduler of continuous batching: slots, pages and the queue of requests.

Pure Python and numpy, no device. A request waits until there is a slot for it
and pages for the most tokens that it can sample; it then keeps both until it
ends, so a running request never waits for pages. Between requests a session
holds its pages and no slot.

The queue is first come, first served, except that some requests go before all
others, and that a request lets others of its kind pass while another session is
consuming the same prompt, which it will find cached.
When pages run short, unused prefixes go first, then the pages of idle sessions,
longest idle first, then those of waiting sessions, latest first (`pages`). A
session that lost its pages consumes its tokens anew. There is no deadlock:
running requests end without further pages, and once enough have ended, the
first in the queue gets its pages.
"""

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from composer_jax.core import records
from composer_jax.rollout import options, pages, sessions

# A session and the request of it that a dispatch worked on.
Row = tuple[sessions.Session, sessions.ServedRequest]


@dataclasses.dataclass(kw_only=True, slots=True)
class Stats:
  """Current state and counters of an engine."""

  sessions: int = 0  # open sessions
  running: int = 0  # requests with a slot
  waiting: int = 0  # requests without a slot
  pages: int = 0  # pages of the KV cache
  pages_free: int = 0  # pages without an owner
  pages_cached: int = 0  # pages kept as prefixes
  prefix_hit_tokens: int = 0  # context tokens found cached
  context_tokens: int = 0  # tokens consumed by extend
  sampled_tokens: int = 0
  draft_passes: int = 0  # passes over a session that had drafts
  draft_tokens: int = 0  # sampled tokens that were drafted
  dispatches: int = 0  # extends and decodes
  swaps: int = 0  # swaps of weights
  swap_s: float = 0.0  # seconds of the last swap, placing of weights excluded
  failures: int = 0  # requests that failed
  version: int  # policy version served


class Slots:
  """Sessions, their pages and slots, and the requests that wait for some.

  Attributes:
    holdings: pages, and the sessions and prefixes that hold them.
    sessions: open sessions by name.
    queue: sessions whose requests wait for a slot.
    running: sessions whose requests have a slot, by name.
    finished: completions and failures not yet taken.
    stats: counters; `Engine.stats` adds the current state.
  """

  def __init__(
    self,
    limits: options.EngineOptions,
    version: int,
    route_shape: tuple[int, int],
    *,
    share_sampled: bool,
  ):
    """Starts with nothing open; `route_shape` is (MoE layers, active experts).

    `share_sampled` also shares prefixes that decode consumed, which requires
    that decode gives the same bits as extend.
    """
    self._limits = limits
    self._route_shape = route_shape
    self._share_sampled = share_sampled
    self.holdings = pages.Holdings(limits, version)
    self.sessions: dict[str, sessions.Session] = {}
    self.queue: collections.deque[sessions.Session] = collections.deque()
    self.running: dict[str, sessions.Session] = {}
    # Sessions without a request, longest idle first.
    self._idle: dict[str, sessions.Session] = {}
    # The session that found too few pages, until some may have been released.
    self._refused: sessions.Session | None = None
    self.finished: list[records.Completion | records.Failure] = []
    self.stats = Stats(version=version)

  @property
  def num_unfinished(self) -> int:
    """Requests whose outcome has not been taken."""
    return len(self.queue) + len(self.running) + len(self.finished)

  def submit(
    self,
    request: records.SampleRequest,
    on_tokens: sessions.OnTokens | None = None,
    guide: sessions.Guide | None = None,
    is_first: bool = False,
  ) -> None:
    """Queues a request, or raises a ValueError that names the broken rule."""
    name, max_len = request.session, self._limits.max_len
    session = self.sessions.get(name)
    if session and session.work:
      raise ValueError(
        f'Session {name!r} already has a request under way; wait for its '
        'completion before the next one.'
      )
    length = len(request.context_T) + (session.length if session else 0)
    if length == 0:
      raise ValueError(
        f'The first request of session {name!r} has an empty context; give at '
        'least one token.'
      )
    if length >= max_len:
      raise ValueError(
        f'Session {name!r} would hold {length} tokens '
        f'({len(request.context_T)} of them new context), which leaves no '
        f'room to sample within max_len ({max_len}); shorten the context or '
        'raise max_len.'
      )
    if session is None:
      session = self.sessions[name] = sessions.Session(
        name=name,
        tokens_T=np.zeros(0, np.int32),
        routes_TMA=np.zeros((0, *self._route_shape), np.uint16),
        versions_T=np.zeros(1, np.int32),
      )
    self._idle.pop(name, None)
    session.start(request, on_tokens, max_len, guide)
    session.at_work.is_first = is_first
    place = sum(s.at_work.is_first for s in self.queue)
    self.queue.insert(place if is_first else len(self.queue), session)

  def close(self, name: str) -> None:
    """Ends an open session and drops its request."""
    session = self.sessions.pop(name)
    self._idle.pop(name, None)
    self.running.pop(name, None)
    if session in self.queue:
      self.queue.remove(session)
    self.holdings.strip(session)
    session.work = self._refused = None

  def admit(self) -> None:
    """Gives slots and pages to as many requests as there is room for."""
    running, has_first = self.running.values(), False
    for session in list(self.queue):
      is_full = len(running) == self._limits.num_slots
      is_first = session.at_work.is_first
      if is_full or session is self._refused or has_first > is_first:
        return
      if self.holdings.waits(session):
        has_first |= is_first
        continue
      victims = [*self._idle.values(), *list(self.queue)[::-1]]
      if not self.holdings.find(session, running, victims):
        self._refused = session
        return
      self.queue.remove(session)
      self.running[session.name] = session
      self.stats.prefix_hit_tokens += session.at_work.num_cached
      # Prefixes are those of the version that is served.
      session.versions_T[: session.at_work.num_cached] = self.stats.version

  @property
  def is_refreshing(self) -> bool:
    """True if a swap now would leave caches of several versions despite it."""
    running = self.running.values()
    return any(s.at_work.refreshed and s.consumed for s in running)

  def prefilling(self) -> list[sessions.Session]:
    """Sessions with context to consume, those put off longest first."""
    pending = [s for s in self.running.values() if s.needs_context]
    return sorted(pending, key=lambda s: -s.at_work.waiting)

  def decoding(self) -> list[sessions.Session]:
    """Sessions whose next step is to sample another token."""
    return [s for s in self.running.values() if not s.needs_context]

  def extend(self, session: sessions.Session, count: int) -> None:
    """Counts context as consumed, once its pass is dispatched."""
    session.at_work.waiting = 0
    session.consume(count, self.stats.version, is_shareable=True)
    self.stats.context_tokens += count

  def extended(
    self,
    session: sessions.Session,
    start: int,
    count: int,
    routes_TMA: np.ndarray | None,
  ) -> None:
    """Takes the report of a chunk of context, whose values were finite."""
    end, keys = start + count, session.at_work.keys
    if routes_TMA is not None:
      session.routes_TMA[start:end] = routes_TMA
    if keys is not None:
      whole = end == session.length - 1
      self.holdings.share(session, keys, start, end, whole=whole)
      self._refused = None

  def sampled(self, rows: Iterable[Row], report: sessions.Sampled) -> None:
    """Takes the report of a decode dispatch, row by row."""
    counts = (report.tokens_TB >= 0).sum(0).tolist()
    failed = (report.tokens_TB == sessions.NOT_FINITE).any(0).tolist()
    for row, (session, work) in enumerate(rows):
      if session.work is not work:
        continue
      if counts[row]:
        self._take_tokens(session, work, report, row, counts[row])
      if failed[row]:
        self.fail(session, session.consumed, 1, report.version)
      elif work.stopped or not work.remaining:
        self._finish(session)

  def _take_tokens(self, session, work, report, row, count) -> None:
    version, position = report.version, session.length
    session.consume(count, version, is_shareable=self._share_sampled)
    if work.guide is not None:
      for token in report.tokens_TB[:count, row].tolist():
        work.guide.take(token)
    # Versions rise within a cache: its first token has the oldest.
    piece = row, count, int(session.versions_T[0])
    work.pieces.append((report, piece))
    session.length += count
    work.remaining -= count
    has_drafts = report.drafts_BK is not None
    work.drafts_K = report.drafts_BK[row] if has_drafts else None
    work.refreshed = False
    self.stats.sampled_tokens += count
    work.stopped = session.last_token in work.request.stop_tokens
    if len(work.pieces) == sessions.MAX_PIECES:
      session.settle()
    if work.on_tokens is not None:
      work.on_tokens(report.tokens(session.name, position, piece))

  def _finish(self, session: sessions.Session) -> None:
    session.settle()
    self.finished.append(session.completion())
    del self.running[session.name]
    self.holdings.finish(session, share=self._share_sampled)
    session.work = self._refused = None
    self._idle[session.name] = session

  def fail(
    self, session: sessions.Session, position: int, count: int, version: int
  ) -> None:
    """Ends a session whose values are not finite, and has its pages cleared."""
    name = session.name
    reason = (
      f'The pass over {count} tokens from {position} on of session {name!r} '
      f'gave values that are not finite, with the weights of version {version}.'
    )
    self.finished.append(
      records.Failure(
        session=name, position=position, version=version, reason=reason
      )
    )
    self.stats.failures += 1
    self.holdings.condemn(session)
    self.close(session.name)

  def swap(self, version: int, *, refresh: bool) -> None:
    """Goes on with other weights, once every report has been taken.

    Prefixes of other versions are dropped. With `refresh` sessions consume
    their tokens anew, a running one at most once between two sampled tokens:
    with a swap at every step it would otherwise never sample. So do those that
    the swap would tear.
    """
    self.stats.version = version
    self.stats.swaps += 1
    self._refused = None
    self.holdings.reset(version)
    for session in self.sessions.values():
      work = session.work
      if work is not None:
        work.keys = work.waits_for = None
      is_due = refresh or session.is_torn_by_swap
      if is_due and not (work and work.refreshed):
        if work is not None:
          session.settle()  # Its tokens must be in `tokens_T` to be consumed.
        self.holdings.strip(session)
      elif session.consumed:
        session.shareable = None
    # Sessions that lost their pages go to the front of the queue.
    stripped = [s for s in self.running.values() if not s.pages]
    for session in stripped:
      del self.running[session.name]
      session.at_work.refreshed = True
    self.queue.extendleft(stripped[::-1])

  def take_finished(self) -> list[records.Completion | records.Failure]:
    finished, self.finished = self.finished, []
    return finished
