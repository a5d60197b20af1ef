"""Manifests and pointers have one spelling and refuse any other."""

import contextlib
import dataclasses
import hashlib
import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_jax.delta.format import identity, keys
from composer_jax.delta.format import identity as grids
from composer_jax.delta.format import manifest as manifests
from tests.delta import faults_damage

SAME, PLANES, CLASS = 0, 1, 3
HASH = hashlib.sha256(b'').hexdigest()
KEY = keys.Hmac(bytes(32))


def tensor(name, shape, rows, dtype='uint8'):
  """Rows of (codec, pack, length), one for each box."""
  table = np.zeros(len(rows), manifests.CHUNK)
  for row, (codec, pack, length) in zip(table, rows, strict=True):
    row['codec'], row['pack'], row['length'] = codec, pack, length
  table['post'] = np.arange(len(rows) * 16).reshape(-1, 16) % 251
  return manifests.Tensor(name, dtype, shape, table)


def bare(codec):
  return (codec, manifests.NO_PACK, 0)


def bundle(tensors, packs=(), **fields):
  defaults = dict(
    version=7,
    base_id=HASH,
    target_id=identity.root({t.name: t.node for t in tensors}),
    previous=manifests.Link(6, HASH, 9),
    keyframe=manifests.Link(3, HASH, 9),
  )
  if fields.pop('is_key', False):
    defaults |= dict(base_id='', previous=None, keyframe=None)
  return manifests.Manifest(
    tensors=tuple(tensors),
    packs=tuple((HASH, length) for length in packs),
    **defaults | fields,
  )


# 4 boxes of 2**20 bytes.
WIDE = (2**22,)


@pytest.fixture
def delta():
  rows = [(CLASS, 1, 5), bare(SAME), (PLANES, 0, 2**20), (PLANES, 1, 7)]
  return bundle(
    [
      tensor('a/b', (3,), [(CLASS, 1, 67)]),
      tensor('a/w', WIDE, rows),
      tensor('e', (0, 3), [], 'bfloat16'),
      tensor('s', (), [bare(SAME)], 'float64'),
    ],
    packs=(2**20, 79),
  )


def keyframe(**fields):
  return bundle(
    [tensor('w', (4, 2), [(PLANES, 0, 32)], 'float32')],
    [32],
    **dict(is_key=True) | fields,
  )


def test_manifests_read_back(delta):
  packed = bundle([tensor('w', (5,), [(PLANES, 0, 5)])], [5], is_key=True)
  for written in (delta, keyframe(), packed, bundle([])):
    read = manifests.Manifest.from_bytes(written.to_bytes())
    assert read.to_bytes() == written.to_bytes()
    for field in dataclasses.fields(written):
      if field.name != 'tensors':
        assert getattr(read, field.name) == getattr(written, field.name)
    assert read.specs == written.specs
    for one, other in zip(read.tensors, written.tensors, strict=True):
      np.testing.assert_array_equal(one.chunks, other.chunks)
      assert not one.chunks.flags.writeable
      assert not other.chunks.flags.writeable
      assert one.grid == grids.of(one.shape)


def test_a_chunk_takes_few_bytes():
  """Its hash, and little of what is alike in all of them."""
  rows = [(CLASS, 0, 300 + 7 * n % 100) for n in range(64)]
  packs = [sum(length for *_, length in rows)]
  none = bundle([tensor('w', (0,), [])]).to_bytes()
  many = bundle([tensor('w', (64 * 2**20,), rows)], packs).to_bytes()
  assert len(many) < len(none) + 64 * (16 + 2)


def test_bytes_and_offsets(delta):
  assert delta.full_bytes == 3 + 2**22 + 0 + 8
  assert delta.bundle_bytes == 2**20 + 79
  assert keyframe().bundle_bytes == 32
  assert keyframe().full_bytes == 32
  found = [offsets.tolist() for offsets in delta.offsets()]
  assert found == [[0], [67, 0, 0, 72], [], [0]]
  assert bundle([]).offsets() == ()


