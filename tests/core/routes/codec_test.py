"""Tapes of routes: lossless, near the bound, and refused if damaged."""

import dataclasses
import itertools
import math
import struct
import tracemalloc

import blake3
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from composer_jax.core import records
from composer_jax.core.routes import codec

# Kimi K2 and DeepSeek-V3, Qwen3, Moonlight, Mixtral, our own, and Nemotron's.
SIZES = [
  (384, 8),
  (256, 8),
  (128, 8),
  (64, 8),
  (64, 6),
  (8, 2),
  (4, 2),
  (2, 1),
  (512, 22),
]


def make_scheme(num_experts, num_active, num_layers=3):
  # The first layer is dense, as in most models.
  return codec.RouteScheme(
    num_experts=num_experts,
    num_active=num_active,
    layers=tuple(range(1, num_layers + 1)),
  )


def make_ids(num_tokens, scheme, seed=0):
  rng = np.random.default_rng(seed)
  shape = (num_tokens, len(scheme.layers), scheme.num_experts)
  order = np.argsort(rng.random(shape), axis=-1)
  return order[..., : scheme.num_active].astype(np.uint16)


def bound_bits(scheme):
  return math.log2(math.perm(*scheme.sizes))


def payload_bits(message, scheme):
  empty = make_ids(0, scheme)
  # A tape without gaps has one run, which belongs to the header.
  return 8 * (len(message) - len(codec.encode(empty, scheme)) - 4)


@pytest.mark.parametrize(
  'sizes,bits', [((384, 8), 68.57), ((8, 2), math.log2(56)), ((2, 1), 1)]
)
def test_bound_of_known_models(sizes, bits):
  assert bound_bits(make_scheme(*sizes)) == pytest.approx(bits, abs=5e-3)


def test_bound_of_kimi_k2_is_its_set_and_its_order():
  have = bound_bits(make_scheme(384, 8))
  bits_of_set = math.log2(math.comb(384, 8))
  assert round(bits_of_set, 1) == 53.3
  assert have == pytest.approx(bits_of_set + math.log2(math.factorial(8)))


@pytest.mark.parametrize('sizes', SIZES)
@pytest.mark.parametrize('num_tokens', [1, 37, 1000])
def test_a_tape_takes_its_bound_and_five_percent(sizes, num_tokens):
  scheme = make_scheme(*sizes, num_layers=24 if num_tokens == 1000 else 3)
  ids_TMA = make_ids(num_tokens, scheme)
  message = codec.encode(ids_TMA, scheme)
  bound = num_tokens * len(scheme.layers) * bound_bits(scheme)
  # The last byte of a message may be used in part.
  assert bound <= payload_bits(message, scheme) < 1.05 * bound + 8
  if num_tokens == 1000:
    assert 8 * len(message) < 1.05 * bound
  np.testing.assert_array_equal(codec.decode(message).ids_TMA, ids_TMA)


@st.composite
def tapes(draw):
  num_experts = draw(st.integers(1, 600) | st.integers(1, 9))
  num_active = draw(st.integers(1, min(num_experts, 9)))
  scheme = make_scheme(num_experts, num_active, draw(st.integers(1, 3)))
  num_tokens = draw(st.integers(0, 40) | st.sampled_from([64, 700]))
  ids_TMA = make_ids(num_tokens, scheme, draw(st.integers(0, 9)))
  missing = draw(st.sets(st.integers(0, max(num_tokens - 1, 0))))
  ids_TMA[[t for t in missing if t < num_tokens]] = records.NO_ROUTE
  return scheme, ids_TMA, draw(st.integers(0, 1 << 20))


@hypothesis.given(tape=tapes(), form=st.sampled_from(codec.FORMS))
@hypothesis.settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(tape, form):
  scheme, ids_TMA, start = tape
  message = codec.encode(ids_TMA, scheme, start=start, form=form)
  again = codec.decode(message)
  assert (again.start, again.scheme) == (start, scheme)
  assert again.ids_TMA.dtype == np.uint16
  np.testing.assert_array_equal(again.ids_TMA, ids_TMA)


@pytest.mark.parametrize(
  'sizes', [(1, 1), (2, 2), (5, 5), (600, 30), (65535, 2), (1024, 1024)]
)
def test_unusual_sizes_are_read_too(sizes):
  scheme = make_scheme(*sizes, num_layers=2)
  ids_TMA = make_ids(9, scheme)
  tape = codec.decode(codec.encode(ids_TMA, scheme))
  np.testing.assert_array_equal(tape.ids_TMA, ids_TMA)


