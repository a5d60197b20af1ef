"""Owners of the pages of the KV cache, and the prefixes that pages hold.

`Pages` counts owners, `Prefixes` finds pages of equal prompts, and `Holdings`
uses both to give pages to sessions.

A page is free, or has any number of owners. A page with values that are not
finite is stained: masking hides stale numbers from a later owner, but zero
times NaN is NaN, so the page must be cleared once it is released.
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
    references: number of owners of each page.
    to_clear: released stained pages, to be cleared before the next dispatch.
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
    """Gives free pages a first owner; there must be enough."""
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
    """Marks held pages to be cleared once they are released."""
    self._stained.update(pages)


class PrefixPage(NamedTuple):
  """A page of a prefix: `count` tokens that follow the page of key `parent`."""

  page: int
  parent: bytes
  count: int
  routes_TMA: np.ndarray


class Match(NamedTuple):
  """Pages found of a prefix: full ones, then maybe a partial one."""

  full: Sequence[PrefixPage] = ()
  partial: PrefixPage | None = None
  missing: bytes | None = None  # key of the first page not found, if any

  @property
  def pages(self) -> list[PrefixPage]:
    """All pages, in order."""
    return [*self.full, *([self.partial] if self.partial else [])]


def _key(parent: bytes, tokens_T: np.ndarray) -> bytes:
  return hashlib.blake2b(parent + tokens_T.tobytes(), digest_size=16).digest()


class Prefixes:
  """Pages of one version's prefixes, least recently used first.

  Keys and values at a position depend on the weights and on every token up to
  it, so a page's key is a hash of the version and all tokens from the start of
  the session to the page's last. The store owns its pages, as a session does;
  when pages run short it releases those without another owner, least recently
  used first.

  The last page of a prompt, usually partial, is stored too. Its owner goes on
  writing behind the stored tokens, so a session that finds it takes a copy.
  """

  def __init__(self, pages: Pages, page_size: int, version: int):
    self._pages = pages
    self._page_size = page_size
    self._stored = collections.OrderedDict[bytes, PrefixPage]()
    self._key_of_page: dict[int, bytes] = {}
    # parent -> {token count: number of its partial pages with that count}.
    self._partial: dict[bytes, collections.Counter[int]] = {}
    self.reset(version)

  @property
  def held(self) -> list[int]:
    return [stored.page for stored in self._stored.values()]

  def keys(self, tokens_T: np.ndarray) -> list[bytes]:
    """Returns the root's key, and that of each page of these tokens.

    The key of page `index` is `keys[index + 1]`, its parent's `keys[index]`.
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
    """Finds the longest partial page that begins with these tokens."""
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
    """Adds page `index` of a prefix, unless the same tokens are stored."""
    parent, key = keys[index : index + 2]
    if key not in self._stored:
      self._pages.retain([page])
      # The page may be stored with fewer tokens.
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
    """Releases the least recently used page without another owner, if any."""
    for stored in self._stored.values():
      if self._pages.references[stored.page] == 1:
        self.forget([stored.page])
        return True
    return False

  def forget(self, pages: Iterable[int]) -> None:
    """Removes those of these pages that are stored."""
    for page in pages:
      key = self._key_of_page.pop(page, None)
      if key is None:
        continue
      stored = self._stored.pop(key)
      if stored.count < self._page_size:
        counts = self._partial.pop(stored.parent)
        if others := counts - collections.Counter([stored.count]):
          self._partial[stored.parent] = others
      self._pages.release([page])

  def reset(self, version: int) -> None:
    """Removes all pages; later ones belong to `version`."""
    self.forget(self.held)
    self._root = f'version {version}'.encode()


class Holdings:
  """Gives pages to sessions and takes them back.

  Attributes:
    to_copy: (source, target, count) of pages whose first tokens are to be
      copied in this order, after `pages.to_clear`, before the next dispatch.
  """

  def __init__(self, limits: options.EngineOptions, version: int):
    self.pages = Pages(limits.pages)
    self.prefixes = Prefixes(self.pages, limits.page_size, version)
    self.to_copy: list[tuple[int, int, int]] = []
    self._page_size = limits.page_size
    self._share = limits.share_prefixes
    # Key of a page -> session that is consuming its tokens.
    self._filling: dict[bytes, sessions.Session] = {}

  def waits(self, session: sessions.Session) -> bool:
    """True if another session is filling the next page of this prefix."""
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
    """Gives a session pages for as many tokens as its request may need.

    Sessions in `kept` keep theirs; `victims` may lose theirs, in this order.
    Returns true if there were enough pages.
    """
    match = self._match(session)
    # The source of a copy takes room too: there may be enough without it.
    return any(
      self._find(session, match._replace(partial=partial), kept, victims)
      for partial in (match.partial, None)
    )

  def _find(self, session, match, kept, victims) -> bool:
    shared = [stored.page for stored in match.full]
    held = [stored.page for stored in match.pages]
    last = session.length + session.at_work.remaining - 1
    count = -(-last // self._page_size) - len(session.pages) - len(shared)
    # So that they are not evicted to make room for the others.
    self.pages.retain(held)
    if not self._make_room(count, [session, *kept], held, victims):
      self.pages.release(held)
      return False
    taken = self.pages.take(count)
    if match.partial:
      # A copy, since the owner goes on writing behind the matched tokens.
      source = match.partial.page
      self.to_copy.append((source, taken[0], match.partial.count))
      self.pages.release([source])
    session.pages += shared + taken
    if not session.consumed:
      for stored in match.pages:
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
    """Frees pages until `count` are free; false if kept ones prevent that."""
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
    """Stores the pages that tokens start..end of a session filled, as prefixes.

    With `whole` the last page is stored even if it is not full.
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
    """Releases the unused pages of a request; with `share` stores others."""
    self.stop_filling(session)
    used = -(-session.consumed // self._page_size)
    self.pages.release(session.pages[used:])
    del session.pages[used:]
    if share:
      keys = self.prefixes.keys(session.tokens_T[: session.consumed])
      self.share(session, keys, 0, session.consumed, whole=True)

  def strip(self, session: sessions.Session) -> None:
    """Takes all pages of a session, which then consumes its tokens anew."""
    self.stop_filling(session)
    self.pages.release(session.pages)
    session.pages = []
    session.consumed = session.shareable = 0
    if session.work is not None:
      session.work.start_over()

  def stop_filling(self, session: sessions.Session) -> None:
    """Stops other sessions from waiting for pages of this one."""
    for key in [k for k, s in self._filling.items() if s is session]:
      del self._filling[key]

  def condemn(self, session: sessions.Session) -> None:
    """Removes a session's pages, with values not finite, from prefixes."""
    self.pages.stain(session.pages)
    self.prefixes.forget(session.pages)

  def reset(self, version: int) -> None:
    self._filling.clear()
    self.prefixes.reset(version)
