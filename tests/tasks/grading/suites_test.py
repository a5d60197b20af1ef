"""pytest in a box: outcomes, selection, order, traces and forged reports."""

import hmac
import json
import struct
import zlib

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from composer_jax.tasks.grading import suites

LIMITS = base.Limits(
    wall_s=20.0, cpu_s=10.0, memory_bytes=1 << 30, processes=32,
    file_bytes=16 << 20, output_bytes=1 << 20,
)  # fmt: skip

_MODULE = b"""
class Box:
    def __init__(self, size):
        self.size = size

    def grow(self, by=1):
        self.size += by
        return self.size

def f(x, *more, k=1, **rest):
    return x + k

def g(x):
    return f(x)
"""
_TESTS = b"""
import sys
import pk
import pytest

def test_passes():
    assert pk.f(1) == 2

@pytest.mark.parametrize('x', [1, 2])
def test_cases(x):
    assert pk.f(x) == 2

@pytest.mark.xfail
def test_expected():
    assert False

@pytest.mark.xfail
def test_unexpected():
    pass

def test_skips():
    pytest.skip('later')

@pytest.fixture
def broken():
    raise ValueError('no')

def test_broken(broken):
    pass

@pytest.fixture
def breaks():
    yield
    raise ValueError('late')

def test_breaks_at_the_end(breaks):
    pass

def test_through():
    assert pk.g(4) == 5

class TestBox:
    def test_grow(self):
        box = pk.Box(3)
        assert box.grow() == 4
        assert box.grow(by=2) == 6
"""
FILES = {
  'src/pk/__init__.py': _MODULE,
  'tests/test_a.py': _TESTS,
  'tests/test_b.py': b'import no_such_module\n',
  # Configuration of the workspace is not read.
  'pytest.ini': b'[pytest]\naddopts = --collect-only\n',
}
A = 'tests/test_a.py'
WANTED = {
  f'{A}::test_passes': 'passed',
  f'{A}::test_cases[1]': 'passed',
  f'{A}::test_cases[2]': 'failed',
  f'{A}::test_expected': 'xfailed',
  f'{A}::test_unexpected': 'xpassed',
  f'{A}::test_skips': 'skipped',
  f'{A}::test_broken': 'error',
  f'{A}::test_breaks_at_the_end': 'error',
  f'{A}::test_through': 'passed',
  f'{A}::TestBox::test_grow': 'passed',
  'tests/test_b.py': 'error',
}


@pytest.fixture(scope='module')
def sandbox():
  with sandbox_open.open_sandbox(
    'auto', LIMITS, allow_unsafe=True, packages=('pytest',)
  ) as opened:
    yield opened


@pytest.fixture(scope='module')
def run(sandbox):
  def go(files, **options):
    box = sandbox.open('', files)
    try:
      return suites.run(box, source_roots=('src', '.'), **options)
    finally:
      box.close()

  return go


def test_every_outcome_is_told(run):
  result = run(FILES)
  assert result.status == 'ok', result
  assert result.outcomes == WANTED
  assert len(result.collected) == len(WANTED) - 1
  assert 'no_such_module' in result.errors['tests/test_b.py']
  assert result.passed([f'{A}::test_passes', f'{A}::gone']) == 1


def test_selection_order_and_trace(run):
  ids = [f'{A}::test_cases', f'{A}::TestBox::test_grow', 'gone.py::test_x']
  results = [
    run(
      FILES,
      ids=ids,
      order_seed=seed,
      arguments=('-q',),
      trace=suites.Trace(
        folders=('src/pk',),
        record=(('src/pk/__init__.py', ''),),
        deleted=(('pk', ''),),
      ),
    )
    for seed in (0, 1)
  ]
  orders = [tuple(result.outcomes) for result in results]
  wanted = {f'{A}::test_cases[1]', f'{A}::test_cases[2]', ids[1]}
  assert set(orders[0]) == set(orders[1]) == wanted
  assert orders[0] != orders[1]
  entered = results[0].entered
  at = 'src/pk/__init__.py'
  assert entered[f'{A}::test_cases[1]'] == (f'{at}:f',)
  assert entered[ids[1]] == (f'{at}:Box.__init__', f'{at}:Box.grow')
  calls = [(symbol, call) for _, symbol, _, call, *_ in results[0].inputs]
  assert ('f', [[1], {'k': 1}]) in calls
  assert ('Box.__init__', [[3], {}]) in calls
  assert ('Box.grow', [[2], {}]) in calls
  # All calls of Box are of the same object.
  objects = {i[2] for i in results[0].inputs if 'Box' in i[1]}
  assert len(objects) == 1