def test_parts_of_a_long_tape_show_in_no_byte(monkeypatch):
  scheme = make_scheme(64, 6, num_layers=5)
  ids_TMA = make_ids(2000, scheme)
  ids_TMA[5::11] = records.NO_ROUTE
  whole = codec.encode(ids_TMA, scheme)
  monkeypatch.setattr(codec, '_CHUNK_ROUTES', 1)
  assert codec.encode(ids_TMA, scheme) == whole
  np.testing.assert_array_equal(codec.decode(whole).ids_TMA, ids_TMA)


def test_the_plain_form_is_the_ids_behind_a_header_of_its_own_length():
  scheme = make_scheme(8, 2)
  ids_TMA = make_ids(4, scheme)
  ids_TMA[2] = records.NO_ROUTE
  message = codec.encode(ids_TMA, scheme, form='plain')
  assert message[24 + 2 * 3 : -16] == ids_TMA.astype('<u2').tobytes()


@pytest.mark.parametrize('form', codec.FORMS)
def test_a_flipped_bit_or_a_missing_byte_is_refused(form):
  scheme = make_scheme(8, 2)
  ids_TMA = make_ids(6, scheme)
  ids_TMA[2] = records.NO_ROUTE
  message = codec.encode(ids_TMA, scheme, form=form)
  for n in range(len(message)):
    for bits in (1, 0x80, 0xFF):
      damaged = bytearray(message)
      damaged[n] ^= bits
      with pytest.raises(ValueError, match='checksum|begin with'):
        codec.decode(bytes(damaged))
    with pytest.raises(ValueError, match='checksum|truncated'):
      codec.decode(message[:n])
  with pytest.raises(ValueError, match='checksum'):
    codec.decode(message + b'\0')


def sealed(message, at, data):
  """A message with other bytes at a place and the checksum they call for."""
  body = bytearray(message[:-16])
  body[at : at + len(data)] = data
  return bytes(body) + blake3.blake3(body).digest(length=16)


@pytest.mark.parametrize(
  'at,data,message',
  [
    (5, b'\2', 'form 2.*forms 0..1'),
    (6, struct.pack('<H', 1), r'num_active must .*num_experts \(1\); got 2'),
    (
      6,
      struct.pack('<HH', 2000, 1025),
      r'num_active must lie in 1\.\.1024.* 1025',
    ),
    (10, struct.pack('<H', 4), 'runs of the routes begin with'),
    (10, struct.pack('<H', 9999), 'too few for 9999 layers'),
    (16, struct.pack('<I', 7), r'\[2, 1, 3\].*add up to 7 tokens'),
    (24, struct.pack('<H', 3), 'ascending indices.*3, 2, 3'),
    (30, struct.pack('<III', 2, 0, 4), 'none but the first may be empty'),
    (30, struct.pack('<III', 3, 1, 2), None),
    (42, b'\xff' * 8, 'hold a word that no route has'),
  ],
)
def test_an_intact_message_that_makes_no_sense_is_refused(at, data, message):
  scheme = make_scheme(8, 2)
  ids_TMA = make_ids(6, scheme)
  ids_TMA[2] = records.NO_ROUTE
  forged = sealed(codec.encode(ids_TMA, scheme), at, data)
  if message is None:  # Only the hash protects runs.
    ids_TMA[[2, 3]] = ids_TMA[[3, 2]]
    np.testing.assert_array_equal(codec.decode(forged).ids_TMA, ids_TMA)
    return
  with pytest.raises(ValueError, match=message):
    codec.decode(forged)


@pytest.mark.parametrize('form', codec.FORMS)
def test_an_intact_message_of_another_length_is_refused(form):
  scheme = make_scheme(8, 2)
  message = codec.encode(make_ids(6, scheme), scheme, form=form)
  for forged in (
    sealed(message[:-17] + message[-16:], 0, b''),
    sealed(message[:-16] + b'\0' + message[-16:], 0, b''),
  ):
    with pytest.raises(ValueError, match=r'is \d+ bytes; 6 tokens of .* need'):
      codec.decode(forged)


# Each message has 46 or 50 bytes.
@pytest.mark.parametrize(
  'sizes,runs', [((8, 2), [0, (1 << 32) - 1]), ((1, 1), [(1 << 32) - 1])]
)
def test_a_short_message_cannot_ask_for_all_memory(sizes, runs):
  scheme = make_scheme(*sizes, num_layers=1)
  empty = codec.encode(make_ids(0, scheme), scheme)
  head = empty[:16] + struct.pack('<II', (1 << 32) - 1, len(runs))
  message = head + empty[24:-16] + struct.pack(f'<{len(runs)}I', *runs)
  message += blake3.blake3(message).digest(length=16)
  tracemalloc.start()
  with pytest.raises(ValueError, match=r'4294967295 tokens.*in increments'):
    codec.decode(message)
  assert tracemalloc.get_traced_memory()[1] < 1 << 20
  tracemalloc.stop()


