"""Any HTTP cache may stand between a store and its followers.

The laws are checked behind the least of caches and behind nginx.
"""

import concurrent.futures
import os
import threading
import time
import urllib.error
import urllib.request

import pytest

from benchmarks import delta_servers
from composer_jax.delta import follower as followers
from composer_jax.delta.store import objects as store
from tests.delta import bundles

ONCE = {'retry_config': {'max_retries': 1}}
needs_nginx = pytest.mark.skipif(
  not delta_servers.has_nginx(), reason='no nginx: apt-get install nginx-light'
)
either = pytest.mark.parametrize(
  'kind',
  [delta_servers.Cache, pytest.param(delta_servers.Nginx, marks=needs_nginx)],
)


@pytest.fixture
def origin(run):
  with delta_servers.Origin(run.store.root) as origin:
    yield origin


def _follow(cache):
  """A new follower's weights; what it refuses is an error."""
  follower = followers.Follower(
    store.Store(cache.url, options=ONCE), 'run', bundles.SIGNER
  )
  update = follower.poll()
  assert follower.problem is None
  bundles.assert_same_bits(update, bundles.weights(1))


def _objects(origin):
  return [path for path, _ in origin.asked if path.startswith('/objects/')]


def _until(condition):
  while not condition():
    time.sleep(0.01)


@either
def test_the_second_follower_costs_the_origin_a_pointer(kind, run, origin):
  with kind(origin.url) as cache:
    _follow(cache)
    assert _objects(origin)
    origin.asked.clear()
    _follow(cache)
  pointer, _ = run.store.read_pointer('run')
  assert sum(sent for _, sent in origin.asked) <= len(pointer)
  assert not _objects(origin)


def _flip(data):
  return data[:-1] + bytes([data[-1] ^ 1])


@either
@pytest.mark.parametrize('change', [_flip, lambda data: bytes(len(data))])
def test_what_the_cache_damaged_is_read_past_and_stored_anew(
  kind, change, origin
):
  with kind(origin.url) as cache:
    _follow(cache)
    cache.damage(change)
    origin.asked.clear()
    _follow(cache)
    assert _objects(origin)
    origin.asked.clear()
    _follow(cache)
    assert not _objects(origin)


@pytest.mark.parametrize(
  'kind',
  [
    delta_servers.Cache,
    # On a busy machine its idle connections end before they are used again.
    pytest.param(delta_servers.Nginx, marks=[needs_nginx, pytest.mark.slow]),
  ],
)
def test_what_the_cache_cut_short_is_read_past(kind, origin):
  # Only then nginx ends the connection, and nothing else tells of the cut.
  soon = {'keepalive_timeout 5s;': 'keepalive_timeout 50ms;'}
  options = [soon] if kind is delta_servers.Nginx else []
  with kind(origin.url, *options) as cache:
    _follow(cache)
    for change in lambda data: data[:-1], lambda data: b'':
      cache.damage(change)
      _follow(cache)


@either
def test_damage_that_the_origin_served_once_does_not_stay(kind, run, origin):
  name = run.edges[-1].manifest
  path = run.store.root / 'objects' / name
  intact = path.read_bytes()
  with kind(origin.url) as cache:
    reader = store.Store(cache.url, options=ONCE)
    path.write_bytes(_flip(intact))
    follower = followers.Follower(reader, 'run', bundles.SIGNER)
    assert follower.poll() is None
    assert name in follower.problem and 'damaged' in follower.problem
    path.write_bytes(intact)
    assert follower.poll().version == 1
    _follow(cache)


@either
def test_what_is_behind_a_cache_is_a_store_to_read(kind, run, origin, tmp_path):
  data = bytes(range(256)) * 100
  name = run.store.put(data)
  with kind(origin.url) as cache:
    client = store.Store(cache.url, options=ONCE)
    assert client.get(name) == client.get(name, length=len(data)) == data
    assert client.get_range(name, 100, 300) == data[100:300]
    with pytest.raises(ValueError, match='from 25599 to 25601'):
      client.get_range(name, len(data) - 1, len(data) + 1)
    with pytest.raises(ValueError, match='from 99999 to 100000'):
      client.get_range(name, 99999, 100000)
    with pytest.raises(FileNotFoundError, match='0' * 64):
      client.get('0' * 64)
    assert client.read_pointer('another') is None
    assert client.read_pointer('run')[0] == run.store.read_pointer('run')[0]
  assert client.root is None and not client.is_writable
  for refused in (
    lambda: client.put(b'x'),
    lambda: client.move_pointer('run', b'x', None),
    lambda: client.delete([name]),
    client.sizes,
    client.run_ids,
  ):
    with pytest.raises(ValueError, match='can only be read'):
      refused()