@pytest.mark.parametrize(
  'text, status, error',
  [
    ('import os\nos._exit(0)', 'exit', 'ended with 0 before pytest'),
    ('import sys\nsys.exit(0)', 'stopped', 'pytest gave up'),
    ('import os\nos.kill(os.getpid(), 9)', 'killed', ''),
    (
      'import os\nfor n in range(3, 256):\n'
      '    try:\n        os.write(n, bytes(64))\n'
      '    except OSError:\n        pass',
      'forged',
      'its key did not sign',
    ),
  ],
)
def test_a_run_that_does_not_end_well_has_a_status(run, text, status, error):
  files = {**FILES, 'src/pk/__init__.py': text.encode()}
  result = run(files, ids=[f'{A}::test_passes'])
  assert result.status == status, result
  assert error in result.error
  assert not result.passed([f'{A}::test_passes'])


def test_a_new_interpreter_hashes_otherwise(run):
  text = """
import pytest
@pytest.mark.parametrize('x', sorted('abcdefghijklmnop', key=hash))
def test_x(x):
    pass
"""
  files = {'tests/test_h.py': text.encode()}
  warm = [run(files).collected for _ in range(2)]
  cold = [run(files, hash_seed=seed).collected for seed in (1, 1, 2)]
  assert warm[0] == warm[1]
  assert cold[0] == cold[1] and len({*warm, *cold}) == 3


def test_a_hang_is_ended(run):
  files = {**FILES, 'src/pk/__init__.py': b'while True:\n    pass\n'}
  assert run(files, ids=[f'{A}::x'], cpu_s=1.0).status == 'timeout'


def test_what_waits_is_no_hang(run):
  files = {**FILES, 'src/pk/__init__.py': b'import time\ntime.sleep(1.5)\n'}
  assert run(files, ids=[f'{A}::x'], cpu_s=1.0).status == 'ok'


def test_tests_may_lie_within_the_package(run):
  path = 'src/pk/tests/test_in.py'
  text = 'import pk\n\ndef test_in():\n    assert pk.Box(3).grow(1) or True\n'
  result = run(
    {**FILES, path: text.encode()},
    ids=[f'{path}::test_in'],
    trace=suites.Trace(
      folders=('src/pk',),
      record=(('src/pk/__init__.py', 'Box'),),
      tests=(path,),
      deleted=(('pk', 'Box'),),
    ),
  )
  assert [i[1:4] for i in result.inputs] == [
    ['Box.__init__', '0', [[3], {}]],
    ['Box.grow', '0', [[1], {}]],
  ]


# What reaches nothing is kept for the past of an object that has to have one.
@pytest.mark.parametrize('deleted, kept', [('Box', True), ('Other', False)])
def test_a_trace_tells_which_calls_reach_a_function(run, deleted, kept):
  result = run(
    FILES,
    ids=[f'{A}::test_through', f'{A}::TestBox::test_grow'],
    trace=suites.Trace(
      folders=('src/pk',),
      record=(('src/pk/__init__.py', 'f'),),
      deleted=(('pk', deleted),),
    ),
  )
  reach = {(symbol, reaches) for _, symbol, _, _, reaches, _ in result.inputs}
  past = {('Box.__init__', False), ('Box.grow', False)}
  assert reach == {('g', True), ('f', True)} | (past if kept else set())


def signed(key, *parts):
  mac = hmac.new(key, digestmod='sha256')
  frames = []
  for part in parts:
    data = zlib.compress(json.dumps(part).encode())
    mac.update(data)
    frames.append(struct.pack('!I', len(data)) + mac.digest() + data)
  return frames


def test_only_signed_frames_in_their_order_count():
  key = bytes(range(32))
  first, last = signed(key, [['collected', ['a']]], [['end', 0]])
  events = [['collected', ['a']], ['end', 0]]
  assert suites._events(first + last, key) == (events, True)
  assert suites._events(last, key) == ([], False)  # the first is left out
  assert suites._events(first + first, key) == (events[:1], False)
  (other,) = signed(bytes(32), [['end', 0]])
  assert suites._events(other, key) == ([], False)
  more = signed(key, [['end', 0]], [['end', 0]])
  assert not suites._events(b''.join(more), key)[1]  # nothing after the end


@pytest.mark.parametrize('batch', [5, {'a': 1}, [5], [[]], ['end']])
def test_signed_frames_that_hold_no_events_are_forged(batch):
  key = bytes(32)
  assert suites._events(signed(key, batch)[0], key) == ([], False)


@pytest.mark.parametrize(
  'event',
  [['other'], ['test', 'a'], ['test', [], 'call', 'passed', False],
   ['test', 'a', 'call', 'won', False], ['collected', 5]],
)  # fmt: skip
def test_signed_events_that_the_plugin_never_writes_are_forged(event):
  key = bytes(32)
  events = suites._events(signed(key, [event, ['end', 0]])[0], key)
  done = base.CommandResult(level='rlimits', status='ok', exit_code=0)
  assert suites._result(done, *events).status == 'forged'


def test_what_an_unsigned_frame_says_is_not_believed():
  key = bytes(32)
  assert suites._events(b'', key) == ([], True)
  assert suites._events(bytes(35), key) == ([], True)  # no whole header
  assert suites._events(bytes(36), key) == ([], False)
  assert suites._events(b'passed' * 100, key) == ([], False)
