"""Which session holds which pages, and what they find filled by others.

Between the two books, `pages` (how often a page is held) and `prefixes` (which
tokens a page holds), and the sessions that own both. No device.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from composer_jax.rollout import pages as pages_lib
from composer_jax.rollout import prefixes as prefixes_lib
from composer_jax.rollout import sessions


class Copy(NamedTuple):
  """The first `count` tokens of a page that another one gets."""

  source: int
  target: int
  count: int


class Holdings:
  """Gives pages to sessions and takes them back.

  Attributes:
    pages: counts of all pages.
    prefixes: pages kept for whoever has the same tokens.
    to_copy: pages to copy before the next dispatch, in this order, once those
      of `pages.to_clear` are cleared.
  """

  def __init__(self, num_pages: int, page_size: int, version: int, share: bool):
    self.pages = pages_lib.Pages(num_pages)
    self.prefixes = prefixes_lib.Prefixes(self.pages, page_size, version)
    self.to_copy: list[Copy] = []
    self._page_size = page_size
    self._share = share
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
    victims: Callable[[], Iterable[sessions.Session]],
  ) -> bool:
    """Gives a session pages for the most tokens that its request can come to.

    Args:
      session: with a request.
      kept: sessions that keep their pages.
      victims: () -> those that may lose them, in this order.

    Returns:
      Whether it has them now.
    """
    match = self._match(session)
    # A page to copy from takes room as well: there may be enough without.
    return self._find(session, match, kept, victims) or self._find(
      session, match._replace(partial=None), kept, victims
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
      self.to_copy.append(Copy(source, taken[0], match.partial.count))
      self.pages.release([source])
    session.pages += shared + taken
    if not session.consumed:
      session.adopt(match)
      for key in (session.at_work.keys or ())[len(shared) + 1 :]:
        if session.needs_context:
          self._filling.setdefault(key, session)
    return True

  def _match(self, session: sessions.Session) -> prefixes_lib.Match:
    if session.consumed or not self._share:
      return prefixes_lib.Match()
    context_T = session.tokens_T[: session.length - 1]
    if session.at_work.keys is None:
      session.at_work.keys = self.prefixes.keys(context_T)
    return self.prefixes.match(context_T, session.at_work.keys)

  def _make_room(self, count, kept, held, victims) -> bool:
    """Frees `count` pages, if those that are kept leave so many."""
    if count <= self.pages.num_free:
      return True
    lasting = {page for session in kept for page in session.pages}
    if count > self.pages.total - len(lasting.union(held)):
      return False
    stripped = iter([v for v in victims() if v.pages and v not in kept])
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

    The last page is shared although it is not full if `whole` says so; `keys`
    are those of the session's pages.
    """
    if not self._share or (session.shareable or 0) < end:
      return
    size = self._page_size
    for index in range(
      start // size, -(-end // size) if whole else end // size
    ):
      first = index * size
      count = min(size, end - first)
      routes_TMA = session.routes_TMA[first : first + count].copy()
      page = session.pages[index]
      self.prefixes.put(keys, index, page, count, routes_TMA)
      self._filling.pop(keys[index + 1], None)

  def finish(self, session: sessions.Session, *, share: bool) -> None:
    """Takes the pages that a request did not come to use.

    Others may have the rest, if `share` says so.
    """
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
    """Forgets all prefixes: they are of other weights."""
    self._filling.clear()
    self.prefixes.reset(version)
