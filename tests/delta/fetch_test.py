"""Requests for parts of packs, and what is asked for again."""

import time

import pytest

from composer_jax.delta import follower as followers
from composer_jax.delta import rebuild
from composer_jax.delta.store import objects as stores
from tests.delta import bundles


def blob(start, stop, pack='a'):
  return rebuild.Blob((pack, 1000), start, stop, None, 0)


def test_neighbours_are_asked_for_together_and_gaps_not_at_all(monkeypatch):
  monkeypatch.setattr(rebuild, 'RANGE_BYTES', 30)
  blobs = [
    blob(90, 95, pack='b'),
    blob(0, 10),
    blob(10, 25),
    blob(40, 90),
    blob(25, 31),
  ]
  found = [
    (r[0].pack[0], r[0].start, r[-1].stop, len(r))
    for r in rebuild.requests(blobs)
  ]
  assert found == [
    ('a', 0, 25, 2),
    ('a', 25, 31, 1),
    ('a', 40, 90, 1),
    ('b', 90, 95, 1),
  ]
  assert rebuild.requests([]) == []


class Noisy(stores.Store):
  """Damages what it is asked for, so many times."""

  left = 0
  asked = 0

  def get_range(self, name, start, stop, *, fresh=False):
    data = super().get_range(name, start, stop, fresh=fresh)
    self.left, self.asked = self.left - 1, self.asked + 1
    return data if self.left < 0 else data[:-1] + bytes([data[-1] ^ 8])


def test_a_range_damaged_on_its_way_is_asked_for_again(run):
  store = Noisy(run.store.url)

  def wanted(name, *_):
    return [((0, 8),)] if name == 'bias' else []

  def follow():
    follower = followers.Follower(store, 'run', bundles.SIGNER, wanted=wanted)
    return follower, follower.poll()

  _, update = follow()
  usual = store.asked
  assert update.version == 1 and usual
  store.left, store.asked = 1, 0
  _, update = follow()
  assert update.version == 1 and store.asked == usual + 1
  bits = update.block('bias', ((0, 8),)).tobytes()
  assert bits == run.make(1)['bias'].tobytes()
  store.left = 10**6
  follower, update = follow()
  assert update is None and 'bias (chunk 0' in follower.problem


def test_an_object_damaged_on_its_way_is_asked_for_again(tmp_path):
  store = stores.Store(tmp_path)
  name = store.put(b'index')
  read, damaged = store._backend.read, [True]

  def read_damaged(*args, **named):
    data = read(*args, **named)
    return data[::-1] if damaged and damaged.pop() else data

  store._backend.read = read_damaged
  assert store.get(name, 5) == b'index' and not damaged
  damaged += [True, True]
  with pytest.raises(ValueError, match='its hash is wrong'):
    store.get(name, 5)


def test_the_stream_keeps_the_order_and_works_ahead():
  begun = []

  def work(job):
    begun.append(job)
    time.sleep(0.01 if job % 3 else 0.03)
    return job

  stream = rebuild.in_order(work, range(30), 8, 1)
  assert next(stream) == 0
  time.sleep(0.05)
  # What nobody waits for yet is bounded.
  assert len(begun) == 8
  assert list(stream) == list(range(1, 30))
