"""What rots in a receiver's memory, and what a liar would fill it with."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import zstandard

from composer_jax.delta import chain, rebuild
from composer_jax.delta import follower as followers
from composer_jax.delta.codec import coding
from composer_jax.delta.format import identity
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects as stores
from tests.delta import faults, faults_hostile

MIB = 2**20


def drifting(version):
  """Weights that move a little each version."""
  rng = np.random.default_rng(0)
  masters = rng.normal(0, 0.02, (300, 400))
  masters += 3e-5 * version * np.sign(rng.normal(size=masters.shape))
  return {'kernel': masters.astype(ml_dtypes.bfloat16)}


@pytest.fixture
def followed(tmp_path):
  """A receiver at version 3 of a run whose singles are deltas."""
  store = stores.Store(tmp_path)
  options = chain.BundleOptions(threads=1)
  publisher = chain.BundleWriter(store, faults.RUN, faults.KEY, options=options)
  follower = followers.Follower(store, faults.RUN, faults.KEY, threads=1)
  for version in range(5):
    publisher.publish(faults.blocks(drifting(version)), version)
    if version < 4:
      follower.poll()
  return follower


def assert_at(follower, version):
  found = follower.held.arrays()['kernel']
  assert follower.held.version == version, follower.problem
  assert found.tobytes() == drifting(version)['kernel'].tobytes()


def test_what_rotted_in_memory_is_rebuilt(followed):
  held = followed.held
  tensor = held.tensors['kernel']
  buffer = tensor.buffer.copy()
  buffer.view(np.uint8)[4321] ^= 4
  tensor = dataclasses.replace(tensor, buffer=buffer)
  held = dataclasses.replace(held, tensors={'kernel': tensor})
  followed.held = held
  followed.poll()
  assert_at(followed, 4)
  assert followed.stats.route[0] == 'key 0'


def test_a_wrong_bundle_is_given_up(followed, caplog):
  """One that fails is not tried again."""
  caplog.set_level(logging.WARNING)
  store = stores.Store(followed._store.root)
  pointer = manifests.unseal(
    store.read_pointer(faults.RUN)[0], faults.KEY, faults.RUN
  )
  head = rebuild.read_manifest(store, pointer.head)
  ((pack, length),) = head.packs
  bad = bytearray(store.get(pack))
  bad[-1] ^= 1
  packs = ((store.put(bytes(bad)), length),)
  data = dataclasses.replace(head, packs=packs).to_bytes()
  name = store.put(data)
  lie = dataclasses.replace(
    pointer,
    sequence=pointer.sequence + 1,
    head=manifests.Link(head.version, name, len(data)),
  )
  sealed = manifests.seal(lie, faults.KEY)
  store.move_pointer(faults.RUN, sealed, store.read_pointer(faults.RUN)[1])
  assert followed.poll() is None
  assert 'kernel (chunk 0, version 4)' in followed.problem
  assert caplog.text.count('another way is tried') == 1
  assert_at(followed, 3)


# Memory: each lie is signed, and its hashes fit.


def _bomb(size):
  """A frame that says nothing of its length and has very many zeros."""
  compressor = zstandard.ZstdCompressor(level=1).compressobj()
  parts = [compressor.compress(bytes(MIB)) for _ in range(size // MIB)]
  return b''.join([*parts, compressor.flush()])


def _claims(frame, length):
  """The same frame, which now claims to have this length."""
  # Magic, descriptor (8 bytes of content size, one segment), the size.
  head = frame[:4] + b'\xe0' + length.to_bytes(8, 'little')
  has_window = not frame[4] & 0x20
  return head + frame[5 + has_window :]


def _plane(frame):
  return len(frame).to_bytes(4, 'little') + frame


def _signed(world, header, table, blob=None):
  """Makes a head of one box out of the world's keyframe and lies about it."""
  pointer = dataclasses.asdict(world.head)
  pointer['sequence'] += 1
  if blob is not None:
    table['length'][0] = len(blob)
    name = hashlib.sha256(blob).hexdigest()
    world.store.files[f'objects/{name}'] = blob
    header['packs'] = [[name, len(blob)]]
  data = faults_hostile._join(header, table)
  link = [world.head.version, faults_hostile._put(world, data), len(data)]
  pointer['head'] = pointer['keyframe'] = link
  pointer['target_id'] = header['target_id']
  faults_hostile._sign(world, pointer)


