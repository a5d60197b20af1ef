"""Identity depends on the bits, names, dtypes and shapes, and nothing else."""

import sys

import blake3
import ml_dtypes
import numpy as np
import pytest

from composer_jax.delta.format import identity
from composer_jax.delta.format import identity as grids
from tests.delta import identities


def test_identity_is_the_merkle_root_it_says_it_is():
  # 8 boxes of 16 columns: their order and cut are the grid's.
  array = np.arange(4096 * 128, dtype='<u2').reshape(4096, 128)
  grid = grids.of(array.shape)
  assert grid.sides == (4096, 16)
  posts = b''.join(
    blake3.blake3(array[:, at : at + 16].tobytes()).digest(16)
    for at in range(0, 128, 16)
  )
  head = b'["tensor","CDB5","w","uint16",[4096,128]]\n'
  node = blake3.blake3(head + posts).digest()
  assert identity.tensor_node('w', 'uint16', (4096, 128), posts) == node
  other = identity.tensor_node('a', 'bool', (0,), b'')
  expected = blake3.blake3(b'["weights","CDB5",2]\n' + other + node).hexdigest()
  assert identity.root({'w': node, 'a': other}) == expected
  tensors = {'w': array, 'a': np.zeros(0, bool)}
  assert identities.target_id(tensors) == expected


def test_identity_sees_every_bit_name_dtype_and_shape():
  base = {'w': np.zeros((2, 3), np.float32), 'e': np.zeros(0, np.float32)}
  variants = [
    base,
    {**base, 'w': -base['w']},
    {**base, 'w': base['w'] * np.nan},
    {**base, 'w': np.zeros((3, 2), np.float32)},
    {**base, 'w': np.zeros((2, 3), np.int32)},
    {**base, 'w': np.zeros(6, np.float32)},
    {'v': base['w'], 'e': base['e']},
    {'w': base['w']},
    {},
    {**base, 'e': np.zeros((0, 2), np.float32)},
    {**base, 's': np.zeros((), np.float32)},
  ]
  assert len({identities.target_id(v) for v in variants}) == len(variants)


def test_identity_does_not_see_order_or_memory():
  array = np.arange(24, dtype=np.int8).reshape(4, 6)
  bias = np.float16([0.0, -0.0, np.nan])
  expected = identities.target_id({'w': array, 'b': bias})
  other = np.asfortranarray(array)
  assert identities.target_id({'b': bias, 'w': other}) == expected
  strided = np.repeat(array, 2, 1)[:, ::2]
  assert identities.target_id({'w': strided, 'b': bias}) == expected


@pytest.mark.parametrize('dtype', identity.DTYPES.values(), ids=str)
def test_a_box_hashes_to_its_little_endian_bits(dtype):
  bits = np.arange(1, 1 + 6 * dtype.itemsize, dtype=np.uint8)
  values = bits.view(dtype).reshape(2, 3)
  expected = blake3.blake3(bits.tobytes()).digest(16)
  assert sys.byteorder == 'little'
  assert identity.hash_chunk(values) == expected
  assert identity.flat_bits(values).tobytes() == bits.tobytes()
  assert identity.flat_bits(values).dtype == np.dtype(f'u{dtype.itemsize}')


def test_dtypes_that_no_bundle_carries_are_refused_by_name():
  assert identity.DTYPES['bfloat16'] == ml_dtypes.bfloat16
  for dtype in ('complex64', '>f4', 'U3'):
    with pytest.raises(ValueError, match=f"w: dtype '.*{dtype[1:]}'"):
      identities.target_id({'w': np.zeros(2, dtype)})


@pytest.mark.parametrize(
  'data',
  [
    b'{"a":1} ',
    b'{"a": 1}',
    b'{"b":1,"a":1}',
    b'{"a":1,"a":1}',
    b'{"a":1.00}',
    b'"\\u0041"',
    '"é"'.encode(),
    b'[' * 10_000,
    b'1' * 10_000,
    b'\xff',
    b'',
  ],
)
def test_json_has_one_spelling(data):
  with pytest.raises(ValueError, match='JSON'):
    identity.parse_canonical(data)


def test_json_reads_back():
  value = {'b': [1, None, True, 'é'], 'a': -2}
  data = identity.canonical_json(value)
  assert data == b'{"a":-2,"b":[1,null,true,"\\u00e9"]}'
  assert identity.parse_canonical(data) == value


def test_counts_and_hashes():
  assert [identity.is_count(v) for v in (0, 2**63 - 1)] == [True, True]
  assert not any(map(identity.is_count, (-1, 2**63, True, 1.0, '1', None)))
  assert identity.is_hash('0f' * 32)
  bad = ('0F' * 32, '0' * 63, '0' * 65, '0' * 63 + 'g', '0' * 64 + '\n', None)
  assert not any(map(identity.is_hash, bad))
