"""Whatever comes out of a box, its readers answer, soon and in little memory.

Each reader gets bytes that hypothesis makes, and well-formed data with bytes
and values changed (100,000 cases of each with --slow).
"""

import contextlib
import hmac
import io
import json
import random
import struct
import time
import tracemalloc
import zlib

import hypothesis
import pytest
from hypothesis import strategies as st

from composer_jax.sandbox import base, results
from composer_jax.sandbox.inside import wire
from composer_jax.tasks.deletion import leaks
from composer_jax.tasks.grading import equality, held_out, suites
from composer_jax.tasks.monitors import watch

KEY = bytes(32)
_MOST_BYTES, _MOST_S = 64 << 20, 1.0


def signed(*parts):
  mac = hmac.new(KEY, digestmod='sha256')
  frames = []
  for part in parts:
    data = zlib.compress(part)
    mac.update(data)
    frames.append(struct.pack('!I', len(data)) + mac.digest() + data)
  return b''.join(frames)


def read_suite(data, sign=True):
  done = base.CommandResult(level='none', status='ok', exit_code=0)
  events = suites._events(signed(data) if sign else data, KEY)
  result = suites._result(done, *events)
  for mapping in (result.outcomes, result.errors, result.entered):
    assert all(type(name) is str for name in mapping)
  assert all(outcome in suites.OUTCOMES for outcome in result.outcomes.values())


def read_answers(data):
  outcomes = results.read_json(data)
  equality.same(outcomes, [1, {'dict': [['a', 1.5]]}], 1e-6)
  equality.same({'dict': outcomes}, {'dict': outcomes})
  equality.same(outcomes, OUTCOMES, 1e-6)
  for outcome in outcomes if isinstance(outcomes, list) else ():
    equality.same(outcome, OUTCOMES[-1])
  if isinstance(outcomes, list):
    [held_out._is_answer([o, 0.1]) for o in outcomes]
    [held_out._is_answer(o) for o in outcomes]
  equality.same({'set': outcomes}, {'set': [1]})
  assert type(equality.shows(outcomes)) is bool


def read_message(data):
  wire.decode(io.BytesIO(data).read, 1 << 20)


def read_code(data):
  text = data.decode('latin-1')
  calls = [watch.WatchedCall(tool='run', arguments={'command': text})]
  watch.scan(watch.Evidence(calls=calls, after={'a.py': text}, package='pk'))


EVENTS = [
  ['names', ['a.py:f', 'a.py:g']], ['collected', ['t.py::test_a']],
  ['trace', '', [0]], ['collect', 't.py', 'error', 'no module'],
  ['test', 't.py::test_a', 'call', 'passed', False],
  ['finish', 't.py::test_a'], ['trace', 't.py::test_a', [0, 1]],
  ['inputs', [['a.py', 'f', None, [[1], {}], True, '']]], ['end', 0],
]  # fmt: skip
OUTCOMES = [
  ['ok', {'tuple': [1, {'float': 'nan'}]}, None], ['raised', 'E', []],
  ['missing'], ['ok', {'dict': [['k', {'set': [1, 2]}]]}, [1]],
  ['ok', {'object': 'A', 'text': '', 'items': [{'tuple': [2.5]}], 'attributes':
          {'b': {'object': 'B', 'text': 'c', 'items': [], 'attributes': {}}}},
   None],
  ['ok', {'dict': [[{'ratio': [3, 2]}, {'complex': '1j'}]]}, [{'range': [9]}]],
]  # fmt: skip
READERS = {
  'report': (read_suite, json.dumps(EVENTS).encode()),
  'frames': (lambda d: read_suite(d, sign=False), signed(b'[["end", 0]]')),
  'answers': (read_answers, json.dumps(OUTCOMES).encode()),
  'results': (lambda d: results.parse(d, 2), b'[["ok", [1]], ["raised", "E"]]'),
  'text': (results.clean, b'\x1b[31mred\x1b]0;t\x07 \xc3\xbc\r\n'),
  'message': (read_message, wire.encode({'do': 'read'}, [b'ab', b'c'], 99)),
  'packed': (
    lambda d: leaks.scan({'f.zip': d}, ['def f(a):\n  return a + 41'], []),
    zlib.compress(b'def f(a):\n  return a + 41\n' * 3),
  ),
  'code': (read_code, b'import gc\nx = {1: [gc.a(2)]}\ngit log -p; cat a.pyc'),
}  # fmt: skip
_REFUSALS = (ValueError, EOFError, struct.error)


