"""A follower on hand-made bundles: ways around damage, and pointers."""

import dataclasses
import functools

import numpy as np
import pytest

from composer_jax.delta import follower as followers
from composer_jax.delta import rebuild
from composer_jax.delta.format import identity as grids
from composer_jax.delta.format import keys, manifest
from composer_jax.delta.store import objects as store_lib
from tests.delta import bundles, identities


@pytest.fixture
def run(tmp_path):
  run = bundles.Run(tmp_path / 'store')
  run.add(0)
  run.point(0)
  return run


def follow(run, **options):
  return followers.Follower(run.store, 'run', bundles.SIGNER, **options)


def step(run, versions, **options):
  for version in versions:
    run.add(version, base=version - 1, **options)
    run.point(version)


def assert_serves(subscriber, run, version):
  assert subscriber.held.version == version
  held = subscriber.held
  assert held.target_id == subscriber.held.target_id
  assert held.target_id == identities.target_id(run.make(version))
  bundles.assert_same_bits(held, run.make(version))


def test_every_way_leads_to_the_same_bits(run):
  follower = follow(run)
  assert follower.poll().version == 0
  for version in range(1, 10):
    step(run, [version])
    assert follower.poll().version == version and follower.problem is None
    assert follower.stats.route == (f'delta {version - 1}-{version}',)
    assert_serves(follower, run, version)
    assert follower.poll() is None and follower.problem is None
  joiner = follow(run)
  joiner.poll()
  singles = [f'delta {v}-{v + 1}' for v in range(9)]
  assert joiner.stats.route == ('key 0', *singles)
  assert_serves(joiner, run, 9)
  run.add(9)
  run.point(9)
  assert joiner.poll() is None and joiner.problem is None
  assert follow(run).poll().target_id == joiner.held.target_id


def test_the_usual_update_reads_the_manifest_and_its_packs(run):
  follower = follow(run)
  follower.poll()
  step(run, [1])
  follower.poll()
  assert follower.stats.bytes == run.edges[-1].bytes


def test_weights_that_are_held_under_another_version_are_not_fetched(run):
  run.make = lambda version: bundles.weights(0)
  follower = follow(run)
  first = follower.poll()
  step(run, [1])
  update = follower.poll()
  assert (update.version, update.target_id) == (1, first.target_id)
  # But what vouches for the name is read.
  assert follower.stats.route == ()
  assert follower.stats.bytes == run.edges[-1].link.bytes
  # The next delta builds on version 1.
  run.make = bundles.weights
  step(run, [2])
  assert follower.poll().version == 2
  assert follower.stats.route == ('delta 1-2',)


def test_when_all_ways_are_broken_the_old_version_is_served(run, caplog):
  follower = follow(run)
  follower.poll()
  held = follower.held
  step(run, [1])
  single, key = run.edges[-1], run.add(1)
  run.point(1)
  bundles.damage(run.path(run.packs(single)[-1]))
  path = run.path(key.manifest)
  intact = path.read_bytes()
  path.unlink()
  for _ in range(2):
    assert follower.poll() is None
    assert 'its hash is wrong' in follower.problem
    assert key.manifest in follower.problem
    assert follower.held is held
  assert caplog.text.count('keeps serving version 0') == 1
  path.write_bytes(intact)
  assert follower.poll().version == 1 and follower.problem is None


def test_it_falls_back_from_a_delta_to_the_keyframe(run, caplog):
  step(run, [1, 2])
  follower = follow(run)
  follower.poll()
  step(run, [3])
  run.add(3)
  run.point(3)
  bundles.damage(run.path(run.packs(run.edges[-2])[-1]))
  assert follower.poll().version == 3
  assert follower.stats.route == ('key 3',)
  assert '(chunk 0, version 3)' in caplog.text
  assert_serves(follower, run, 3)


