"""Packed routes are near the bound for every size of a router."""

import math

import numpy as np
import pytest

from composer_jax.core.routes import bits as route_bits


@pytest.mark.parametrize('num_active', [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 22])
def test_a_tape_takes_its_bound_and_two_percent_whatever_the_size(num_active):
  sizes = {*range(max(2, num_active), 140), 256, 257, 384, 512, 513, 65535}
  for num_experts in sizes:
    bound = sum(math.log2(num_experts - a) for a in range(num_active))
    bits = 8e-6 * route_bits.num_bytes(10**6, num_experts, num_active)
    assert bound <= bits < 1.02 * bound, num_experts


@pytest.mark.parametrize(
  'num_experts,num_active,routes,bits',
  # The longest period, the shortest, and neither.
  [(384, 8, 7, 485), (60, 7, 1, 41), (10, 7, 19, 367)],
)
def test_the_period_is_the_one_that_wastes_least(
  num_experts, num_active, routes, bits
):
  for n in (1, 64):
    have = route_bits.num_bytes(8 * n * routes, num_experts, num_active)
    assert have == n * bits


# Full words of the first begin with the digits 0, 1, 2, 4, 1, 2, 4 and so on of
# a route: none of them ends where a route does.
@pytest.mark.parametrize('num_experts,num_active', [(40, 5), (8, 6), (237, 6)])
def test_full_words_that_never_end_with_a_route_are_cut(
  num_experts, num_active
):
  rng = np.random.default_rng(0)
  order_ZE = np.argsort(rng.random((1000, num_experts)), axis=-1)
  ids_ZA = order_ZE[:, :num_active].astype(np.uint16)
  data = route_bits.pack(ids_ZA, num_experts)
  again_ZA = route_bits.unpack(memoryview(data), 1000, num_experts, num_active)
  np.testing.assert_array_equal(again_ZA, ids_ZA)


def test_aligned_routes_fill_numbers_of_64_bits():
  for sizes in ((384, 8), (8, 2), (2, 1), (512, 22)):
    routes = route_bits.aligned_routes(*sizes)
    assert route_bits.num_bytes(routes, *sizes) % 8 == 0
    more = route_bits.num_bytes(3 * routes + 5, *sizes)
    less = route_bits.num_bytes(2 * routes + 5, *sizes)
    assert more - less == route_bits.num_bytes(routes, *sizes)
