"""A store in a real S3 server that fails in the ways that servers do."""

import datetime
import hashlib
import os
import threading

import numpy as np
import pytest

from composer_jax.delta import chain
from composer_jax.delta import follower as followers
from composer_jax.delta.format import identity, keys
from composer_jax.delta.store import objects as store
from tests.delta import s3_server


@pytest.fixture(scope='module')
def server():
  with s3_server.run() as running:
    yield running


@pytest.fixture(autouse=True)
def calm(server):
  server.trouble.clear()


RETRY = {
  'max_retries': 2,
  'backoff': {
    'init_backoff': datetime.timedelta(milliseconds=5),
    'max_backoff': datetime.timedelta(milliseconds=10),
  },
}


@pytest.fixture
def place(server, tmp_path):
  name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
  opened = store.Store(
    f's3://{s3_server.BUCKET}/{name}', options={'retry_config': RETRY}
  )
  opened.read_pointer('run')  # connects
  server.seen.clear()
  return opened


@pytest.mark.parametrize('trouble', [503, 429, 'drop', 'lose'])
def test_trouble_that_passes_is_waited_for(place, server, trouble):
  server.trouble[:] = [trouble, trouble]
  name = place.put(b'content')
  for ask, answer in (
    (lambda: place.get(name), b'content'),
    (lambda: place.get_range(name, 2, 5), b'nte'),
    (place.sizes, {name: 7}),
  ):
    server.seen.clear()
    server.trouble[:] = [trouble, trouble]
    assert ask() == answer
    assert len(server.seen) == 3


def test_half_an_answer_is_not_taken_for_the_whole(place, server):
  name = place.put(bytes(1000))
  server.trouble[:] = ['cut', 'cut']
  assert place.get(name, 1000) == bytes(1000)
  assert not server.trouble


@pytest.mark.parametrize('trouble', [503, 'drop', 'cut'])
def test_trouble_that_stays_is_told_with_its_place_and_cure(
  place, server, trouble
):
  name = place.put(b'content')
  server.seen.clear()
  server.trouble[:] = [trouble] * 10
  with pytest.raises(
    ConnectionError, match='reading failed.*Check that the server'
  ) as caught:
    place.get(name)
  assert caught.value.filename == f'{place.url}/objects/{name}'
  assert len(server.seen) == 3


@pytest.mark.parametrize(
  'status, error, words',
  [
    (401, PermissionError, 'credentials'),
    (403, PermissionError, 'credentials'),
    (400, OSError, 'failed'),
  ],
)
def test_a_refusal_is_not_tried_again(place, server, status, error, words):
  server.trouble[:] = [status] * 10
  with pytest.raises(error, match=words) as caught:
    place.get('0' * 64)
  assert caught.value.filename.startswith(place.url)
  assert len(server.seen) == 1


def test_a_bucket_that_is_not_there_is_not_an_empty_store(server):
  place = store.Store('s3://nobody-made-this')
  for ask in (
    lambda: place.read_pointer('run'),
    lambda: place.put(b'x'),
    place.sizes,
  ):
    with pytest.raises(ValueError, match='no such bucket; make it'):
      ask()


def test_a_server_that_restarts_is_waited_for(server, place):
  name = place.put(b'before')
  retry = {'backoff': {'init_backoff': datetime.timedelta(milliseconds=200)}}
  patient = store.Store(place.url, options={'retry_config': retry})
  patient.get(name)
  server.stop()
  restarting = threading.Timer(0.3, server.start)
  restarting.start()
  assert patient.get(name) == b'before'
  restarting.join()


def test_who_has_no_credentials_is_told_which(server, monkeypatch):
  monkeypatch.delenv('AWS_ACCESS_KEY_ID')
  monkeypatch.delenv('AWS_SECRET_ACCESS_KEY')
  monkeypatch.setenv('AWS_METADATA_ENDPOINT', 'http://127.0.0.1:1')
  url, options = f's3://{s3_server.BUCKET}', {'retry_config': RETRY}
  with pytest.raises(PermissionError, match='credentials in its environment'):
    store.Store(url, options=options).read_pointer('run')
  monkeypatch.setenv('AWS_SKIP_SIGNATURE', 'true')
  assert store.Store(url, options=options).read_pointer('run') is None


def test_options_go_before_the_environment(server, monkeypatch):
  endpoint = os.environ['AWS_ENDPOINT_URL']
  monkeypatch.setenv('AWS_ENDPOINT_URL', 'http://127.0.0.1:1')
  url = f's3://{s3_server.BUCKET}'
  place = store.Store(url, options={'endpoint': endpoint})
  assert place.read_pointer('run') is None
  with pytest.raises(ValueError, match="opened: .*'nonsense' is not valid"):
    store.Store(url, options={'nonsense': 1})


def test_an_old_object_is_made_young_by_putting_it_again(place, server):
  name = place.put(b'content')
  server.age(2 * store.GRACE_S)
  place.put(b'content')
  assert place.delete([name]) == []
  server.age(2 * store.GRACE_S)
  assert place.delete([name]) == [name]
  assert name not in place.sizes()


def test_many_objects_are_deleted_in_few_requests(place, server):
  names = [place.put(b'%d' % n) for n in range(5)]
  server.seen.clear()
  assert place.delete(names[1:], grace_s=0) == names[1:]
  assert server.count('POST', '?delete') == 1
  assert list(place.sizes()) == names[:1]


# The pointer.


def test_a_pointer_that_was_deleted_is_a_conflict(place):
  tag = place.move_pointer('run', b'first', None)
  place._backend.delete(['refs/run/latest'], 0)
  with pytest.raises(store.Conflict):
    place.move_pointer('run', b'second', tag)


# A run.


def _blocks(seed):
  values = np.random.default_rng(seed).integers(0, 2**16, (64, 1024))
  yield identity.Block(
    name='w',
    dtype='uint16',
    shape=(64, 1024),
    index=((0, 64), (0, 1024)),
    values=values.astype(np.uint16),
  )


def test_a_run_goes_through_a_bucket_whatever_befalls_its_requests(
  place, server
):
  key = keys.Hmac(b'sixteen bytes ..')
  options = chain.BundleOptions(grace_s=0, threads=1, keyframe_every=2)
  publisher = chain.BundleWriter(place, 'run', key, options=options)
  reader = store.Store(place.url, options={'retry_config': RETRY})
  receiver = followers.Follower(reader, 'run', key, threads=1)
  for version in range(3):
    # Every other request of publisher and subscriber, in turn.
    server.trouble[:] = ['ok', 503, 'ok', 500, 'ok', 429] * 3
    published = publisher.publish(_blocks(version), version)
    server.trouble[:] = ['ok', 503, 'ok', 500] * 2
    update = receiver.poll()
    assert receiver.problem is None
    assert update.target_id == published.target_id
    (block,) = _blocks(version)
    np.testing.assert_array_equal(update.arrays()['w'], block.values)
  server.trouble.clear()
  # And another publisher of the same run is told, and spoils nothing.
  other = chain.BundleWriter(
    store.Store(place.url), 'run', key, options=options
  )
  publisher.publish(_blocks(3), 3)
  with pytest.raises(ValueError, match='publisher'):
    other.publish(_blocks(4), 3)
  assert receiver.poll().version == 3
  objects = len(place.sizes())
  publisher.gc(1)
  assert 0 < len(place.sizes()) < objects
  late = followers.Follower(reader, 'run', key, threads=1)
  assert late.poll().target_id == receiver.held.target_id
