"""Candidates, their prompts, and the tests that are hidden."""

import pytest

from composer_jax.tasks.deletion import (
  candidates,
  descriptions,
  edit,
  prompt,
  workspace,
)
from composer_jax.tasks.repository import task_set
from tests.tasks import small_package

TEXTS = {
  p: t for p, t in small_package.FILES.items() if p.startswith('larder/')
}
TESTS = {p: small_package.FILES[p] for p in small_package.TESTS}
LAYOUT = workspace.layout(
  {path: text.encode() for path, text in small_package.FILES.items()}
)
_SHELF = 'tests/test_shelf.py::TestShelf::'
ENTERED = {
  '': ('larder/words.py:<module>', 'larder/numbers.py:median'),
  **{
    i: ('larder/words.py:slug',)
    for i in small_package.ALL_IDS
    if '::test_slug' in i
  },
  **{
    i: ('larder/numbers.py:' + i.split('::test_')[1].split('_')[0],)
    for i in small_package.ALL_IDS
    if 'numbers' in i
  },
  **{
    i: ('larder/words.py:count_vowels', 'larder/words.py:_is_vowel')
    for i in small_package.ALL_IDS
    if '::test_count' in i
  },
  **{
    i: ('larder/shelf.py:Shelf.__init__', 'larder/words.py:slug')
    for i in small_package.ALL_IDS
    if 'TestShelf' in i
  },
}
MAP = candidates.test_map(ENTERED, small_package.ALL_IDS)


def keys(tier, max_share=1.0, seed='0', **options):
  return [
    c.key
    for c in candidates.candidates(
      TEXTS, MAP, tier, max_share=max_share, seed=seed, **options
    )
  ]


def test_tiers_have_their_candidates():
  # Other bodies have two lines, run at import, or are entered by no test.
  assert keys('body') == ['body/larder/numbers.py:chunks']
  assert keys('class') == ['class/larder/shelf.py:Shelf']
  assert set(keys('file')) == {'file/larder/numbers.py', 'file/larder/shelf.py'}
  assert keys('symbol') != []


def test_bodies_of_other_lengths_are_candidates_if_asked_for():
  small = keys('body', lines=range(1, 3))
  assert 'body/larder/words.py:slug' in small
  assert 'body/larder/numbers.py:chunks' not in small


def test_what_runs_at_import_is_not_stubbed():
  # `median` runs at import, and could still be deleted as a whole.
  assert 'body/larder/numbers.py:median' not in keys('body')
  assert 'symbol/larder/numbers.py:median' in keys('symbol')


def test_a_feature_that_takes_too_many_tests_along_is_no_candidate():
  assert len(MAP.touched('larder/words.py', 'slug')) == 6 + 6
  assert len(MAP.touched('larder/numbers.py', '')) == 9  # of 28
  assert 'file/larder/numbers.py' in keys('file', max_share=0.33)
  assert 'file/larder/numbers.py' not in keys('file', max_share=0.32)


def test_the_order_is_of_the_seed():
  assert keys('symbol') == keys('symbol')
  orders = {tuple(keys('symbol', seed=str(i))) for i in range(6)}
  assert len(orders) > 1
  assert len({tuple(sorted(order)) for order in orders}) == 1


def test_a_closure_has_helpers_of_nobody_else():
  texts = {
    'm.py': (
      'def _a():\n  x = 1\n  y = 2\n  return x + y\n\n\n'
      'def f():\n  x = _a()\n  y = _b()\n  return x + y\n\n\n'
      'def _b():\n  return 1\n\n\n'
      'def g():\n  return _b()\n\n\n'
      'def lone():\n  x = 1\n  y = 2\n  return x + y\n\n\n'
      'def h():\n  return lone()\n'
    )
  }
  entered = dict.fromkeys('ab', ('m.py:f', 'm.py:lone'))
  mapped = candidates.test_map(entered, ['a', 'b', 'c'])
  closures = candidates.candidates(
    texts, mapped, 'closure', max_share=1.0, seed='0'
  )
  # `g` uses `_b`, too. The caller of `lone` goes with it.
  assert sorted(c.key for c in closures) == [
    'closure/m.py:_a+m.py:f',
    'closure/m.py:h+m.py:lone',
  ]


