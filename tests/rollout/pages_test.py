"""Pages are counted exactly and cleared before another session gets them."""

from composer_jax.rollout import pages as pages_lib


def test_a_page_is_free_once_its_last_owner_gave_it_back():
  pages = pages_lib.Pages(3)
  first, second = pages.take(2)
  pages.retain([first])
  assert pages.num_free == 1
  pages.release([first, second])
  assert pages.num_free == 2 and pages.references[first] == 1
  pages.release([first])
  assert pages.num_free == len(pages.references) == 3
  assert sorted(pages.take(3)) == [0, 1, 2]


def test_a_stained_page_is_to_be_cleared_once_nobody_holds_it():
  pages = pages_lib.Pages(2)
  bad, other = pages.take(2)
  pages.retain([bad])
  pages.stain([bad])
  pages.release([bad, other])
  assert pages.to_clear == [] and pages.num_free == 1
  pages.release([bad])
  assert pages.to_clear == [bad] and pages.num_free == 2
  # A cleared page is like any other.
  pages.to_clear = []
  pages.release(pages.take(2))
  assert pages.to_clear == [] and pages.num_free == 2
