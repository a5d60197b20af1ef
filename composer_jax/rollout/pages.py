"""Who holds which page of the KV cache: reference counts, no device.

A page is free, or held by any number of owners. It is stained if it holds
values that are not finite: masking hides stale numbers from a later owner, but
zero times NaN is NaN, so it must be cleared once it is released.
"""

from collections.abc import Iterable


class Pages:
  """Reference counts of a fixed number of pages.

  Attributes:
    to_clear: released and stained, to be cleared before the next dispatch.
  """

  def __init__(self, num_pages: int):
    self._free = list(range(num_pages))[::-1]
    self._references = [0] * num_pages
    self._stained: set[int] = set()
    self.to_clear: list[int] = []

  @property
  def total(self) -> int:
    return len(self._references)

  @property
  def num_free(self) -> int:
    return len(self._free)

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
      self._free.append(page)
      if page in self._stained:
        self._stained.remove(page)
        self.to_clear.append(page)

  def stain(self, pages: Iterable[int]) -> None:
    """Marks held pages: they are to be cleared once they are released."""
    self._stained.update(pages)
