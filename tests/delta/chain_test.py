"""Publisher and subscriber on a real directory: chains, damage, rewinds."""

import pathlib
import shutil

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from composer_jax.delta import bundle, publish, restore, subscribe
from composer_jax.delta import store as store_lib


def weights(version, seed=0):
  """Weights that move a little each version, special values among them."""
  rng = np.random.default_rng(seed)
  masters = rng.normal(0, 0.02, (40, 50)).astype(np.float32)
  masters += 1e-4 * version * np.sign(rng.normal(size=masters.shape))
  kernel = masters.astype(ml_dtypes.bfloat16)
  kernel.reshape(-1).view(np.uint16)[:6] = [
      0x8000, 0, 0x7F80, 0xFF80, 0x7FC1 + version, 0xFFFF - version
  ]  # fmt: skip
  bias = (rng.normal(size=8) + 1e-3 * version).astype(np.float32)
  return {
    'bias': bias,
    'empty': np.zeros((0, 3), np.float32),
    'frozen': np.arange(30, dtype=np.int8).reshape(5, 6),
    'kernel': kernel,
    'scalar': np.array(version, np.float32),
  }


def blocks(arrays):
  for name, array in arrays.items():
    ends = tuple((0, length) for length in array.shape)
    yield name, str(array.dtype), array.shape, ends, array


def assert_same_bits(found, wanted):
  assert found.keys() == wanted.keys()
  for name, array in wanted.items():
    assert found[name].dtype == array.dtype, name
    assert found[name].shape == array.shape, name
    assert found[name].tobytes() == array.tobytes(), name


@pytest.fixture
def store(tmp_path):
  return store_lib.Store(tmp_path / 'store')


def publish_all(store, versions, **options):
  publisher = publish.Publisher(store, 'run', **options)
  for v in versions:
    info = publisher.publish(blocks(weights(v)), v)
  return publisher, info


def test_follower_and_late_joiner_get_the_same_bits(store):
  publisher = publish.Publisher(store, 'run', keyframe_every=3)
  follower = subscribe.Subscriber(store, 'run')
  assert follower.poll() is None and follower.problem is None
  previous, kinds = '', []
  for v in range(7):
    info = publisher.publish(blocks(weights(v)), v)
    update = follower.poll()
    assert (update.version, update.target_id) == (v, info.target_id)
    assert_same_bits(update.weights, weights(v))
    joiner = subscribe.Subscriber(store, 'run').poll()
    assert_same_bits(joiner.weights, weights(v))
    assert info.target_id == bundle.target_id(weights(v))
    assert info.base_id == previous
    previous = info.target_id
    kinds.append(info.kind)
    assert follower.poll() is None and follower.problem is None
  assert kinds == ['key', 'delta', 'delta', 'key', 'delta', 'delta', 'key']
  with pytest.raises(ValueError, match='read-only'):
    update.weights['bias'][0] = 1


def test_identity_does_not_depend_on_the_path(tmp_path):
  ids = set()
  for keyframe_every in (1, 2, 100):
    store = store_lib.Store(tmp_path / str(keyframe_every))
    _, info = publish_all(store, range(4), keyframe_every=keyframe_every)
    ids.add(info.target_id)
  assert len(ids) == 1


def test_many_chunks_and_many_packs(store, monkeypatch):
  monkeypatch.setattr(bundle, 'CHUNK_ELEMENTS', 64)
  monkeypatch.setattr(publish, 'PACK_BYTES', 100)
  publish_all(store, range(3))
  update = subscribe.Subscriber(store, 'run').poll()
  assert_same_bits(update.weights, weights(2))
  manifest = store.manifest(store.pointer('run').manifest)
  assert len(manifest.objects) > 3


def test_other_tensors_make_a_keyframe(store):
  publisher, _ = publish_all(store, range(2))
  grown = {**weights(2), 'more': np.ones(3, np.float32)}
  assert publisher.publish(blocks(grown), 2).kind == bundle.KEY
  assert_same_bits(subscribe.Subscriber(store, 'run').poll().weights, grown)


# Damage. `damaged` is a store of four versions whose last three are deltas.


@pytest.fixture(scope='module')
def healthy(tmp_path_factory):
  root = tmp_path_factory.mktemp('healthy')
  publish_all(store_lib.Store(root), range(4), keyframe_every=100)
  return root


@pytest.fixture
def damaged(healthy, tmp_path):
  return pathlib.Path(shutil.copytree(healthy, tmp_path / 'damaged'))


def refused(root):
  """Polls as a joiner; returns the problem, or None when served rightly."""
  subscriber = subscribe.Subscriber(store_lib.Store(root), 'run')
  update = subscriber.poll()
  if update is None:
    assert subscriber.held is None
    return subscriber.problem
  assert_same_bits(update.weights, weights(update.version))
  assert update.version == 3
  return None


