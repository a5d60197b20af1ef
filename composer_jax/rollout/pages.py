"""Who holds which page of the KV cache: reference counts, no device.

A page is free, held by any number of owners, or stained: released while it
held values that are not finite. Masking hides stale numbers from a later
owner, but zero times NaN is NaN, so a stained page is cleared first.
"""

from collections.abc import Iterable


class Pages:
  """Reference counts of a fixed number of pages."""

  def __init__(self, num_pages: int):
    self._free = list(range(num_pages))[::-1]
    self._references = [0] * num_pages
    self._stained: set[int] = set()
    self._to_clear: list[int] = []
    # Goes up whenever a page comes free: what could not be had may be now.
    self.num_released = 0

  @property
  def total(self) -> int:
    return len(self._references)

  @property
  def num_free(self) -> int:
    return len(self._free)

  @property
  def num_unowned(self) -> int:
    """Free pages, and those that will be once they are cleared."""
    return len(self._free) + len(self._to_clear)

  def references(self, page: int) -> int:
    return self._references[page]

  def take(self, count: int) -> list[int]:
    """Returns free pages, held once; the caller knows that there are enough."""
    assert 0 <= count <= len(self._free), (count, len(self._free))
    pages = [self._free.pop() for _ in range(count)]
    for page in pages:
      self._references[page] = 1
    return pages

  def retain(self, pages: Iterable[int]) -> None:
    """Adds an owner to pages that have one."""
    for page in pages:
      assert self._references[page] > 0, page
      self._references[page] += 1

  def release(self, pages: Iterable[int]) -> None:
    """Takes an owner away; the last one gives the page back."""
    for page in pages:
      assert self._references[page] > 0, page
      self._references[page] -= 1
      if self._references[page]:
        continue
      self.num_released += 1
      if page in self._stained:
        self._stained.discard(page)
        self._to_clear.append(page)
      else:
        self._free.append(page)

  def stain(self, pages: Iterable[int]) -> None:
    """Marks held pages: they are cleared before they have another owner."""
    self._stained.update(pages)

  def take_to_clear(self) -> list[int]:
    """Returns released stained pages, free from now on: clear them at once."""
    pages, self._to_clear = self._to_clear, []
    self._free += pages
    return pages
