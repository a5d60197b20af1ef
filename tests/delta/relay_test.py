"""Relays serve what they verified, ask once, and form trees."""

import concurrent.futures
import contextlib
import functools
import gzip
import http.server
import os
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest

from composer_jax.delta import (
  identity,
  manifest,
  publish,
  relay,
  signing,
  store,
  subscribe,
)

KEY = signing.Hmac(b'sixteen bytes ..')
ONCE = {'retry_config': {'max_retries': 0}}
DATA = bytes(range(256)) * 100


@pytest.fixture
def origin(tmp_path):
  return store.Store(tmp_path / 'origin')


@pytest.fixture
def serve(origin, tmp_path):
  """Starts relays; gives a client and the relay behind it."""
  stacks = []

  def start(upstream=origin, cache='cache', **options):
    opened = relay.Relay(upstream, tmp_path / cache, **options)
    stacks.append(contextlib.ExitStack())
    url = stacks[-1].enter_context(relay.running(opened))
    return store.Store(url, options=ONCE), opened

  yield start
  # At once, as each takes a moment.
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    list(pool.map(lambda stack: stack.close(), stacks))


def _until(condition):
  give_up = time.monotonic() + 20
  while not condition():
    assert time.monotonic() < give_up
    time.sleep(0.01)


def test_a_relay_is_a_store_to_read(origin, serve, tmp_path):
  client, _ = serve(poll_s=0)
  name, empty = origin.put(DATA), origin.put(b'')
  assert client.get(name) == client.get(name, length=len(DATA)) == DATA
  assert client.get(empty) == b''
  assert client.get_range(name, 100, 300) == DATA[100:300]
  assert client.length(name) == len(DATA)
  assert client.exists(name) and not client.exists('0' * 64)
  assert client.get_file(name, len(DATA), tmp_path / 'file') == len(DATA)
  assert (tmp_path / 'file').read_bytes() == DATA
  with pytest.raises(ValueError, match='from 25599 to 25601'):
    client.get_range(name, len(DATA) - 1, len(DATA) + 1)
  with pytest.raises(ValueError, match='from 99999 to 100000'):
    client.get_range(name, 99999, 100000)
  with pytest.raises(FileNotFoundError, match='0' * 64):
    client.get('0' * 64)
  assert client.read_pointer('run') is None
  origin.move_pointer('run', b'pointer', None)
  assert client.read_pointer('run')[0] == b'pointer'
  assert not client.is_local and not client.is_writable
  for refused in (
    lambda: client.put(b'x'),
    lambda: client.move_pointer('run', b'x', None),
    lambda: client.delete([name]),
    client.sizes,
    client.run_ids,
  ):
    with pytest.raises(ValueError, match='can only be read'):
      refused()


class _TakesErrors(urllib.request.HTTPErrorProcessor):
  def http_response(self, request, response):
    return response


@pytest.mark.parametrize(
  'asked, status, got',
  [
    ('bytes=5-9', 206, DATA[5:10]),
    ('bytes=25590-', 206, DATA[25590:]),
    ('bytes=25590-99999', 206, DATA[25590:]),
    ('bytes=25600-', 416, b''),
    ('bytes=9-5', 416, b''),
    ('bytes=-5', 200, DATA),
    ('bytes=0-1,3-4', 200, DATA),
    ('nonsense', 200, DATA),
  ],
)
def test_any_range_is_answered_as_http_says(origin, serve, asked, status, got):
  client, _ = serve()
  request = urllib.request.Request(
    f'{client.url}/objects/{origin.put(DATA)}', headers={'Range': asked}
  )
  opener = urllib.request.build_opener(_TakesErrors)
  with opener.open(request) as answer:
    assert (answer.status, answer.read()) == (status, got)
  if status == 416:
    assert answer.headers['Content-Range'] == f'bytes */{len(DATA)}'


def test_however_many_ask_the_upstream_is_asked_once(origin, serve):
  name = origin.put(DATA)
  client, _ = serve()
  before = origin.traffic.requests
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    found = list(pool.map(client.get, [name] * 64))
  assert found == [DATA] * 64
  assert origin.traffic.requests - before == 1
  assert origin.traffic.bytes_read == len(DATA)