@settings(max_examples=50, deadline=None, database=None)
@given(st.data())
def test_blobs_lie_in_their_packs_one_after_another(data):
  counts = data.draw(st.lists(st.integers(0, 5), max_size=4))
  num_packs = data.draw(st.integers(1, 3))
  packs, tensors, blobs = [b''] * num_packs, [], []
  for at, count in enumerate(counts):
    rows = []
    for _ in range(count):
      if data.draw(st.booleans()):
        pack = data.draw(st.integers(0, num_packs - 1))
        length = data.draw(st.integers(1, 9))
        blob = len(blobs).to_bytes() * length
        packs[pack] += blob
        rows.append((CLASS, pack, length))
        blobs.append((at, len(rows) - 1, pack, blob))
      else:
        rows.append(bare(SAME))
    tensors.append(tensor(f't{at}', (count * 2**20,), rows))
  # A pack without blobs may not be named.
  used = [pack for pack, held in enumerate(packs) if held]
  for t in tensors:
    table = t.chunks.copy()
    table['pack'] = [
      pack if pack == manifests.NO_PACK else used.index(pack)
      for pack in table['pack']
    ]
    object.__setattr__(t, 'chunks', table)
  read = bundle(tensors, [len(packs[pack]) for pack in used])
  offsets = read.offsets()
  for at, box, pack, blob in blobs:
    start = offsets[at][box]
    assert packs[pack][start : start + len(blob)] == blob


def read_or_refuse(data):
  """A changed manifest is refused, or is one that is written the same way."""
  with contextlib.suppress(ValueError):
    read = manifests.Manifest.from_bytes(data)
    again = manifests.Manifest.from_bytes(read.to_bytes())
    assert again.to_bytes() == read.to_bytes()
    assert len(read.offsets()) == len(read.tensors)


def test_no_manifest_is_read_with_a_byte_changed_unless_it_says_so(delta):
  for data in (delta.to_bytes(), keyframe().to_bytes()):
    for at, bits in itertools.product(range(len(data)), (1, 255)):
      changed = bytearray(data)
      changed[at] ^= bits
      read_or_refuse(bytes(changed))


def test_hashes_are_guarded_by_the_root(delta):
  data = delta.to_bytes()
  for at in range(len(data) - 16 * 6, len(data)):
    changed = bytearray(data)
    changed[at] ^= 255
    with pytest.raises(ValueError, match='Merkle root'):
      manifests.Manifest.from_bytes(bytes(changed))


def test_no_part_of_a_manifest_is_one(delta):
  data = delta.to_bytes()
  for length in range(len(data)):
    with pytest.raises(ValueError):
      manifests.Manifest.from_bytes(data[:length])
  for more in (b'\0', bytes(16), data):
    with pytest.raises(ValueError, match='length of its header|must have'):
      manifests.Manifest.from_bytes(data + more)


@settings(max_examples=200, deadline=None, database=None)
@given(st.data())
def test_manifests_of_arbitrary_bytes(data):
  whole = keyframe().to_bytes()
  start, stop = sorted(data.draw(st.integers(0, len(whole))) for _ in '..')
  middle = data.draw(st.binary(max_size=60))
  read_or_refuse(whole[:start] + middle + whole[stop:])


JUNK = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(2**70), 2**70)
  | st.floats()
  | st.text(max_size=5)
  | st.sampled_from([HASH, 'key', 'delta', 'w', 'uint8', 'STORED', '../x']),
  lambda inner: (
    st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3)
  ),
  max_leaves=8,
)


def respell(data, change):
  """Applies `change` to the header's fields; keeps everything else right."""
  fields, table = faults_damage.parse(data)
  change(fields)
  return faults_damage.join(fields, table)


@settings(max_examples=100, deadline=None, database=None)
@given(st.data())
def test_headers_of_arbitrary_values(data):
  whole = keyframe().to_bytes()
  names = sorted(f.name for f in dataclasses.fields(manifests.Manifest))
  name = data.draw(st.sampled_from([*names, 'more']))
  path = data.draw(st.lists(st.integers(0, 2), max_size=3))

  def change(fields):
    at, key = fields, name
    for step in path:
      if isinstance(at.get(key) if at is fields else at[key], list):
        if step >= len(at[key]):
          break
        at, key = at[key], step
    at[key] = data.draw(JUNK)

  read_or_refuse(respell(whole, change))


