"""Several processes that publish one bundle, each with a part of the blocks."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from composer_jax.delta import chain, chunking, rebuild, team
from composer_jax.delta.format import identity as grids
from composer_jax.delta.store import objects as stores
from tests.delta import publish_test as t


def weights(version):
  rng = np.random.default_rng(0)
  wide = rng.normal(size=(96, 24)) + 1e-3 * version
  return {
    **t.weights(version),
    'wide': wide.astype(np.float32),
    'word': (wide * 9).astype(np.int16),
  }


def rows_of(array, start, stop):
  ends = ((start, stop), *((0, n) for n in array.shape[1:]))
  return ends, array[start:stop]


def blocks(arrays, process, count):
  """Rows of the wide arrays; the others go round the processes.

  The last process begins in the middle of a box, so that one is cut.
  """
  for place, (name, array) in enumerate(arrays.items()):
    if name not in ('wide', 'word'):
      if place % count == process:
        yield from t.blocks({name: array})
      continue
    borders = [96 * p // count for p in range(count)] + [96]
    if count > 1:
      borders[-2] += 1
    ends, values = rows_of(array, *borders[process : process + 2])
    yield name, str(array.dtype), array.shape, ends, values


def cut_bytes(arrays, count):
  """By the rule: bytes of the boxes that no block holds whole."""
  total = 0
  for name in ('wide', 'word'):
    array = arrays[name]
    grid = grids.of(array.shape)
    assert grid.num_chunks > 1
    held = [
      index
      for p in range(count)
      for other, _, _, index, _ in blocks(arrays, p, count)
      if other == name
    ]
    for number in range(grid.num_chunks):
      box = grid.chunk(number)
      whole = any(
        all(a >= c and b <= d for (a, b), (c, d) in zip(box, i, strict=True))
        for i in held
      )
      size = np.prod([b - a for a, b in box]) * array.itemsize
      total += 0 if whole else int(size)
  return total


def run_together(root, count, work, timeout_s=1e6, attempt='first'):
  """Runs work(publisher, process), each with a store of its own."""

  def run(process):
    peers = team.Peers(
      process=process, count=count, attempt=attempt, timeout_s=timeout_s
    )
    publisher = t.open_publisher(
      stores.Store(root), peers=peers, keyframe_every=3,
      threads=1,
    )  # fmt: skip
    return work(publisher, process)

  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    futures = [pool.submit(run, p) for p in range(count)]
    concurrent.futures.wait(futures)
  return futures


def table(store, edge):
  """All that a manifest says, but for who packed a blob."""
  found = rebuild.read_manifest(store, edge.link)
  fields = ('codec', 'length', 'post')
  return (
    found.target_id,
    found.base_id,
    [(x.name, x.dtype, x.shape) for x in found.tensors],
    [x.chunks[f].tobytes() for x in found.tensors for f in fields],
  )


@pytest.fixture
def small_chunks(monkeypatch):
  """Arrays of some thousand elements have many boxes, and ragged ones."""

  def of(shape):
    return grids.Grid(shape, tuple(max(1, min(n, 20)) for n in shape))

  monkeypatch.setattr(grids, 'of', of)


@pytest.mark.usefixtures('small_chunks')
@pytest.mark.parametrize('count', [2, 3])
def test_many_processes_publish_what_one_does(tmp_path, count):
  def publish_all(publisher, process):
    infos = []
    for v in range(5):
      mine = blocks(weights(v), process, publisher._team.count)
      infos.append(publisher.publish(mine, v))
    return infos

  def run(count):
    root = tmp_path / str(count)
    futures = run_together(root, count, publish_all)
    return stores.Store(root), [f.result() for f in futures]

  store, infos = run(count)
  alone, (wanted,) = run(1)
  assert all(found == infos[0] for found in infos)
  for found, one in zip(infos[0], wanted, strict=True):
    assert (found.target_id, found.base_id) == (one.target_id, one.base_id)
    assert (found.changed, found.elements) == (one.changed, one.elements)
    assert (found.kind, found.full_bytes) == (one.kind, one.full_bytes)
    # The cut boxes, and one process cuts none.
    assert found.cut_bytes == cut_bytes(weights(0), count) > one.cut_bytes == 0
  assert t.spans(store) == t.spans(alone)
  for found, one in zip(t.edges(store), t.edges(alone), strict=True):
    assert table(store, found) == table(alone, one)
  update = t.served(store)
  t.assert_same_bits(update, weights(4))
  # Scratch of the last round alone is left.
  assert len(list((store.root / 'messages').rglob('*-0'))) <= 8


@pytest.mark.usefixtures('small_chunks')
def test_processes_rewind_and_reopen_together(tmp_path):
  def first(publisher, process):
    for v in range(4):
      publisher.publish(blocks(weights(v), process, 2), v)
    publisher.rewind(1)
    publisher.publish(blocks(weights(2), process, 2), 2)
    publisher.publish(blocks(weights(1), process, 2), 1)
    return publisher.version

  def second(publisher, process):
    publisher.rewind(1)
    info = publisher.publish(blocks(weights(2), process, 2), 2)
    return info.kind, info.target_id

  futures = run_together(tmp_path, 2, first)
  assert [f.result() for f in futures] == [2, 2]
  store = stores.Store(tmp_path)
  before = t.served(store)
  t.assert_same_bits(before, weights(2))
  futures = run_together(tmp_path, 2, second, attempt='second')
  assert {f.result() for f in futures} == {('delta', before.target_id)}
  # Of the first start nothing is left.
  parts = store.root / 'messages' / 'run'
  assert {path.name.split('.')[0] for path in parts.iterdir()} == {'second'}


class Weighed(stores.Store):
  """Counts what is read of packs."""

  read = 0

  def get_range(self, name, start, stop, **named):
    self.read += stop - start
    return super().get_range(name, start, stop, **named)


@pytest.mark.usefixtures('small_chunks')
def test_each_process_reads_its_part_of_the_base(tmp_path):
  def publish_one(publisher, process):
    publisher.publish(blocks(weights(0), process, 3), 0)

  for future in run_together(tmp_path, 3, publish_one):
    future.result()

  def reopen(process):
    peers = team.Peers(process=process, count=3, attempt='again', timeout_s=1e6)
    store = Weighed(tmp_path)
    publisher = t.open_publisher(store, peers=peers)
    kind = publisher.publish(blocks(weights(1), process, 3), 1).kind
    return kind, store.read

  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    kinds, read = zip(*pool.map(reopen, range(3)), strict=True)
  assert kinds == ('delta',) * 3
  whole = t.edges(stores.Store(tmp_path))[0].bytes
  # Twice what two of them share: boxes of `word` and `wide` that are cut.
  assert max(read) < 0.6 * whole
  t.assert_same_bits(t.served(stores.Store(tmp_path)), weights(1))


@pytest.mark.usefixtures('small_chunks')
@pytest.mark.parametrize('culprit', [0, 1])
def test_a_failure_of_one_ends_the_round_of_all(tmp_path, culprit):
  def work(publisher, process):
    publisher.publish(blocks(weights(0), process, 3), 0)
    mine = list(blocks(weights(1), process, 3))
    try:
      publisher.publish(mine + mine[-1:] * (process == culprit), 1)
    except (ValueError, OSError) as error:
      message = str(error)
    # The next round is as good as ever.
    publisher.publish(mine, 1)
    return message

  futures = run_together(tmp_path, 3, work)
  messages = [f.result() for f in futures]
  assert all('overlaps another block' in m for m in messages)
  assert f'process {culprit} failed' in messages[culprit - 1]
  t.assert_same_bits(t.served(stores.Store(tmp_path)), weights(1))


def hot(version):
  """Rows of which a few elements change, half of them in every version."""
  rows = np.ones((2, 2**16), np.float32)
  for v in range(version):
    rng = np.random.default_rng(v)
    for row in rows:
      at = 60 * rng.choice(1000, 500, replace=False)
      row[at] += rng.choice([-1, 1], 500) * 2.0**-20
  return {f'row{p}': row for p, row in enumerate(rows)}


def test_after_a_failure_all_have_the_same_base(tmp_path):
  def work(process):
    peers = team.Peers(process=process, count=2, attempt='a', timeout_s=1e6)
    publisher = t.open_publisher(stores.Store(tmp_path), peers=peers)
    kinds = []
    for v in range(7):
      name = f'row{process}'
      mine = list(t.blocks({name: hot(v)[name]}))
      if v == 4:
        with pytest.raises(ValueError, match='overlaps another'):
          publisher.publish(mine + mine * (1 - process), v)
      kinds.append(publisher.publish(mine, v).kind)
    return kinds

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    kinds, same = pool.map(work, range(2))
  assert kinds == same == ['key'] + ['delta'] * 6
  t.assert_same_bits(t.served(stores.Store(tmp_path)), hot(6))


@pytest.mark.usefixtures('small_chunks')
def test_boxes_may_move_to_another_process(tmp_path):
  array = np.arange(6000, dtype=np.int32).reshape(60, 100)

  def work(publisher, process):
    for v in range(6):
      border = 20 if v < 3 else 40
      ends = (0, border) if process == 0 else (border, 60)
      index, values = rows_of(array + v, *ends)
      publisher.publish([('a', 'int32', array.shape, index, values)], v)

  for future in run_together(tmp_path, 2, work):
    future.result()
  t.assert_same_bits(t.served(stores.Store(tmp_path)), {'a': array + 5})


class Mute(stores.Store):
  """Loses the first order after the next move of the pointer."""

  armed = moved = False

  def move_pointer(self, run_id, data, tag):
    tag = super().move_pointer(run_id, data, tag)
    self.moved = self.armed
    return tag

  def put_message(self, run_id, key, data):
    if self.moved and key.endswith('-0'):
      self.armed = self.moved = False
      raise OSError(5, 'Input/output error')
    super().put_message(run_id, key, data)


def test_who_missed_a_commit_asks_the_store(tmp_path):
  def work(process):
    peers = team.Peers(process=process, count=2, attempt='a', timeout_s=1e6)
    store = Mute(tmp_path)
    publisher = t.open_publisher(store, peers=peers)
    publisher.publish(blocks(weights(0), process, 2), 0)
    store.armed = process == 0
    with pytest.raises(OSError, match='Input/output error'):
      publisher.publish(blocks(weights(1), process, 2), 1)
    infos = [
      publisher.publish(blocks(weights(v), process, 2), v) for v in (1, 2)
    ]
    return [info.kind for info in infos]

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    kinds = list(pool.map(work, range(2)))
  assert kinds == [['delta', 'delta']] * 2
  t.assert_same_bits(t.served(stores.Store(tmp_path)), weights(2))


def test_blocks_that_two_processes_hold_are_refused(tmp_path):
  def work(publisher, process):
    publisher.publish(t.blocks(t.weights(0)), 0)

  futures = run_together(tmp_path, 2, work)
  for future in futures:
    with pytest.raises(ValueError, match='bias.*overlap'):
      future.result()


PROCESS = """
import json, os, pathlib, signal, sys
from composer_jax.delta import team
from composer_jax.delta.store import objects as stores
from tests.delta import faults_parts, publish_parts_test as p, publish_test as t

