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
import dataclasses
import hashlib
from collections.abc import Iterable

import numpy as np

from composer_jax.rollout import pages as pages_lib


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
  """A page of a prefix.

  Attributes:
    page: held by the store.
    parent: key of the page before.
    count: tokens in it.
    routes_TMA: uint16 of those; None from an engine that records none.
  """

  page: int
  parent: bytes
  count: int
  routes_TMA: np.ndarray | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Match:
  """What the store has of a prefix.

  Attributes:
    full: its leading full pages.
    partial: a page whose tokens come next; None without one.
    missing: key of the first page that is not there; None if all are.
  """

  full: list[Entry]
  partial: Entry | None
  missing: bytes | None

  @property
  def num_tokens(self) -> int:
    tail = self.partial.count if self.partial else 0
    return sum(entry.count for entry in self.full) + tail


def root(version: int) -> bytes:
  """Returns the key that every first page of a version descends from."""
  return f'version {version}'.encode()


def key_of(parent: bytes, tokens_T: np.ndarray) -> bytes:
  """Returns the key of a page that holds these tokens after its parent's."""
  return hashlib.blake2b(parent + tokens_T.tobytes(), digest_size=16).digest()


class Prefixes:
  """Pages of one version's prefixes, least recently used first."""

  def __init__(self, pages: pages_lib.Pages, page_size: int, version: int):
    self._pages = pages
    self._page_size = page_size
    self._root = root(version)
    self._entries: collections.OrderedDict[bytes, Entry] = (
      collections.OrderedDict()
    )
    self._key_of_page: dict[int, bytes] = {}
    # parent -> {count: number of its partial pages that hold so many tokens}.
    self._partial: dict[bytes, collections.Counter[int]] = {}

  def __len__(self) -> int:
    return len(self._entries)

  @property
  def held(self) -> list[int]:
    """The page of every entry."""
    return [entry.page for entry in self._entries.values()]

  def keys(self, tokens_T: np.ndarray) -> list[bytes]:
    """Returns the key of each page that these tokens fill or begin."""
    keys, parent = [], self._root
    for start in range(0, len(tokens_T), self._page_size):
      parent = key_of(parent, tokens_T[start : start + self._page_size])
      keys.append(parent)
    return keys

  def match(self, tokens_T: np.ndarray, keys: list[bytes]) -> Match:
    """Finds the longest prefix of `tokens_T`, whose keys are given."""
    full: list[Entry] = []
    num_full = len(tokens_T) // self._page_size
    for key in keys[:num_full]:
      entry = self._entries.get(key)
      if entry is None:
        break
      full.append(entry)
    parent = keys[len(full) - 1] if full else self._root
    partial, tail = self._tail(parent, tokens_T[len(full) * self._page_size :])
    self._touch([*keys[: len(full)], *([tail] if tail else [])])
    missing = keys[len(full)] if len(full) < len(keys) else None
    return Match(
      full=full, partial=partial, missing=None if missing == tail else missing
    )

  def _tail(self, parent, tokens_T) -> tuple[Entry | None, bytes | None]:
    """Finds the longest partial page that holds the first of these tokens."""
    for count in sorted(self._partial.get(parent, ()), reverse=True):
      if count <= len(tokens_T):
        key = key_of(parent, tokens_T[:count])
        if key in self._entries:
          return self._entries[key], key
    return None, None

  def put(self, keys: list[bytes], index: int, entry: Entry) -> None:
    """Adds page `index` of a prefix, unless it has one with these tokens."""
    key = keys[index]
    if key not in self._entries:
      self._pages.retain([entry.page])
      # The tokens grew since.
      if entry.page in self._key_of_page:
        self._remove(self._key_of_page[entry.page])
      self._entries[key] = entry
      self._key_of_page[entry.page] = key
      if entry.count < self._page_size:
        counts = self._partial.setdefault(entry.parent, collections.Counter())
        counts[entry.count] += 1
    self._touch([k for k in keys[: index + 1] if k in self._entries])

  def _touch(self, keys: list[bytes]) -> None:
    # Children first, so that a parent is never evicted before its child.
    for key in keys[::-1]:
      self._entries.move_to_end(key)

  def parent(self, keys: list[bytes], index: int) -> bytes:
    """Returns the key before that of page `index`."""
    return keys[index - 1] if index else self._root

  def _remove(self, key: bytes) -> None:
    entry = self._entries.pop(key)
    del self._key_of_page[entry.page]
    if entry.count < self._page_size:
      counts = self._partial[entry.parent]
      counts[entry.count] -= 1
      if not counts[entry.count]:
        del counts[entry.count]
      if not counts:
        del self._partial[entry.parent]
    self._pages.release([entry.page])

  def evict(self) -> bool:
    """Gives back the page used longest ago of those nobody else holds."""
    for key, entry in self._entries.items():
      if self._pages.references(entry.page) == 1:
        self._remove(key)
        return True
    return False

  def forget(self, pages: Iterable[int]) -> None:
    """Drops what it knows of these pages."""
    for page in pages:
      if page in self._key_of_page:
        self._remove(self._key_of_page[page])

  def reset(self, version: int) -> None:
    """Drops everything; what comes belongs to `version`."""
    for key in list(self._entries):
      self._remove(key)
    self._root = root(version)