def test_what_the_upstream_damaged_is_never_served(origin, serve, tmp_path):
  name = origin.put(DATA)
  path = origin.root / 'objects' / name
  client, _ = serve()
  for damaged in DATA[:-1] + b'x', DATA[:-1], DATA + b'x', b'':
    path.write_bytes(damaged)
    with pytest.raises(OSError, match='502'):
      client.get(name)
    with pytest.raises(OSError, match='502'):
      client.get_range(name, 0, 1)
  assert not os.listdir(tmp_path / 'cache' / 'objects')
  origin.put(DATA)
  assert client.get(name) == DATA


def test_whoever_asks_for_what_is_not_there_leaves_nothing(serve, tmp_path):
  client, _ = serve()
  for digit in '0123':
    with pytest.raises(FileNotFoundError):
      client.get(digit * 64)
  assert not os.listdir(tmp_path / 'cache' / 'objects')


def test_what_the_cache_damaged_is_fetched_again(origin, serve, tmp_path):
  name = origin.put(DATA)
  path = tmp_path / 'cache' / 'objects' / name
  client, _ = serve()
  client.get(name)
  for damaged in b'x' + DATA[1:], b'':
    path.write_bytes(damaged)
    assert client.get_range(name, 0, 10) == DATA[:10]
    assert path.read_bytes() == DATA
  path.unlink()
  assert client.get(name) == DATA
  assert origin.traffic.bytes_read == 4 * len(DATA)


def test_a_new_life_takes_only_intact_files_over(origin, serve, tmp_path):
  names = [origin.put(DATA), origin.put(DATA[1:])]
  with relay.running(relay.Relay(origin, tmp_path / 'cache')) as url:
    for name in names:
      store.Store(url).get(name)
  (tmp_path / 'cache' / 'objects' / names[0]).write_bytes(DATA[:-1] + b'?')
  before = origin.traffic.bytes_read
  client, _ = serve()
  assert client.get(names[0]) == DATA
  assert client.get(names[1]) == DATA[1:]
  assert origin.traffic.bytes_read - before == len(DATA)


def test_a_pointer_is_asked_for_once_in_a_while_and_outlives_its_upstream(
  origin, serve
):
  tag = origin.move_pointer('run', b'first', None)
  client, _ = serve(poll_s=3600)
  before = origin.traffic.requests
  assert {client.read_pointer('run')[0] for _ in range(5)} == {b'first'}
  assert origin.traffic.requests - before == 1
  origin.move_pointer('run', b'second', tag)
  assert client.read_pointer('run')[0] == b'first'
  eager, _ = serve(cache='other', poll_s=0)
  assert eager.read_pointer('run')[0] == b'second'
  path = origin.root / 'refs' / 'run' / 'latest'
  path.write_bytes(bytes(5000))  # refused by the relay's own store
  assert eager.read_pointer('run')[0] == b'second'
  new, _ = serve(cache='third')
  with pytest.raises(OSError, match='502'):
    new.read_pointer('run')


def test_the_cache_forgets_what_was_not_used_for_longest(
  origin, serve, tmp_path
):
  names = [origin.put(bytes([n]) * 1000) for n in range(5)]
  client, _ = serve(max_bytes=3500)
  for name in names[:3]:
    client.get(name)
  client.get(names[0])
  client.get(names[3])
  kept = set(os.listdir(tmp_path / 'cache' / 'objects'))
  assert kept == {names[0], names[2], names[3]}
  # A smaller cache in a new life, and an object that is larger than it.
  small, _ = serve(max_bytes=500)
  assert not os.listdir(tmp_path / 'cache' / 'objects')
  assert small.get(names[4]) == bytes([4]) * 1000
  assert os.listdir(tmp_path / 'cache' / 'objects') == [names[4]]
  # What another program deletes meanwhile is no trouble.
  (tmp_path / 'cache' / 'objects' / names[0]).symlink_to('nowhere')
  assert small.get(names[3]) == bytes([3]) * 1000


def test_what_lands_is_not_what_others_make_room_with(origin, tmp_path):
  first, second = origin.put(DATA), origin.put(DATA[1:])

  class Upstream(store.Store):
    def get_file(self, name, *args, **named):
      length = super().get_file(name, *args, **named)
      if name == first:
        assert opened.fetch(second).result(20) == len(DATA) - 1
      return length

  opened = relay.Relay(Upstream(origin.url), tmp_path / 'cache', max_bytes=1)
  with contextlib.closing(opened):
    assert opened.fetch(first).result(20) == len(DATA)
    with opened.open(first) as file:
      assert file.read() == DATA


# Bundles.


