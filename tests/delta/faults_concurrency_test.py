"""Readers in threads while one publisher publishes, rewinds and deletes."""

import contextlib
import logging
import os
import threading
import time
from concurrent import futures

import pytest

from composer_jax.delta import follower as followers
from composer_jax.delta.store import objects as stores
from tests.delta import faults, identities


@pytest.fixture(scope='module', autouse=True)
def small_chunks():
  logging.disable(logging.WARNING)
  with faults.small_chunks():
    yield
  logging.disable(logging.NOTSET)


class Readers:
  """Each polls as fast as it can; what it holds is compared at once."""

  def __init__(self, root, published):
    self.root, self.published = root, published
    self.refused, self.served = [], []
    self.stopped = threading.Event()

  def read(self, number):
    """Follows, or joins again and again; whole, or in part."""
    reader = None
    store = stores.Store(self.root)
    is_last = False
    while not is_last:
      is_last = self.stopped.wait(0.001)  # else they would starve the writer
      if reader is None or number % 2:
        reader = followers.Follower(
          store,
          faults.RUN,
          faults.KEY,
          wanted=faults.half if number % 3 == 2 else None,
          threads=1 + number % 2,
          now=lambda: 0.0,
        )
      self._look(number, reader, reader.held, reader.poll())
    assert faults.named(reader.held) == self.published[-1][:2], reader.problem

  def _look(self, number, reader, before, update):
    if update is None:
      assert reader.held is before
      if reader.problem:
        self.refused.append((number, reader.problem))
      return
    # Published, or just about to be: the pointer moves before the call ends.
    named = faults.named(update)
    rows = [row for row in self.published if row[:2] == named]
    assert rows, f'nobody published {named}'
    for name, array in rows[0][2].items():
      (index,) = faults.half(name, str(array.dtype), array.shape)
      found = update.block(name, index)
      wanted = array[tuple(slice(*ends) for ends in index)]
      assert found.tobytes() == wanted.tobytes(), f'wrong accept: {name}'
    self.served.append((number, update.version))


@contextlib.contextmanager
def reading(root, published, count=3):
  readers = Readers(root, published)
  with futures.ThreadPoolExecutor(count) as pool:
    reads = [pool.submit(readers.read, number) for number in range(count)]
    try:
      yield readers
    finally:
      readers.stopped.set()
    for read in reads:
      read.result()


def wait_until(condition):
  while not condition():
    time.sleep(0.001)


def publish(publisher, published, version, seed):
  arrays = faults.weights('floats', version, seed)
  identity = identities.target_id(arrays)
  published.append((version, identity, arrays))
  publisher.publish(faults.blocks(arrays), version)


@pytest.mark.parametrize(
  'rounds', [2, pytest.param(30, marks=pytest.mark.slow)]
)
def test_readers_never_see_a_wrong_or_torn_state(tmp_path, rounds):
  """Objects are deleted under their hands; that is a refusal at worst."""
  publisher = faults.publisher_of(stores.Store(tmp_path))
  published, version = [], 0
  publish(publisher, published, version, 0)
  with reading(tmp_path, published) as readers:
    wait_until(lambda: {number for number, _ in readers.served} == {0, 1, 2})
    for turn in range(rounds):
      for _ in range(4):
        version += 1
        publish(publisher, published, version, turn)
      # No other publisher is there, so nothing has to be spared.
      publisher.gc(2)
      if turn % 2:
        publisher.rewind(version - 1)
        publish(publisher, published, version, 100 + turn)
  # All three, and each saw several versions.
  assert {number for number, _ in readers.served} == {0, 1, 2}
  assert len({v for n, v in readers.served if n == 0}) > 1


def test_who_reads_what_is_held_sees_one_version(tmp_path):
  """One thread polls, while others serve `held`."""
  publisher = faults.publisher_of(stores.Store(tmp_path))
  published = []
  publish(publisher, published, 0, 0)
  receiver = followers.Follower(
    stores.Store(tmp_path), faults.RUN, faults.KEY, now=lambda: 0.0
  )
  receiver.poll()
  stopped, seen = threading.Event(), [set(), set()]

  def serve(versions):
    while not stopped.wait(0.001):
      held = receiver.held
      version = held.version
      assert faults.named(held) == published[version][:2]
      for name, found in held.arrays().items():
        assert found.tobytes() == published[version][2][name].tobytes(), name
      versions.add(version)

  with futures.ThreadPoolExecutor(2) as pool:
    work = [pool.submit(serve, versions) for versions in seen]
    try:
      for version in range(1, 9):
        publish(publisher, published, version, 0)
        receiver.poll()
        wait_until(lambda: all(receiver.held.version in s for s in seen))
    finally:
      stopped.set()
    for done in work:
      done.result()
  publish(publisher, published, 9, 0)
  assert receiver.poll().version == 9


class Slow(stores.Store):
  """While it reads its second object, a pack, the world goes on."""

  meanwhile, asked = None, 0

  def get(self, name, *args):
    if self.asked and self.meanwhile is not None:
      meanwhile, self.meanwhile = self.meanwhile, None
      meanwhile()
    self.asked += 1
    return super().get(name, *args)


@pytest.mark.parametrize('grace_s', [0, stores.GRACE_S])
def test_what_is_deleted_while_it_is_read(tmp_path, grace_s):
  publisher = faults.publisher_of(
    stores.Store(tmp_path), keyframe_every=1, grace_s=grace_s
  )
  published = []
  publish(publisher, published, 0, 0)
  publish(publisher, published, 1, 0)
  store = Slow(tmp_path)
  reader = followers.Follower(store, faults.RUN, faults.KEY, now=lambda: 0.0)

  def meanwhile():
    for version in (2, 3, 4):
      publish(publisher, published, version, 0)
    assert (publisher.gc(1) > 0) == (grace_s == 0)

  store.meanwhile = meanwhile
  update = reader.poll()
  if grace_s:
    assert update is not None and update.version == 1
  else:
    assert update is None and 'No such file' in reader.problem
  assert reader.poll().version == 4
  found = reader.held.arrays()['kernel']
  assert found.tobytes() == published[4][2]['kernel'].tobytes()


@pytest.mark.parametrize('folder', ['refs', f'refs/{faults.RUN}'])
def test_a_folder_that_cannot_be_listed_is_not_empty(
  tmp_path, monkeypatch, folder
):
  """Else a second run would take the store for its own, and `gc` the first."""
  store = stores.Store(tmp_path)
  publish(faults.publisher_of(store), [], 0, 0)
  scandir, before = os.scandir, store.sizes()

  def broken(path):
    if str(path) == str(tmp_path / folder):
      raise OSError(5, 'Input/output error', str(path))
    return scandir(path)

  monkeypatch.setattr(os, 'scandir', broken)
  with pytest.raises(OSError, match='Input/output error'):
    faults.publisher_of(store, 'other')
  monkeypatch.undo()
  assert store.sizes() == before