def _key(world):
  name = world.head.keyframe.manifest
  return faults_hostile._parse(world.files[f'objects/{name}'])


def _bundle_bombs(world):
  """Yields after each lie was told."""
  header, table = _key(world)
  header['version'] = world.head.version
  header['tensors'] = [['kernel', 'uint8', [MIB]]]
  row = table[:1].copy()
  row['pack'] = 0
  nodes = {
    'kernel': identity.tensor_node(
      'kernel', 'uint8', [MIB], row['post'].tobytes()
    )
  }
  header['target_id'] = identity.root(nodes)
  frame = _bomb(128 * MIB)
  for blob in (
    _plane(frame),
    _plane(_claims(frame, MIB)),
    _plane(_claims(frame, 2**62)),
    _plane(_claims(frame, 0)),
    _plane(frame) * 20,
    b'\xff' * 40,
  ):
    row['codec'] = coding.PLANES
    _signed(world, dict(header), row.copy(), blob)
    yield f'planes of {len(blob)} bytes'
  # An array as large as a manifest can say, with one row, and with none.
  for shape in ([2**62], [2**40, 0], [2**31, 2**31], [MIB, MIB], [1] * 17):
    lie = dict(header, tensors=[['kernel', 'uint8', shape]])
    _signed(world, lie, row.copy(), frame[:MIB])
    yield f'shape {shape}'


def _text_bombs(world):
  pointer = dataclasses.asdict(world.head)
  pointer['sequence'] += 1
  deep = [b'[' * n + b']' * n for n in (900, 10**5, 10**6)]
  long = [b'9' * 10**6, b'{"a":' * 10**5, b' ' * (2**24 + 1)]
  for data in (*deep, *long, b'CDB5\n\xff\xff\xff\xff\2\0\0\0{}', b''):
    for field in ('head', 'keyframe'):
      fields = dict(pointer)
      name = faults_hostile._put(world, data)
      fields[field] = [world.head.version, name, max(len(data), 1)]
      faults_hostile._sign(world, fields)
      yield f'{field} of {len(data)} bytes'
  header, table = _key(world)
  header['version'] = world.head.version
  for rows in (2**17 + 1, 2**19):
    lie = dict(header, tensors=[['kernel', 'uint8', [1]]] * rows)
    _signed(world, lie, table)
    yield f'{rows} tensors'
  faults_hostile._sign(world, {'pad': 'x' * 10**6})
  yield 'long pointer'


def test_texts_of_any_depth_are_refused():
  """One depth that parses may be too deep to be written again."""
  for depth in range(300, 1400):
    for text in (b'[' * depth + b']' * depth, b'{"a":' * depth + b'}' * depth):
      with contextlib.suppress(ValueError):
        identity.parse_canonical(text)
  with pytest.raises(ValueError, match='not valid JSON'):
    identity.parse_canonical(b'[' * 10**6 + b']' * 10**6)


def tell_lies():
  """Polls at each of them; prints the most memory that any of it took."""
  logging.disable(logging.CRITICAL)
  world = faults.build('one', keyframe_every=9, versions=2)
  refused = 0
  zstandard.ZstdDecompressor().decompress(_bomb(MIB), max_output_size=MIB)
  for number, bombs in enumerate([_bundle_bombs, _text_bombs]):
    world.store.files = dict(world.files)
    before = faults.peak_mib()
    for what in bombs(world):
      receiver = world.receiver('whole', None)
      update = receiver.poll()
      verdict = faults_hostile._check(world, receiver, None, update)
      # Where the head is no good, the keyframe may lead around it.
      assert verdict == 'refused' or what.startswith('keyframe'), what
      refused += verdict == 'refused'
    after = faults.peak_mib()
    print(json.dumps([number, refused, after - before]))


