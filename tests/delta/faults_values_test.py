"""Whatever the bits are, they come back: every dtype, every step, every NaN."""

import ml_dtypes
import numpy as np
import pytest

from composer_jax.delta import chain
from composer_jax.delta import follower as followers
from composer_jax.delta.codec import coding
from composer_jax.delta.format import identity
from composer_jax.delta.store import objects as stores
from tests.delta import codec_reference, faults, identities

BF16 = np.dtype(ml_dtypes.bfloat16)


def assert_survives(values, base, tier='small'):
  before = None if base is None else base.tobytes()
  kind, blob = coding.encode(values, base, tier=tier)
  found = coding.decode(kind, blob, values.size, values.dtype, base)
  assert found.dtype == values.dtype
  assert found.tobytes() == values.tobytes(), (kind, tier, values.dtype)
  assert base is None or base.tobytes() == before
  assert len(blob) <= values.nbytes + coding.MAX_OVERHEAD
  return kind


def random_bits(rng, dtype, size):
  raw = rng.integers(0, 256, size * dtype.itemsize, np.uint8)
  if dtype == np.bool_:
    raw &= 1
  return raw.view(dtype)


@pytest.mark.parametrize('tier', coding.TIERS)
def test_every_bfloat16_becomes_any_other(tier):
  rng = np.random.default_rng(0)
  every = np.arange(2**16, dtype=np.uint16)
  partners = rng.permutation(every)
  few = np.where(rng.random(2**16) < 0.03, partners, every).astype(np.uint16)
  steps = [every ^ 0x8000, every ^ 1, every + 1, every - 200]
  for new in (partners, few, *steps):
    for values, base in (new, every), (every, new):
      base = base.astype(np.uint16).view(BF16)
      assert_survives(values.astype(np.uint16).view(BF16), base, tier)
  assert_survives(every.view(BF16), None, tier)


@pytest.mark.parametrize('tier', coding.TIERS)
def test_every_nan_payload_among_ordinary_weights(tier):
  """In a sea of small steps, so that the codecs of steps are the smallest."""
  rng = np.random.default_rng(1)
  nans = np.concatenate(
    [np.arange(0x7F81, 0x8000), np.arange(0xFF81, 0x10000)]
  ).astype(np.uint16)
  base = rng.normal(0, 0.02, 2**15).astype(BF16)
  values = base.copy().view(np.uint16)
  at = rng.choice(values.size, values.size // 20, replace=False)
  values[at] += 1
  base_bits = base.view(np.uint16)
  places = rng.choice(values.size, nans.size, replace=False)
  values[places] = nans  # They appear,
  base_bits[places[::2]] = rng.permutation(nans)[::2]  # or are there before,
  kinds = set()
  for pair in ((values, base_bits), (base_bits, values)):  # and go.
    kinds.add(assert_survives(*(bits.view(BF16) for bits in pair), tier))
  assert kinds == {coding.FLAT if tier == 'fast' else coding.CLASS}


@pytest.mark.parametrize('name', sorted(identity.DTYPES))
def test_every_dtype_survives_every_step(name):
  dtype = identity.DTYPES[name]
  rng = np.random.default_rng(2)
  size = 3000
  base = random_bits(rng, dtype, size)
  bits = codec_reference.to_bits(base)
  share = rng.random(size) < 0.05
  for reach in (1, 127, 128, 129, 2**15, 2**31, 2**62):
    values = bits.copy()
    limit = min(reach, 2 ** (8 * dtype.itemsize - 1))
    far = rng.integers(1, limit + 1, size, np.uint64).astype(bits.dtype)
    values[share] += far[share]
    values[share & (rng.random(size) < 0.5)] -= bits.dtype.type(1)
    if dtype == np.bool_:
      values &= 1
    for tier in coding.TIERS:
      assert_survives(values.view(dtype), base, tier)
      assert_survives(base, values.view(dtype), tier)
  for tier in coding.TIERS:
    assert_survives(random_bits(rng, dtype, size), base, tier)
    assert_survives(base, None, tier)
    for small in (0, 1, 2, 3):
      assert_survives(base[:small].copy(), None, tier)
      assert_survives(random_bits(rng, dtype, small), base[:small].copy(), tier)


def test_zeros_keep_their_signs_and_numbers_their_place():
  for name in ('bfloat16', 'float16', 'float32', 'float64', 'float8_e5m2'):
    dtype = identity.DTYPES[name]
    zeros = np.zeros(100, dtype)
    signed = zeros.copy()
    signed[::3] = -0.0
    assert signed.tobytes() != zeros.tobytes()
    for tier in coding.TIERS:
      assert_survives(signed, zeros, tier)
      assert_survives(zeros, signed, tier)


def test_all_dtypes_go_through_a_store(tmp_path):
  """Zero-size, 0-d, tied, frozen and odd shapes, each in every dtype."""
  rng = np.random.default_rng(3)
  store = stores.Store(tmp_path)
  options = chain.BundleOptions(threads=1)
  publisher = chain.BundleWriter(store, 'run', faults.KEY, options=options)
  follower = followers.Follower(store, 'run', faults.KEY, threads=1)
  weights = {}
  for name, dtype in identity.DTYPES.items():
    weights[f'{name}/frozen'] = random_bits(rng, dtype, 12).reshape(3, 4)
    weights[f'{name}/none'] = np.zeros((3, 0, 2), dtype)
    weights[f'{name}/one'] = random_bits(rng, dtype, 1).reshape(())
    weights[f'{name}/tied'] = random_bits(rng, dtype, 77).reshape(7, 11)
    weights[f'{name}/tied_too'] = weights[f'{name}/tied']
  for version in range(3):
    for name, dtype in identity.DTYPES.items():
      for part in ('one', 'tied'):
        array = weights[f'{name}/{part}'].copy()
        chosen = rng.random(array.shape) < 0.2
        fresh = random_bits(rng, dtype, array.size).reshape(array.shape)
        weights[f'{name}/{part}'] = np.where(
          chosen, fresh.view(f'u{dtype.itemsize}'),
          array.view(f'u{dtype.itemsize}'),
        ).astype(f'u{dtype.itemsize}').view(dtype)  # fmt: skip
      weights[f'{name}/tied_too'] = weights[f'{name}/tied']
    info = publisher.publish(faults.blocks(weights), version)
    joiner = followers.Follower(store, 'run', faults.KEY, threads=1)
    for receiver in (follower, joiner):
      update = receiver.poll()
      assert update is not None, receiver.problem
      found = update.arrays()
      assert found.keys() == weights.keys()
      for name, array in weights.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes(), name
    assert info.target_id == identities.target_id(weights)
