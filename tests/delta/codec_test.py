"""Codecs are exact on every bit pattern, small on optimizer steps, bounded."""

import tracemalloc

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from composer_jax.delta import codec

SPECIAL_U2 = np.array(
  [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x0001, 0x8001],
  np.uint16,
)
few = hypothesis.settings(max_examples=40, deadline=None, database=None)


def roundtrip(bits, base):
  kind, blob = codec.encode(bits, base)
  decoded = codec.decode(kind, blob, bits.size, bits.dtype, base)
  assert decoded.dtype == bits.dtype
  np.testing.assert_array_equal(decoded, bits)
  return kind, blob


@few
@hypothesis.given(
  st.integers(0, 2**32 - 1),
  st.sampled_from([1, 2, 4, 8]),
  st.integers(1, 3000),
  st.sampled_from([0.0, 0.001, 0.1, 1.0]),
  st.booleans(),
)
def test_every_bit_pattern_survives(seed, width, size, share, has_base):
  rng = np.random.default_rng(seed)
  dtype = np.dtype(f'u{width}')
  top = np.iinfo(dtype).max
  base = rng.integers(0, top, size, dtype, endpoint=True)
  bits = base.copy()
  changed = rng.random(size) < share
  bits[changed] = rng.integers(0, top, changed.sum(), dtype, endpoint=True)
  roundtrip(bits, base if has_base else None)


def test_special_values_are_bits_like_any_other():
  n = len(SPECIAL_U2)
  for shift in range(n):
    kind, _ = roundtrip(np.roll(SPECIAL_U2, shift), SPECIAL_U2)
    assert (kind == codec.SAME) == (shift == 0)
  every = np.arange(2**16, dtype=np.uint16)
  roundtrip(every[::-1].copy(), every)


def test_number_line_is_the_order_of_the_floats():
  bits = np.array([0xFF80, 0xBF80, 0x8000, 0x0000, 0x3F80, 0x7F80], np.uint16)
  values = bits.view(ml_dtypes.bfloat16).astype(np.float32)
  assert (np.diff(values[[0, 1, 3, 4, 5]]) > 0).all()
  keys = codec._ordered(bits)
  assert (np.diff(keys.astype(int)) > 0).all()
  assert keys[3] - keys[2] == 1  # -0 and +0 are neighbours, not the same
  np.testing.assert_array_equal(codec._unordered(keys), bits)


def test_small_steps_cost_less_than_xor_and_zstd():
  import zstandard

  rng = np.random.default_rng(0)
  masters = rng.normal(0, 0.02, 200_000).astype(np.float32)
  moved = masters + rng.normal(0, 1e-6, masters.shape).astype(np.float32)
  base, bits = (
    m.astype(ml_dtypes.bfloat16).view(np.uint16) for m in (masters, moved)
  )
  kind, blob = roundtrip(bits, base)
  peer = zstandard.ZstdCompressor(level=3).compress((bits ^ base).tobytes())
  assert kind == codec.STEPS
  assert 2 * len(blob) < len(peer) < bits.nbytes / 20


def test_noise_falls_back_to_raw():
  noise = np.random.default_rng(0).integers(0, 2**16, 5000, np.uint16)
  assert roundtrip(noise, None) == (codec.RAW, noise.tobytes())
  assert roundtrip(noise, noise[::-1].copy())[0] == codec.RAW


@pytest.mark.parametrize(
  'kind, blob, message',
  [
    ('xor', b'', 'not one of'),
    (codec.SAME, b'x', 'has 1 bytes and must have 0'),
    (codec.RAW, b'x', 'has 1 bytes and must have 20'),
    (codec.ZSTD, b'x' * 30, 'zstd frame'),
    (codec.ZSTD, codec._compress(bytes(10**8)), 'must have 20'),
    (codec.ZSTD, codec._compress(bytes(20)) + b'x', 'zstd'),
    (codec.STEPS, b'abc', 'header'),
    (codec.STEPS, b'\xff' * 8, 'changed elements in a chunk of 10'),
    (
      codec.STEPS,
      codec._STEPS_HEADER.pack(1, 13)
      + codec._compress(np.uint32(10).tobytes())
      + codec._compress(bytes(2)),
      'changed element 10 in a chunk of 10',
    ),
  ],
)
def test_foreign_blobs_are_refused_without_allocating(kind, blob, message):
  with pytest.raises(ValueError, match=message):
    codec.decode(kind, blob, 10, np.dtype('u2'), np.zeros(10, np.uint16))


def test_decompression_bomb_is_not_inflated():
  bomb = codec._compress(bytes(10**8))
  tracemalloc.start()
  try:
    with pytest.raises(ValueError, match='has 100000000 bytes and must have'):
      codec.decode(codec.ZSTD, bomb, 10, np.dtype('u2'), None)
    assert tracemalloc.get_traced_memory()[1] < 10**6
  finally:
    tracemalloc.stop()


def test_delta_without_a_base_is_refused():
  with pytest.raises(ValueError, match='needs a base'):
    codec.decode(codec.STEPS, b'', 10, np.dtype('u2'), None)
