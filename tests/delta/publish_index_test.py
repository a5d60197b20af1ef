"""What stays listed: every version of the window, and a short way to it."""

import hypothesis
import pytest
from hypothesis import strategies as st

from composer_jax.delta import chunking
from composer_jax.delta import run as runs
from composer_jax.delta.format import manifest
from composer_jax.delta.store import objects as stores
from tests.delta import publish_test as t


def edge(base, version):
  name = f'{-1 if base is None else base:032x}{version:032x}'.replace('-', 'f')
  return manifest.Edge(
    version=version,
    base_version=base,
    bytes=1,
    manifest=name,
    manifest_bytes=1,
    target=f'{version:016x}',
  )


def run(last, keyframe_every, late=0):
  """The edges of a run as a publisher makes them, `late` keyframes delayed."""
  edges = [edge(None, 0)]
  for v in range(1, last + 1):
    edges.append(edge(v - 1, v))
    is_key = v > late and (v - late) % keyframe_every == 0
    edges += [edge(None, v)] if is_key else []
  return edges


def ends(edges):
  return [(e.base_version, e.version) for e in edges]


def test_closed_form():
  edges = run(20, 100)
  assert runs.pruned(edges, 4) == tuple(edges)  # No keyframe is nearer.
  edges = run(20, 6)
  assert sorted(ends(runs.pruned(edges, 4)), key=str) == sorted(
    [(12, 13), (13, 14), (14, 15), (15, 16), (16, 17), (17, 18), (18, 19),
     (19, 20), (None, 12), (None, 18)],
    key=str,
  )  # fmt: skip


def reachable(edges):
  """Versions that can be reached from a keyframe."""
  found = {e.version for e in edges if e.kind == manifest.KEY}
  while True:
    more = {e.version for e in edges if e.base_version in found}
    if more <= found:
      return found
    found |= more


@hypothesis.settings(max_examples=200, deadline=None, database=None)
@hypothesis.given(
  last=st.integers(0, 60),
  keyframe_every=st.integers(1, 40),
  late=st.integers(0, 5),
  keep=st.integers(1, 70),
)
def test_all_of_the_window_can_be_reached_and_leads_to_the_head(
  last, keyframe_every, late, keep
):
  edges = run(last, keyframe_every, late)
  # As publishers do it: a little more each version.
  grown = []
  for version in range(last + 1):
    grown += [e for e in edges if e.version == version]
    grown = list(runs.pruned(grown, keep))
  assert set(grown) == set(runs.pruned(edges, keep))
  assert tuple(grown) == runs.pruned(grown, keep)
  window = set(range(max(0, last - keep + 1), last + 1))
  assert window <= reachable(grown)
  # Every single of the window is there, for who follows closely.
  assert {v for b, v in ends(grown) if b == v - 1} >= window - {0}


def test_the_head_is_a_delta_where_there_is_one():
  edges = [edge(None, 8), edge(7, 8)]
  assert runs.head_of(edges, 8) == edges[1]
  assert runs.head_of(edges[:1], 8) == edges[0]
  assert runs.head_of(edges, 7) is None


def test_shares_that_disagree_or_do_not_cover_are_refused():
  def share(name, shape=(2,), chunks=()):
    return chunking.ChunkTable(specs={name: ('int8', shape)}, rows=dict(chunks))

  with pytest.raises(ValueError, match='w: one process has blocks of'):
    chunking.merge([share('w'), share('w', (3,))])
  with pytest.raises(ValueError, match='w: 2 elements are in chunks'):
    chunking.merge([share('w')])


def test_a_keyframe_that_became_old_takes_its_chain_along(tmp_path):

  store = stores.Store(tmp_path)
  publisher = t.open_publisher(store, keyframe_every=4, keep=3)
  for v in range(12):
    publisher.publish(t.blocks(t.weights(v)), v)
    t.assert_same_bits(t.served(store), t.weights(v))
    assert len(t.edges(store)) <= 12
  # The window is 9 to 11.
  assert sorted(t.spans(store), key=str) == sorted(
    [(8, 9), (9, 10), (10, 11), (None, 8)], key=str
  )
  assert publisher.gc() > 0
  t.assert_same_bits(t.served(store), t.weights(11))