def replaced(**values):
  return lambda fields: fields.update(values)


ROW = ['w', 'float32', [4, 2]]


@pytest.mark.parametrize(
  'change, message',
  [
    (replaced(version=True), 'version'),
    (replaced(version=7.0), 'version'),
    (replaced(version=2**63), 'version'),
    (replaced(version='7'), 'version'),
    (replaced(base_id=HASH), 'order of its links'),
    (replaced(base_id='x'), 'base_id'),
    (replaced(previous=[6, HASH, 9]), 'order of its links'),
    (replaced(keyframe=[6, HASH, 9]), 'order of its links'),
    (replaced(previous=[7, HASH, 9], keyframe=[3, HASH, 9]), 'order of'),
    (replaced(previous=[8, HASH, 9], keyframe=[3, HASH, 9]), 'order of'),
    (replaced(previous=[5, HASH, 9], keyframe=[6, HASH, 9]), 'order of'),
    (replaced(previous=['6', HASH, 9]), 'previous'),
    (replaced(previous=[6, 'x', 9]), 'previous'),
    (replaced(previous=[6, HASH, 2**29]), 'previous'),
    (replaced(previous=[6, HASH]), 'previous'),
    (replaced(previous={'version': 6}), 'previous'),
    (replaced(keyframe=6), 'keyframe'),
    (replaced(target_id='0' * 64), 'Merkle root'),
    (replaced(target_id='0' * 63), 'target_id'),
    (replaced(more=1), 'fields must be'),
    (lambda fields: fields.pop('version'), 'fields must be'),
    (replaced(packs=[[HASH, 5]]), 'fill it exactly'),
    (replaced(packs=[[HASH, 0]]), 'pack'),
    (replaced(packs=[['x', 1]]), 'pack'),
    (replaced(packs=[HASH]), 'list of packs'),
    (replaced(tensors=[]), 'something follows'),
    (replaced(tensors=[ROW, ROW]), 'no room'),
    (replaced(tensors=[['v', 'bool', [0]], ROW]), 'Merkle root'),
    (replaced(tensors=[ROW, ['w', 'bool', [0]]]), 'order of the tensors'),
    (replaced(tensors=[ROW, ['v', 'bool', [0]]]), 'order of the tensors'),
    (replaced(tensors=[['', 'bool', [1]]]), 'tensor name'),
    (replaced(tensors=[['w\n', 'bool', [1]]]), 'tensor name'),
    (replaced(tensors=[['\ud800', 'bool', [1]]]), 'tensor name'),
    (replaced(tensors=[['w', 'complex64', [1]]]), 'dtype'),
    (replaced(tensors=[['w', ['bool'], [1]]]), 'dtype'),
    (replaced(tensors=[['w', 'bool', 1]]), 'shape'),
    (replaced(tensors=[['w', 'bool', [-1]]]), 'shape'),
    (replaced(tensors=[['w', 'bool', [1.0]]]), 'shape'),
    (replaced(tensors=[['w', 'bool', [1] * 17]]), 'shape'),
    (replaced(tensors=[['w', 'bool', [0, 2**40, 2**40]]]), 'shape'),
    (replaced(tensors=[['w', 'bool', [2**62]]]), 'no room'),
    (replaced(tensors=[['w', 'bool', [2**10, 2**10, 2**10]]]), 'no room'),
    # Its grid alone would take minutes.
    (replaced(tensors=[['w', 'bool', [1, 2**40 + 8, 2**19 - 1]]]), 'no room'),
    (replaced(tensors=[['w', 'bool', [2**10, 2**9]]]), 'no room'),
  ],
)
def test_a_wrong_header_is_refused_and_named(change, message):
  with pytest.raises(ValueError, match=message):
    manifests.Manifest.from_bytes(respell(keyframe().to_bytes(), change))