# What configs/delta/nginx.conf promises beyond that.


@pytest.fixture
def nginx(origin):
  with delta_servers.Nginx(origin.url) as nginx:
    yield nginx


class _TakesErrors(urllib.request.HTTPErrorProcessor):
  def http_response(self, request, response):
    return response


def _get(url, **headers):
  opener = urllib.request.build_opener(_TakesErrors)
  with opener.open(urllib.request.Request(url, headers=headers)) as answer:
    return answer.status, answer.headers, answer.read()


@needs_nginx
def test_nginx_asks_once_however_many_ask(run, origin, nginx):
  name = run.store.put(bytes(range(256)) * 1000)
  arrived, go = threading.Event(), threading.Event()

  def wait(path):
    arrived.set()
    assert go.wait(20)

  origin.before = wait
  client = store.Store(nginx.url, options=ONCE)
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    futures = [pool.submit(client.get, name) for _ in range(64)]
    assert arrived.wait(20)
    go.set()
    assert len({future.result(20) for future in futures}) == 1
  assert origin.asked == [(f'/objects/{name}', 256_000)]


@needs_nginx
def test_nginx_fetches_the_slices_that_are_asked_for(run, origin, nginx):
  side = 8 * 2**20
  data = bytes(range(251)) * (2 * side // 251 + 1000)
  name = run.store.put(data)
  url = f'{nginx.url}/objects/{name}'
  for asked, status, body, slices in (
    (f'bytes={side + 5}-{side + 9}', 206, data[side + 5 : side + 10], 1),
    (f'bytes={side - 5}-{side + 9}', 206, data[side - 5 : side + 10], 2),
    (f'bytes={len(data) - 3}-', 206, data[-3:], 3),
    (f'bytes={len(data) - 3}-{len(data) + 9}', 206, data[-3:], 3),
    ('bytes=0-1,3-4', 200, data, 3),
    ('nonsense', 200, data, 3),
  ):
    found = _get(url, Range=asked)
    assert (found[0], found[2]) == (status, body), asked
    assert len(origin.asked) == slices, asked
    # A store makes old objects young again when they are published once more.
    os.utime(run.store.root / 'objects' / name)
  assert _get(url, Range=f'bytes={len(data)}-')[0] == 416
  assert sum(sent for _, sent in origin.asked) == len(data)
  _, headers, _ = _get(url)
  assert headers['Cache-Control'] == 'public, max-age=31536000, immutable'
  assert headers['ETag'] is None


@needs_nginx
def test_nginx_serves_a_store_and_nothing_else(run, origin, nginx):
  (run.store.root / 'other').write_text('x')
  assert _get(f'{nginx.url}/other')[0] == 404
  assert _get(f'{nginx.url}/objects/../other')[0] == 404
  assert origin.asked == []
  request = urllib.request.Request(f'{nginx.url}/refs/run/latest', b'x')
  with pytest.raises(urllib.error.HTTPError, match='403'):
    urllib.request.urlopen(request)


@needs_nginx
def test_a_pointer_passes_nginx_in_a_second_and_outlives_the_origin(
  run, origin, nginx
):
  client = store.Store(nginx.url, options=ONCE)
  name = run.edges[-1].manifest
  client.get(name)
  _, headers, _ = _get(f'{nginx.url}/refs/run/latest')
  assert headers['Cache-Control'] == 'no-store'
  _, tag = run.store.read_pointer('run')
  run.store.move_pointer('run', b'moved', tag)
  _until(lambda: client.read_pointer('run')[0] == b'moved')

  refused = []

  def refuse(path):
    refused.append(path)
    raise ConnectionError

  origin.before = refuse

  def stands():
    assert client.read_pointer('run')[0] == b'moved'
    return refused

  _until(stands)
  assert client.get(name)
  assert set(refused) == {'/refs/run/latest'}


@needs_nginx
@pytest.mark.slow
def test_what_nginx_keeps_is_bounded(run, origin):
  with delta_servers.Nginx(
    origin.url, {'max_size=200g': 'max_size=1m'}
  ) as nginx:
    client = store.Store(nginx.url, options=ONCE)
    for number in range(8):
      client.get(run.store.put(bytes([number]) * 500_000))
    assert len(nginx.files()) > 2
    # Its manager looks every ten seconds.
    _until(lambda: len(nginx.files()) <= 2)
