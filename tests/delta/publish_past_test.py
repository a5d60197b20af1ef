"""Versions of the past: rewound, healed, and collected as garbage."""

import pytest

from composer_jax.delta import chain, rebuild
from composer_jax.delta.format import keys
from composer_jax.delta.store import objects as stores
from tests.delta import publish_test as t


@pytest.fixture
def store(tmp_path):
  return stores.Store(tmp_path / 'store')


def test_rewind_voids_later_versions_and_receivers_follow(store):
  publisher = t.open_publisher(store)
  ids = [
    publisher.publish(t.blocks(t.weights(v)), v).target_id for v in range(4)
  ]
  subscriber = t.joiner(store)
  assert subscriber.poll().version == 3
  resumed = t.open_publisher(store)
  resumed.rewind(1)
  assert t.spans(store) == [(None, 0), (0, 1)]
  update = subscriber.poll()
  assert (update.version, update.target_id) == (1, ids[1])
  # Bit-equal training gives the same identity again, other training another.
  assert resumed.publish(t.blocks(t.weights(2)), 2).target_id == ids[2]
  assert subscriber.poll().target_id == ids[2]
  other = resumed.publish(t.blocks(t.weights(3, seed=5)), 3)
  assert other.base_id == ids[2] != ids[3]
  assert subscriber.poll().target_id == other.target_id
  resumed.rewind(7)  # nothing later was published
  assert resumed.version == 3


def test_rewind_past_all_listed_versions_starts_a_new_chain(store):
  publisher = t.open_publisher(store)
  for v in (5, 6):
    publisher.publish(t.blocks(t.weights(v)), v)
  subscriber = t.joiner(store)
  subscriber.poll()
  publisher.rewind(2)
  assert publisher.version is None
  assert subscriber.poll() is None and subscriber.held.version == 6
  info = publisher.publish(t.blocks(t.weights(2)), 2)
  assert (info.kind, info.base_id) == ('key', '')
  assert subscriber.poll().target_id == info.target_id


def damage(store, part):
  """Damages a part of the last version."""
  head = t.pointer(store)
  path = store.root / 'objects' / head.head.manifest
  found = rebuild.read_manifest(store, head.head)
  if part == 'pack':
    path = path.with_name(found.packs[0][0])
  elif part == 'base':
    older = rebuild.read_manifest(store, found.previous)
    path = path.with_name(older.packs[0][0])
  elif part == 'pointer':
    path = store.root / 'refs' / 'run' / 'latest'
  path.write_bytes(b'rot')


@pytest.mark.parametrize('last', [1, 2])
@pytest.mark.parametrize('part', ['manifest', 'pack', 'base', 'pointer'])
def test_a_resumed_trainer_heals_the_version_it_resumes_from(store, part, last):
  publisher = t.open_publisher(store)
  for v in range(last + 1):
    publisher.publish(t.blocks(t.weights(v)), v)
  subscriber = t.joiner(store)
  subscriber.poll()
  damage(store, part)
  resumed = t.open_publisher(store)
  resumed.rewind(1)
  info = resumed.publish(t.blocks(t.weights(1)), 1)
  joined = t.served(store)
  assert (joined.version, joined.target_id) == (1, info.target_id)
  t.assert_same_bits(joined, t.weights(1))
  # So does who followed all along, and nothing stands in the way of the next.
  subscriber.poll()
  assert subscriber.problem is None
  assert subscriber.held.target_id == info.target_id
  assert resumed.publish(t.blocks(t.weights(2)), 2).kind == 'delta'
  assert subscriber.poll().version == t.served(store).version == 2


@pytest.mark.parametrize('part', ['manifest', 'pack', 'pointer'])
def test_publishing_the_last_version_again_heals_it(store, part):
  publisher = t.open_publisher(store)
  for v in range(2):
    publisher.publish(t.blocks(t.weights(v)), v)
  damage(store, part)
  if publisher.version is not None:
    with pytest.raises(ValueError, match='version 1 .*rewind'):
      publisher.publish(t.blocks(t.weights(1, seed=1)), 1)
  info = publisher.publish(t.blocks(t.weights(1)), 1)
  # A live publisher writes the pointer again; the rest takes a keyframe.
  assert info.kind == ('delta' if part == 'pointer' else 'key')
  assert t.served(store).version == 1
  assert publisher.publish(t.blocks(t.weights(2)), 2).kind == 'delta'
  t.assert_same_bits(t.served(store), t.weights(2))