def _weights(seed):
  generator = np.random.default_rng(seed)
  return {'w': generator.integers(0, 2**16, (256, 1024)).astype(np.uint16)}


def _blocks(arrays):
  for name, array in arrays.items():
    index = tuple((0, side) for side in array.shape)
    yield identity.Block(
      name=name,
      dtype=array.dtype.name,
      shape=array.shape,
      index=index,
      values=array,
    )


@pytest.fixture
def publisher(origin):
  return publish.Publisher(origin, 'run', KEY, threads=1)


def test_a_new_bundle_is_fetched_before_anyone_asks(
  origin, serve, publisher, tmp_path
):
  publisher.publish(_blocks(_weights(0)), 0)
  publisher.publish(_blocks(_weights(1)), 1)
  data, _ = origin.read_pointer('run')
  pointer = manifest.unseal(data, KEY, 'run')
  bundle = manifest.Manifest.from_bytes(origin.get(pointer.manifest))
  wanted = {pointer.manifest, pointer.index, *(p for p, _ in bundle.packs)}
  client, opened = serve()
  client.read_pointer('run')
  _until(lambda: set(os.listdir(tmp_path / 'cache' / 'objects')) >= wanted)
  assert set(os.listdir(tmp_path / 'cache' / 'objects')) == wanted
  # Of a pointer that names nothing, nothing is made.
  opened._fetch_bundle(b'seal\n{"manifest": "../x", "index": 3}')
  opened._fetch_bundle(b'seal\n[]')
  opened._fetch_bundle(b'\xff\n\xff')


@pytest.mark.parametrize('clusters', [4, 16])
def test_egress_is_one_bundle_whatever_the_number_of_clusters(
  origin, serve, publisher, clusters
):
  publisher.publish(_blocks(_weights(0)), 0)
  clients = []
  for number in range(clusters):
    above = clients[(number - 1) // 2] if number else origin
    clients.append(serve(above, f'cache{number}', poll_s=0.02)[0])
  subscribers = [
    subscribe.Subscriber(c, 'run', KEY, threads=1) for c in clients
  ]
  with concurrent.futures.ThreadPoolExecutor(clusters) as pool:
    for version in 0, 1:
      if version:
        origin.traffic.bytes_read = 0
        info = publisher.publish(_blocks(_weights(1)), 1)
        published = origin.traffic.bytes_read  # its own reading back
      list(pool.map(_follow, subscribers, [version] * clusters))
  egress = origin.traffic.bytes_read - published
  assert info.bytes <= egress <= 1.05 * info.bytes
  for client in clients:
    assert client.traffic.bytes_read >= info.bytes


def _follow(subscriber, version):
  def arrived():
    subscriber.poll()
    assert subscriber.problem is None
    return subscriber.held is not None and subscriber.held.version == version

  _until(arrived)
  np.testing.assert_array_equal(
    subscriber.held.weights.arrays()['w'], _weights(version)['w']
  )


# Servers that are no relays.


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
    client = store.Store(url + '/', options=ONCE)
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
    client = store.Store(url, options=ONCE)
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
    client = store.Store(url, options=ONCE)
    with pytest.raises(ValueError, match='damaged'):
      client.get('0' * 64, limit=2**25)
    assert client.traffic.bytes_read == len(bomb)


def test_a_server_that_tells_no_length_is_said_to():
  with _serving(functools.partial(_Answer, headers=[], data=b'')) as url:
    with pytest.raises(OSError, match='does not tell its length'):
      store.Store(url, options=ONCE).length('0' * 64)


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


def test_a_port_that_is_taken_is_named_before_anything_is_said(origin, serve):
  client, opened = serve()
  port = int(client.url.rpartition(':')[2])
  said = []
  with pytest.raises(ValueError, match=f'127.0.0.1:{port} .*another --port'):
    relay.serve(opened, '127.0.0.1', port, said.append)
  assert said == []


NO_EXTRA = """
import sys
sys.modules['uvicorn'] = None
from composer_jax.delta import relay, store
assert not {'jax', 'starlette', 'aiohttp'} & set(sys.modules)
try:
  relay.serve(relay.Relay(store.Store(sys.argv[1]), sys.argv[1]), '', 0)
except ValueError as error:
  print(error)
"""


def test_a_missing_extra_is_named_with_its_cure(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', NO_EXTRA, str(tmp_path)],
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  assert 'uvicorn' in done.stdout
  assert 'pip install "composer_jax[relay]"' in done.stdout