def test_a_broken_way_is_left_for_the_next_best(run):
  step(run, [1, 2])
  bad = run.add(2)
  step(run, [3])
  bundles.damage(run.path(run.packs(bad)[0]))
  follower = follow(run)
  assert follower.poll().version == 3
  assert follower.stats.route == (
    *('key 0', 'delta 0-1', 'delta 1-2'),
    'delta 2-3',
  )
  assert_serves(follower, run, 3)


@pytest.mark.parametrize('lag', range(1, 6))
def test_no_way_is_cheaper(run, lag):
  """A follower takes the deltas, or the newest keyframe if that is less."""
  for version in range(1, 7):
    step(run, [version])
    if version == 6 - lag:
      follower = follow(run)
      follower.poll()
    if version == 4:
      run.add(4)
  joiner = follow(run)
  joiner.poll()
  assert joiner.stats.route == ('key 4', 'delta 4-5', 'delta 5-6')
  sizes = {e.version: e.bytes for e in run.edges if e.base_version is not None}
  (key,) = (e.bytes for e in run.edges if e.base_version is None and e.version)
  later = sizes[5] + sizes[6]
  follower.poll()
  deltas = [f'delta {v - 1}-{v}' for v in sizes if v > 6 - lag]
  cost = sum(sizes[v] for v in sizes if v > 6 - lag)
  is_less = lag > 2 and key + later < cost
  assert list(follower.stats.route) == (
    list(joiner.stats.route) if is_less else deltas
  )


def test_a_signed_pointer_that_renames_an_older_state_is_refused_by_all(run):
  """Old followers, who hold those weights, look at the manifest too."""
  follower = follow(run)
  follower.poll()
  link = run.edges[0].link._replace(version=7)
  named = dataclasses.replace(run.pointer, sequence=9, head=link, keyframe=link)
  _, tag = run.store.read_pointer('run')
  sealed = manifest.seal(named, bundles.SIGNER)
  run.store.move_pointer('run', sealed, tag)
  for receiver in (follower, follow(run)):
    assert receiver.poll() is None
    assert 'its version is 0, and what leads to it says 7' in receiver.problem
  assert follower.held.version == 0


def test_weights_that_were_published_thrice_are_known(run):
  run.make = lambda version: bundles.weights(min(version, 1))
  follower = follow(run)
  follower.poll()
  step(run, [1])
  follower.poll()
  step(run, [2, 3])
  assert follower.poll().version == 3
  assert follower.stats.route == ()
  assert_serves(follower, run, 3)


def test_rotten_held_weights_are_noticed_and_healed(run, caplog):
  follower = follow(run)
  held = follower.poll()
  run.add(1, base=0)
  run.add(1)
  run.point(1)
  for name in ('frozen', 'kernel'):
    buffer = held.tensors[name].buffer
    with pytest.raises(ValueError, match='read-only'):
      buffer[20] = 0
    buffer.setflags(write=True)
    buffer.view(np.uint8)[20] ^= 1
  assert follower.poll().version == 1
  assert follower.stats.route == ('key 1',)
  assert 'the weights that are held changed in memory' in caplog.text
  assert_serves(follower, run, 1)


def test_a_lost_manifest_stops_only_those_who_need_it(run):
  step(run, [1])
  follower = follow(run)
  follower.poll()
  step(run, [2])
  lost = run.path(run.edges[1].manifest)
  lost.unlink()
  assert follower.poll().version == 2
  joiner = follow(run)
  assert joiner.poll() is None and lost.name in joiner.problem


def test_a_link_that_lies_is_refused(run):
  step(run, [1, 2])
  key, _, second = run.edges
  bundle = rebuild.read_manifest(run.store, second.link)
  true_id = run.held.pop(1).target_id
  run.make = lambda version: bundles.weights(version, seed=5)
  other = run.add(1).link  # of other weights
  for previous, message in (
    (key.link._replace(version=1), 'version is 0, and what leads to it'),
    (other, f'target_id is .*{true_id}'),
  ):
    lie = dataclasses.replace(bundle, previous=previous).to_bytes()
    link = manifest.Link(2, run.store.put(lie), len(lie))
    pointer = dataclasses.replace(run.pointer, head=link)
    with pytest.raises(ValueError, match=message):
      followers.load(run.store, pointer)