@pytest.mark.parametrize(
  'rows, packs, message',
  [
    ([(7, 0, 1)], [1], 'codec'),
    ([bare(6)], [], 'codec'),
    ([(5, 0, 1)], [1], 'codec'),
    ([(SAME, 0, 0)], [1], 'pack of a chunk'),
    ([(CLASS, 1, 1)], [1], 'pack of a chunk'),
    ([(CLASS, manifests.NO_PACK, 1)], [], 'pack of a chunk'),
    ([(CLASS, 0, 0)], [1], 'length of a blob'),
    ([(SAME, manifests.NO_PACK, 1)], [], 'length of a blob'),
    ([(CLASS, 0, 5 + 513)], [518], 'length of a blob'),
    ([(CLASS, 0, 4)], [5], 'fill it exactly'),
    ([(CLASS, 0, 4)], [3], 'fill it exactly'),
    ([(CLASS, 0, 4)], [4, 1], 'fill it exactly'),
    ([bare(SAME)], [1], 'fill it exactly'),
  ],
)
def test_a_wrong_row_is_refused_and_named(rows, packs, message):
  good = bundle([tensor('w', (5,), [(CLASS, 0, 5 + 512)])], [517])
  assert manifests.Manifest.from_bytes(good.to_bytes()).full_bytes == 5
  with pytest.raises(ValueError, match=message):
    bundle([tensor('w', (5,), rows)], packs)


def test_a_table_has_a_row_for_each_box():
  for rows in ([], [bare(SAME)] * 2):
    with pytest.raises(ValueError, match="number of chunks of 'w'"):
      tensor('w', (5,), rows)


def bombs():
  def framed(header):
    return faults_damage.join(header, np.zeros(0, manifests.CHUNK))

  yield b'CDB5\n' + b'\xff' * 8
  yield framed(b'[' * 2**12)
  yield framed(b'{"a":' * 2**12)
  yield framed(b'1' * 2**12)
  yield framed(bytes(2**24))
  yield framed(bytes(2**25))
  good = keyframe().to_bytes()
  for shape in ([2**62], [2**20, 2**20], [2**43 - 1], [3] * 16):
    yield respell(good, replaced(tensors=[['w', 'bool', shape]]))
  folders = [['/'.join('a' * 512) + str(at), HASH, 0] for at in range(10, 60)]
  yield respell(good, replaced(packs=folders, version=-1))


@pytest.mark.parametrize('at', range(len(list(bombs()))))
def test_bombs_take_memory_in_proportion_to_their_bytes(at):
  data = next(itertools.islice(bombs(), at, None))
  tracemalloc.start()
  try:
    with pytest.raises(ValueError):
      manifests.Manifest.from_bytes(data)
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < 2**18 + 400 * len(data)


def test_sizes_are_bounded():
  with pytest.raises(ValueError, match='length'):
    manifests.Manifest.from_bytes(bytes(2**28 + 1))
  fields, table = faults_damage.parse(keyframe().to_bytes())
  for more in (2**24, 2**17):  # too long, and too much for so few bytes
    head = identity.canonical_json(fields | {'base_id': 'r' * more})
    with pytest.raises(ValueError, match='length of its header'):
      manifests.Manifest.from_bytes(faults_damage.join(head, table))
  rng = np.random.default_rng(0)
  rows = rng.integers(0, 10**6, 2**17 + 1).tolist()
  data = faults_damage.join(fields | {'tensors': rows}, table)
  with pytest.raises(ValueError, match='number of tensors, 131073'):
    manifests.Manifest.from_bytes(data)
  with pytest.raises(ValueError, match='length of a pointer'):
    manifests.unseal(bytes(4097), KEY, 'run')