@pytest.mark.parametrize('tier', task_set.TIERS)
def test_edits_change_source_and_nothing_else(tier):
  for candidate in candidates.candidates(
    TEXTS, MAP, tier, max_share=1.0, seed='0'
  ):
    changes, lost = candidates.edit(TEXTS, LAYOUT, candidate)
    assert changes and set(changes) <= set(TEXTS)
    is_inside = all('.' in d.symbol for d in candidate.deleted)
    assert (lost == {}) == (tier == 'body' or is_inside)
    for path, text in changes.items():
      assert text != TEXTS[path]


def test_hidden_tests_are_whole_functions():
  failing = [i for i in small_package.ALL_IDS if '::test_slug' in i]
  shown, cut = prompt.hide(failing, TESTS, share=0.34, seed='1')
  hidden = set(failing) - set(shown)
  assert hidden and shown
  assert len({i.partition('[')[0] for i in hidden}) == 1
  (path,) = cut
  left = edit.symbols(path, cut[path])
  gone = {i.partition('[')[0].split('::')[1] for i in hidden}
  assert gone.isdisjoint(s.name for s in left)
  assert len(left) == 9 - 3 + 2  # of three functions one is gone
  assert prompt.hide(failing, TESTS, share=0.34, seed='1')[0] == shown


def test_one_test_stays_and_one_goes():
  failing = [f'{_SHELF}test_put', f'{_SHELF}test_take']
  for share in (0.0, 1.0):
    shown, cut = prompt.hide(failing, TESTS, share=share, seed='1')
    assert len(shown) == 1 and len(cut) == 1


def test_what_is_not_defined_in_the_file_cannot_be_hidden():
  failing = ['tests/test_shelf.py::Other::test_a', 'tests/x.py::test_b']
  assert prompt.hide(failing, TESTS, share=0.5, seed='1')[1] == {}


def test_the_prompt_gives_interfaces_and_no_code():
  def tell(task):
    return prompt.prompt(
      *('larder', '1.0', task.tier, task.deleted, TEXTS),
      descriptions.Description(),
    )

  for task in small_package.tasks():
    text = tell(task)
    for item in task.deleted:
      assert item.path in text
      if item.symbol:
        assert item.symbol.rpartition('.')[2] + '(' in text.replace(
          'class Shelf', 'Shelf('
        )
    assert 'return ' not in text and 'range(' not in text
  assert 'def take(self, name)`: Removes one thing; an unknown' in (
    tell(small_package.tasks()[2])
  )


def test_difficulty_grows_with_all_it_is_made_of():
  def of(tier='body', num_lines=10, num_symbols=1, num_failing=5):
    return prompt.difficulty(tier, num_lines, num_symbols, num_failing)

  assert [of(tier=t) for t in task_set.TIERS] == sorted(
    {of(tier=t) for t in task_set.TIERS}
  )
  assert of() < of(num_lines=20) and of() < of(num_symbols=2)
  assert of() < of(num_failing=50)
  assert of(num_lines=0, num_failing=0) == 0
  assert of('closure', 10_000, 50, 10_000) < 1


def test_a_body_is_taken_along_by_what_holds_it():
  deleted = lambda path, name='': (task_set.Deleted(path=path, symbol=name),)
  shapes = lambda *where: candidates.shapes(deleted(*where), TEXTS)
  put = shapes('larder/shelf.py', 'Shelf.put')
  assert len(put) == 1
  assert put < shapes('larder/shelf.py', 'Shelf') <= shapes('larder/shelf.py')
  # A body of one line is its own task, and nobody else's.
  total = shapes('larder/shelf.py', 'Shelf.total')
  assert len(total) == 1 and not total & shapes('larder/shelf.py', 'Shelf')
