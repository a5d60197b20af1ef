"""Chains, republishing, rewinding and collecting on a local store."""

import logging
import os

import ml_dtypes
import numpy as np
import pytest

from composer_jax.delta import chain, chunking, rebuild
from composer_jax.delta import follower as followers
from composer_jax.delta.format import keys, manifest
from composer_jax.delta.store import objects as stores
from tests.delta import bundles, identities

KEY = keys.Hmac(b'a key of the tests' * 2)


def weights(version, seed=0):
  """Weights that move a little each version, special values among them."""
  rng = np.random.default_rng(seed)
  masters = rng.normal(0, 0.02, (40, 50)) + 1e-4 * version
  kernel = masters.astype(ml_dtypes.bfloat16)
  kernel.reshape(-1).view(np.uint16)[:5] = [
      0x8000, 0, 0x7F80, 0x7FC1 + version, 0xFFFF - version
  ]  # fmt: skip
  return {
    'bias': (rng.normal(size=300) + version).astype(np.float32),
    'empty': np.zeros((0, 3), np.float32),
    'frozen': np.arange(30, dtype=np.int8).reshape(5, 6),
    'kernel': kernel,
    'scalar': np.array(version, np.float16),
  }


def blocks(arrays):
  for name, array in arrays.items():
    ends = tuple((0, length) for length in array.shape)
    yield name, str(array.dtype), array.shape, ends, array


@pytest.fixture
def store(tmp_path):
  return stores.Store(tmp_path / 'store')


def open_publisher(store, run_id='run', **options):
  options = {'grace_s': 0.0, 'keyframe_every': 100} | options
  others = {n: options.pop(n) for n in ('now', 'peers') if n in options}
  bundling = chain.BundleOptions(**options)
  return chain.BundleWriter(store, run_id, KEY, options=bundling, **others)


def files_of(store):
  paths = [
    p for p in store.root.rglob('*') if p.is_file() and p.name != '.lock'
  ]
  return {p: p.read_bytes() for p in paths}


def joiner(store, run_id='run'):
  return followers.Follower(store, run_id, KEY)


def served(store, run_id='run'):
  subscriber = joiner(store, run_id)
  update = subscriber.poll()
  assert update is not None, subscriber.problem
  return update


def pointer(store, run_id='run'):
  return manifest.unseal(store.read_pointer(run_id)[0], KEY, run_id)


def edges(store, run_id='run'):
  return bundles.history(store, pointer(store, run_id))


def spans(store):
  return [(e.base_version, e.version) for e in edges(store)]


def assert_same_bits(held, wanted):
  found = held.arrays()
  assert found.keys() == wanted.keys()
  for name, array in wanted.items():
    assert found[name].dtype == array.dtype, name
    assert found[name].shape == array.shape, name
    assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize('tier', ['fast', 'small'])
def test_each_version_is_one_delta_and_keyframes_come_besides(store, tier):
  publisher = open_publisher(store, keyframe_every=3, tier=tier)
  follower, previous, kinds = joiner(store), '', []
  for v in range(9):
    info = publisher.publish(blocks(weights(v)), v)
    update = follower.poll()
    assert (update.version, update.target_id) == (v, info.target_id)
    for held in (update, served(store)):
      assert_same_bits(held, weights(v))
    assert info.target_id == identities.target_id(weights(v))
    assert info.base_id == previous
    previous = info.target_id
    kinds.append((info.kind, info.keyframe_bytes > 0))
    assert follower.stats.bytes < info.bytes + 10_000
  singles = [(None, 0)] + [(v - 1, v) for v in range(1, 9)]
  assert kinds[0] == ('key', False)
  assert [k[0] for k in kinds[1:]] == ['delta'] * 8
  assert [v for v, k in enumerate(kinds) if k[1]] == [3, 6]
  assert sorted(spans(store), key=str) == sorted(
    [*singles, (None, 3), (None, 6)], key=str
  )


