"""Publisher and subscriber on a real directory: chains, damage, rewinds."""

import pathlib
import shutil

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from composer_jax.delta import chain, rebuild
from composer_jax.delta import chunking as encoding
from composer_jax.delta import follower as followers
from composer_jax.delta.format import manifest
from composer_jax.delta.store import objects as store_lib
from tests.delta import bundles, identities

WEIGHTS = {version: bundles.weights(version) for version in range(12)}


@pytest.fixture
def store(tmp_path):
  return store_lib.Store(tmp_path / 'store')


def publisher_of(store, **options):
  options = {'threads': 1, **options}
  options = chain.BundleOptions(**options)
  return chain.BundleWriter(store, 'run', bundles.SIGNER, options=options)


def publish_all(store, versions, **options):
  publisher = publisher_of(store, **options)
  for v in versions:
    info = publisher.publish(bundles.blocks(WEIGHTS[v]), v)
  return publisher, info


def follow(store, **options):
  options = {'threads': 1, **options}
  return followers.Follower(store, 'run', bundles.SIGNER, **options)


def read_pointer(store):
  return manifest.unseal(store.read_pointer('run')[0], bundles.SIGNER, 'run')


def packs_of(store):
  head = rebuild.read_manifest(store, read_pointer(store).head)
  return [store.root / 'objects' / name for name, _ in head.packs]


def test_follower_and_late_joiner_get_the_same_bits(store):
  publisher = publisher_of(store, keyframe_every=3)
  follower = follow(store)
  lagging = follow(store)
  assert follower.poll() is None and follower.problem is None
  previous, routes = '', set()
  for v in range(9):
    info = publisher.publish(bundles.blocks(WEIGHTS[v]), v)
    update = follower.poll()
    assert (update.version, update.target_id) == (v, info.target_id)
    bundles.assert_same_bits(update, WEIGHTS[v])
    assert follower.stats.route == (f'delta {v - 1}-{v}' if v else 'key 0',)
    joiner = follow(store)
    bundles.assert_same_bits(joiner.poll(), WEIGHTS[v])
    routes |= set(joiner.stats.route)
    if v % 4 == 0:
      bundles.assert_same_bits(lagging.poll(), WEIGHTS[v])
      routes |= set(lagging.stats.route)
    assert info.target_id == identities.target_id(WEIGHTS[v])
    assert info.base_id == previous
    previous = info.target_id
    assert info.kind == (manifest.DELTA if v else manifest.KEY)
    assert follower.poll() is None and follower.problem is None
  assert {'key 0', 'key 3', 'key 6'} <= routes
  with pytest.raises(ValueError, match='read-only'):
    update.arrays()['bias'][0] = 1


def test_identity_does_not_depend_on_the_path(tmp_path):
  ids = set()
  for number, options in enumerate(
    (
      {'keyframe_every': 1},
      {'keyframe_every': 2, 'tier': 'fast'},
    )
  ):
    store = store_lib.Store(tmp_path / str(number))
    _, info = publish_all(store, range(4), **options)
    ids.add(info.target_id)
    bundles.assert_same_bits(follow(store).poll(), WEIGHTS[3])
  assert ids == {identities.target_id(WEIGHTS[3])}


def test_many_chunks_and_many_packs(store, monkeypatch):
  monkeypatch.setattr(encoding, 'PACK_BYTES', 2000)
  weights = {v: bundles.weights(v, shape=(4, 256, 512)) for v in range(2)}
  publisher = publisher_of(store, threads=2)
  for v, arrays in weights.items():
    publisher.publish(bundles.blocks(arrays), v)
  for threads in (1, 3):
    update = follow(store, threads=threads).poll()
    bundles.assert_same_bits(update, weights[1])
  assert len(packs_of(store)) > 3


def test_other_tensors_make_a_keyframe(store):
  publisher, _ = publish_all(store, range(2))
  follower = follow(store)
  follower.poll()
  grown = {**WEIGHTS[2], 'more': np.ones(3, np.float32)}
  assert publisher.publish(bundles.blocks(grown), 2).kind == manifest.KEY
  for receiver in (follower, follow(store)):
    bundles.assert_same_bits(receiver.poll(), grown)


def test_receivers_follow_a_rewind(store):
  publisher, _ = publish_all(store, range(4))
  follower = follow(store)
  follower.poll()
  publisher.rewind(1)
  assert follower.poll().version == 1
  other = bundles.weights(2, seed=7)
  publisher.publish(bundles.blocks(other), 2)
  update = follower.poll()
  assert update.version == 2 and follower.problem is None
  bundles.assert_same_bits(update, other)


# Damage. `damaged` is a store of four versions whose last three are deltas.


@pytest.fixture(scope='module')
def healthy(tmp_path_factory):
  root = tmp_path_factory.mktemp('healthy')
  publish_all(store_lib.Store(root), range(4))
  return root


@pytest.fixture
def damaged(healthy, tmp_path):
  return pathlib.Path(shutil.copytree(healthy, tmp_path / 'damaged'))