@hypothesis.settings(
  max_examples=250,
  deadline=None,
  database=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(st.data())
def test_no_damage_is_ever_served(damaged, data):
  paths = sorted(p for p in damaged.rglob('*') if p.is_file())
  path = data.draw(st.sampled_from(paths))
  intact = path.read_bytes()
  at = data.draw(st.integers(0, len(intact) - 1))
  kind = data.draw(st.sampled_from(['flip', 'cut', 'grow', 'swap', 'lose']))
  if kind == 'flip':
    bad = bytearray(intact)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
  elif kind == 'swap':
    bad = data.draw(st.sampled_from([p for p in paths if p != path]))
    bad = bad.read_bytes()
  else:
    bad = {'cut': intact[:at], 'grow': intact + b'\0', 'lose': None}[kind]
  try:
    path.unlink() if bad is None else path.write_bytes(bad)
    problem = refused(damaged)
    lost_pointer = kind == 'lose' and path.name == 'latest'
    # Whatever was damaged is named, and every file matters to a joiner.
    assert lost_pointer or problem is not None
    named = ('latest', path.name, *weights(0))
    assert lost_pointer or any(name in problem for name in named)
  finally:
    path.write_bytes(intact)
  assert refused(damaged) is None


def test_every_byte_of_the_pointer_is_sealed(damaged):
  path = damaged / 'refs' / 'run' / 'latest'
  intact = path.read_bytes()
  store = store_lib.Store(damaged)
  for at in range(len(intact)):
    flipped = bytearray(intact)
    flipped[at] ^= 1 << at % 8
    for bad in (flipped, intact[:at]):
      path.write_bytes(bad)
      with pytest.raises(ValueError, match='latest: the pointer is damaged'):
        store.pointer('run')


def test_damaged_blob_names_the_tensor_and_old_weights_stay(store, caplog):
  publisher, _ = publish_all(store, range(2))
  subscriber = subscribe.Subscriber(store, 'run')
  held = subscriber.poll()
  publisher.publish(blocks(weights(2)), 2)
  manifest = store.manifest(store.pointer('run').manifest)
  ((pack, _),) = manifest.objects
  path = store.objects / pack
  intact = path.read_bytes()
  path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
  assert subscriber.poll() is None
  assert (
    'scalar (chunk 0, version 2): its blob is damaged' in subscriber.problem
  )
  assert subscriber.held is held
  assert 'keeps serving version 1' in caplog.text
  path.write_bytes(intact)
  assert subscriber.poll().version == 2 and subscriber.problem is None


def test_next_keyframe_heals_a_broken_chain(store):
  publisher, _ = publish_all(store, range(2), keyframe_every=3)
  subscriber = subscribe.Subscriber(store, 'run')
  subscriber.poll()
  publisher.publish(blocks(weights(2)), 2)
  ((pack, _),) = store.manifest(store.pointer('run').manifest).objects
  (store.objects / pack).unlink()
  assert subscriber.poll() is None and 'bias' in subscriber.problem
  publisher.publish(blocks(weights(3)), 3)
  assert subscriber.poll().version == 3


def test_rotten_held_weights_are_healed_from_the_keyframe(store):
  publisher, _ = publish_all(store, range(2))
  subscriber = subscribe.Subscriber(store, 'run')
  kernel = subscriber.poll().weights['kernel']
  kernel.setflags(write=True)
  kernel[20, 20] += 1
  publisher.publish(blocks(weights(2)), 2)
  assert_same_bits(subscriber.poll().weights, weights(2))


def test_wrong_base_is_refused_by_the_name_of_the_tensor(store):
  publish_all(store, range(2))
  manifest = store.manifest(store.pointer('run').manifest)
  with pytest.raises(ValueError, match=r'kernel \(chunk 0.*not belong'):
    restore.apply(store, manifest, weights(0, seed=1))
  with pytest.raises(ValueError, match='other tensors than its base: bias'):
    restore.apply(store, manifest, {'w': np.zeros(3)})


def test_rolled_back_and_foreign_pointers_are_refused(store, tmp_path):
  publisher, _ = publish_all(store, range(1))
  path = store.pointer_path('run')
  old = path.read_bytes()
  publisher.publish(blocks(weights(1)), 1)
  memory = tmp_path / 'memory'
  subscriber = subscribe.Subscriber(store, 'run', memory=memory)
  held = subscriber.poll()
  path.write_bytes(old)
  restarted = subscribe.Subscriber(store, 'run', memory=memory)
  for receiver in (subscriber, restarted):
    assert receiver.poll() is None
    assert 'latest: the pointer was rolled back' in receiver.problem
  assert subscriber.held is held
  path.unlink()
  assert subscriber.poll() is None and 'is gone' in subscriber.problem
  other = store.pointer_path('other')
  other.parent.mkdir()
  other.write_bytes(old)
  stranger = subscribe.Subscriber(store, 'other')
  assert stranger.poll() is None
  assert "belongs to run 'run', not 'other'" in stranger.problem
  with pytest.raises(ValueError, match=r"run_id '\.\./run'"):
    store.pointer('../run')
