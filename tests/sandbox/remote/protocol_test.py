"""A sandbox behind messages gives the same results as the sandbox itself."""

import contextlib
import dataclasses
import socket
import struct
import threading

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox.remote import messages, protocol
from tests.sandbox import conftest

LIMITS = conftest.LIMITS
SHORT = dataclasses.replace(LIMITS, wall_s=0.1)


@pytest.fixture(scope='module')
def near():
  with conftest.open_or_skip('unshare') as sandbox:
    yield sandbox


@contextlib.contextmanager
def connected(serve, *, grace_s=10.0, limits=LIMITS):
  """A remote sandbox whose other end is served by a thread."""
  ours, served = socket.socketpair()
  thread = threading.Thread(target=serve, args=(served,))
  thread.start()
  transport = messages.StreamTransport(ours)
  try:
    yield protocol.RemoteSandbox(transport, limits, grace_s=grace_s)
  finally:
    transport.close()
    thread.join(10)
    served.close()
    assert not thread.is_alive()


@pytest.fixture(scope='module')
def far(near):
  def serve(end):
    protocol.serve(end.makefile('rb').read, end.sendall, near, size=2)

  with connected(serve) as sandbox:
    yield sandbox


def test_it_says_what_the_other_end_is(near, far):
  assert (far.level, far.about) == (near.level, near.about)


def test_calls_give_the_same_from_near_and_far(near, far):
  files = {'m.py': 'def f(x):\n  print("seen")\n  return [1 / x, {"a": None}]'}
  results = [x.call(files, 'm', 'f', [[2], [0]]) for x in (near, far)]
  assert [r.status for r in results] == ['ok', 'ok']
  assert results[0].value == results[1].value
  assert results[0].stdout == results[1].stdout
  with pytest.raises(ValueError, match='must be relative'):
    far.call({'../m.py': ''}, 'm', 'f', [[1]])


def test_boxes_are_the_same_from_near_and_far(near, far):
  seen = []
  for sandbox in (near, far):
    with contextlib.ExitStack() as closing:
      box = sandbox.open('', {'a/b.txt': b'\0\xff', 'c.py': b'print(3)'})
      closing.callback(box.close)
      script = 'import os; os.write(3, b"r\\0"); print("seen")'
      script += '; print(input()); open("new", "w").write("n"); exit(4)'
      result = box.run(
        base.Command(argv=('python', '-c', script), stdin=b'line\n')
      )
      facts = [result.status, result.exit_code, result.output, result.report]
      facts += [box.files(), box.files('a'), box.changes(), box.read('new', 9)]
      box.remove('a/b.txt')
      box.write('d/e', b'e')
      facts += [box.changes(), box.files()]
      for path in ('../x', 'missing', 'a'):
        with pytest.raises(base.FileRefused) as error:
          box.read(path, 10)
        facts.append(str(error.value))
      seen.append(facts)
  assert seen[0] == seen[1]
  assert seen[0][:4] == ['ok', 4, 'seen\nline\n', b'r\0']


def test_threads_share_one_stream(far):
  def one(index):
    files = {'m.py': f'def f(x): return x + {index}'}
    results[index] = far.call(files, 'm', 'f', [[10]]).value

  results = {}
  threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  assert results == {i: [['ok', 10 + i]] for i in range(4)}


def answering(*replies):
  """A server that gives prepared answers, and then none."""

  def serve(end):
    about = {'level': 'unshare', 'about': {}}
    prepared = [(about, ()), *replies]
    stream = end.makefile('rb')
    with contextlib.suppress(EOFError, OSError):
      while True:
        header, _ = messages.decode(stream.read)
        if not prepared:
          continue
        reply = prepared.pop(0)
        if isinstance(reply, bytes):
          end.sendall(reply)
        else:
          fields = {'id': header['id'], **reply[0]}
          end.sendall(messages.encode(fields, reply[1]))

  return serve


