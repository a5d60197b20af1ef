"""Who holds which page of the KV cache, and which prefix a page holds.

`Pages` counts owners, `Prefixes` lets equal prompts be consumed once,
`Holdings` gives pages to sessions by both.

A page is free, or held by any number of owners. It is stained if it holds
values that are not finite: masking hides stale numbers from a later owner, but
zero times NaN is NaN, so it must be cleared once it is released.
"""

import collections
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from composer_jax.rollout import options, sessions


class Pages:
  """Reference counts of a fixed number of pages.

  Attributes:
    references: owners of each page.
    to_clear: released and stained, to be cleared before the next dispatch.
  """

  def __init__(self, num_pages: int):
    self._free = list(range(num_pages))[::-1]
    self.references = [0] * num_pages
    self._stained: set[int] = set()
    self.to_clear: list[int] = []

  @property
  def num_free(self) -> int:
    return len(self._free)

  def take(self, count: int) -> list[int]:
    """Returns free pages, held once; the caller knows that there are enough."""
    assert 0 <= count <= len(self._free), (count, len(self._free))
    pages = [self._free.pop() for _ in range(count)]
    for page in pages:
      self.references[page] = 1
    return pages

  def retain(self, pages: Iterable[int]) -> None:
    """Adds an owner to pages that have one."""
    for page in pages:
      assert self.references[page] > 0, page
      self.references[page] += 1

  def release(self, pages: Iterable[int]) -> None:
    """Takes an owner away; the last one gives the page back."""
    for page in pages:
      assert self.references[page] > 0, page
      self.references[page] -= 1
      if self.references[page]:
        continue
      self._free.append(page)
      if page in self._stained:
        self._stained.remove(page)
        self.to_clear.append(page)

  def stain(self, pages: Iterable[int]) -> None:
    """Marks held pages: they are to be cleared once they are released."""
    self._stained.update(pages)


class PrefixPage(NamedTuple):
  """A page after that of key `parent`, which holds `count` tokens."""

  page: int
  parent: bytes
  count: int
  routes_TMA: np.ndarray


class Match(NamedTuple):
  """A prefix's full pages, a partial one behind them, the first missing key."""

  full: Sequence[PrefixPage] = ()
  partial: PrefixPage | None = None
  missing: bytes | None = None

  @property
  def found(self) -> list[PrefixPage]:
    """All of its pages, in order."""
    return [*self.full, *([self.partial] if self.partial else [])]


def _key(parent: bytes, tokens_T: np.ndarray) -> bytes:
  return hashlib.blake2b(parent + tokens_T.tobytes(), digest_size=16).digest()