def refused(root):
  """Polls as a joiner; returns the problem, or None when served rightly."""
  subscriber = follow(store_lib.Store(root))
  update = subscriber.poll()
  if update is None:
    assert subscriber.held is None
    return subscriber.problem
  bundles.assert_same_bits(update, WEIGHTS[update.version])
  assert update.version == 3
  return None


def needed(root):
  """The files without which a joiner cannot be served."""
  store = store_lib.Store(root)
  names = set()
  for edge in bundles.history(store, read_pointer(store)):
    packs = rebuild.read_manifest(store, edge.link).packs
    names |= {edge.manifest, *(name for name, _ in packs)}
  return {'latest', *names}


@hypothesis.settings(
  max_examples=150,
  deadline=None,
  database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(st.data())
def test_no_damage_is_ever_served(damaged, data):
  paths = sorted(p for p in damaged.rglob('*') if p.is_file())
  matter = needed(damaged)
  path = data.draw(st.sampled_from(paths))
  intact = path.read_bytes()
  at = data.draw(st.integers(0, max(len(intact) - 1, 0)))
  kind = data.draw(st.sampled_from(['flip', 'cut', 'grow', 'swap', 'lose']))
  if kind == 'flip' and intact:
    bad = bytearray(intact)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
  elif kind == 'swap':
    bad = data.draw(st.sampled_from([p for p in paths if p != path]))
    bad = bad.read_bytes()
  else:
    bad = {'cut': intact[:at], 'grow': intact + b'\0'}.get(kind)
  path.chmod(0o644)
  try:
    path.unlink() if bad is None else path.write_bytes(bad)
    problem = refused(damaged)
    if path.name in matter and (bad is not None or path.name != 'latest'):
      # Whatever was damaged is named; what follows a pack is never read.
      is_named = problem is not None and any(
        name in problem for name in ('latest', path.name, *WEIGHTS[0])
      )
      assert is_named or kind == 'grow'
  finally:
    path.write_bytes(intact)


def test_what_was_damaged_once_is_served_when_it_is_whole(damaged):
  for path in sorted(
    p for p in damaged.rglob('*') if p.name in needed(damaged)
  ):
    bundles.damage(path)
    assert refused(damaged) is not None
    bundles.damage(path)
  assert refused(damaged) is None


def test_the_pointer_is_signed_from_end_to_end(damaged):
  path = damaged / 'refs' / 'run' / 'latest'
  intact = path.read_bytes()
  subscriber = follow(store_lib.Store(damaged))
  for at in range(0, len(intact), 5):
    flipped = bytearray(intact)
    flipped[at] ^= 1 << at % 8
    for bad in (flipped, intact[:at]):
      path.write_bytes(bad)
      assert subscriber.poll() is None
      assert 'latest: the pointer is damaged' in subscriber.problem


def test_damaged_blob_names_the_tensor_and_old_weights_stay(store, caplog):
  publisher, _ = publish_all(store, range(2))
  subscriber = follow(store)
  held = subscriber.poll()
  publisher.publish(bundles.blocks(WEIGHTS[2]), 2)
  (path,) = packs_of(store)
  bundles.damage(path)
  assert subscriber.poll() is None
  assert '(chunk 0' in subscriber.problem
  assert 'its hash is wrong' in subscriber.problem
  assert subscriber.held is held
  assert 'keeps serving version 1' in caplog.text
  bundles.damage(path)
  assert subscriber.poll().version == 2 and subscriber.problem is None


def test_next_keyframe_heals_a_broken_chain(store):
  publisher, _ = publish_all(store, range(2), keyframe_every=3)
  subscriber = follow(store)
  subscriber.poll()
  publisher.publish(bundles.blocks(WEIGHTS[2]), 2)
  (path,) = packs_of(store)
  path.unlink()
  assert subscriber.poll() is None and path.name in subscriber.problem
  publisher.publish(bundles.blocks(WEIGHTS[3]), 3)
  assert subscriber.poll().version == 3
  assert subscriber.stats.route == ('key 3',)


def test_publishing_again_heals_the_store_and_the_receivers(store):
  publisher, _ = publish_all(store, range(3))
  (path,) = packs_of(store)
  bundles.damage(path)
  joiner = follow(store)
  assert joiner.poll() is None and joiner.problem is not None
  publisher_of(store).publish(bundles.blocks(WEIGHTS[2]), 2)
  assert joiner.poll().version == 2 and joiner.problem is None
  bundles.assert_same_bits(joiner.held, WEIGHTS[2])


def test_rotten_held_weights_are_healed_from_the_keyframe(store):
  publisher, _ = publish_all(store, range(2))
  subscriber = follow(store)
  kernel = subscriber.poll().tensors['kernel'].buffer
  kernel.setflags(write=True)
  kernel[420] += 1
  publisher.publish(bundles.blocks(WEIGHTS[2]), 2)
  bundles.assert_same_bits(subscriber.poll(), WEIGHTS[2])
  assert subscriber.stats.route[0] == 'key 0'
