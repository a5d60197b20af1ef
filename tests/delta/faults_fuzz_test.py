"""No damage and no lie is ever served, and receivers recover by themselves."""

import collections
import logging
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from composer_jax.delta import follower as followers
from composer_jax.delta.format import manifest as manifests
from tests.delta import faults, faults_damage, faults_hostile, faults_store


@pytest.fixture(scope='module', autouse=True)
def quiet():
  """A hundred thousand refusals are not worth a log."""
  logging.disable(logging.WARNING)
  yield
  logging.disable(logging.NOTSET)


@pytest.fixture(scope='module')
def worlds():
  with faults.small_chunks():
    yield [
      faults.build('floats'),
      faults.build('codes'),
      faults.build('words', tier='fast'),
      # Singles alone: nothing leads around a broken one.
      faults.build(
        'floats',
        keyframe_every=100,
        versions=5,
      ),
      faults.build('words', keyframe_every=100, versions=6),
    ]


def few(count):
  return hypothesis.settings(
    max_examples=count,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )


@few(250)
@hypothesis.given(rng=st.randoms(), number=st.integers(0, 4))
def test_damage_is_refused_and_healed(worlds, rng, number):
  faults_damage.run_case(worlds[number], rng, collections.Counter())


@few(150)
@hypothesis.given(rng=st.randoms(), number=st.integers(0, 4))
def test_signed_lies_are_refused_or_are_what_they_say(worlds, rng, number):
  faults_hostile.lie(worlds[number], rng, collections.Counter())


def run_many(worlds, once, first, count):
  """Runs cases until so many faults were injected; returns what happened."""
  counts, wrong, seed = collections.Counter(), [], first
  while counts['injected'] < count:
    world = worlds[seed % len(worlds)]
    try:
      once(world, random.Random(seed), counts)
    except AssertionError as error:
      wrong.append((seed, str(error)))
      counts['injected'] += 1
    seed += 1
  assert not wrong, (len(wrong), wrong[:5], counts)
  return counts


def test_many_seeds(worlds):
  """What chance finds in a second, more evenly than hypothesis looks."""
  counts = run_many(worlds, faults_damage.run_case, 0, 250)
  assert counts['refused'] > 25 and counts['served'] > 25
  run_many(worlds, faults_hostile.lie, 0, 75)


@pytest.mark.slow
def test_no_wrong_accept_among_a_hundred_thousand_faults(worlds):
  counts = run_many(worlds, faults_damage.run_case, 10**6, 100_000)
  print(dict(counts))
  # Most were met by the receiver, and no kind is rare.
  assert counts['met'] > 35_000
  kinds = counts.keys() - {'nothing', 'nothing held', 'injected', 'met'}
  assert len(kinds) > 20 and min(counts[kind] for kind in kinds) > 500


@pytest.mark.slow
def test_no_wrong_accept_among_twenty_thousand_lies(worlds):
  counts = run_many(worlds, faults_hostile.lie, 10**6, 20_000)
  print(dict(counts))


# Small cases, all of them.


@pytest.mark.parametrize('label', ['fork', 'other', 'enemy'])
def test_another_run_is_taken_for_this_one_by_nobody(worlds, label):
  for world in worlds:
    for name in world.receivers:
      world.store.files, world.store.noise = dict(world.files), None
      faults_damage.bring(world, label)
      receiver = world.receiver(*name)
      update = receiver.poll()
      faults.check(world, receiver, world.receivers[name].held, update)
      # Whom a fork does not lead back follows it: one key signed both.
      assert update is None or label == 'fork'
      faults.check_recovers(world, receiver)


@pytest.fixture(scope='module')
def tiny():
  """A keyframe and a delta of one tensor: nothing can be spared."""
  with faults.small_chunks():
    yield faults.build('one', keyframe_every=9, versions=2)


def paths_of(world):
  """The pointer and each object, by what it is."""
  found = {'pointer': faults.LATEST}
  for link in (world.head.head, world.head.keyframe):
    data = world.files[f'objects/{link.manifest}']
    bundle = manifests.Manifest.from_bytes(data)
    found[f'manifest of {bundle.kind}'] = f'objects/{link.manifest}'
    for number, (pack, _) in enumerate(bundle.packs):
      found[f'pack {number} of {bundle.kind}'] = f'objects/{pack}'
  return found


