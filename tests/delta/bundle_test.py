"""Identity depends on the bits and on nothing else; manifests are canonical."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from composer_jax.delta import bundle


def whole(name, array):
  ends = tuple((0, length) for length in array.shape)
  return bundle.Block(name, str(array.dtype), array.shape, ends, array)


def test_blocks_of_any_sharding_assemble_to_the_same_identity():
  array = np.arange(24, dtype=np.float32).reshape(4, 6)
  array = array.astype(ml_dtypes.bfloat16)
  quarters = [
      bundle.Block(
          'w', 'bfloat16', (4, 6), ((a, a + 2), (b, b + 3)),
          array[a : a + 2, b : b + 3],
      )
      for b in (3, 0)
      for a in (0, 2)
  ]  # fmt: skip
  bias = whole('b', np.float32([0.0, -0.0, np.nan]))
  one = bundle.assemble([whole('w', array), bias])
  other = bundle.assemble([bias, *quarters])
  assert list(one) == list(other) == ['b', 'w']
  assert bundle.target_id(one) == bundle.target_id(other)
  array[0, 0] = 7  # the publisher's copy is its own
  assert one['w'][0, 0] == 0


def test_identity_sees_every_bit_name_dtype_and_shape():
  base = {'w': np.zeros((2, 3), np.float32), 'e': np.zeros(0, np.float32)}
  variants = [
    base,
    {**base, 'w': -base['w']},
    {**base, 'w': np.zeros((3, 2), np.float32)},
    {**base, 'w': np.zeros((2, 3), np.int32)},
    {**base, 'w': np.zeros(6, np.float32)},
    {'v': base['w'], 'e': base['e']},
    {'w': base['w']},
    {**base, 'e': np.zeros((0, 2), np.float32)},
    {**base, 's': np.zeros((), np.float32)},
  ]
  assert len({bundle.target_id(v) for v in variants}) == len(variants)


@pytest.mark.parametrize(
  'pieces, message',
  [
    ([((0, 2),)], 'w: 2 elements are in no block'),
    ([((0, 3),), ((2, 4),)], r'w: the block at \(\(2, 4\),\).* overlaps'),
    ([((0, 4),), ((4, 6),)], 'leaves the array'),
  ],
)
def test_bad_blocks_are_refused_by_name(pieces, message):
  blocks = [
    ('w', 'float32', (4,), index, np.zeros(index[0][1] - index[0][0], 'f4'))
    for index in pieces
  ]
  with pytest.raises(ValueError, match=message):
    bundle.assemble(blocks)


def test_dtypes_that_no_bundle_carries_are_refused_by_name():
  with pytest.raises(ValueError, match="w: dtype 'complex64'"):
    bundle.assemble([whole('w', np.zeros(2, np.complex64))])
  with pytest.raises(ValueError, match='w: a block of a float64 array'):
    bundle.assemble([('w', 'float32', (1,), ((0, 1),), np.zeros(1))])


@pytest.fixture
def manifest():
  arrays = {'w': np.arange(5, dtype=np.uint8)}
  (leaf,) = bundle.hash_chunks(arrays['w'])
  chunk = bundle.Chunk('raw', 5, leaf, leaf)
  return bundle.Manifest(
      run_id='run', version=3, kind=bundle.KEY, depth=0, base_id='',
      previous='', target_id=bundle.target_id(arrays), objects=((leaf, 5),),
      tensors=(
          bundle.Tensor(name='w', dtype='uint8', shape=(5,), chunks=(chunk,)),
      ),
  )  # fmt: skip


def test_manifest_reads_back(manifest):
  assert bundle.Manifest.from_bytes(manifest.to_bytes()) == manifest
  assert manifest.full_bytes == 5


def test_no_other_spelling_of_a_manifest_is_read(manifest):
  data = manifest.to_bytes()
  others = [
    data + b' ',
    data.replace(b'"version":3', b'"version":3.0'),
    data.replace(b'"version":3', b'"version":true'),
    data.replace(b'"version":3', b'"version":3,"version":3'),
    data.replace(b'"shape":[5]', b'"shape":[9]'),
    data.replace(b'"shape":[5]', b'"shape":5'),
    data.replace(b'"shape":[5]', b'"shape":[1125899906842624]'),
    data.replace(b'CDB1', b'CDB2'),
    data.replace(b'"raw"', b'"row"'),
    data.replace(b'"key"', b'"delta"'),
    b'[' * 5000,
    b'{}',
    b'\xff',
  ]
  for other in others:
    with pytest.raises(ValueError, match='manifest|JSON|tensor'):
      bundle.Manifest.from_bytes(other)


def test_manifest_must_have_the_root_it_claims(manifest):
  with pytest.raises(ValueError, match='Merkle root'):
    dataclasses.replace(manifest, target_id='0' * 64)
