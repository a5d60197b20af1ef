"""Pieces of objects: what is asked for, what is kept, what a kill leaves."""

import signal
import subprocess
import sys
import time

import pytest

from composer_jax.delta import fetch, identity, subscribe
from composer_jax.delta import store as store_lib
from tests.delta import bundles


class Counting(store_lib.Store):
  """Notes what it is asked for; `fail` may refuse a request by its number."""

  def __init__(self, root, fail=lambda number: None):
    super().__init__(root)
    self.asked, self.fail = [], fail

  def get(self, name, length=None, limit=None):
    self.fail(len(self.asked))
    self.asked.append(name)
    return super().get(name, length, limit)

  def get_range(self, name, start, stop):
    self.fail(len(self.asked))
    self.asked.append((name, start, stop))
    return super().get_range(name, start, stop)


def follow(store, **options):
  return subscribe.Subscriber(store, 'run', bundles.SIGNER, **options)


def blob(start, stop, data=b'', tensor='w'):
  return fetch.Blob(tensor, 0, start, stop, identity.short_hash(data))


def test_neighbours_are_asked_for_together_and_gaps_not_at_all(monkeypatch):
  monkeypatch.setattr(fetch, 'PIECE_BYTES', 30)
  rows = [
    ('a', blob(0, 10)),
    ('a', blob(10, 25)),
    ('a', blob(25, 31)),
    ('a', blob(40, 90)),
    ('b', blob(90, 95)),
  ]
  found = [(p.name, p.start, p.stop, len(p.blobs)) for p in fetch.pieces(rows)]
  assert found == [
    ('a', 0, 25, 2),
    ('a', 25, 31, 1),
    ('a', 40, 90, 1),
    ('b', 90, 95, 1),
  ]
  assert fetch.pieces([]) == []


def test_a_piece_damaged_on_its_way_is_asked_for_again(tmp_path):
  class Noisy(store_lib.Store):
    left = 1

    def get_range(self, name, start, stop):
      data = super().get_range(name, start, stop)
      self.left -= 1
      return data if self.left < 0 else data[:-1] + bytes([data[-1] ^ 8])

  store = Noisy(tmp_path)
  data = bytes(range(100))
  piece = fetch.Piece(
    store.put(data), (blob(0, 40, data[:40]), blob(40, 100, data[40:], 'v'))
  )
  with fetch.Fetcher(store) as fetcher:
    assert fetcher.piece(piece) == data
    assert fetcher.tally.bytes == 200
    store.left = 2
    with pytest.raises(ValueError, match=r'v \(box 0.*blob is damaged'):
      fetcher.piece(piece)


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
  with fetch.Fetcher(store) as fetcher:
    assert fetcher.whole(name, 100) == b'index'
    store.left = 2
    with pytest.raises(ValueError, match='its hash is wrong'):
      fetcher.whole(name, 100)


def test_the_stream_keeps_the_order_and_works_ahead(tmp_path, monkeypatch):
  monkeypatch.setattr(fetch, 'IN_FLIGHT', 8)
  begun = []

  def get(job):
    begun.append(job)
    time.sleep(0.01 if job % 3 else 0.03)
    return memoryview(bytes([job]))

  with fetch.Fetcher(store_lib.Store(tmp_path)) as fetcher:
    stream = fetcher.stream(range(30), get)
    first = next(stream)
    assert first == (0, b'\0')
    time.sleep(0.05)
    # What nobody waits for yet is bounded.
    assert fetch.IN_FLIGHT <= len(begun) <= fetch.IN_FLIGHT + 1
    assert [job for job, _ in stream] == list(range(1, 30))