def test_older_forked_and_foreign_pointers_are_refused(run, tmp_path):
  memory = tmp_path / 'memory'
  path = run.store.root / 'refs' / 'run' / 'latest'
  old = path.read_bytes()
  step(run, [1])
  new = path.read_bytes()
  follower = follow(run, memory=memory)
  held = follower.poll()
  # The same sequence with other contents: two publishers.
  run.add(2, base=1)
  run.point(2, sequence=run.pointer.sequence)
  fork = path.read_bytes()
  for sealed in (old, fork):
    path.write_bytes(sealed)
    for receiver in (follower, follow(run, memory=memory)):
      assert receiver.poll() is None
      assert 'latest: the pointer was rolled back or' in receiver.problem
  assert follower.held is held
  path.unlink()
  assert follower.poll() is None and 'is gone' in follower.problem
  other = path.parent.parent / 'other' / 'latest'
  other.parent.mkdir()
  other.write_bytes(new)
  stranger = followers.Follower(run.store, 'other', bundles.SIGNER)
  assert stranger.poll() is None
  assert "belongs to run 'run', not 'other'" in stranger.problem
  path.write_bytes(new)
  wrong_key = followers.Follower(
    run.store, 'run', keys.Hmac(b'another key, long')
  )
  assert wrong_key.poll() is None and 'signature' in wrong_key.problem
  memory.write_bytes(new[:-1])
  damaged = follow(run, memory=memory)
  assert damaged.poll() is None
  assert 'Delete it to trust the store anew' in damaged.problem


def test_a_pointer_whose_weights_are_withheld_is_remembered(run, tmp_path):
  memory = tmp_path / 'memory'
  path = run.store.root / 'refs' / 'run' / 'latest'
  follow(run, memory=memory).poll()
  old = path.read_bytes()
  step(run, [1])
  run.path(run.edges[-1].manifest).unlink()
  assert follow(run, memory=memory).poll() is None
  path.write_bytes(old)
  restarted = follow(run, memory=memory)
  assert restarted.poll() is None and 'rolled back' in restarted.problem


def test_an_expired_pointer_is_refused_until_it_is_renewed(run):
  clock = [100.0]
  follower = follow(run, now=lambda: clock[0])
  run.point(0, expires=200)
  assert follower.poll().version == 0
  clock[0] = 201
  assert follower.poll() is None
  assert 'version 0 expired 1 s ago' in follower.problem
  assert follower.held.version == 0
  run.point(0, expires=300)
  assert follower.poll() is None and follower.problem is None


def test_rewinds_lead_back_and_unexplained_ways_back_do_not(run):
  step(run, [1, 2])
  follower = follow(run)
  follower.poll()
  void = run.edges[-1]
  run.edges = [e for e in run.edges if e.version < 2]
  run.point(1, rewinds=1)
  assert follower.poll().version == 1
  assert_serves(follower, run, 1)
  # Version 2 again, with other weights than those that are void.
  run.make = lambda version: bundles.weights(version, seed=5)
  del run.held[2]
  assert run.add(2, base=1).manifest != void.manifest
  run.point(2, rewinds=1)
  assert follower.poll().version == 2
  run.point(1, rewinds=1)
  assert follower.poll() is None and 'rolled back' in follower.problem


def test_an_unreachable_store_is_said_and_the_old_version_served(run):
  follower = follow(run)
  held = follower.poll()
  step(run, [1])

  class Away(store_lib.Store):
    def get(self, *args, **named):
      raise ConnectionError('no route to the store')

  follower._store = Away(run.store.url)
  assert follower.poll() is None
  assert 'no route to the store' in follower.problem
  assert follower.held is held
  follower._store = run.store
  assert follower.poll().version == 1


