"""Stores behind web servers: read within bounds, whatever answers."""

import contextlib
import functools
import gzip
import http.server
import os
import threading

import pytest

from composer_jax.delta import retries, store

ONCE = retries.Policy(attempts=1)
DATA = bytes(range(256)) * 100


@pytest.fixture
def origin(tmp_path):
  return store.Store(tmp_path / 'origin')


@contextlib.contextmanager
def _serving(handler):
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


class _Answer(http.server.BaseHTTPRequestHandler):
  """One answer, whatever is asked."""

  def __init__(self, *args, headers, data):
    self.answer = headers, data
    super().__init__(*args)

  def do_HEAD(self):
    self.send_response(200)
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
    client = store.Store(url + '/', retries=ONCE)
    assert client.get(name) == DATA
    long = os.urandom(1 << 20)
    end = client.get_range(origin.put(long), 700_000, 1_040_000)
    assert end == long[700_000:1_040_000]
    assert client.length(name) == len(DATA)
    assert client.read_pointer('run')[0] == b'pointer'
    assert client.get_file(name, None, tmp_path / 'file') == len(DATA)
    with pytest.raises(FileNotFoundError):
      client.get('0' * 64)


def test_an_endless_answer_is_cut_at_what_was_asked_for():
  with _serving(_Endless) as url:
    client = store.Store(url, retries=ONCE)
    for ask in (
      lambda: client.get('0' * 64, limit=1000),
      lambda: client.get('0' * 64, length=1000),
      lambda: client.read_pointer('run'),
    ):
      with pytest.raises(ValueError, match='more than 1000|exceeds 4096'):
        ask()
    assert client.traffic.bytes_read <= 3 * 2**18


def test_a_compressed_answer_is_not_unpacked():
  bomb = gzip.compress(bytes(2**24))
  headers = [('Content-Encoding', 'gzip'), ('Content-Length', str(len(bomb)))]
  handler = functools.partial(_Answer, headers=headers, data=bomb)
  with _serving(handler) as url:
    client = store.Store(url, retries=ONCE)
    with pytest.raises(ValueError, match='damaged'):
      client.get('0' * 64, limit=2**25)
    assert client.traffic.bytes_read == len(bomb)


def test_a_server_that_tells_no_length_is_said_to():
  with _serving(functools.partial(_Answer, headers=[], data=b'')) as url:
    with pytest.raises(OSError, match='does not tell its length'):
      store.Store(url, retries=ONCE).length('0' * 64)


def test_a_server_that_is_away_is_told_with_its_url():
  client = store.Store(
    'http://127.0.0.1:1',
    retries=retries.Policy(attempts=3),
    sleep=lambda _: None,
  )
  with pytest.raises(
    retries.GaveUp, match='reading failed 3 times.*Check'
  ) as e:
    client.get('0' * 64)
  assert e.value.filename == f'http://127.0.0.1:1/objects/{"0" * 64}'