def attempt(name, data):
  """Reads; anything but the reader's own refusal is an error."""
  with contextlib.suppress(*_REFUSALS):
    READERS[name][0](data)


@pytest.mark.parametrize('name', READERS)
def test_any_bytes_are_read_or_refused(name):
  @hypothesis.settings(max_examples=100, deadline=None, database=None)
  @hypothesis.seed(0)
  @hypothesis.given(st.binary(max_size=300) | st.text(max_size=200))
  def check(data):
    attempt(name, data if isinstance(data, bytes) else data.encode('utf-8'))

  check()


@pytest.mark.parametrize('name', ['report', 'answers', 'results'])
def test_any_json_is_read_or_refused(name):
  leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
  leaves |= st.floats() | st.sampled_from(
    ['end', 'test', 'trace', 'names', 'inputs', 'ok', 'raised', 'missing']
  )
  nested = lambda inner: (
    st.lists(inner, max_size=6)
    | st.dictionaries(
      st.text(max_size=3) | st.sampled_from(['dict', 'set', 'float']), inner
    )
  )

  @hypothesis.settings(max_examples=200, deadline=None, database=None)
  @hypothesis.seed(0)
  @hypothesis.given(st.lists(st.recursive(leaves, nested, max_leaves=12)))
  def check(value):
    attempt(name, json.dumps(value).encode())

  check()


def mutate(name, count):
  draw = random.Random(name)
  _, seed = READERS[name]
  tokens = [
    b'[', b']', b'{', b'}', b'"', b',', b'1e999', b'null', b'-1', b'[]',
    b'{"dict": [[]]}', b'\\ud800', b'9' * 5000, b'\x00', b'\xff',
  ]  # fmt: skip
  for _ in range(count):
    data = bytearray(seed)
    for _ in range(draw.randrange(1, 6)):
      at = draw.randrange(len(data) + 1)
      stop = at + draw.choice((0, 0, 1, 1, 2, 9))
      data[at:stop] = draw.choice((
        b'', bytes([draw.randrange(256)]), draw.choice(tokens),
        data[draw.randrange(len(data) + 1) :][: draw.randrange(20)],
      ))  # fmt: skip
    attempt(name, bytes(data))


@pytest.mark.parametrize('name', READERS)
def test_damaged_data_is_read_or_refused(name):
  mutate(name, 3000 // len(READERS))


@pytest.mark.slow
@pytest.mark.parametrize('name', READERS)
def test_much_damaged_data_is_read_or_refused(name):
  mutate(name, 100_000)


BOMBS = {
  'zeros': lambda: bytes(200 << 20),
  'lists': lambda: b'[' + b'[],' * (2 << 20) + b'[]]',
  'depth': lambda: b'[' * (1 << 20),
  'events': lambda: b'[' + b'["end",0],' * 600_000 + b'["end",0]]',
  'wide text': lambda: json.dumps(['\U0001f600' + 'a' * (7 << 20)]).encode(),
  'digits': lambda: b'[' + b'9' * (4 << 20) + b']',
  'quotes': lambda: b'["' + b'\\"' * (2 << 20),
  'commands': lambda: b'git log ' * 8000,
  'numbers': lambda: json.dumps([n * 1e-300 for n in range(199_000)]).encode(),
  'brackets of code': lambda: b'x = ' + b'[' * 90_000,
  'names of code': lambda: b'a,' * 400_000,
}


@pytest.mark.slow
@pytest.mark.parametrize('bomb', BOMBS)
@pytest.mark.parametrize('name', ['report', 'answers', 'code', 'packed'])
def test_a_bomb_costs_little(name, bomb):
  data = BOMBS[bomb]()
  if name in ('answers', 'code'):
    data = data[: 4 << 20]  # the bound of a file that is taken
  if name in ('report', 'packed'):
    data = zlib.compress(data, 1)
  frame = hmac.new(KEY, data, 'sha256').digest()
  report = struct.pack('!I', len(data)) + frame + data
  attempts = {
    'report': lambda: read_suite(report, sign=False),
    'answers': lambda: attempt('answers', data),
    'code': lambda: attempt('code', data),
    'packed': lambda: attempt('packed', data),
  }
  tracemalloc.start()
  attempts[name]()
  _, most = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert most - len(data) < _MOST_BYTES, most
  began = time.process_time()
  attempts[name]()
  assert time.process_time() - began < _MOST_S