def test_live_publisher_replaces_a_damaged_pointer(store):
  publisher = t.open_publisher(store)
  publisher.publish(t.blocks(t.weights(0)), 0)
  subscriber = t.joiner(store)
  subscriber.poll()
  damage(store, 'pointer')
  assert subscriber.poll() is None and subscriber.problem
  publisher.publish(t.blocks(t.weights(1)), 1)
  assert subscriber.poll().version == 1


def test_gc_keeps_what_the_last_versions_need(store):
  publisher = t.open_publisher(store, keyframe_every=3)
  for v in range(8):  # keyframes 0, 3, 6
    publisher.publish(t.blocks(t.weights(v)), v)
  assert publisher.gc(3) > 0  # 7, 6, 5, and 4 and 3 below 5
  wanted = [(None, 3), (2, 3), (3, 4), (4, 5), (None, 6), (5, 6), (6, 7)]
  assert t.spans(store) == wanted
  assert len(store.sizes()) == 2 * len(wanted)  # a manifest and a pack of each
  assert publisher.gc(3) == 0
  t.assert_same_bits(t.served(store), t.weights(7))
  assert publisher.publish(t.blocks(t.weights(8)), 8).kind == 'delta'
  with pytest.raises(ValueError, match='neither new .the last is 8. nor kept'):
    publisher.publish(t.blocks(t.weights(1)), 1)
  publisher.rewind(4)
  assert t.served(store).version == 4
  with pytest.raises(ValueError, match='keep must be at least 1'):
    publisher.gc(0)


def test_gc_leaves_young_objects_to_who_may_be_about_to_need_them(store):
  publisher = t.open_publisher(store, grace_s=3600.0)
  for v in range(3):
    publisher.publish(t.blocks(t.weights(v)), v)
  name = store.put(b'of a publisher that has not moved its pointer')
  before = store.sizes()
  assert publisher.gc(1) == 0
  assert before.keys() <= store.sizes().keys()
  assert t.open_publisher(store).gc(1) > 0
  assert name not in store.sizes()


@pytest.mark.parametrize('part', ['manifest', 'pointer'])
def test_gc_deletes_nothing_when_it_cannot_know_what_is_needed(store, part):
  publisher = t.open_publisher(store)
  for v in range(3):
    publisher.publish(t.blocks(t.weights(v)), v)
  publisher = t.open_publisher(store)
  damage(store, part)
  before = t.files_of(store)
  with pytest.raises(ValueError, match='damaged|expected'):
    publisher.gc(64)
  assert t.files_of(store) == before


def test_gc_deletes_nothing_if_what_joiners_need_is_not_listed(store):
  publisher = t.open_publisher(store)
  for v in range(5):
    publisher.publish(t.blocks(t.weights(v)), v)
  publisher = t.open_publisher(store)
  middle = t.edges(store)[2].manifest
  (store.root / 'objects' / middle).rename(store.root / 'aside')
  before = store.sizes()
  with pytest.raises(FileNotFoundError, match=middle):
    publisher.gc(1)
  assert store.sizes() == before


def test_a_second_run_is_refused_however_early_it_was_opened(store):
  first = t.open_publisher(store)
  second = chain.BundleWriter(store, 'other', t.KEY)
  first.publish(t.blocks(t.weights(0)), 0)
  with pytest.raises(ValueError, match="has the run 'run'"):
    second.publish(t.blocks(t.weights(1)), 0)
  # Two that come at once are told before either deletes what the other needs.
  pointer = store.root / 'refs' / 'run' / 'latest'
  other = store.root / 'refs' / 'other' / 'latest'
  other.parent.mkdir()
  other.write_bytes(pointer.read_bytes())
  before = store.sizes()
  with pytest.raises(ValueError, match="has the run 'other'"):
    first.gc(1)
  assert store.sizes() == before


def test_a_pointer_that_was_put_back_is_told(store):
  publisher = t.open_publisher(store)
  publisher.publish(t.blocks(t.weights(0)), 0)
  path = store.root / 'refs' / 'run' / 'latest'
  older = path.read_bytes()
  publisher.publish(t.blocks(t.weights(1)), 1)
  path.write_bytes(older)
  with pytest.raises(ValueError, match='put back to version 0; start the'):
    publisher.publish(t.blocks(t.weights(2)), 2)


def test_a_store_has_one_run(store):
  t.open_publisher(store).publish(t.blocks(t.weights(0)), 0)
  for key in (t.KEY, keys.Hmac(b'another key' * 3)):
    with pytest.raises(ValueError, match="has the run 'run'; publish 'other'"):
      chain.BundleWriter(store, 'other', key)
  t.assert_same_bits(t.served(store), t.weights(0))
