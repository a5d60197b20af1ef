"""A store in a real S3 server that fails in the ways that servers do."""

import hashlib
import logging
import os

import numpy as np
import pytest
from botocore import exceptions

from composer_jax.delta import (
  identity,
  publish,
  retries,
  signing,
  store,
  store_backend,
  subscribe,
)
from tests.delta import s3_server

PIECE = store_backend.PIECE_BYTES


@pytest.fixture(scope='module')
def server():
  with s3_server.run() as running:
    yield running


@pytest.fixture(autouse=True)
def calm(server):
  server.trouble.clear()


@pytest.fixture
def waits():
  return []


@pytest.fixture
def place(server, tmp_path, waits):
  name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
  opened = store.Store(
    f's3://{s3_server.BUCKET}/{name}',
    retries=retries.Policy(attempts=3, base_s=0.5),
    sleep=waits.append,
  )
  opened.exists('0' * 64)  # connects
  server.seen.clear()
  return opened


@pytest.mark.parametrize('trouble', [503, 'drop', 'lose'])
def test_trouble_that_passes_costs_a_logged_wait(
  place, server, waits, caplog, trouble
):
  # The HTTP client itself repeats once what met a lost connection.
  trouble = [trouble] * (2 if isinstance(trouble, str) else 1)
  with caplog.at_level(logging.WARNING):
    server.trouble[:] = ['ok', *trouble * 2]  # a look comes first
    name = place.put(b'content')
    server.trouble[:] = trouble
    assert place.get(name) == b'content'
    server.trouble[:] = trouble * 2
    assert place.get_range(name, 2, 5) == b'nte'
    server.trouble[:] = trouble
    assert place.length(name) == 7
    server.trouble[:] = trouble
    assert place.sizes() == {name: 7}
  assert len(waits) == 7
  assert all(0.25 <= wait_s <= 1 for wait_s in waits)
  told = [r.getMessage() for r in caplog.records if 'attempt' in r.getMessage()]
  assert len(told) == 7
  assert (
    f'{place.url}/objects/{name}: writing failed (attempt 2 of 3)' in (told[1])
  )
  assert place.traffic.bytes_written == 7
  assert place.traffic.requests == 14


@pytest.mark.parametrize(
  'error, again',
  [
    (exceptions.ConnectTimeoutError(endpoint_url='x'), True),
    (exceptions.ReadTimeoutError(endpoint_url='x'), True),
    (exceptions.EndpointConnectionError(endpoint_url='x'), True),
    (exceptions.ConnectionClosedError(endpoint_url='x'), True),
    (exceptions.ProxyConnectionError(proxy_url='x'), True),
    (exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), True),
    (exceptions.SSLError(endpoint_url='x', error='certificate'), False),
    (exceptions.NoCredentialsError(), False),
  ],
)
def test_what_clients_raise_of_networks_may_pass(error, again):
  assert retries.is_transient(error) == again


def test_half_an_answer_is_not_taken_for_the_whole(place, server, waits):
  name = place.put(bytes(1000))
  server.trouble[:] = ['cut', 'cut']
  assert place.get(name, 1000) == bytes(1000)
  assert len(waits) == 2


def test_trouble_that_stays_is_told_with_its_place_and_cure(
  place, server, waits
):
  name = place.put(b'content')
  server.seen.clear()
  server.trouble[:] = [503] * 10
  with pytest.raises(
    retries.GaveUp,
    match='reading failed 3 times.*Service Unavail.*Check that the server',
  ) as caught:
    place.get(name)
  assert caught.value.filename == f'{place.url}/objects/{name}'
  assert len(server.seen) == 3 and len(waits) == 2


@pytest.mark.parametrize(
  'status, error, words',
  [
    (403, PermissionError, 'credentials'),
    (400, OSError, 'failed'),
  ],
)
def test_a_refusal_is_not_tried_again(
  place, server, waits, status, error, words
):
  server.trouble[:] = [status] * 10
  with pytest.raises(error, match=words) as caught:
    place.get('0' * 64)
  assert caught.value.filename.startswith(place.url)
  assert len(server.seen) == 1 and not waits


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
  restarted = []

  def sleep(_):
    if not restarted:
      server.start()
    restarted.append(1)

  patient = store.Store(place.url, sleep=sleep)
  patient.exists(name)
  server.stop()
  assert patient.get(name) == b'before'
  assert len(restarted) == 1


def test_what_is_intact_is_not_sent_again(place, server):
  name = place.put(b'content')
  server.seen.clear()
  place.put(b'content')
  assert [(m, n) for m, _, n in server.seen] == [('HEAD', 0)]
  assert place.traffic.bytes_written == 7
  # One as long, with another sum.
  place._backend.fs.pipe_file(f'{place.url}/objects/{name}', b'Content')
  place.put(b'content')
  assert place.get(name) == b'content'


def test_an_old_object_is_made_young_without_sending_it(place, server):
  name = place.put(b'content')
  server.age(2 * store.GRACE_S)
  server.seen.clear()
  place.put(b'content')
  assert [n for _, _, n in server.seen] == [0, 0]
  assert place.delete([name]) == []
  server.age(2 * store.GRACE_S)
  assert place.delete([name]) == [name]
  assert not place.exists(name)


def test_many_objects_are_deleted_in_few_requests(place, server):
  names = [place.put(b'%d' % n) for n in range(5)]
  server.seen.clear()
  assert place.delete(names[1:], grace_s=0) == names[1:]
  assert server.count('POST', '?delete') == 1
  assert list(place.sizes()) == names[:1]


# The pointer.