def test_after_any_break_only_what_is_missing_moves(run, tmp_path, monkeypatch):
  monkeypatch.setattr(fetch, 'PIECE_BYTES', 400)
  monkeypatch.setattr(fetch, 'IN_FLIGHT', 1)
  whole = Counting(run.store.url)
  wanted = follow(whole).poll()
  assert len(whole.asked) > 8
  for stop in range(len(whole.asked)):
    cache = tmp_path / f'cache{stop}'

    def fail(number, stop=stop):
      if number >= stop:
        raise ConnectionError('cut')

    cut = Counting(run.store.url, fail)
    receiver = follow(cut, cache=cache)
    assert receiver.poll() is None and 'cut' in receiver.problem
    assert len(cut.asked) == stop
    again = Counting(run.store.url)
    receiver = follow(again, cache=cache)
    assert receiver.poll().target_id == wanted.target_id
    bundles.assert_same_bits(receiver.held.weights, bundles.weights(1))
    assert len(again.asked) == len(whole.asked) - stop
    assert {*again.asked, *cut.asked} == {*whole.asked}
    # Held weights need no cache.
    assert not cache.exists()


def test_damaged_and_strange_files_of_a_cache_are_not_believed(
  run, tmp_path, caplog
):
  cache = tmp_path / 'cache'
  path = run.path(run.edges[1].manifest)
  data = path.read_bytes()
  path.unlink()
  run.point(1)
  receiver = follow(run.store, cache=cache)
  assert receiver.poll() is None
  path.write_bytes(data)
  kept = sorted(p for p in cache.rglob('*') if p.is_file())
  assert len(kept) > 3
  for number, file in enumerate(kept):
    if number % 3 == 0:
      bundles.damage(file)
    elif number % 3 == 1:
      file.write_bytes(file.read_bytes()[:-1])
  (cache / 'torn').mkdir()
  (cache / 'torn' / '.0-9.00.tmp').write_bytes(b'torn')
  assert receiver.poll().version == 1
  bundles.assert_same_bits(receiver.held.weights, bundles.weights(1))


def test_a_cache_is_bounded_and_a_full_disk_only_costs_the_restart(
  tmp_path, caplog
):
  cache = fetch.Cache(tmp_path / 'cache')
  for number in range(10):
    cache.write(f'object{number}', '0-100', bytes(100))
    time.sleep(0.002)
  assert cache.read('object0', '0-100', 100) == bytes(100)
  cache.trim(350)
  left = {n for n in range(10) if cache.read(f'object{n}', '0-100', 100)}
  assert left == {0, 8, 9}  # The first was of use a moment ago.
  # What another thread writes at this moment stays; a new receiver is alone.
  torn = cache.folder / 'object9' / '.0-100.0123456789abcdef.tmp'
  torn.write_bytes(b'half')
  cache.trim(350)
  assert torn.exists()
  fetch.Cache(cache.folder)
  assert not torn.exists() and cache.read('object9', '0-100', 100)
  blocked = tmp_path / 'file'
  blocked.write_bytes(b'')
  cache = fetch.Cache(blocked)
  for _ in range(2):
    cache.write('object', '0-1', b'x')
  assert cache.read('object', '0-1', 1) is None
  assert caplog.text.count('nothing more is kept for a restart') == 1


KILLED = """
import os, signal, sys
from composer_jax.delta import fetch
from tests.delta import bundles, fetch_test
fetch.PIECE_BYTES, fetch.IN_FLIGHT = 400, 1
def fail(number):
  if number == int(sys.argv[3]):
    os.kill(os.getpid(), signal.SIGKILL)
store = fetch_test.Counting(sys.argv[1], fail)
fetch_test.follow(store, cache=sys.argv[2], memory=sys.argv[4]).poll()
"""


def test_a_killed_receiver_goes_on_where_it_was(run, tmp_path, monkeypatch):
  monkeypatch.setattr(fetch, 'PIECE_BYTES', 400)
  monkeypatch.setattr(fetch, 'IN_FLIGHT', 1)
  cache, memory = tmp_path / 'cache', tmp_path / 'memory'
  whole = Counting(run.store.url)
  follow(whole).poll()
  arguments = [run.store.url, cache, '6', memory]
  ended = subprocess.run([sys.executable, '-c', KILLED, *map(str, arguments)])
  assert ended.returncode == -signal.SIGKILL
  again = Counting(run.store.url)
  receiver = follow(again, cache=cache, memory=memory)
  assert receiver.poll().version == 1
  assert len(again.asked) == len(whole.asked) - 6
  assert {*again.asked} < {*whole.asked}
  bundles.assert_same_bits(receiver.held.weights, bundles.weights(1))
