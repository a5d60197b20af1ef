"""Laws of the wires: closed forms on small tori, and cuts."""

import itertools

import numpy as np
import pytest

from composer_jax.optim.muon import cost
from composer_jax.plan import network


def torus(*sizes, rings=True, devices=1):
  places = np.array([*np.ndindex(*sizes, devices)])
  return network.Torus(sizes, (rings,) * len(sizes), places, 1.0, 6.0)


def groups(*sets):
  return frozenset(frozenset(map(int, s)) for s in sets)


def longest(wires, kind, num_bytes, *sets):
  return max(wires.seconds(kind, num_bytes, groups(*sets)).values())


@pytest.mark.parametrize(
  ('sizes', 'rings', 'pieces'),
  [
    ((4,), True, 2.0),  # n^2 / 8 of the pieces of a pair on each link.
    ((8,), True, 8.0),
    ((5,), True, 3.0),  # (n^2 - 1) / 8
    ((4,), False, 4.0),  # n^2 / 4 in the middle
    ((4, 4), True, 8.0),  # n^3 / 8
    ((2, 4, 8), True, 64.0),  # The longest side counts: 8 * n^2 / 8.
  ],
)
def test_an_exchange_among_all_has_its_closed_form(sizes, rings, pieces):
  number = int(np.prod(sizes))
  seconds = longest(
    torus(*sizes, rings=rings), 'all-to-all', number - 1, range(number)
  )
  assert seconds == pytest.approx(pieces)


@pytest.mark.parametrize('kind', ['all-gather', 'reduce-scatter'])
@pytest.mark.parametrize(
  ('sizes', 'rings', 'sets', 'seconds'),
  [
    ((8,), True, [range(8)], 7 / 2),  # Both directions of the ring.
    ((8,), False, [range(8)], 7.0),  # The ends have one link.
    ((4, 4), True, [range(16)], 15 / 4),
    ((8,), True, [[0, 1, 2, 3], [4, 5, 6, 7]], 3.0),  # Halves are lines.
    # Two rings that interleave share the links.
    ((8,), True, [[0, 2, 4, 6], [1, 3, 5, 7]], 3.0),
  ],
)
def test_gathers_use_the_links_of_a_group(kind, sizes, rings, sets, seconds):
  wires = torus(*sizes, rings=rings)
  assert longest(wires, kind, len(sets[0]) - 1, *sets) == seconds


def test_devices_of_a_chip_share_its_links():
  one, two = torus(4, 4), torus(4, 4, devices=2)
  # Each device sends as much to each other as before, and each chip has two.
  exchange = two.seconds('all-to-all', 31, groups(range(32)))
  alone = longest(one, 'all-to-all', 15, range(16))
  assert exchange['dimension 0'] == pytest.approx(4 * alone)
  # Pieces of 16 chips and of the chip itself, at six times the speed.
  assert exchange['die'] == pytest.approx(16 / 6)
  # What one device of a chip gets, the other has too.
  gathered = two.seconds('all-gather', 31, groups(range(32)))
  assert gathered['dimension 0'] == pytest.approx(32 * 15 / 16 / 4)
  apart = groups(range(0, 32, 2), range(1, 32, 2))
  gathered = two.seconds('all-gather', 15, apart)
  assert gathered == {'dimension 0': 2 * 15 / 4, 'dimension 1': 2 * 15 / 4}


@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('sizes', [(8,), (4, 4), (2, 3, 4)])
def test_no_exchange_is_faster_than_its_bisection(seed, sizes):
  wires, number = torus(*sizes), int(np.prod(sizes))
  order = np.random.default_rng(seed).permutation(number)
  width = int(np.random.default_rng(seed).choice([2, number // 2, number]))
  sets = order.reshape(-1, width)
  spent = wires.seconds('all-to-all', width - 1, groups(*sets))
  for i, size in enumerate(sizes):
    half = wires.places[:, i] < size // 2
    crossing = sum(
      half[a] and not half[b]
      for each in sets
      for a, b in itertools.permutations(each, 2)
    )
    # Two of the links of each ring lead from one half to the other.
    links = 2 * number // size
    assert spent.get(f'dimension {i}', 0.0) >= crossing / links - 1e-9


def test_a_switch_serves_its_node_and_the_network_the_rest():
  wires = network.Nodes(4, within=2.0, across=1.0)
  assert wires.seconds('all-to-all', 6, groups(range(4))) == {'node': 3.0}
  # Of seven others three are here, and four elsewhere.
  assert wires.seconds('all-to-all', 7, groups(range(8))) == {
    'node': 3 / 2,
    'network': 4.0,
  }
  # Four devices bring one copy of what the other node holds.
  assert wires.seconds('all-gather', 7, groups(range(8))) == {
    'node': 7 / 2,
    'network': 1.0,
  }


@pytest.mark.parametrize(
  ('topology', 'mesh', 'words', 'link'),
  [
    ('v5p:4x4x8', (2, 32, 2), 'links of 90 GB/s in 4x4x8 chips', 90e9),
    ('tpu7x:4x4x4', (2, 32, 2), 'links of 90 GB/s in 4x4x4 chips', 90e9),
    ('v5e:8x16', (2, 32, 2), 'links of 45 GB/s in 8x16 chips', 45e9),
  ],
)
def test_places_are_those_of_the_mesh(topology, mesh, words, link):
  wires = network.of(topology, mesh)
  assert (wires.words, wires.link) == (words, link)
  assert len(np.unique(wires.places, axis=0)) == np.prod(mesh)
  # The innermost axis joins neighbours.
  pairs = wires.places.reshape(-1, mesh[-1], wires.places.shape[1])
  assert (abs(np.diff(pairs, axis=1)).sum(-1) == 1).all()


def test_sides_close_where_slices_are_whole_cubes_or_pods():
  closed = lambda name, *mesh: network.of(name, mesh).is_ring
  assert closed('v5p:4x4x8', 1, 128, 1) == (True,) * 3
  assert closed('v5p:2x4x4', 1, 32, 1) == (False,) * 3
  assert closed('v5e:8x16', 1, 128, 1) == (False, True)


def test_gpus_have_nodes():
  wires = network.of('h200:16', (2, 4, 2))
  rates = cost.BY_NAME['h200']
  assert wires == network.Nodes(8, 0.9 * rates.within, 0.9 * rates.across)


@pytest.mark.parametrize(
  ('strides', 'count', 'first'),
  [
    (((2, 8), (4, 2)), 8, range(0, 16, 2)),
    (((2, 8), (4, 2)), 4, range(0, 8, 2)),
    # The major axis comes first in the order of neighbours.
    (((4, 2), (2, 8)), 2, [0, 8]),
  ],
)
def test_neighbours_follow_their_strides(strides, count, first):
  sets = network.neighbours(16, strides, count)
  assert frozenset(first) in sets
  assert sorted(place for each in sets for place in each) == [*range(16)]