def refuses(world, key, data, version):
  """Polls with one file changed; returns whether it was refused by its name."""
  world.store.files = {**world.files, key: data}
  receiver = world.receiver('whole', version)
  before = receiver.held
  verdict = faults.check(world, receiver, before, receiver.poll())
  name = key.rpartition('/')[2]
  shown = receiver.problem or ''
  return verdict == 'refused' and (name[:12] in shown or 'kernel' in shown)


@pytest.mark.parametrize('every', [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_of_every_file_counts(tiny, every):
  paths, number = paths_of(tiny), 0
  assert len(paths) >= 5
  for key in paths.values():
    intact = tiny.files[key]
    for bit in range(8 * len(intact)):
      # Of an eighth, each byte has its turn, with another bit than the last.
      if (bit + bit // 8) % every:
        continue
      bad = bytearray(intact)
      bad[bit // 8] ^= 1 << bit % 8
      assert refuses(tiny, key, bytes(bad), None), (key, bit)
      number += 1
  assert number > 1_000


def test_every_bit_of_the_pointer_counts_for_a_follower(tiny):
  intact = tiny.files[faults.LATEST]
  for bit in range(8 * len(intact)):
    bad = bytearray(intact)
    bad[bit // 8] ^= 1 << bit % 8
    assert refuses(tiny, faults.LATEST, bytes(bad), 0), bit


def test_every_truncation_is_refused(tiny):
  for key in paths_of(tiny).values():
    # Every third, at another offset in each file.
    for length in range(len(key) % 3, len(tiny.files[key]), 3):
      assert refuses(tiny, key, tiny.files[key][:length], None), (key, length)


def test_any_two_files_in_each_others_place_are_refused(tiny):
  paths = sorted(paths_of(tiny).values())
  for a in paths:
    for b in paths:
      if a != b:
        assert refuses(tiny, a, tiny.files[b], None), (a, b)


# What a receiver keeps on its disk.


def test_every_bit_of_the_memory_counts(tiny, tmp_path):
  memory = tmp_path / 'memory'
  tiny.store.files = dict(tiny.files)
  tiny.follow(memory=memory).poll()
  intact = memory.read_bytes()
  assert intact == tiny.files[faults.LATEST]
  changed = [
    intact[: bit // 8]
    + bytes([intact[bit // 8] ^ 1 << bit % 8])
    + intact[bit // 8 + 1 :]
    for bit in range(0, 8 * len(intact), 37)
  ]
  for data in (*changed, *(intact[:n] for n in range(0, len(intact), 29))):
    memory.write_bytes(data)
    damaged = tiny.follow(memory=memory)
    assert damaged.poll() is None
    assert 'Delete it to trust the store anew' in damaged.problem
  memory.write_bytes(intact)
  old = tiny.follow(memory=memory)
  # Restarted, it knows what it saw: an older pointer is refused.
  tiny.store.files = {**tiny.files, faults.LATEST: tiny.moves[0]}
  assert old.poll() is None and 'rolled back' in old.problem
  faults.check_recovers(tiny, old)


def test_publishing_a_version_twice_changes_nothing(tiny):
  store = faults_store.Store(tiny.files)
  for _ in range(2):
    publisher = faults.publisher_of(store, keyframe_every=9)
    info = publisher.publish(faults.blocks(faults.weights('one', 1)), 1)
    assert store.files == tiny.files and info.version == 1
  # The loser of two publishers ends; the store is the winner's.
  first, second = (
    faults.publisher_of(store, keyframe_every=9) for _ in range(2)
  )
  first.publish(faults.blocks(faults.weights('one', 2)), 2)
  after = dict(store.files)
  with pytest.raises(ValueError, match='another publisher'):
    second.publish(faults.blocks(faults.weights('one', 2, seed=4)), 2)
  assert after[faults.LATEST] == store.files[faults.LATEST]
  follower = followers.Follower(store, 'run', faults.KEY, now=lambda: 0.0)
  found = follower.poll().arrays()['kernel']
  truth = faults.weights('one', 2)['kernel']
  assert np.array_equal(found.view(np.uint16), truth.view(np.uint16))