OPENED = ({'box': 1}, ())
RAN = {
    'status': 'ok', 'exit_code': 0, 'output': 'x', 'truncated': False,
    'error': '', 'wall_s': 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
  'reply',
  [
    b'\xff' * 64,
    struct.pack('!IIH', 1 << 30, 0, 0),
    struct.pack('!IIH', 2, 0, 0) + b'[]',
    struct.pack('!IIH', 2, 0, 0) + b'{]',
    struct.pack('!IIH', 200_000, 0, 0) + b'[' * 200_000,
    struct.pack('!IIH', 2, 5, 1) + struct.pack('!I', 4) + b'{}xxxx',
    ({'id': 10**9}, ()),
    ({'id': [1]}, ()),
    ({**RAN, 'status': 'splendid'}, (b'',)),
    ({**RAN, 'exit_code': '0'}, (b'',)),
    ({**RAN, 'exit_code': True}, (b'',)),
    ({**RAN, 'output': ['x']}, (b'',)),
    ({**RAN, 'wall_s': 'soon'}, (b'',)),
    ({**RAN, 'wall_s': -1}, (b'',)),
    (RAN, ()),
    (RAN, (b'', b'')),
    ({'error': 'lost', 'reason': 'went away'}, ()),
  ],
)
def test_a_malformed_answer_is_a_failure_of_the_sandbox(reply):
  with connected(answering(OPENED, reply)) as sandbox:
    result = sandbox.open('').run(base.Command(argv=('true',)))
  assert (result.status, bool(result.error)) == ('infrastructure', True)


def test_an_answer_is_bounded_and_safe_to_show():
  text = '\x1b[2J\ud800' + 'x' * (2 * LIMITS.output_bytes)
  report = bytes(2 * LIMITS.output_bytes)
  reply = ({**RAN, 'output': text, 'error': '\x1b]0;a\x07b'}, (report,))
  large = ({}, (bytes(11),))
  with connected(answering(OPENED, reply, large)) as sandbox:
    box = sandbox.open('')
    result = box.run(base.Command(argv=('true',)))
    with pytest.raises(base.FileRefused, match='more than 10 bytes'):
      box.read('x', 10)
  assert len(result.output) <= LIMITS.output_bytes
  assert len(result.report) == LIMITS.output_bytes
  assert not {'\x1b', '\x07', '\ud800'} & set(result.output + result.error)
  assert result.output.endswith('x')


@pytest.mark.parametrize('value', [b'[NaN]', b'[["ok", 1]]', b'', b'{'])
def test_a_forged_value_is_no_value(value):
  closed = ({}, ())
  with connected(answering(OPENED, (RAN, (value,)), closed)) as sandbox:
    result = sandbox.call({}, 'm', 'f', [[1], [2]])
  assert (result.status, result.value) == ('exit', None)


def test_silence_ends_every_wait():
  with connected(answering(OPENED), grace_s=0.3, limits=SHORT) as sandbox:
    box = sandbox.open('')
    results = []
    threads = [
      threading.Thread(
        target=lambda: results.append(box.run(base.Command(argv=('x',))))
      )
      for _ in range(3)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    assert [x.status for x in results] == ['infrastructure'] * 3
    assert 'no answer in time' in results[0].error
    with pytest.raises(base.SandboxLost, match='no answer in time'):
      box.read('x', 1)
    assert sandbox.call({}, 'm', 'f', [[1]]).status == 'infrastructure'
    box.close()


def test_an_end_that_reads_nothing_blocks_nobody(monkeypatch):
  monkeypatch.setattr(protocol, '_QUICK_S', 0.3)

  def serve(end):
    stream = end.makefile('rb')
    header, _ = messages.decode(stream.read)
    about = {'id': header['id'], 'level': 'unshare', 'about': {}}
    end.sendall(messages.encode(about))
    waits.append(gone.wait(300))

  gone, waits = threading.Event(), []
  try:
    with connected(serve, grace_s=0.3, limits=SHORT) as sandbox:
      files = {'m.py': 'x' * (4 << 20)}
      result = sandbox.call(files, 'm', 'f', [[1]])
      gone.set()
    assert result.status == 'infrastructure'
    # The call ended before the other end closed.
    assert waits in ([], [True])
  finally:
    gone.set()


def test_messages_survive_the_wire():
  header = {'do': 'x', 'text': '\u20ac'}
  parts = (b'', b'a' * 70_000, b'\0')
  data = messages.encode(header, parts)
  position = 0

  def read(count):
    nonlocal position
    position += count
    return data[position - count : position]

  assert messages.decode(read) == (header, parts)
  assert position == len(data)


def test_a_message_that_would_be_refused_is_not_sent(monkeypatch):
  monkeypatch.setattr(messages, 'MAX_PARTS', 10)
  with pytest.raises(ValueError, match='11 bytes in 1 parts must not exceed'):
    messages.encode({}, (bytes(11),))
  with pytest.raises(ValueError, match='exceeds'):
    data = struct.pack('!IIH', 2, 11, 1)
    messages.decode(lambda count: data[:count])
  with pytest.raises(ValueError, match='parts of 9 bytes were announced as 4'):
    pieces = [struct.pack('!IIH', 2, 4, 1), struct.pack('!I', 9)]
    messages.decode(lambda _: pieces.pop(0))
