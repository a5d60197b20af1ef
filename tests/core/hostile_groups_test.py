"""Bytes of an attacker make a ValueError, within bounds, or a right group."""

import io
import json
import tracemalloc
import zipfile

import numpy as np
import pytest

from composer_jax.core import group_bytes
from tests.core import group_bytes_test

DATA = group_bytes.to_bytes(group_bytes_test.GROUP)


def parts():
  with zipfile.ZipFile(io.BytesIO(DATA)) as archive:
    return {name: archive.read(name) for name in archive.namelist()}


def packed(contents, compression=zipfile.ZIP_STORED):
  data = io.BytesIO()
  with zipfile.ZipFile(data, 'w', compression) as archive:
    for name, content in contents.items():
      archive.writestr(name, content)
  return data.getvalue()


def npy(array):
  data = io.BytesIO()
  np.save(data, array)
  return data.getvalue()


def with_header(change):
  contents = parts()
  header = json.loads(np.load(io.BytesIO(contents['header.npy'])).tobytes())
  change(header)
  text = np.frombuffer(json.dumps(header).encode(), np.uint8)
  return packed(contents | {'header.npy': npy(text)})


def test_any_flipped_bit_or_cut_is_a_group_or_a_value_error():
  rng = np.random.default_rng(0)
  refused = 0
  for at in rng.integers(len(DATA), size=600):
    damaged = bytearray(DATA)
    damaged[at] ^= 1 << rng.integers(8)
    for data in (bytes(damaged), DATA[:at]):
      try:
        group_bytes.from_bytes(data)
      except ValueError:
        refused += 1
  assert refused > 1000


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda h: h.update(rollouts=7), 'TypeError'),
    (lambda h: h.update(rollouts=[[]]), 'TypeError'),
    (lambda h: h['rollouts'][0].update(reward='1'), 'Rollout.reward must be'),
    (lambda h: h['rollouts'][0].update(reward=1e400), 'Rollout.reward must'),
    (lambda h: h['rollouts'][0].update(num_turns=2**60), 'Rollout.num_turns'),
    (lambda h: h['rollouts'][0].update(member=True), 'KeyError'),
    (lambda h: h['rollouts'][0].update(tools=[3]), 'Rollout.tools must be'),
    (lambda h: h['rollouts'][0].update(more=1), 'more'),
    (lambda h: h['rollouts'][0]['verdict'].update(passed=1), 'Verdict.passed'),
    (lambda h: h['rollouts'][0]['verdict'].update(score='1'), 'Verdict.score'),
    (
      lambda h: h['rollouts'][0].update(reward_terms={'a': '1'}),
      'reward_terms',
    ),
    (lambda h: h.update(policies=[[1]]), 'cannot be read|policies|sequence'),
  ],
)
def test_a_field_of_another_type_is_named(change, message):
  with pytest.raises(ValueError, match=message):
    group_bytes.from_bytes(with_header(change))


def test_a_member_that_stands_twice_is_refused_before_its_tape_is_unpacked():
  data = with_header(lambda h: h['rollouts'].append(h['rollouts'][0]))
  with pytest.raises(ValueError, match='holds a member twice'):
    group_bytes.from_bytes(data)


def test_all_tapes_together_take_what_one_may():
  tapes = [
    t.expert_ids_TMA.nbytes
    for r in group_bytes_test.GROUP.rollouts
    for t in r.trajectories
  ]
  assert len(tapes) > 1
  contents = parts()
  arrays = group_bytes._arrays(packed(contents), 1 << 30)
  read = lambda: json.loads(arrays['header'].tobytes())
  group_bytes._group(read(), arrays, sum(tapes))
  with pytest.raises(ValueError, match='the reader takes'):
    group_bytes._group(read(), arrays, sum(tapes) - 1)


def test_an_array_whose_header_overflows_a_parser_is_refused():
  contents = parts()
  header = b'-' * 9000 + b'1'
  array = b'\x93NUMPY\x01\x00' + len(header).to_bytes(2, 'little') + header
  contents[next(n for n in contents if n.startswith('0/'))] = array
  with pytest.raises(ValueError):
    group_bytes.from_bytes(packed(contents))


def test_a_deep_header_is_refused():
  text = np.frombuffer(b'[' * 100_000, np.uint8)
  with pytest.raises(ValueError, match='RecursionError'):
    group_bytes.from_bytes(packed(parts() | {'header.npy': npy(text)}))


@pytest.mark.parametrize(
  'content',
  [
    npy(np.zeros(3, object)),
    npy(np.zeros(9, np.int32))[:-4],
    npy(np.zeros(9, np.int32)).replace(b'(9,)', b'(7,)'),
    npy(np.zeros(9, np.int32)).replace(b'\x93NUMPY\x01', b'\x93NUMPY\x02'),
    b'\x93NUMPY\x01\x00\x10\x00' + b'(' * 16,
    b'',
  ],
)
def test_an_array_that_is_none_is_refused(content):
  name = '0/0/tokens_T.npy'
  with pytest.raises(ValueError):
    group_bytes.from_bytes(packed(parts() | {name: content}))


@pytest.mark.parametrize('compression', [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(compression):
  with pytest.raises(ValueError, match='is compressed otherwise'):
    group_bytes.from_bytes(packed(parts(), compression))


def peak_of(data, max_bytes):
  tracemalloc.start()
  with pytest.raises(ValueError) as refused:
    group_bytes.from_bytes(data, max_bytes)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  return peak, str(refused.value)


def test_what_unpacks_to_more_than_it_may_is_refused_before_it_does():
  bomb = npy(np.zeros(1 << 24, np.int32))
  data = packed({'0/0/tokens_T.npy': bomb}, zipfile.ZIP_DEFLATED)
  peak, message = peak_of(data, 1 << 20)
  assert 'unpacked; at most 1048576 may' in message and peak < 1 << 20


def test_a_stream_longer_than_it_states_is_not_unpacked():
  bomb = npy(np.zeros(1 << 24, np.int32))
  data = packed({'x.npy': bomb}, zipfile.ZIP_DEFLATED)
  length = len(bomb).to_bytes(4, 'little')
  assert data.count(length) == 2
  peak, _ = peak_of(data.replace(length, (500).to_bytes(4, 'little')), 1 << 20)
  assert peak < 1 << 20


def test_a_tape_of_more_tokens_than_fit_takes_no_memory():
  from composer_jax.core.routes import codec

  scheme = codec.RouteScheme(num_experts=8, num_active=2, layers=(0, 1))
  ids_TMA = np.full((1 << 22, 2, 2), 65535, np.uint16)
  tape = np.frombuffer(codec.encode(ids_TMA, scheme), np.uint8)
  assert len(tape) < 100
  del ids_TMA
  data = packed(parts() | {'0/0/routes.npy': npy(tape)})
  peak, message = peak_of(data, 1 << 20)
  assert 'the reader takes 1048576' in message and peak < 1 << 20