def test_a_reader_takes_as_many_bytes_as_it_says():
  scheme = make_scheme(8, 2)
  message = codec.encode(make_ids(6, scheme), scheme)
  size = 6 * 3 * 2 * 2
  codec.decode(message, size)
  with pytest.raises(ValueError, match=f'{size} bytes .*takes {size - 1}'):
    codec.decode(message, size - 1)


def test_the_plain_form_has_no_runs():
  scheme = make_scheme(8, 2, num_layers=1)
  message = codec.encode(make_ids(1, scheme), scheme, form='plain')
  forged = message[:20] + struct.pack('<I', 1) + message[24:26] + b'\7' * 4
  with pytest.raises(ValueError, match='have 1 runs; in the plain form'):
    codec.decode(sealed(forged + message[26:], 0, b''))


def test_bits_after_the_last_route_are_zero_or_refused():
  scheme = make_scheme(8, 2, num_layers=1)
  message = codec.encode(make_ids(1, scheme), scheme)
  with pytest.raises(ValueError, match='hold a word that no route has'):
    codec.decode(sealed(message, 30, bytes([message[30] | 0x80])))


@pytest.mark.parametrize(
  'place,ids,message',
  [
    ((3, 1), [5, 5], r'Token 13, layer 2 .*\[5, 5\]; ids .* must differ'),
    ((0, 2), [8, 1], r'Token 10, layer 3 .*\[8, 1\]; .*num_experts \(8\)'),
    ((1, 0), [65535, 1], r'Token 11, layer 1 .*65535, 1\]; .*NO_ROUTE'),
    ((1, 0), [65535] * 2, r'Token 11, layer 2 .*NO_ROUTE \(65535\) must fill'),
    ((1, 2), [65535] * 2, 'Token 11, layer 3 .*NO_ROUTE'),
    ((1, 2), [0, 0], r'Token 11, layer 3 .*\[0, 0\]; ids .* must differ'),
  ],
)
def test_what_is_no_route_is_refused_by_token_and_layer(place, ids, message):
  scheme = make_scheme(8, 2)
  ids_TMA = make_ids(6, scheme)
  ids_TMA[place] = ids
  for form in codec.FORMS:
    with pytest.raises(ValueError, match=message):
      codec.encode(ids_TMA, scheme, start=10, form=form)
  plain = codec.encode(make_ids(6, scheme), scheme, start=10, form='plain')
  with pytest.raises(ValueError, match=message):
    codec.decode(sealed(plain, 30, ids_TMA.astype('<u2').tobytes()))


@pytest.mark.parametrize('slots', tuple(itertools.combinations(range(4), 2)))
def test_an_expert_twice_is_refused_in_whatever_slots(slots):
  scheme = make_scheme(8, 4)
  ids_TMA = make_ids(3, scheme)
  first, second = slots
  ids_TMA[1, 1, second] = ids_TMA[1, 1, first]
  with pytest.raises(ValueError, match='Token 1, layer 2 .*must differ'):
    codec.check(ids_TMA, scheme)


def test_what_cannot_be_written_is_refused_by_name():
  scheme = make_scheme(8, 2)
  ids_TMA = make_ids(6, scheme)
  with pytest.raises(ValueError, match=r'\(6, 2, 2\); \(tokens, 3 layers'):
    codec.encode(ids_TMA[:, :2], scheme)
  with pytest.raises(ValueError, match='uint16, not int64'):
    codec.encode(ids_TMA.astype(np.int64), scheme)
  with pytest.raises(ValueError, match="form must be one of .* not 'zip'"):
    codec.encode(ids_TMA, scheme, form='zip')
  with pytest.raises(ValueError, match='start must lie in 0.*not -1'):
    codec.encode(ids_TMA, scheme, start=-1)


@pytest.mark.parametrize(
  'change,message',
  [
    (
      dict(num_experts=2000, num_active=1025),
      r'num_active must lie in 1\.\.1024.* got 1025',
    ),
    (dict(num_active=9), r'num_active must .*num_experts \(8\); got 9'),
    (dict(num_experts=65536), 'num_experts must .* got 65536'),
    (dict(layers=()), r'at least one; got \(\)'),
    (dict(layers=(2, 2)), r'ascending .*\(2, 2\)'),
    (dict(layers=(1, 65536)), '65536'),
  ],
)
def test_impossible_schemes_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(make_scheme(8, 2), **change)
