"""The planner on hand-drawn maps."""

import numpy as np
import pytest

from composer_jax.delta import follower as followers
from composer_jax.delta import rebuild
from composer_jax.delta.format import manifest as manifests


def target(version):
  return f'{version:016x}'


def edge(base, version, cost):
  # A name of its own for each edge.
  name = f'{version:08x}{(base or 0):08x}{cost:048x}'
  return manifests.Edge(
    version=version,
    base_version=base,
    bytes=cost,
    manifest=name,
    manifest_bytes=1,
    target=target(version),
  )


def held(version, target_id):
  return rebuild.Held(version=version, target_id=target_id, tensors={})


def start(version):
  return held(version, target(version) + 48 * '0')


def legs(way):
  return [(e.base_version, e.version) for e in way.edges]


SINGLES = [edge(v, v + 1, 10) for v in range(20)]
MAP = [edge(None, 0, 1000), edge(None, 16, 900), *SINGLES]


def test_each_receiver_goes_its_cheapest_way():
  last = start(19)
  way = followers.cheapest(MAP, 20, last)
  assert (way.bytes, way.start, legs(way)) == (10, last, [(19, 20)])
  assert followers.cheapest(MAP, 20, start(5)).bytes == 150
  way = followers.cheapest(MAP, 20)
  assert (way.bytes, way.start) == (940, None)
  assert legs(way)[0] == (None, 16)
  assert followers.cheapest(MAP, 20, start(20)).edges == ()
  assert followers.cheapest(MAP, 21, start(20)) is None


def test_banned_bundles_are_gone_around_to_the_keyframe():
  names = {(e.base_version, e.version): e.manifest for e in MAP}
  assert followers.cheapest(MAP, 20, start(19), {names[19, 20]}) is None
  banned = {names[12, 13]}
  way = followers.cheapest(MAP, 20, start(8), banned)
  assert (way.start, way.bytes) == (None, 940)
  banned |= {names[None, 16]}
  assert followers.cheapest(MAP, 20, start(8), banned) is None


def test_void_versions_are_not_started_from_and_equal_weights_are():
  assert followers.cheapest(MAP, 20, held(19, 64 * 'f')).start is None
  # The same weights under another version: no matter how they came to be.
  other = held(77, target(19) + 48 * '0')
  assert legs(followers.cheapest(MAP, 20, other)) == [(19, 20)]
  # A version that the index forgot is one that its edges may still leave.
  assert followers.cheapest(SINGLES[5:], 7, start(5)).bytes == 20


@pytest.mark.parametrize('seed', range(20))
def test_no_way_is_cheaper(seed):
  rng = np.random.default_rng(seed)
  costs = rng.integers(1, 50, 6).tolist()
  frames = {v: int(rng.integers(1, 150)) for v in rng.choice(6, 2)}
  edges = [edge(v, v + 1, cost) for v, cost in enumerate(costs)]
  edges += [edge(None, int(v), cost) for v, cost in frames.items()]
  begin = int(rng.integers(0, 7))
  # From each version that is there, in one way, to the last.
  found = [cost + sum(costs[v:]) for v, cost in frames.items()]
  found.append(sum(costs[begin:]))
  way = followers.cheapest(edges, 6, start(begin))
  assert way.bytes == min(found)
