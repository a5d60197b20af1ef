"""Which pages hold which prefix, so that equal prompts are consumed once.

Pure Python and numpy, no device. Keys and values at a position depend on every
token up to it and on the weights, so a page is known by a hash of the version
and all tokens from the start of the session to its own last one. The store
owns the pages that it names, as a session does; it gives back those that
nobody else holds, least recently used first, when pages run short.

The last page of a prompt is full by chance only. It is kept as well, under the
tokens that it holds; its owner goes on writing behind them, so who finds it
takes a copy.
"""

import collections
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from composer_jax.rollout import pages as pages_lib


class PrefixPage(NamedTuple):
  """A page that the store holds.

  Attributes:
    page: its number.
    parent: key of the page before.
    count: tokens in it.
    routes_TMA: uint16 of those.
  """

  page: int
  parent: bytes
  count: int
  routes_TMA: np.ndarray


class Match(NamedTuple):
  """What the store has of a prefix.

  Attributes:
    full: its leading full pages.
    partial: a page whose tokens come next; None without one.
    missing: key of the first page that is not there; None if all are.
  """

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
  """Pages of one version's prefixes, least recently used first."""

  def __init__(self, pages: pages_lib.Pages, page_size: int, version: int):
    self._pages = pages
    self._page_size = page_size
    self._stored: collections.OrderedDict[bytes, PrefixPage] = (
      collections.OrderedDict()
    )
    self._key_of_page: dict[int, bytes] = {}
    # parent -> {count: number of its partial pages that hold so many tokens}.
    self._partial: dict[bytes, collections.Counter[int]] = {}
    self.reset(version)

  def __len__(self) -> int:
    return len(self._stored)

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
    missing = next(iter(keys[last + 1 :]), None)
    return Match(
      full,
      partial=self._stored[tail] if tail else None,
      missing=None if missing == tail else missing,
    )

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
      if self._pages.references(stored.page) == 1:
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
