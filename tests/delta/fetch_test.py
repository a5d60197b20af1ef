"""Ranges of packs: what is asked for, and what is asked for again."""

import dataclasses
import time

import pytest

from composer_jax.delta import rebuild
from composer_jax.delta.format import identity
from composer_jax.delta.store import objects as store_lib


@dataclasses.dataclass
class Slot:
  """Names a tensor."""

  name: str = 'w'

  def where(self, at):
    return f'{self.name} (chunk {at})'


def blob(start, stop, data=b'', tensor='w', pack='a'):
  short = identity.short_hash(data)
  return rebuild.Blob(pack, start, stop, short, Slot(tensor), 0)


def test_neighbours_are_asked_for_together_and_gaps_not_at_all(monkeypatch):
  monkeypatch.setattr(rebuild, 'RANGE_BYTES', 30)
  blobs = [
    blob(0, 10),
    blob(10, 25),
    blob(25, 31),
    blob(40, 90),
    blob(90, 95, pack='b'),
  ]
  found = [
    (r[0].pack, r[0].start, r[-1].stop, len(r)) for r in rebuild.ranges(blobs)
  ]
  assert found == [
    ('a', 0, 25, 2),
    ('a', 25, 31, 1),
    ('a', 40, 90, 1),
    ('b', 90, 95, 1),
  ]
  assert rebuild.ranges([]) == []


def test_a_range_damaged_on_its_way_is_asked_for_again(tmp_path):
  class Noisy(store_lib.Store):
    left = 1

    def get_range(self, name, start, stop):
      data = super().get_range(name, start, stop)
      self.left -= 1
      return data if self.left < 0 else data[:-1] + bytes([data[-1] ^ 8])

  store = Noisy(tmp_path)
  data = bytes(range(100))
  name = store.put(data)
  blobs = [
    blob(0, 40, data[:40], pack=name),
    blob(40, 100, data[40:], 'v', pack=name),
  ]
  with rebuild.Fetcher(store) as fetcher:
    assert fetcher.range(blobs) == data
    assert fetcher.cost.bytes == 200
    store.left = 2
    with pytest.raises(ValueError, match=r'v \(chunk 0.*blob is damaged'):
      fetcher.range(blobs)


def test_an_object_damaged_on_its_way_is_asked_for_again(tmp_path):
  class Noisy(store_lib.Store):
    left = 1

    def get(self, *args):
      self.left -= 1
      if self.left >= 0:
        raise ValueError('its hash is wrong')
      return super().get(*args)

  store = Noisy(tmp_path)
  name = store.put(b'index')
  with rebuild.Fetcher(store) as fetcher:
    assert fetcher.get(name, 5) == b'index'
    store.left = 2
    with pytest.raises(ValueError, match='its hash is wrong'):
      fetcher.get(name, 5)


def test_the_stream_keeps_the_order_and_works_ahead(tmp_path):
  begun = []

  def get(job):
    begun.append(job)
    time.sleep(0.01 if job % 3 else 0.03)
    return memoryview(bytes([job]))

  with rebuild.Fetcher(store_lib.Store(tmp_path)) as fetcher:
    stream = rebuild.in_flight(fetcher.pool, get, range(30), 8)
    assert next(stream) == b'\0'
    time.sleep(0.05)
    # What nobody waits for yet is bounded.
    assert 8 <= len(begun) <= 8 + 1
    assert [data[0] for data in stream] == list(range(1, 30))