@pytest.mark.parametrize('tag', [None, 'seen'])
def test_a_move_whose_answer_was_lost_is_not_a_conflict(
  place, server, waits, tag
):
  if tag:
    tag = place.move_pointer('run', b'first', None)
  else:
    place.move_pointer('other', b'first', None)  # tries the conditions
  server.trouble[:] = ['lose', 'lose']
  moved = place.move_pointer('run', b'second', tag)
  assert len(waits) == 1
  assert place.read_pointer('run') == (b'second', moved)
  # But another's move under the same circumstances is.
  server.trouble[:] = [500]
  with pytest.raises(store.Conflict):
    place.move_pointer('run', b'third', tag)


def test_a_pointer_that_was_deleted_is_a_conflict(place):
  tag = place.move_pointer('run', b'first', None)
  place._backend.delete(['refs/run/latest'], 0)
  with pytest.raises(store.Conflict):
    place.move_pointer('run', b'second', tag)


@pytest.mark.parametrize('answer', ['ok', 501])
def test_a_server_that_does_not_mind_conditions_is_told(
  place, server, caplog, answer
):
  server.minds_conditions = False
  server.trouble[:] = ['ok', answer]
  try:
    with caplog.at_level(logging.WARNING):
      tag = place.move_pointer('run', b'first', None)
    assert 'does not mind If-Match' in caplog.text
    place.move_pointer('run', b'second', tag)
    with pytest.raises(store.Conflict):
      place.move_pointer('run', b'third', tag)
    assert place.run_ids() == ['run']
  finally:
    server.minds_conditions = True


# Long files, of two pieces and a bit.


@pytest.fixture(scope='module')
def long_file(tmp_path_factory):
  path = tmp_path_factory.mktemp('long') / 'file'
  path.write_bytes(os.urandom(1 << 20) * 33)
  return path


def test_a_long_file_moves_in_pieces_each_retried_alone(
  place, server, waits, long_file, tmp_path
):
  length = long_file.stat().st_size
  server.trouble[:] = ['ok', 'ok', 500, 503]
  name, _ = place.put_file(long_file)
  assert len(waits) == 2
  sent = sum(count for _, path, count in server.seen if 'partNumber' in path)
  assert length < sent <= length + 2 * PIECE + 10_000
  server.seen.clear()
  assert place.put_file(long_file) == (name, length)
  assert sum(count for _, _, count in server.seen) == 0

  # A subscriber that dies after two pieces, and its successor.
  server.trouble[:] = ['ok', 'ok', *[503] * 3]
  with pytest.raises(retries.GaveUp, match='does not move twice'):
    place.get_file(name, length, tmp_path / 'file')
  assert not (tmp_path / 'file').exists()
  before = place.traffic.bytes_read
  place.get_file(name, length, tmp_path / 'file')
  assert place.traffic.bytes_read - before == length - 2 * PIECE
  assert (tmp_path / 'file').read_bytes() == long_file.read_bytes()


def test_an_upload_whose_last_answer_was_lost_is_complete(
  place, server, waits, long_file
):
  server.trouble[:] = ['ok'] * 5 + ['lose']
  name, length = place.put_file(long_file)
  assert len(waits) == 1
  assert place.length(name) == length


def test_unfinished_uploads_are_ended(place, server, long_file):
  server.trouble[:] = ['ok', 'ok', *[500] * 20]
  with pytest.raises(retries.GaveUp, match='writing failed'):
    place.put_file(long_file)
  server.trouble.clear()
  listed = lambda: place._backend.fs.call_s3(
    'list_multipart_uploads', Bucket=s3_server.BUCKET
  ).get('Uploads', [])
  assert len(listed()) == 1  # the server would not end it, either
  # This server dates them all to 2010.
  place.delete([], grace_s=1e9)
  assert len(listed()) == 1
  place.delete([])
  assert not listed()


def test_uploads_of_other_programs_are_left_alone(server, caplog):
  place = store.Store(f's3://{s3_server.BUCKET}')
  other = dict(Bucket=s3_server.BUCKET, Key='theirs/film')
  call = place._backend.fs.call_s3
  upload = call('create_multipart_upload', **other)['UploadId']
  place.delete([])
  call('abort_multipart_upload', UploadId=upload, **other)
  # To list them is a permission of its own, without which objects still go.
  name = place.put(b'content')
  server.trouble[:] = ['ok', 403]
  assert place.delete([name], grace_s=0) == [name]
  assert 'Unfinished uploads stay: ' in caplog.text


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
  place, server, waits
):
  key = signing.Hmac(b'sixteen bytes ..')
  publisher = publish.Publisher(place, 'run', key, grace_s=0, threads=1)
  reader = store.Store(place.url, sleep=waits.append)
  subscriber = subscribe.Subscriber(reader, 'run', key, threads=1)
  for version in range(3):
    # Every other request of publisher and subscriber, in turn.
    server.trouble[:] = ['ok', 503, 'ok', 500, 'ok', 429] * 3
    published = publisher.publish(_blocks(version), version)
    server.trouble[:] = ['ok', 503, 'ok', 500] * 2
    update = subscriber.poll()
    assert subscriber.problem is None
    assert update.target_id == published.target_id
    (block,) = _blocks(version)
    np.testing.assert_array_equal(update.weights.arrays()['w'], block.values)
  assert len(waits) > 6
  server.trouble.clear()
  # And another publisher of the same run is told, and spoils nothing.
  other = publish.Publisher(
    store.Store(place.url), 'run', key, grace_s=0, threads=1
  )
  publisher.publish(_blocks(3), 3)
  with pytest.raises(ValueError, match='publisher'):
    other.publish(_blocks(4), 3)
  assert subscriber.poll().version == 3
  objects = len(place.sizes())
  publisher.gc(1)
  assert 0 < len(place.sizes()) < objects
  late = subscribe.Subscriber(reader, 'run', key, threads=1)
  assert late.poll().target_id == subscriber.held.target_id