def test_what_cannot_be_reached_is_gone_around_but_not_for_ever(run):
  class Lame(store_lib.Store):
    lame, asked = (), 0

    def get(self, name, *args, **named):
      if name in self.lame:
        self.asked += 1
        raise ConnectionError('asked in vain')
      return super().get(name, *args, **named)

  store = Lame(run.store.url)
  follower = followers.Follower(store, 'run', bundles.SIGNER)
  follower.poll()
  for version in (1, 2, 3):
    run.add(version, base=version - 1)
    run.add(version)
  run.point(3)
  store.lame = [run.edges[-1].manifest]
  assert follower.poll().version == 3 and store.asked == 1
  store.lame = [e.manifest for e in run.edges if e.base_version is None]
  store.asked = 0
  joiner = followers.Follower(store, 'run', bundles.SIGNER)
  assert joiner.poll() is None and store.asked == followers.MAX_UNREACHED
  assert 'asked in vain' in joiner.problem


def test_wrong_bases_are_refused(run):
  run.add(1, base=0)
  delta = rebuild.read_manifest(run.store, run.edges[-1].link)
  other = bundles.from_arrays(bundles.weights(0, seed=1))
  with pytest.raises(ValueError, match='builds on the weights .*not on those'):
    rebuild.apply(run.store, delta, other)
  little = bundles.from_arrays({'w': np.zeros(3)})
  little = dataclasses.replace(little, target_id=delta.base_id)
  with pytest.raises(ValueError, match="other tensors than its base: .*'bias'"):
    rebuild.apply(run.store, delta, little)
  with pytest.raises(ValueError, match='not on those that are held: none'):
    rebuild.apply(run.store, delta, None)


def test_older_versions_can_be_loaded(run):
  step(run, [1, 2, 3])
  for version in range(4):
    held = followers.load(run.store, run.pointer, version=version)
    assert held.version == version
    bundles.assert_same_bits(held, run.make(version))
  with pytest.raises(
    ValueError, match='version 7 cannot be rebuilt: no bundle'
  ):
    followers.load(run.store, run.pointer, version=7)


def test_threads_and_the_number_of_pieces_do_not_matter(tmp_path):
  run = bundles.Run(
    tmp_path / 's',
    make=lambda v: bundles.weights(v, shape=(4, 256, 512)),
  )
  run.add(0, pack_bytes=2**17)
  run.add(1, base=0, pack_bytes=2**14)
  run.point(1)
  assert len(run.held[0].tensors['kernel'].posts) > 2
  for threads in (1, 2, 5):
    subscriber = follow(run, threads=threads)
    subscriber.poll()
    assert_serves(subscriber, run, 1)
  with pytest.raises(ValueError, match='max_workers'):
    followers.load(run.store, run.pointer, threads=0)


# Partial receivers.