class Prefixes:
  """Pages of one version's prefixes, least recently used first.

  Keys and values at a position depend on every token up to it and on the
  weights, so a page is known by a hash of the version and all tokens from the
  start of the session to its own last one. The store owns the pages that it
  names, as a session does; it gives back those that nobody else holds, least
  recently used first, when pages run short.

  The last page of a prompt is full by chance only. It is kept as well, under
  the tokens that it holds; its owner goes on writing behind them, so who finds
  it takes a copy.
  """

  def __init__(self, pages: Pages, page_size: int, version: int):
    self._pages = pages
    self._page_size = page_size
    self._stored = collections.OrderedDict[bytes, PrefixPage]()
    self._key_of_page: dict[int, bytes] = {}
    # parent -> {count: number of its partial pages that hold so many tokens}.
    self._partial: dict[bytes, collections.Counter[int]] = {}
    self.reset(version)

  @property
  def held(self) -> list[int]:
    return [stored.page for stored in self._stored.values()]

  def keys(self, tokens_T: np.ndarray) -> list[bytes]:
    """Returns the root's key, and that of each page these tokens fill or begin.

    The parent of page `index` is thus `keys[index]`, its own `keys[index + 1]`.
    """
    keys = [self._root]
    for start in range(0, len(tokens_T), self._page_size):
      keys.append(_key(keys[-1], tokens_T[start : start + self._page_size]))
    return keys

  def match(self, tokens_T: np.ndarray, keys: list[bytes]) -> Match:
    """Finds the longest prefix of `tokens_T`, whose keys are given."""
    num_full = len(tokens_T) // self._page_size
    full: list[PrefixPage] = []
    for key in keys[1 : num_full + 1]:
      if key not in self._stored:
        break
      full.append(self._stored[key])
    last = len(full)
    tail = self._tail(keys[last], tokens_T[last * self._page_size :])
    self._touch([*keys[1 : last + 1], *([tail] if tail else [])])
    partial = self._stored[tail] if tail else None
    missing = next(iter(keys[last + 1 :]), None)
    return Match(full, partial, None if missing == tail else missing)

  def _tail(self, parent: bytes, tokens_T: np.ndarray) -> bytes | None:
    """Finds the longest partial page that holds the first of these tokens."""
    for count in sorted(self._partial.get(parent, ()), reverse=True):
      if count <= len(tokens_T):
        key = _key(parent, tokens_T[:count])
        if key in self._stored:
          return key
    return None

  def put(
    self,
    keys: list[bytes],
    index: int,
    page: int,
    count: int,
    routes_TMA: np.ndarray,
  ) -> None:
    """Adds page `index` of a prefix, unless it has one with these tokens."""
    parent, key = keys[index : index + 2]
    if key not in self._stored:
      self._pages.retain([page])
      # The tokens grew since.
      self.forget([page])
      self._stored[key] = PrefixPage(page, parent, count, routes_TMA)
      self._key_of_page[page] = key
      if count < self._page_size:
        self._partial.setdefault(parent, collections.Counter())[count] += 1
    self._touch([k for k in keys[1 : index + 2] if k in self._stored])

  def _touch(self, keys: list[bytes]) -> None:
    # Children first, so that a parent is never evicted before its child.
    for key in keys[::-1]:
      self._stored.move_to_end(key)

  def evict(self) -> bool:
    """Gives back the page used longest ago of those nobody else holds."""
    for stored in self._stored.values():
      if self._pages.references[stored.page] == 1:
        self.forget([stored.page])
        return True
    return False

  def forget(self, pages: Iterable[int]) -> None:
    """Drops what it knows of these pages."""
    for page in pages:
      key = self._key_of_page.pop(page, None)
      if key is None:
        continue
      stored = self._stored.pop(key)
      if stored.count < self._page_size:
        counts = self._partial.pop(stored.parent)
        if left := counts - collections.Counter([stored.count]):
          self._partial[stored.parent] = left
      self._pages.release([page])

  def reset(self, version: int) -> None:
    """Drops everything; what comes belongs to `version`."""
    self.forget(self.held)
    self._root = f'version {version}'.encode()


