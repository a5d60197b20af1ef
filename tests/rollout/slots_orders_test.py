"""Slots in random orders of events: nothing leaks, hangs or is mixed up."""

import collections

import numpy as np
import pytest

from composer_jax.core import records
from tests.rollout import tables


class Cache:
  """The content of a device's cache, as the tokens that it was computed from.

  A place of a page holds (tokens up to this place, versions that computed them,
  version that computed this one).
  """

  def __init__(self, page_size):
    self._size = page_size
    self._places = {}

  def _of(self, session, position):
    return session.pages[position // self._size], position % self._size

  def write(self, session, tokens, start, count, version):
    """Consumes tokens; checks that the cache holds all tokens before them."""
    for position in range(start, start + count):
      versions = {version}
      if position:
        known, older, _ = self._places[self._of(session, position - 1)]
        assert known == tuple(tokens[:position]), 'another session wrote here'
        versions |= older
      place = self._of(session, position)
      self._places[place] = tuple(tokens[: position + 1]), versions, version

  def copy(self, copies):
    values = [
      (target, offset, self._places[source, offset])
      for source, target, count in copies
      for offset in range(count)
    ]
    self._places |= {(page, offset): held for page, offset, held in values}

  def clear(self, pages):
    for place in [p for p in self._places if p[0] in pages]:
      del self._places[place]

  def writer(self, session, position):
    return self._places[self._of(session, position)][2]

  def versions(self, session):
    """Returns the versions that computed a session's cache."""
    last = session.consumed - 1
    return self._places[self._of(session, last)][1] if last >= 0 else set()


class Serving:
  """An engine without arithmetic, driven by a random number generator.

  As in the engine, a report is read one dispatch late, or before any other
  event.
  """

  def __init__(self, seed):
    self.rng = np.random.default_rng(seed)
    self.version = 0
    self.outcomes = collections.Counter()
    self.asked = collections.Counter()
    # Counts of interesting cases, so that the test shows that it met them.
    self.seen = collections.Counter()
    page_size = int(self.rng.choice([1, 2, 4]))
    self.cache = Cache(page_size)
    self.known, self.routes = {}, {}
    self.unread = []
    self.table = tables.make_table(
      num_slots=int(self.rng.integers(1, 5)),
      max_len=13,
      page_size=page_size,
      # The fewest that hold one session, and a few more.
      num_pages=12 // page_size + int(self.rng.integers(5)),
      share_sampled=bool(self.rng.integers(2)),
    )

  def _read(self, keep=0):
    while len(self.unread) > keep:
      self.unread.pop(0)()
    for outcome in self.table.take_finished():
      self.outcomes[outcome.session] += 1
      if isinstance(outcome, records.Completion):
        session = self.table.sessions[outcome.session]
        routes = outcome.consumed_expert_ids_TMA[:, 0].tolist()
        window = self.routes.setdefault(outcome.session, [])
        assert outcome.routes_start <= len(window)
        self.seen['later'] += bool(window)
        self.seen['lost'] += outcome.routes_start < len(window)
        self.seen['cached'] += outcome.num_cached > 0
        window[outcome.routes_start :] = routes
        # Routes are those of the passes that wrote the cache.
        assert window == [
          [position, self.cache.writer(session, position)]
          for position in range(session.length - 1)
        ]
        sampled = self.known[outcome.session][-len(outcome.tokens_T) :]
        assert outcome.tokens_T.tolist() == sampled

  def submit(self):
    name = self.rng.choice(list('abcdef'))
    context = self.rng.integers(0, 2, self.rng.integers(8)).tolist()
    new = int(self.rng.integers(1, 6))
    is_new = name not in self.table.sessions
    try:
      self.table.submit(tables.request(name, context, new))
    except ValueError:
      return
    self.asked[name] += 1
    self.known[name] = context if is_new else self.known[name] + context
    if is_new:
      self.routes.pop(name, None)

  def _admit(self):
    waiting = {s for s in self.table.sessions.values() if not s.pages}
    self.table.admit()
    holdings = self.table.holdings
    self.cache.clear(holdings.pages.to_clear)
    self.cache.copy(holdings.to_copy)
    holdings.pages.to_clear, holdings.to_copy = [], []
    for session in waiting:
      if session.pages:
        # A cached prefix was computed by the current weights.
        assert self.cache.versions(session) <= {self.version}

  def _extend(self, session, finite):
    start, end = session.chunk(tables.CHUNK)
    known, work = self.known[session.name], session.at_work
    self.cache.write(session, known, start, end - start, self.version)
    self.table.extend(session, end - start)
    version = self.version

    def read():
      if session.work is not work:
        return
      if finite:
        routes_TMA = tables.routes(np.arange(start, end)[:, None], version)
        self.table.extended(session, start, end - start, routes_TMA)
      else:
        self.table.fail(session, start, end - start, version)

    return read

  def _decode(self, sessions, tokens):
    for session in sessions:
      known = self.known[session.name]
      sampled = tokens[: session.at_work.remaining]
      count = len(sampled)
      if 9 in sampled:
        count = sampled.index(9) + 1
      known += sampled[:count]
      self.cache.write(session, known, session.consumed, count, self.version)
    report = tables.make_report(sessions, tokens, self.version)
    rows = [(s, s.at_work) for s in sessions]
    return lambda: self.table.sampled(rows, report)

  def work(self):
    self._admit()
    pending, decoding = self.table.prefilling(), self.table.decoding()
    if pending and (not decoding or self.rng.random() < 0.5):
      pending = pending[: self.rng.integers(1, 5)]
      reads = [self._extend(s, self.rng.random() > 0.03) for s in pending]
      self.unread.append(lambda: [read() for read in reads])
    else:
      self._read()
      if decoding := self.table.decoding():
        tokens = self.rng.choice([5, 5, 6, 9], self.rng.integers(1, 4)).tolist()
        rows = [(session, session.at_work) for session in decoding]
        idle = tables.make_report(decoding, [])
        self.unread.append(self._decode(decoding, tokens))
        # The engine dispatches once more before it reads which rows ended.
        self.unread.append(lambda: self.table.sampled(rows, idle))
    self._read(keep=1)

  def close(self):
    name = self.rng.choice(list('abcdef'))
    self._read()
    session = self.table.sessions.get(name)
    if session is not None:
      self.asked[name] -= session.work is not None
      self.table.close(name)

  def fail(self):
    self._read()
    if decoding := self.table.decoding():
      session = decoding[0]
      self.table.fail(session, session.consumed, 1, self.version)
      self._read()

  def swap(self):
    self._read()
    self.version += 1
    self.table.swap(self.version, refresh=bool(self.rng.integers(2)))

  def finish(self):
    self._read()
    for _ in range(1000):
      if not self.table.num_unfinished:
        break
      self._admit()
      for session in self.table.prefilling():
        self._extend(session, True)()
      if decoding := self.table.decoding():
        self._decode(decoding, [5, 5])()
      self._read()
    assert self.outcomes == +self.asked, 'a request never ended'
    for name in list(self.table.sessions):
      self.table.close(name)
    tables.check_books(self.table)
    pages = self.table.holdings.pages
    cached = len(self.table.holdings.prefixes.held)
    assert pages.num_free + cached == len(pages.references)


_EVENTS = ('submit', 'work', 'close', 'fail', 'swap')
_CHANCES = (0.25, 0.64, 0.04, 0.01, 0.06)


@pytest.mark.parametrize('part', range(4))
def test_any_order_of_events_leaves_every_session_its_own(part):
  event_counts = collections.Counter()
  for seed in range(100 * part, 100 * (part + 1)):
    serving = Serving(seed)
    for event in serving.rng.choice(_EVENTS, 60, p=_CHANCES):
      getattr(serving, event)()
      tables.check_books(serving.table)
    serving.finish()
    event_counts += serving.seen
  # Second turns, turns whose session had lost its pages, and prefix hits.
  names = ('later', 'lost', 'cached')
  assert min(event_counts[name] for name in names) > 100, event_counts