def halves(name, dtype, shape, *, count, part):
  """The regions of one of `count` devices that divide the last dimension."""
  if not shape or shape[-1] < count:
    return [tuple((0, n) for n in shape)] if part == 0 else []
  ends = [shape[-1] * k // count for k in (part, part + 1)]
  return [(*((0, n) for n in shape[:-1]), tuple(ends))]


def test_resharded_receivers_fetch_and_hold_only_their_parts(tmp_path):
  run = bundles.Run(
    tmp_path / 's', make=lambda v: bundles.weights(v, shape=(4, 256, 512))
  )
  run.add(0, pack_bytes=2**15)
  run.add(1, base=0, pack_bytes=2**12)
  run.point(1)
  whole = run.make(1)
  grid = grids.of(whole['kernel'].shape)
  assert grid.num_chunks > 1
  for count in (1, 2, 4):
    parts = {name: np.zeros_like(array) for name, array in whole.items()}
    moved = []
    for part in range(count):
      wanted = functools.partial(halves, count=count, part=part)
      receiver = follow(run, wanted=wanted)
      held = receiver.poll()
      assert held.target_id == identities.target_id(whole)
      moved.append(receiver.stats.bytes)
      for name, array in whole.items():
        for index in wanted(name, '', array.shape):
          where = tuple(slice(*ends) for ends in index)
          parts[name][where] = held.block(name, index)
    for name, array in whole.items():
      assert parts[name].tobytes() == array.tobytes(), (count, name)
    if count == 1:
      full = moved[0]
    else:
      assert max(moved) < full


def test_a_partial_receiver_asks_for_exactly_its_blobs(tmp_path):
  run = bundles.Run(
    tmp_path / 's', make=lambda v: bundles.weights(v, shape=(4, 256, 512))
  )
  edge = run.add(0, pack_bytes=2**30)
  run.point(0)
  table = rebuild.read_manifest(run.store, edge.link)
  kernel = next(t for t in table.tensors if t.name == 'kernel')
  boxes = [0, len(kernel.chunks) - 1]
  regions = [kernel.grid.chunk(number) for number in boxes]
  receiver = follow(
    run, wanted=lambda name, *_: regions if name == 'kernel' else []
  )
  held = receiver.poll()
  manifest_bytes = len(table.to_bytes())
  blob_bytes = sum(int(kernel.chunks['length'][b]) for b in boxes)
  assert receiver.stats.bytes == manifest_bytes + blob_bytes
  for region in regions:
    where = tuple(slice(*ends) for ends in region)
    wanted = run.make(0)['kernel'][where]
    assert held.block('kernel', region).tobytes() == wanted.tobytes()
  with pytest.raises(
    ValueError, match='kernel: chunk 1 of .* is not among the 2'
  ):
    held.block('kernel', kernel.grid.chunk(1))
  with pytest.raises(ValueError, match='bias: chunk 0 of 1 is not among the 0'):
    held.arrays()


def test_a_part_can_be_made_from_a_larger_part_and_not_from_a_smaller(tmp_path):
  run = bundles.Run(
    tmp_path / 's', make=lambda v: bundles.weights(v, shape=(4, 256, 512))
  )
  key, delta = (
    rebuild.read_manifest(run.store, run.add(*edge).link)
    for edge in ((0,), (1, 0))
  )
  grid = run.held[0].tensors['kernel'].grid

  def of(*numbers):
    regions = [grid.chunk(number) for number in numbers]
    return lambda name, *_: regions if name == 'kernel' else []

  base = rebuild.apply(run.store, key, None, wanted=of(1, 2, 5))
  for larger in (base, run.held[0]):
    part = rebuild.apply(run.store, delta, larger, wanted=of(2, 5))
    for number in (2, 5):
      found = part.block('kernel', grid.chunk(number))
      wanted = run.held[1].block('kernel', grid.chunk(number))
      assert found.tobytes() == wanted.tobytes()
  with pytest.raises(ValueError, match='kernel: 2 chunks are wanted'):
    rebuild.apply(run.store, delta, base, wanted=of(2, 6))


def test_blocks_of_any_region_are_those_of_the_array():
  rng = np.random.default_rng(0)
  array = rng.normal(size=(3, 130, 5, 700)).astype(np.float32)
  held = bundles.from_arrays({'w': array})
  bundles.assert_same_bits(held, {'w': array})
  for _ in range(50):
    index = tuple(
      tuple(sorted(rng.integers(0, n + 1, 2).tolist())) for n in array.shape
    )
    block = held.block('w', index)
    assert not block.flags.writeable
    wanted = array[tuple(slice(*ends) for ends in index)]
    np.testing.assert_array_equal(block, wanted)
  with pytest.raises(ValueError, match='v is not among the 1 tensors'):
    held.block('v', ())
  # No bits of another box, nor of memory that nobody has written to.
  flat = bundles.from_arrays({'w': array[0, 0]})
  for weights, index in (
    (held, ((0, 3), (0, 130), (0, 5), (600, 701))),
    (held, ((0, 3), (-1, 130), (0, 5), (0, 700))),
    (flat, ((0, 6), (0, 700))),
    (flat, ((-2, 3), (0, 700))),
  ):
    with pytest.raises(ValueError, match='w: the region .* leaves an array'):
      weights.block('w', index)