class Holdings:
  """Gives pages to sessions and takes them back.

  Attributes:
    to_copy: (source, target, count) of pages whose first tokens are to be
      copied before the next dispatch, in this order, once those of
      `pages.to_clear` are cleared.
  """

  def __init__(self, limits: options.EngineOptions, version: int):
    self.pages = Pages(limits.pages)
    self.prefixes = Prefixes(self.pages, limits.page_size, version)
    self.to_copy: list[tuple[int, int, int]] = []
    self._page_size = limits.page_size
    self._share = limits.share_prefixes
    # Pages that a session is consuming tokens for, by key.
    self._filling: dict[bytes, sessions.Session] = {}

  def waits(self, session: sessions.Session) -> bool:
    """Whether another session is filling the next page of this one's prefix."""
    work = session.at_work
    if work.waits_for not in self._filling:
      missing = self._match(session).missing
      work.waits_for = missing if missing in self._filling else None
    return work.waits_for is not None

  def find(
    self,
    session: sessions.Session,
    kept: Iterable[sessions.Session],
    victims: Iterable[sessions.Session],
  ) -> bool:
    """Gives a session pages for the most tokens that its request can come to.

    Sessions that are `kept` keep theirs, `victims` may lose them, in this
    order. Returns whether there were enough.
    """
    match = self._match(session)
    # A page to copy from takes room as well: there may be enough without.
    return any(
      self._find(session, match._replace(partial=partial), kept, victims)
      for partial in (match.partial, None)
    )

  def _find(self, session, match, kept, victims) -> bool:
    shared = [stored.page for stored in match.full]
    held = [stored.page for stored in match.found]
    last = session.length + session.at_work.remaining - 1
    count = -(-last // self._page_size) - len(session.pages) - len(shared)
    # Held, so that they are not evicted to make room for the rest.
    self.pages.retain(held)
    if not self._make_room(count, [session, *kept], held, victims):
      self.pages.release(held)
      return False
    taken = self.pages.take(count)
    if match.partial:
      # Its owner goes on writing behind the tokens that are wanted of it.
      source = match.partial.page
      self.to_copy.append((source, taken[0], match.partial.count))
      self.pages.release([source])
    session.pages += shared + taken
    if not session.consumed:
      for stored in match.found:
        end = session.consumed + stored.count
        session.routes_TMA[session.consumed : end] = stored.routes_TMA
        session.consumed = end
      session.shareable = session.at_work.num_cached = session.consumed
      for key in (session.at_work.keys or ())[len(shared) + 1 :]:
        if session.needs_context:
          self._filling.setdefault(key, session)
    return True

  def _match(self, session: sessions.Session) -> Match:
    if session.consumed or not self._share:
      return Match()
    context_T = session.tokens_T[: session.length - 1]
    if session.at_work.keys is None:
      session.at_work.keys = self.prefixes.keys(context_T)
    return self.prefixes.match(context_T, session.at_work.keys)

  def _make_room(self, count, kept, held, victims) -> bool:
    """Frees `count` pages, if those that are kept leave so many."""
    if count <= self.pages.num_free:
      return True
    lasting = {page for session in kept for page in session.pages}
    if count > len(self.pages.references) - len(lasting.union(held)):
      return False
    stripped = iter([v for v in victims if v.pages and v not in kept])
    while count > self.pages.num_free:
      if not self.prefixes.evict():
        self.strip(next(stripped))
    return True

  def share(
    self,
    session: sessions.Session,
    keys: list[bytes],
    start: int,
    end: int,
    *,
    whole: bool,
  ) -> None:
    """Lets others have the pages that tokens start..end of a session filled.

    With `whole` the last one is shared although it is not full.
    """
    if not self._share or (session.shareable or 0) < end:
      return
    size = self._page_size
    last = -(-end // size) if whole else end // size
    for index in range(start // size, last):
      first = index * size
      count = min(size, end - first)
      routes_TMA = session.routes_TMA[first : first + count].copy()
      self.prefixes.put(keys, index, session.pages[index], count, routes_TMA)
      self._filling.pop(keys[index + 1], None)

  def finish(self, session: sessions.Session, *, share: bool) -> None:
    """Takes the pages that a request did not come to use; shares the others."""
    self.stop_filling(session)
    used = -(-session.consumed // self._page_size)
    self.pages.release(session.pages[used:])
    del session.pages[used:]
    if share:
      keys = self.prefixes.keys(session.tokens_T[: session.consumed])
      self.share(session, keys, 0, session.consumed, whole=True)

  def strip(self, session: sessions.Session) -> None:
    """Takes all its pages; the session consumes its tokens anew."""
    self.stop_filling(session)
    self.pages.release(session.pages)
    session.pages = []
    session.consumed = session.shareable = 0
    if session.work is not None:
      session.work.start_over()

  def stop_filling(self, session: sessions.Session) -> None:
    """Others wait no longer for what this session would have consumed."""
    for key in [k for k, s in self._filling.items() if s is session]:
      del self._filling[key]

  def condemn(self, session: sessions.Session) -> None:
    """Keeps everyone from pages with values that are not finite."""
    self.pages.stain(session.pages)
    self.prefixes.forget(session.pages)

  def reset(self, version: int) -> None:
    self._filling.clear()
    self.prefixes.reset(version)