def test_a_trillion_parameters_are_read_well_under_a_second():
  shape = (58, 512, 8192, 2, 2048)  # 24 MB of rows
  count = grids.of(shape).num_chunks
  table = np.zeros(count, manifests.CHUNK)
  table['codec'], table['length'] = CLASS, 5000
  # Two publishers in turn, packs of 1600 blobs.
  order = np.arange(count)
  table['pack'] = order // 3200 * 2 + order % 2
  _, blobs = np.unique(table['pack'], return_counts=True)
  gate_up = manifests.Tensor(
    name='gate_up', dtype='bfloat16', shape=shape, chunks=table
  )
  data = bundle([gate_up], (5000 * blobs).tolist()).to_bytes()
  assert count == 950272 and len(data) > 2**23
  start = time.process_time()
  (offsets,) = manifests.Manifest.from_bytes(data).offsets()
  assert time.process_time() - start < 1
  np.testing.assert_array_equal(offsets, order % 3200 // 2 * 5000)


# --- The pointer.


@pytest.fixture
def pointer():
  return manifests.Pointer(
      run_id='run', sequence=9, rewinds=1, target_id='1' * 64, expires=0,
      head=manifests.Link(7, '2' * 64, 4),
      keyframe=manifests.Link(6, '3' * 64, 5),
  )  # fmt: skip


@pytest.fixture
def key():
  return KEY


def test_pointers_read_back_under_their_key(pointer, key):
  data = manifests.seal(pointer, key)
  assert data.startswith(b'CDB5P ')
  assert manifests.unseal(data, key, 'run') == pointer
  with pytest.raises(ValueError, match='signature is wrong'):
    manifests.unseal(data, keys.Hmac(b'\1' * 32), 'run')
  with pytest.raises(ValueError, match="run 'run', not 'walk'"):
    manifests.unseal(data, key, 'walk')


def test_no_bit_of_a_pointer_can_change(pointer, key):
  data = manifests.seal(pointer, key)
  for at in range(len(data)):
    for bit in range(8):
      changed = bytearray(data)
      changed[at] ^= 1 << bit
      with pytest.raises(ValueError):
        manifests.unseal(bytes(changed), key, 'run')
    with pytest.raises(ValueError):
      manifests.unseal(data[:at], key, 'run')
  with pytest.raises(ValueError, match='signature is wrong'):
    manifests.unseal(data + b'\n', key, 'run')


def test_nothing_is_parsed_before_it_is_verified(key):
  bomb = b'[' * 3000
  signed = key.sign(b'CDB5P' + bomb)
  for signature, message in {
    bytes(len(signed)): 'signature is wrong',
    signed: 'JSON',  # so it was the signature that kept the parser from it
  }.items():
    line = f'CDB5P {signature.hex()}\n'.encode()
    with pytest.raises(ValueError, match=message):
      manifests.unseal(line + bomb, key, 'run')


@pytest.mark.parametrize(
  'data, message',
  [
    (b'', 'does not begin'),
    (b'CDB5P 00', 'does not begin'),
    (b'CDB4P hmac-sha256 00\n{}', 'of the format CDB4, .* reads CDB5 alone'),
    (b'CDB5P 00 00\n{}', 'does not begin'),
    (b'CDB5P 0\n{}', 'hexadecimal'),
    (b'CDB5P AA\n{}', 'lower-case'),
    (b'CDB5P \xff\n{}', 'ascii'),
    (b'CDB5P 00\n{}', 'signature is wrong'),
  ],
)
def test_what_is_no_pointer_is_refused(data, message):
  with pytest.raises(ValueError, match=message):
    manifests.unseal(data, KEY, 'run')


@pytest.mark.parametrize(
  'fields',
  [
    dict(run_id='a/b'),
    dict(sequence=-1),
    dict(rewinds=True),
    dict(expires=None),
    dict(target_id=''),
    dict(target_id='F' * 64),
    dict(head=None),
    dict(head=3),
    dict(head=[1.0, HASH, 9]),
    dict(keyframe=[7, HASH, 2**29]),
    dict(keyframe=[7, 'F' * 64, 9]),
    dict(keyframe=[7, HASH, 9, 9]),
  ],
)
def test_wrong_pointers_are_refused_though_signed(pointer, fields):
  (name,) = fields
  with pytest.raises(ValueError, match=name):
    dataclasses.replace(pointer, **fields)
  body = identity.canonical_json(dataclasses.asdict(pointer) | fields)
  signature = KEY.sign(b'CDB5P' + body)
  line = f'CDB5P {signature.hex()}\n'.encode()
  with pytest.raises(ValueError, match=name):
    manifests.unseal(line + body, KEY, 'run')