def test_what_was_counted(store):
  publisher = open_publisher(store)
  before = weights(0)
  first = publisher.publish(blocks(before), 0)
  after = {name: array.copy() for name, array in before.items()}
  after['bias'][[3, 5, 7]] += 1
  after['kernel'][0, 0] = 1
  info = publisher.publish(blocks(after), 1)
  elements = sum(a.size for a in before.values())
  assert (first.changed, first.elements) == (elements, elements)
  assert (info.changed, info.elements) == (4, elements)
  assert info.full_bytes == sum(a.nbytes for a in before.values())
  assert info.cut_bytes == 0
  found = len(store.get(pointer(store).head.manifest))
  packs = rebuild.read_manifest(store, pointer(store).head).packs
  assert info.bytes == found + sum(length for _, length in packs)


def test_blobs_do_not_depend_on_threads_nor_on_the_order_of_blocks(tmp_path):
  manifests = set()
  for threads, step in ((1, 1), (4, 1), (3, -1)):
    store = stores.Store(tmp_path / f'{threads}{step}')
    publisher = open_publisher(store, threads=threads)
    for v in range(2):
      arrays = dict(list(weights(v).items())[::step])
      publisher.publish(blocks(arrays), v)
    manifests.add(pointer(store).head.manifest)
  assert len(manifests) == 1


def test_packs_are_bounded_and_keep_the_order(store, monkeypatch):

  monkeypatch.setattr(chunking, 'PACK_BYTES', 100)
  publisher = open_publisher(store)
  rng = np.random.default_rng(0)
  arrays = {f'w{i}': rng.normal(size=20).astype(np.float32) for i in range(9)}
  for v in range(2):
    publisher.publish(blocks({n: a + v for n, a in arrays.items()}), v)
    found = rebuild.read_manifest(store, pointer(store).head)
    assert len(found.packs) > 3
    # One blob may be longer than a pack; two are never.
    lengths = [t.chunks['length'][0] for t in found.tensors]
    used = [t.chunks['pack'][0] for t in found.tensors]
    assert used == sorted(used)
    for pack, (_, length) in enumerate(found.packs):
      here = [n for n, p in zip(lengths, used, strict=True) if p == pack]
      assert sum(here) == length
      assert length <= 100 or len(here) == 1
  assert_same_bits(served(store), {n: a + 1 for n, a in arrays.items()})


def test_other_tensors_make_a_keyframe(store):
  publisher = open_publisher(store)
  for v in range(2):
    publisher.publish(blocks(weights(v)), v)
  follower = joiner(store)
  follower.poll()
  grown = {**weights(2), 'more': np.ones(3, np.float32)}
  assert publisher.publish(blocks(grown), 2).kind == 'key'
  assert_same_bits(served(store), grown)
  shrunk = {**weights(3), 'bias': np.ones((2, 3), np.float32)}
  assert publisher.publish(blocks(shrunk), 3).kind == 'key'
  assert_same_bits(follower.poll(), shrunk)
  assert publisher.publish(blocks(shrunk), 4).kind == 'delta'
  del shrunk['kernel']
  assert publisher.publish(blocks(shrunk), 5).kind == 'key'
  assert_same_bits(follower.poll(), shrunk)


def test_no_tensors_after_some_are_none(store):
  publisher = open_publisher(store)
  follower = joiner(store)
  for v, arrays in enumerate([weights(0), {}, {}, weights(3)]):
    info = publisher.publish(blocks(arrays), v)
    assert info.target_id == identities.target_id(arrays)
    assert_same_bits(follower.poll(), arrays)


def test_republishing_changes_nothing(store):
  publisher = open_publisher(store)
  infos = [publisher.publish(blocks(weights(v)), v) for v in range(3)]
  before = files_of(store)
  for p in (publisher, open_publisher(store)):
    for v in (0, 2):
      assert p.publish(blocks(weights(v)), v) == infos[v]
  assert files_of(store) == before


