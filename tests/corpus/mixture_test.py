"""Laws of sharing a budget."""

import pytest

from composer_jax.corpus import mixture


@pytest.mark.parametrize(
  'sizes, weights, budget, expected',
  [
    ([100, 100], [1, 1], 50, [25, 25]),
    ([100, 100], [3, 1], 80, [60, 20]),
    # What the small one cannot use goes to the others, in their ratio.
    ([10, 100, 100], [1, 2, 1], 100, [10, 60, 30]),
    ([10, 20], [1, 1], 1000, [10, 20]),
    ([10, 20], [0, 1], 15, [0, 15]),
  ],
)
def test_allocate(sizes, weights, budget, expected):
  assert mixture.allocate(sizes, weights, budget) == expected


def test_errors():
  with pytest.raises(ValueError, match='1 mixture weights for 2 sources'):
    mixture.allocate([1, 2], [1], 3)
  with pytest.raises(ValueError, match='must not be negative'):
    mixture.allocate([1, 2], [1, -1], 3)
