"""Prefixes are found by all of their tokens and the policy version."""

import numpy as np
import pytest

from composer_jax.rollout import pages as pages_lib

SIZE = 4


@pytest.fixture
def pages():
  return pages_lib.Pages(8)


@pytest.fixture
def store(pages):
  return pages_lib.Prefixes(pages, SIZE, 7)


def _fill(store, pages, tokens_T):
  """Adds to the store the pages of a prompt that it lacks, and returns them."""
  keys = store.keys(tokens_T)
  num_full = len(store.match(tokens_T, keys).full)
  new_pages = pages.take(len(keys) - 1 - num_full)
  for index, page in enumerate(new_pages, start=num_full):
    part_T = tokens_T[index * SIZE :][:SIZE]
    routes_TMA = part_T[:, None, None].astype(np.uint16)
    store.put(keys, index, page, len(part_T), routes_TMA)
  pages.release(new_pages)
  return new_pages


def _find(store, tokens):
  tokens_T = np.array(tokens, np.int32)
  return store.match(tokens_T, store.keys(tokens_T))


def _count(store, tokens):
  """Returns how many of these tokens the store has."""
  return sum(stored.count for stored in _find(store, tokens).pages)


def _prompt(*tokens):
  return np.array(tokens, np.int32)


def test_the_longest_prefix_is_found_with_its_routes(store, pages):
  prompt_pages = _fill(store, pages, _prompt(*range(10)))
  assert len(prompt_pages) == 3 and pages.num_free == 5
  match = _find(store, range(10))
  assert [e.page for e in match.full] == prompt_pages[:2]
  assert match.partial.page == prompt_pages[2] and match.missing is None
  routes = [e.routes_TMA[:, 0, 0].tolist() for e in match.full]
  assert routes == [[0, 1, 2, 3], [4, 5, 6, 7]]
  # Other tokens after the eighth, more than ten tokens, fewer than ten.
  assert _count(store, [*range(8), 20, 21]) == 8
  assert _count(store, [*range(10), 20]) == 10
  assert _count(store, range(9)) == 8
  # The second page is no prefix alone or after another first page.
  assert _count(store, range(4, 8)) == 0
  assert _count(store, [9, 9, 9, 9, *range(4, 8)]) == 0


def test_all_prompts_that_lack_a_page_name_it_alike(store, pages):
  _fill(store, pages, _prompt(*range(4)))
  tokens_T = _prompt(*range(8), 1)
  missing = store.match(tokens_T, store.keys(tokens_T)).missing
  assert missing == store.keys(tokens_T)[2]
  assert missing == _find(store, [*range(8), 2, 3]).missing
  # A page of which the store has only a part still counts as missing.
  _fill(store, pages, _prompt(*range(6)))
  match = store.match(tokens_T, store.keys(tokens_T))
  assert match.missing == missing and match.partial.count == 2


def test_other_versions_are_not_found(store, pages):
  _fill(store, pages, _prompt(*range(6)))
  keys = store.keys(_prompt(*range(6)))
  store.reset(8)
  assert len(store.held) == 0 and pages.num_free == 8
  assert not set(keys) & set(store.keys(_prompt(*range(6))))
  assert _count(store, range(6)) == 0


def test_unused_pages_go_longest_unused_first_and_never_before_a_child(
  store, pages
):
  _fill(store, pages, _prompt(*range(8)))
  _fill(store, pages, _prompt(*range(20, 26)))
  # Two prompts share their first page, so the parent has two children.
  _fill(store, pages, _prompt(*range(4), *range(30, 34)))
  held = _find(store, [*range(4), *range(30, 34)]).full
  pages.retain([e.page for e in held])
  gone = []
  while store.evict():
    counts = [_count(store, p) for p in (range(8), range(20, 26))]
    gone.append(counts)
  assert gone == [[4, 6], [4, 4], [4, 0]]
  assert _count(store, [*range(4), *range(30, 34)]) == 8
  assert pages.num_free == 6


def test_what_is_forgotten_is_not_found(store, pages):
  prompt_pages = _fill(store, pages, _prompt(*range(10)))
  store.forget([prompt_pages[1], prompt_pages[2], 99])
  assert _count(store, range(10)) == 4
  assert pages.num_free == 7


def test_a_page_that_grew_is_known_by_its_tokens_of_now(store, pages):
  (page,) = pages.take(1)
  for count in (2, 4):
    keys = store.keys(_prompt(*range(count)))
    store.put(keys, 0, page, count, np.zeros((count, 1, 1), np.uint16))
  assert len(store.held) == 1 and pages.references[page] == 2
  assert _count(store, range(4)) == 4
  assert _count(store, range(2)) == 0