def test_other_weights_under_a_version_are_refused(store):
  publisher = open_publisher(store)
  for v in range(3):
    publisher.publish(blocks(weights(v)), v)
  before = files_of(store)
  for v in (1, 2):
    with pytest.raises(ValueError, match=rf'version {v} with other.*rewind'):
      publisher.publish(blocks(weights(v, seed=1)), v)
  assert files_of(store) == before
  assert publisher.publish(blocks(weights(3)), 3).kind == 'delta'


def test_reopened_publisher_continues_the_chain(store):
  info = open_publisher(store).publish(blocks(weights(0)), 0)
  publisher = open_publisher(store)
  assert (publisher.version, publisher.target_id) == (0, info.target_id)
  after = publisher.publish(blocks(weights(1)), 1)
  assert (after.kind, after.base_id) == ('delta', info.target_id)


def test_loser_of_a_race_gets_an_error_and_breaks_nothing(store):
  one, two = (open_publisher(store) for _ in range(2))
  info = one.publish(blocks(weights(0)), 0)
  before = store.read_pointer('run')
  with pytest.raises(ValueError, match='another publisher moved the pointer'):
    two.publish(blocks(weights(1)), 1)
  two.rewind(0)  # It has published nothing to rewind.

  # The swap decides, however late the other comes.
  class Late:
    def __iter__(self):
      one.publish(blocks(weights(1)), 1)
      yield from blocks(weights(1, seed=3))

  three = open_publisher(store)
  with pytest.raises(ValueError, match='another publisher moved the pointer'):
    three.publish(Late(), 1)
  assert store.read_pointer('run') != before
  assert served(store).version == 1
  assert_same_bits(served(store), weights(1))
  assert one.publish(blocks(weights(2)), 2).kind == 'delta'
  assert info.target_id == identities.target_id(weights(0))


def test_pointers_expire_and_are_renewed_by_publishing(store):
  clock = [1000.0]
  publisher = open_publisher(store, expires_s=60, now=lambda: clock[0])
  publisher.publish(blocks(weights(0)), 0)
  first = pointer(store)
  assert first.expires == 1060
  clock[0] = 1050.0
  publisher.publish(blocks(weights(0)), 0)
  second = pointer(store)
  assert (second.expires, second.sequence) == (1110, first.sequence + 1)
  assert (second.version, second.head) == (0, first.head)
  late = followers.Follower(store, 'run', KEY, now=lambda: 1111.0)
  assert late.poll() is None and 'expired' in late.problem
  late = followers.Follower(store, 'run', KEY, now=lambda: 1109.0)
  assert late.poll().version == 0
  # Who goes on after a pause and publishes what is there renews it, too.
  clock[0] = 1111.0
  again = open_publisher(store, expires_s=60, now=lambda: clock[0])
  again.publish(blocks(weights(0)), 0)
  assert pointer(store).expires == 1171
  before = pointer(store)
  again.publish(blocks(weights(0)), 0)
  assert pointer(store) == before
  never = open_publisher(store, expires_s=0)
  never.publish(blocks(weights(1)), 1)
  late = followers.Follower(store, 'run', KEY, now=lambda: 1e12)
  assert late.poll().version == 1


def test_bad_options_are_named(store):
  for options, message in (
    ({'tier': 'tiny'}, "tier is 'tiny'; it must be one of"),
    ({'keyframe_every': 0}, 'keyframe_every must be at least 1; got 0'),
    ({'run_id': '../run'}, r"run_id '\.\./run'"),
  ):
    with pytest.raises(ValueError, match=message):
      open_publisher(store, **options)