def test_bombs_take_no_memory():
  done = subprocess.run(
    [
      sys.executable,
      '-c',
      'from tests.delta import faults_memory_test as t; t.tell_lies()',
    ],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  rows = [json.loads(line) for line in done.stdout.splitlines()]
  assert rows[-1][1] > 20
  # The bombs hold 128 MiB and more each. Texts of up to 16 MiB are parsed, to
  # objects that take some fifteen times as much.
  assert rows[0][2] < 64 and rows[1][2] < 350, rows


# Memory of a receiver that lags.

_LARGE = 96 * MIB
# Looks: the keyframe, the next version, and two bundles on.
_LOOKS = (0, 1, 3)


def _large(version):
  rng = np.random.default_rng(0)
  bits_N = rng.integers(0x3C00, 0x3E00, _LARGE // 2, np.uint16)
  bits_N[:: 64 + version] += version
  # One tensor that no version changes: all versions share its memory.
  frozen_N = rng.integers(0x3C00, 0x3E00, 1000, np.uint16)
  arrays = {'frozen': frozen_N, 'kernel': bits_N.reshape(-1, 2**10)}
  return {n: a.view(ml_dtypes.bfloat16) for n, a in arrays.items()}


def _digest(update):
  digest = hashlib.sha256()
  for _, tensor in sorted(update.tensors.items()):
    digest.update(tensor.buffer.view(np.uint8))  # `arrays` would copy.
  return digest.hexdigest()


def look(root):
  """Follows pointer after pointer; prints the most memory of each look."""
  root = pathlib.Path(root)
  faults.build('one', keyframe_every=9, versions=2).receiver(
    'whole', None
  ).poll()  # Loads the compiled codec.
  before = faults.peak_mib()
  follower = followers.Follower(
    stores.Store(root), faults.RUN, faults.KEY, threads=1
  )
  digest = None
  for version in _LOOKS:
    shutil.copy(root / f'{version}', root / 'refs' / faults.RUN / 'latest')
    before_it = follower.held
    update = follower.poll()
    assert update is not None, follower.problem
    assert update.target_id == (root / f'{version}.id').read_text()
    after = faults.peak_mib()
    # What was served before is as it was.
    assert digest is None or digest == _digest(before_it)
    digest = _digest(update)
    del update, before_it
    route = list(follower.stats.route)
    print(json.dumps([version, route, after - before]))


@pytest.mark.slow
def test_a_receiver_holds_no_more_than_two_policies(tmp_path):
  store = stores.Store(tmp_path)
  options = chain.BundleOptions(threads=2)
  publisher = chain.BundleWriter(store, faults.RUN, faults.KEY, options=options)
  for version in range(_LOOKS[-1] + 1):
    publisher.publish(faults.blocks(_large(version)), version)
    pointer = tmp_path / 'refs' / faults.RUN / 'latest'
    shutil.copy(pointer, tmp_path / f'{version}')
    head = manifests.unseal(pointer.read_bytes(), faults.KEY, faults.RUN)
    (tmp_path / f'{version}.id').write_text(head.target_id)
  program = 'import sys; from tests.delta import faults_memory_test as t; '
  done = subprocess.run(
    [sys.executable, '-c', f'{program}t.look(sys.argv[1])', str(tmp_path)],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  rows = [json.loads(line) for line in done.stdout.splitlines()]
  assert [row[:2] for row in rows] == [
    [0, ['key 0']],
    [1, ['delta 0-1']],
    [3, ['delta 1-2', 'delta 2-3']],
  ]
  weights = _LARGE / MIB
  bounds = (weights + 64, 2 * weights + 64, 2 * weights + 64)
  for row, bound in zip(rows, bounds, strict=True):
    assert row[2] < bound, rows
