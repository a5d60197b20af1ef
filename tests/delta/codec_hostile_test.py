"""Hostile blobs are refused or decoded: no crash, no hang, no bomb.

numba checks no bounds, so a replay of the same blobs with NUMBA_BOUNDSCHECK=1
must end the same way, one by one.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tracemalloc

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import strategies as st

from composer_jax.delta.codec import coding, model, rans
from tests.delta import codec_reference

BF16 = np.dtype(ml_dtypes.bfloat16)
NARROW = [BF16, np.dtype(np.int8), np.dtype(np.float32)]
few = hypothesis.settings(max_examples=150, deadline=None, database=None)


def plane(size):
  frame = zstandard.ZstdCompressor().compress(bytes(size))
  return len(frame).to_bytes(4, 'little') + frame


def chunk(rng, dtype, size, share):
  base = rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)
  bits = base.view(f'u{dtype.itemsize}').copy()
  changed = rng.random(size) < share
  changed[size // 2] = True
  bits[changed] += rng.integers(1, 40, changed.sum()).astype(bits.dtype)
  return bits.view(dtype), base


def mutate(rng, blob):
  """A few bytes replaced, removed, repeated, or the end cut off."""
  data = bytearray(blob)
  for _ in range(int(rng.integers(1, 4))):
    at = int(rng.integers(0, max(1, len(data))))
    match int(rng.integers(0, 5)):
      case 0 if data:
        data[at] ^= 1 << int(rng.integers(0, 8))
      case 1 if data:
        data[at] = int(rng.choice([0, 127, 128, 255]))
      case 2:
        del data[at : at + int(rng.integers(1, 4))]
      case 3:
        data[at:at] = rng.bytes(int(rng.integers(1, 6)))
      case _:
        del data[at:]
  return bytes(data)


def blobs_of(rng, values, base):
  """A valid blob of each codec, by its number."""
  blobs = {
    coding.SAME: b'',
    coding.PLANES: coding._encode_planes(codec_reference.to_bits(values)),
  }
  for kind in (coding.FLAT, coding.CLASS):
    blob = coding.encode_as(kind, values, base)
    if blob is not None:
      blobs[kind] = blob
  return blobs


def outcome(kind, blob, size, dtype, base):
  """What came out, and nothing else may happen but a ValueError."""
  try:
    found = coding.decode(kind, blob, size, dtype, base)
  except ValueError:
    return 'refused'
  return hashlib.sha256(found.tobytes()).hexdigest()


hostile_chunks = hypothesis.given(
  seed=st.integers(0, 2**32 - 1),
  dtype=st.sampled_from(NARROW),
  size=st.sampled_from([1, 100, 256, 700]),
  share=st.sampled_from([0.01, 0.2, 1.0]),
)


def check_mutated_blobs(seed, dtype, size, share):
  rng = np.random.default_rng(seed)
  values, base = chunk(rng, dtype, size, share)
  before = base.tobytes()
  for kind, blob in blobs_of(rng, values, base).items():
    for data in (mutate(rng, blob), rng.bytes(int(rng.integers(0, 60)))):
      outcome(kind, data, size, dtype, base)
      assert base.tobytes() == before


@few
@hostile_chunks
def test_mutated_blobs_are_refused_or_decoded(seed, dtype, size, share):
  check_mutated_blobs(seed, dtype, size, share)


@pytest.mark.slow
@hypothesis.settings(few, max_examples=3000)
@hostile_chunks
def test_many_mutations_are_refused_or_decoded(seed, dtype, size, share):
  check_mutated_blobs(seed, dtype, size, share)


@few
@hypothesis.given(
  kind=st.integers(-1, 8),
  blob=st.binary(max_size=80),
  size=st.integers(0, 300),
  dtype=st.sampled_from([*NARROW, np.dtype(np.int64)]),
  has_base=st.booleans(),
)
def test_random_bytes_never_crash(kind, blob, size, dtype, has_base):
  base = np.zeros(size, dtype) if has_base else None
  outcome(kind, blob, size, dtype, base)


@pytest.mark.parametrize(
  'kind, blob, message',
  [
    (4, b'', 'codec 4 does not code such a chunk'),
    (coding.SAME, b'x', 'has 1 bytes and must have none'),
    (coding.PLANES, b'', 'zstd frame'),
    (coding.PLANES, b'\xff' * 20, 'zstd frame'),
    (coding.PLANES, plane(9), 'claims 9 bytes and must have 10'),
    (coding.PLANES, 2 * plane(10) + b'x', '1 bytes after its planes'),
    (coding.FLAT, b'', 'ends inside its counts'),
    (coding.FLAT, b'\xff' * 9, 'has no counts'),
    (coding.FLAT, b'\x00' * 9, '0 changes in a chunk of 10'),
    (coding.CLASS, b'', 'ends inside its counts'),
  ],
)
def test_refusals_say_what_is_wrong(kind, blob, message):
  with pytest.raises(ValueError, match=message):
    coding.decode(kind, blob, 10, BF16, np.zeros(10, BF16))


def test_too_many_changes_and_ranks_are_refused():
  counts, levels = np.array([11]), np.array([0])
  head = model.pack_counts(counts, levels)
  with pytest.raises(ValueError, match='11 changes in a chunk of 10'):
    coding.decode(coding.FLAT, head + bytes(9), 10, BF16, np.zeros(10, BF16))
  values = np.zeros(1000, BF16)
  values[999] = 1
  blob = coding.encode_as(coding.FLAT, values, np.zeros(1000, BF16))
  with pytest.raises(ValueError, match='not a coded delta'):
    coding.decode(coding.FLAT, blob, 999, BF16, np.zeros(999, BF16))


def test_escapes_that_lead_nowhere_are_soon_given_up(monkeypatch):
  # Each class claims a change that lies behind all other weights.
  size, half = 2**16, np.dtype(np.float16)
  number = model.kind(half)
  classes = coding._num_classes(coding.CLASS, number)
  counts = np.ones(classes, np.int64)
  levels = np.full(counts.size, model.EVEN)
  places = np.arange(counts.size + 1), np.full(counts.size, size - 1), counts
  body = rans.code(places, levels, 10**6)
  blob = model.pack_counts(counts, levels) + body
  # As Python runs the kernel, its tables can be counted.
  tables, slots = [], rans._slots
  monkeypatch.setattr(
    rans, '_slots', lambda *args: tables.append(0) or slots(*args)
  )
  for name in ('decode_changes', '_values', '_symbols'):
    kernel = getattr(rans, name).py_func
    monkeypatch.setattr(rans, name, kernel)
  with pytest.raises(ValueError, match='not a coded delta'):
    coding.decode(coding.CLASS, blob, size, half, np.zeros(size, half))
  assert 0 < len(tables) < 20


def test_plain_bits_beyond_all_sense_are_refused():
  head = model.pack_counts(np.array([1000]), np.array([127]))
  with pytest.raises(ValueError, match='not a coded delta'):
    coding.decode(
      coding.FLAT, head + bytes(5000), 1000, BF16, np.zeros(1000, BF16)
    )


def test_decompression_bomb_is_not_inflated():
  bomb = plane(10**8)
  tracemalloc.start()
  try:
    with pytest.raises(ValueError, match='a frame claims 100000000 bytes'):
      coding.decode(coding.PLANES, bomb, 10, BF16, None)
    assert tracemalloc.get_traced_memory()[1] < 10**6
  finally:
    tracemalloc.stop()


def replay(dtypes, count):
  """Digests of how a fixed corpus of hostile blobs ends."""
  ends = []
  for seed in range(count):
    rng = np.random.default_rng(seed)
    dtype = dtypes[seed % len(dtypes)]
    size = int(rng.choice([5, 256, 300]))
    values, base = chunk(rng, dtype, size, rng.choice([0.05, 0.9]))
    for kind, blob in blobs_of(rng, values, base).items():
      for _ in range(6):
        data = mutate(rng, blob)
        ends.append(outcome(kind, data, size, dtype, base))
  assert 'refused' in ends and len(set(ends)) > count
  return hashlib.sha256('\n'.join(ends).encode()).hexdigest()


def replay_with_bounds_checked(dtypes, count):
  env = {
    **os.environ,
    'NUMBA_BOUNDSCHECK': '1',
    'NUMBA_OPT': '1',  # compiles in half the time
    'REPLAY': f'{",".join(d.name for d in dtypes)} {count}',
  }
  path = pathlib.Path(__file__)
  root = path.parents[2]
  done = subprocess.run(
    [sys.executable, '-m', 'tests.delta.codec_hostile_test'],
    **dict(cwd=root, env=env, check=True, capture_output=True, text=True),
  )
  return done.stdout.strip()


@pytest.mark.slow
def test_bounds_checks_change_nothing():
  ends = replay_with_bounds_checked([BF16], 12)
  assert ends == replay([BF16], 12)


@pytest.mark.slow
def test_bounds_checks_change_nothing_in_a_large_corpus():
  ends = replay_with_bounds_checked(NARROW, 600)
  assert ends == replay(NARROW, 600)


if __name__ == '__main__':
  names, number = os.environ['REPLAY'].split()
  print(replay([np.dtype(name) for name in names.split(',')], int(number)))
