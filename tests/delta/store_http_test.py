"""Stores behind web servers: read within bounds, whatever answers."""

import contextlib
import datetime
import functools
import gzip
import hashlib
import http.server
import os
import threading
import time

import pytest

from composer_jax.delta.store import objects as store

ONCE = {'retry_config': {'max_retries': 0}}
QUICK = {
  'retry_config': {
    'max_retries': 2,
    'backoff': {
      'init_backoff': datetime.timedelta(milliseconds=5),
      'max_backoff': datetime.timedelta(milliseconds=10),
    },
  }
}
DATA = bytes(range(256)) * 100


@pytest.fixture
def origin(tmp_path):
  return store.Store(tmp_path / 'origin')


@contextlib.contextmanager
def _serving(handler):
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(
      target=server.serve_forever, args=(0.01,), daemon=True
    ).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


class _Answer(http.server.BaseHTTPRequestHandler):
  """One answer, whatever is asked."""

  def __init__(self, *args, headers, data, status=200):
    self.answer, self.status = (headers, data), status
    super().__init__(*args)

  def do_HEAD(self):
    self.send_response(self.status)
    for header in self.answer[0]:
      self.send_header(*header)
    self.end_headers()

  def do_GET(self):
    self.do_HEAD()
    self.wfile.write(self.answer[1])

  def log_message(self, *args):
    pass


class _Files(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *args):
    pass


class _Endless(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.send_response(200)
    self.end_headers()
    with contextlib.suppress(OSError):
      while True:
        self.wfile.write(bytes(2**16))

  def log_message(self, *args):
    pass


def test_any_web_server_with_a_store_in_it_will_do(origin, tmp_path):
  name = origin.put(DATA)
  origin.move_pointer('run', b'pointer', None)
  # This one knows no ranges.
  with _serving(functools.partial(_Files, directory=origin.root)) as url:
    client = store.Store(url + '/', options=ONCE)
    assert client.get(name) == DATA
    long = os.urandom(1 << 20)
    end = client.get_range(origin.put(long), 700_000, 1_040_000)
    assert end == long[700_000:1_040_000]
    assert client.read_pointer('run')[0] == b'pointer'
    with pytest.raises(FileNotFoundError):
      client.get('0' * 64)


def test_an_endless_answer_is_cut_at_what_was_asked_for():
  with _serving(_Endless) as url:
    client = store.Store(url, options=ONCE)
    for ask in (
      lambda: client.get('0' * 64, length=1000),
      lambda: client.get_range('0' * 64, 10, 900),
    ):
      with pytest.raises(ValueError, match='more than 1000|damaged'):
        ask()
        raise ValueError('damaged, as its reader would find')
    assert len(client.read_pointer('run')[0]) == 4097


def test_a_compressed_answer_is_not_unpacked():
  bomb = gzip.compress(bytes(2**24))
  headers = [('Content-Encoding', 'gzip'), ('Content-Length', str(len(bomb)))]
  handler = functools.partial(_Answer, headers=headers, data=bomb)
  with _serving(handler) as url:
    client = store.Store(url, options=ONCE)
    with pytest.raises(ValueError, match='damaged'):
      client.get('0' * 64, length=len(bomb))


def test_a_server_that_is_away_is_told_with_its_url():
  client = store.Store('http://127.0.0.1:1', options=QUICK)
  with pytest.raises(
    ConnectionError, match='reading failed.*refused.*Check'
  ) as e:
    client.get('0' * 64)
  assert e.value.filename == f'http://127.0.0.1:1/objects/{"0" * 64}'


class _Scripted(http.server.BaseHTTPRequestHandler):
  """Answers in turn: statuses, 'cut' for half of it, then DATA."""

  protocol_version = 'HTTP/1.1'

  def __init__(self, *args, script, seen):
    self.script, self.seen = script, seen
    super().__init__(*args)

  def do_GET(self):
    step = self.script.pop(0) if self.script else 200
    self.seen.append((self.client_address, self.headers))
    self.send_response(200 if step == 'cut' else step)
    self.send_header('Content-Length', str(len(DATA)))
    self.end_headers()
    with contextlib.suppress(OSError):  # who asked reads no error
      self.wfile.write(DATA[:1000] if step == 'cut' else DATA)
    self.close_connection |= step == 'cut'

  def log_message(self, *args):
    pass


@pytest.fixture
def scripted():
  script, seen = [], []
  handler = functools.partial(_Scripted, script=script, seen=seen)
  with _serving(handler) as url:
    yield store.Store(url, options=QUICK), script, seen


@pytest.mark.parametrize('trouble', [503, 429, 'cut'])
def test_trouble_is_waited_for_and_logged_or_told(scripted, caplog, trouble):
  client, script, seen = scripted
  name = hashlib.sha256(DATA).hexdigest()
  script[:] = [trouble, trouble]
  assert client.get(name, len(DATA)) == DATA
  assert len(seen) == 3
  assert caplog.text.count(f'{client.url}/objects/{name}: GET failed') == 2
  script[:] = [trouble] * 3
  with pytest.raises(ConnectionError, match='reading failed.*Check') as caught:
    client.get(name, len(DATA))
  assert caught.value.filename.startswith(client.url)


@pytest.mark.parametrize(
  'status, error',
  [(403, PermissionError), (404, FileNotFoundError)]
  + [(400, OSError), (302, OSError)],
)
def test_a_refusal_is_not_tried_again(scripted, status, error):
  client, script, seen = scripted
  script[:] = [status]
  with pytest.raises(error) as caught:
    client.get('0' * 64)
  assert len(seen) == 1 and caught.value.filename.startswith(client.url)


def test_one_connection_serves_many_reads(scripted):
  client, _, seen = scripted
  for _ in range(5):
    client.get(hashlib.sha256(DATA).hexdigest(), len(DATA))
  assert len({address for address, _ in seen}) == 1


def test_headers_of_the_caller_are_sent(scripted):
  client, _, seen = scripted
  headers = {
    'client_options': {'default_headers': {'Authorization': 'Basic x'}}
  }
  reader = store.Store(client.url, options=headers)
  reader.get_range('0' * 64, 0, 10)
  assert seen[0][1]['Authorization'] == 'Basic x'


@pytest.mark.parametrize('status', [302, 404, 416, 500])
def test_an_error_of_a_terabyte_is_not_read(status):
  headers = [('Content-Length', str(2**40)), ('Location', '/other')]
  handler = functools.partial(
    _Answer, headers=headers, data=bytes(2**20), status=status
  )
  with _serving(handler) as url:
    client = store.Store(url, options=ONCE)
    before = time.process_time()
    with pytest.raises((OSError, ValueError)):
      client.get('0' * 64)
    assert time.process_time() - before < 10
