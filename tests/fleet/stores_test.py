"""Leases and groups in the stores that there are: folders, S3, HTTP to read."""

import contextlib

import pytest

from benchmarks import delta_servers
from composer_jax.delta.store import folder
from composer_jax.fleet.leases import documents
from composer_jax.fleet.leases import fleet_store as stores
from tests.delta import s3_server
from tests.fleet import worlds


@pytest.fixture
def bucket():
  pytest.importorskip('obstore')
  with s3_server.run() as server:
    yield server


def store_of(kind, tmp_path):
  where = {'folder': f'{tmp_path}/store', 's3': f's3://{s3_server.BUCKET}/a'}
  options = {'retry_config': {'max_retries': 2}} if kind == 's3' else {}
  return stores.FleetStore(where[kind], options=options)


@pytest.mark.parametrize('kind', ['folder', 's3'])
def test_a_run_goes_through_any_store(kind, tmp_path, bucket):
  world = worlds.World(tmp_path, store_of(kind, tmp_path))
  world.run([world.worker('a'), world.worker('b')])
  world.trainer.collect(4)
  world.trainer.close(is_over=True)
  assert world.trained == worlds.expected()
  assert world.ledger().totals() == {'trained': {'family': 6}}


@pytest.mark.parametrize(
  'kind',
  [
    lambda origin: contextlib.nullcontext(origin),
    pytest.param(
      delta_servers.Nginx,
      marks=pytest.mark.skipif(
        not delta_servers.has_nginx(),
        reason='no nginx: apt-get install nginx-light',
      ),
    ),
  ],
  ids=['http', 'nginx'],
)
def test_a_worker_reads_by_http_and_writes_behind(kind, tmp_path):
  behind = store_of('folder', tmp_path)
  world = worlds.World(tmp_path, behind)
  with contextlib.ExitStack() as stack:
    origin = stack.enter_context(delta_servers.Origin(behind.url))
    cache = stack.enter_context(kind(origin.url)) or origin
    cache = stores.FleetStore(getattr(cache, 'url', cache))
    docs = documents.RunDocuments(cache, worlds.KEY, 'policy', writes=behind)
    world.run([world.worker('far', docs=docs)])
  assert world.trained == worlds.expected()


@pytest.mark.parametrize('kind', ['folder', 's3'])
def test_keys_of_a_fleet_are_swapped_by_their_tag(kind, tmp_path, bucket):
  store, key, most = store_of(kind, tmp_path), 'fleet/r/ledger', 10**6
  assert store.read_tagged_at(key, most) is None
  first = store.swap_at(key, b'a' * 9000, None, most)
  with pytest.raises(folder.Conflict):
    store.swap_at(key, b'b', None, most)
  # Longer than a pointer, and equal in what a pointer may have.
  second = store.swap_at(key, b'a' * 9000 + b'c', first, most)
  with pytest.raises(folder.Conflict):
    store.swap_at(key, b'd', first, most)
  assert store.read_tagged_at(key, most) == (b'a' * 9000 + b'c', second)
  store.put_at('fleet/r/workers/w', b'x' * 5)
  assert store.find_at('fleet/r/workers/') == ['fleet/r/workers/w']
  with pytest.raises(ValueError, match='more than 4 bytes'):
    store.read_at('fleet/r/workers/w', 4)
  store.delete_at(['fleet/r/workers/w', 'fleet/r/workers/none'])
  assert store.read_at('fleet/r/workers/w', 5) is None


@pytest.mark.parametrize(
  'key',
  ['objects/x', 'fleet', 'fleet/../x', 'fleet//x', 'fleet/.x', '/fleet/x'],
)
def test_other_keys_are_refused(key, tmp_path):
  with pytest.raises(ValueError, match='is no key of a fleet'):
    store_of('folder', tmp_path).put_at(key, b'')
