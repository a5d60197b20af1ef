"""Laws of the choice of what is held out."""

import pytest

from composer_jax.corpus import heldout

SMALL = {f'small{i}': 10 for i in range(50)}


@pytest.mark.parametrize('seed', range(3))
def test_several_small_ones_reach_the_quota(seed):
  sizes = {**SMALL, 'large': 500}
  chosen = heldout.choose(sizes, 100, least=0, seed=seed)
  assert len(chosen) == 10 and 'large' not in chosen
  assert chosen == heldout.choose(sizes, 100, least=0, seed=seed)


@pytest.mark.parametrize(
  'sizes, least, expected',
  [
    # One of a line is enough only where nothing asks for more.
    ({'line': 1, 'a': 90, 'b': 900}, 0, {'line'}),
    ({'line': 1, 'a': 90, 'b': 900}, 50, {'line', 'a'}),
    # All too large: the nearest.
    ({'a': 300, 'b': 200, 'c': 900}, 0, {'b'}),
    ({'line': 1, 'b': 110, 'c': 900}, 50, {'b'}),
  ],
)
def test_where_there_are_no_several_small_ones(sizes, least, expected):
  assert heldout.choose(sizes, 100, least=least, seed=0) == expected