@pytest.mark.parametrize(
  'spoil, message',
  [
    (
      lambda b: [*b[:-1], ('kernel', 'bfloat16', (40, 50), ((1, 40), (0, 50)),
                           b[-1][4][1:])],
      'kernel: 2000 elements are in chunks that no blocks make whole',
    ),
    (lambda b: [*b, b[-1]], 'kernel: the block at .* overlaps'),
    (lambda b: [*b, ('x', 'S3', (), (), np.array(b'abc'))], "dtype 'S3'"),
    (
      lambda b: [*b[:-1], ('kernel', 'bfloat16', (40, 50), ((1, 41), (0, 50)),
                           b[-1][4])],
      r'kernel: the block at .* leaves the array',
    ),
  ],
)  # fmt: skip
def test_bad_blocks_are_named_and_change_nothing(store, spoil, message):
  publisher = open_publisher(store)
  publisher.publish(blocks(weights(0)), 0)
  before = store.read_pointer('run')
  for version in (1, 1):
    good = [b for b in blocks(weights(1)) if b[0] != 'scalar']
    scalar = [b for b in blocks(weights(1)) if b[0] == 'scalar']
    with pytest.raises(ValueError, match=message):
      publisher.publish([*scalar, *spoil(good)], version)
  assert store.read_pointer('run') == before
  assert publisher.publish(blocks(weights(1)), 1).kind == 'delta'


def test_a_failing_keyframe_is_told_and_tried_again(store, caplog):
  publisher = open_publisher(store, keyframe_every=1)
  publisher.publish(blocks(weights(0)), 0)

  def encode_key(self, weights):
    raise OSError(28, 'No space left on device')

  with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
    patch.setattr(chunking.Encoder, 'encode_key', encode_key)
    info = publisher.publish(blocks(weights(1)), 1)
  assert (info.kind, info.keyframe_bytes) == ('delta', 0)
  assert 'version 1 is out' in caplog.text and 'No space' in caplog.text
  assert served(store).version == 1
  assert publisher.publish(blocks(weights(2)), 2).keyframe_bytes > 0
  assert (None, 2) in spans(store)


@pytest.mark.parametrize('name', ['CDB4', 'CDB6', 'CDB10'])
def test_a_store_of_another_format_is_refused_and_left_alone(store, name):
  open_publisher(store).publish(blocks(weights(0)), 0)
  path = store.root / 'refs' / 'run' / 'latest'
  other = path.read_bytes().replace(b'CDB5P', f'{name}P'.encode())
  path.write_bytes(other)
  reader = joiner(store)
  assert reader.poll() is None
  assert f'of the format {name}, and this version reads CDB5' in reader.problem
  with pytest.raises(ValueError, match=f'format {name}.*into another store'):
    open_publisher(store)
  assert path.read_bytes() == other


@pytest.mark.parametrize('lost', ['keyframe', 'manifest', 'pack'])
def test_a_store_that_forgets_is_noticed_and_can_be_joined_again(store, lost):
  publisher = open_publisher(store)
  for v in range(5):
    publisher.publish(blocks(weights(v)), v)
  edge = edges(store)[0 if lost == 'keyframe' else 2]
  packs = rebuild.read_manifest(store, edge.link).packs
  names = [edge.manifest] if lost == 'manifest' else [n for n, _ in packs]
  for name in names:
    (store.root / 'objects' / name).unlink()
  assert joiner(store).poll() is None
  follower = joiner(store)
  for v in range(5, 13):
    publisher.publish(blocks(weights(v)), v)
  assert_same_bits(follower.poll(), weights(12))
  assert publisher.gc() >= 0


@pytest.mark.parametrize('spoil', ['long', 'folder', 'pipe'])
def test_a_pointer_that_is_none_starts_a_new_chain(store, spoil):
  open_publisher(store).publish(blocks(weights(0)), 0)
  path = store.root / 'refs' / 'run' / 'latest'
  if spoil == 'long':
    path.write_bytes(bytes(10**5))
  else:
    path.unlink()
    (os.mkdir if spoil == 'folder' else os.mkfifo)(path)
  reader = joiner(store)
  assert reader.poll() is None and 'pointer is damaged' in reader.problem
  publisher = open_publisher(store)
  assert publisher.publish(blocks(weights(1)), 1).kind == 'key'
  assert_same_bits(reader.poll(), weights(1))