root, process = pathlib.Path({root!r}), int(sys.argv[1])
def blocks(v):
  for block in p.blocks(p.weights(v), process, 3):
    if process == 1 and v == 1:
      os.kill(os.getpid(), signal.SIGKILL)
    yield block
team.time = faults_parts.Clock(root)
peers = team.Peers(process=process, count=3, attempt='real')
publisher = t.open_publisher(stores.Store(root), peers=peers, threads=1)
publisher.publish(blocks(0), 0)
try:
  publisher.publish(blocks(1), 1)
except (ValueError, OSError) as error:
  print(json.dumps(str(error)))
"""


def test_a_process_that_dies_is_named_and_the_old_version_stands(tmp_path):
  code = PROCESS.format(root=str(tmp_path))
  children = [
    subprocess.Popen(
      [sys.executable, '-c', code, str(p)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      env={**os.environ, 'OMP_NUM_THREADS': '1'},
      text=True,
    )
    for p in range(3)
  ]
  assert children[1].wait() == -signal.SIGKILL
  # Both others get to where nothing but its message is missing.
  messages = tmp_path / 'messages' / 'run'
  while not all((messages / f'real.2.2-{p}').exists() for p in (0, 2)):
    assert children[0].poll() is None and children[2].poll() is None
    time.sleep(0.01)
  (tmp_path / 'dead').touch()
  ends = [child.communicate() for child in children]
  assert [child.returncode for child in children[::2]] == [0, 0], ends
  for out, _ in ends[::2]:
    assert 'process 1 of 3' in json.loads(out), out
    assert 'another attempt' in json.loads(out), out
  update = t.served(stores.Store(tmp_path))
  assert update.version == 0
  t.assert_same_bits(update, weights(0))


def test_publisher_alone_leaves_no_parts(tmp_path):
  store = stores.Store(tmp_path)
  chain.BundleWriter(store, 'run', t.KEY).publish(t.blocks(t.weights(0)), 0)
  assert not (tmp_path / 'messages').exists()


def test_shares_that_disagree_or_do_not_cover_are_refused():
  def share(name, shape=(2,), chunks=()):
    return chunking.ChunkTable(specs={name: ('int8', shape)}, rows=dict(chunks))

  with pytest.raises(ValueError, match='w: one process has blocks of'):
    chunking.merge([share('w'), share('w', (3,))])
  with pytest.raises(ValueError, match='w: 2 elements are in chunks'):
    chunking.merge([share('w')])
