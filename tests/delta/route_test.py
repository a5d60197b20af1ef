"""The planner on hand-drawn maps."""

import itertools

import numpy as np
import pytest

from composer_jax.delta import follower as followers
from composer_jax.delta import rebuild
from composer_jax.delta.format import manifest as manifests


def target(version):
  return f'{version:016x}'


def edge(base, version, cost):
  kind = manifests.KEY if base is None else manifests.DELTA
  # A name of its own for each road.
  name = f'{version:08x}{(base or 0):08x}{cost:048x}'
  return manifests.Edge(
    version=version,
    base_version=base,
    kind=kind,
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
MAP = [
  edge(None, 0, 1000),
  edge(None, 16, 900),
  *SINGLES,
  edge(0, 8, 45),
  edge(8, 16, 45),
]


def test_each_receiver_goes_its_cheapest_way():
  way = followers.cheapest(MAP, 20, [start(19)])
  assert (way.bytes, way.start, legs(way)) == (10, 0, [(19, 20)])
  way = followers.cheapest(MAP, 20, [start(0)])
  assert way.bytes == 45 + 45 + 40
  assert legs(way)[:2] == [(0, 8), (8, 16)]
  way = followers.cheapest(MAP, 20, [start(5)])
  assert way.bytes == 30 + 45 + 40
  way = followers.cheapest(MAP, 20)
  assert (way.bytes, way.start) == (940, None)
  assert legs(way)[0] == (None, 16)
  assert followers.cheapest(MAP, 20, [start(20)]).edges == ()
  assert followers.cheapest(MAP, 21, [start(20)]) is None


def test_banned_bundles_are_gone_around_to_the_keyframe():
  names = {(e.base_version, e.version): e.manifest for e in MAP}
  banned = {names[19, 20]}
  assert followers.cheapest(MAP, 20, [start(19)], banned) is None
  banned = {names[8, 16]}
  assert followers.cheapest(MAP, 20, [start(8)], banned).bytes == 120
  banned |= {names[12, 13]}
  way = followers.cheapest(MAP, 20, [start(8)], banned)
  assert (way.start, way.bytes) == (None, 940)
  banned |= {names[None, 16]}
  assert followers.cheapest(MAP, 20, [start(8)], banned) is None


def test_void_versions_are_not_started_from_and_equal_weights_are():
  void = held(19, 64 * 'f')
  assert followers.cheapest(MAP, 20, [void]).start is None
  # The same weights under another version: no matter how they came to be.
  other = held(77, target(19) + 48 * '0')
  assert legs(followers.cheapest(MAP, 20, [other])) == [(19, 20)]
  # A version that the index forgot is one that its edges may still leave.
  assert followers.cheapest(SINGLES[5:], 7, [start(5)]).bytes == 20


def brute_force(edges, version, begin):
  """The least cost over all simple paths."""
  best = np.inf
  for count in range(len(edges) + 1):
    for path in itertools.permutations(edges, count):
      reached, cost = begin.version, 0
      for e in path:
        if e.base_version not in (None, reached):
          break
        reached, cost = e.version, cost + e.bytes
      else:
        if reached == version:
          best = min(best, cost)
  return best


@pytest.mark.parametrize('seed', range(20))
def test_no_way_is_cheaper(seed):
  rng = np.random.default_rng(seed)
  edges = []
  for _ in range(6):
    base, version = sorted(rng.choice(5, 2, replace=False).tolist())
    is_key = rng.random() < 0.2
    edges.append(
      edge(
        None if is_key else base,
        version,
        int(rng.integers(1, 50)),
      )
    )
  begin = start(0)
  way = followers.cheapest(edges, 4, [begin])
  best = brute_force(edges, 4, begin)
  assert (np.inf if way is None else way.bytes) == best
