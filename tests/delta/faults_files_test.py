"""Hostile files: whatever lies in a folder store, a poll refuses or is right.

Files are swapped, cut, extended, made sparse, and replaced by directories,
pipes, links and files of other runs and keys. A receiver never serves wrong
bits, never hangs, raises nothing, and takes no more memory than the weights
need: every read is bounded by a length that a verified parent states.
"""

import json
import logging
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys

import pytest

from composer_jax.delta import follower as followers
from composer_jax.delta.format import keys
from composer_jax.delta.store import objects as stores
from tests.delta import faults

SPARSE_BYTES = 2**33
# A pipe that is opened blocks for ever; on a loaded machine a poll takes long.
HANG_S = 60


def _publish(root, key=faults.KEY, versions=5):
  publisher = faults.publisher_of(
    stores.Store(root), key=key, keyframe_every=99
  )
  for version in range(versions):
    arrays = faults.weights('one', version)
    publisher.publish(faults.blocks(arrays), version)
    if version == 2:
      shutil.copy(root / 'refs' / 'run' / 'latest', root.parent / 'replay')


def _flip(path, rng, others):
  data = bytearray(path.read_bytes())
  data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  path.write_bytes(data)


def _cut(path, rng, others):
  os.truncate(path, rng.randrange(path.stat().st_size))


def _extend(path, rng, others):
  with path.open('ab') as file:
    file.write(rng.randbytes(rng.randrange(1, 100)))


def _sparse(path, rng, others):
  if rng.random() < 0.5:
    path.write_bytes(b'')
  os.truncate(path, SPARSE_BYTES)


def _swap(path, rng, others):
  other = rng.choice(others)
  data, more = path.read_bytes(), other.read_bytes()
  path.write_bytes(more)
  if other.is_relative_to(path.parents[1]):
    other.write_bytes(data)


def _lose(path, rng, others):
  path.unlink()


def _put(make):
  def mutate(path, rng, others):
    path.unlink()
    make(path)

  return mutate


MUTATIONS = {
  'flip': _flip,
  'cut': _cut,
  'extend': _extend,
  'sparse': _sparse,
  'swap': _swap,
  'lose': _lose,
  'folder': _put(os.mkdir),
  'pipe': _put(os.mkfifo),
  'loop': _put(lambda path: os.symlink(path, path)),
  'zeros': _put(lambda path: os.symlink('/dev/zero', path)),
  'elsewhere': _put(lambda path: os.symlink('/nowhere', path)),
}


def _files(root):
  return sorted(
    p for p in root.rglob('*') if p.is_file() and not p.name.startswith('.')
  )


def _check(receiver, held):
  """Polls; whatever is served are the bits of its version."""
  signal.alarm(HANG_S)
  update = receiver.poll()
  signal.alarm(0)
  if update is None:
    assert receiver.held is held
    return 'refused' if receiver.problem else 'nothing'
  found = update.arrays()
  for name, array in faults.weights('one', update.version).items():
    assert found[name].tobytes() == array.tobytes(), name
  return 'served'


def attack(folder, count):
  """Mutates and polls; prints verdicts and the growth of memory in bytes."""
  logging.disable(logging.CRITICAL)
  folder = pathlib.Path(folder)
  with faults.small_chunks():
    root, stranger = folder / 'store', folder / 'stranger'
    _publish(root, versions=3)
    follower = followers.Follower(
      stores.Store(root), 'run', faults.KEY, threads=1, now=lambda: 0.0
    )
    old = follower.poll()
    _publish(root, versions=4)
    _publish(stranger, keys.Hmac(b'the key of others'))
    intact = {path: path.read_bytes() for path in _files(root)}
    others = [*intact, *_files(stranger), folder / 'replay']
    verdicts, before = {}, 0
    for number in range(count):
      rng = random.Random(number)
      how = rng.choice(sorted(MUTATIONS))
      path = rng.choice(sorted(intact))
      MUTATIONS[how](path, rng, others)
      joiner = followers.Follower(
        stores.Store(root), 'run', faults.KEY, threads=1, now=lambda: 0.0
      )
      follower.held, follower._seen = old, None
      for receiver, held in ((joiner, None), (follower, old)):
        verdict = _check(receiver, held)
        key = f'{how} {verdict}'
        verdicts[key] = verdicts.get(key, 0) + 1
      for damaged in (path, *intact) if how == 'swap' else (path,):
        if damaged.is_dir() and not damaged.is_symlink():
          damaged.rmdir()
        elif os.path.lexists(damaged):
          damaged.unlink()
        damaged.write_bytes(intact[damaged])
      if number == 20:
        before = faults.peak_mib()
    after = faults.peak_mib()
  print(json.dumps([verdicts, after - before]))


@pytest.mark.slow
@pytest.mark.parametrize(
  'count', [200, pytest.param(20_000, marks=pytest.mark.slow)]
)
def test_hostile_files_are_refused_in_little_memory(tmp_path, count):
  program = (
    'from tests.delta import faults_files_test as t; '
    f't.attack({str(tmp_path)!r}, {count})'
  )
  done = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-3000:]
  verdicts, grown = json.loads(done.stdout.splitlines()[-1])
  assert grown < 64
  for how in MUTATIONS:
    assert verdicts.get(f'{how} refused', 0), verdicts
