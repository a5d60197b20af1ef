"""Laws of every store, and what a directory adds: locks, links and sweeping."""

import concurrent.futures
import errno
import hashlib
import os
import pathlib
import subprocess
import sys
import threading
import time

import obstore
import pytest

from composer_jax.delta.store import folder
from composer_jax.delta.store import objects as store
from tests.delta import s3_server

ABSENT = '0' * 64


@pytest.fixture(scope='module')
def s3():
  with s3_server.run() as server:
    yield server


@pytest.fixture(params=['local', 's3'])
def url(request, tmp_path):
  if request.param == 's3':
    request.getfixturevalue('s3')
  name = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
  return {
    'local': str(tmp_path / 'store'),
    's3': f's3://{s3_server.BUCKET}/{name}/deep',
  }[request.param]


@pytest.mark.parametrize('data', [b'', b'x', bytes(range(256)) * 40])
def test_an_object_comes_back_by_its_hash(url, data):
  places = store.Store(url)
  name = places.put(data)
  assert name == hashlib.sha256(data).hexdigest()
  assert places.put(data) == name
  again = store.Store(url)
  assert again.get(name) == again.get(name, length=len(data)) == data
  assert again.sizes() == {name: len(data)}
  with pytest.raises(FileNotFoundError, match=ABSENT):
    again.get(ABSENT)


def test_a_range_is_exact_or_an_error(url):
  place = store.Store(url)
  name = place.put(b'0123456789')
  assert place.get_range(name, 3, 7) == b'3456'
  assert place.get_range(name, 0, 10) == b'0123456789'
  for start, stop in (8, 12), (10, 11), (30, 40):
    with pytest.raises(ValueError, match=f'{name}: has . bytes from {start}'):
      place.get_range(name, start, stop)
  with pytest.raises(ValueError, match='range'):
    place.get_range(name, -1, 3)


def test_lengths_are_bounded_and_names_are_hashes(url):
  place = store.Store(url)
  name = place.put(b'0123456789')
  for kind, value, words in (
    ('length', 9, 'more than 9 bytes where 9 are expected'),
    ('length', 11, 'has 10 bytes where 11 are expected'),
    ('length', 0, 'more than 0 bytes where 0 are expected'),
  ):
    with pytest.raises(ValueError, match=words):
      place.get(name, **{kind: value})
  for bad in ('../refs/r/latest', name.upper(), name + '0', ''):
    with pytest.raises(ValueError, match='64 lower hex digits'):
      place.get(bad)


def test_a_damaged_object_is_refused_and_putting_it_again_heals(url):
  place = store.Store(url)
  data = b'sixteen bytes ..'
  name = place.put(data)
  for damaged in (b'Sixteen bytes ..', b'', b'longer than it should be'):
    _overwrite(place, f'objects/{name}', damaged)
    with pytest.raises(ValueError, match=f'{name}: '):
      place.get(name, length=len(data))
    assert place.put(data) == name
    assert place.get(name) == data


def _overwrite(place, key, data):
  if place.root is not None:
    (place.root / key).write_bytes(data)
  else:
    obstore.put(place._backend.store, key, data)


def test_the_pointer_moves_only_from_where_it_was_seen(url):
  place, other = store.Store(url), store.Store(url)
  assert place.read_pointer('run') is None
  assert place.run_ids() == []
  first = place.move_pointer('run', b'first', None)
  assert other.read_pointer('run') == (b'first', first)
  second = other.move_pointer('run', b'second', first)
  for tag in None, first:
    with pytest.raises(
      store.Conflict, match='run/latest.*Two must not publish'
    ):
      place.move_pointer('run', b'third', tag)
  assert place.read_pointer('run') == (b'second', second)
  place.move_pointer('other', b'one', None)
  assert place.run_ids() == ['other', 'run']
  _overwrite(place, 'refs/run/latest', bytes(5000))
  # What is too long is cut; unsealing refuses it.
  assert len(place.read_pointer('run')[0]) == 4097
  with pytest.raises(ValueError, match='run_id'):
    place.read_pointer('../run')


def test_of_many_that_move_the_pointer_at_once_one_wins(url):
  places = [store.Store(url) for _ in range(4)]
  together = threading.Barrier(4)

  def move(number, name, tag):
    together.wait()
    try:
      places[number].move_pointer('run', b'%s by %d' % (name, number), tag)
    except store.Conflict:
      return None
    return number

  tag = None
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    for name in b'first', b'second', b'third':
      jobs = [pool.submit(move, number, name, tag) for number in range(4)]
      (winner,) = {job.result() for job in jobs} - {None}
      data, tag = places[0].read_pointer('run')
      assert data == b'%s by %d' % (name, winner)


def test_messages_are_verified_and_dropped(url):
  place = store.Store(url)
  for name in 'v7.0', 'v7.1', 'v8.0':
    place.put_message('run', name, name.encode())
  assert place.get_message('run', 'v7.1') == b'v7.1'
  assert place.get_message('run', 'v7.2') is None
  place.drop_messages('run', but='v8.')
  assert place.get_message('run', 'v7.0') is None
  _overwrite(place, 'messages/run/v8.0', b'torn')
  with pytest.raises(ValueError, match='v8.0: this message is damaged'):
    place.get_message('run', 'v8.0')
  place.put_message('run', 'v8.0', b'')
  assert place.get_message('run', 'v8.0') == b''
  place.drop_messages('run')
  assert place.get_message('run', 'v8.0') is None


def test_young_objects_outlive_a_deletion(url):
  place = store.Store(url)
  names = [place.put(b'%d' % n) for n in range(3)]
  assert place.delete(names[:2]) == []
  assert place.delete([names[0], ABSENT], grace_s=0) == [names[0], ABSENT]
  assert sorted(place.sizes()) == sorted(names[1:])


# A directory.


@pytest.fixture
def local(tmp_path):
  return store.Store(tmp_path / 'store')


def _age(path, seconds):
  then = time.time() - seconds
  os.utime(path, (then, then))


def test_a_directory_has_three_names(tmp_path):
  paths = [tmp_path, str(tmp_path), f'file://{tmp_path}']
  assert [store.Store(p).root for p in paths] == [tmp_path] * 3


@pytest.mark.parametrize(
  'url',
  [
    '',
    's3:/b/x',
    's3:b',
    's3://',
    's3:///x',
    's3://b//x',
    'gs:/b',
    'memory://x',
    'file://',
  ]
  + [
    'direct:',
    'http:/host',
    'http://',
    'http://host/x?token=1',
    'https://host/#x',
  ],
)
def test_what_is_almost_a_url_does_not_become_a_directory(url):
  with pytest.raises(ValueError, match='names no store; take a directory'):
    store.Store(url)


def test_putting_an_old_object_again_saves_it_from_deletion(local):
  names = [local.put(data) for data in (b'wanted again', b'forgotten')]
  for name in names:
    _age(local.root / 'objects' / name, 2 * store.GRACE_S)
  local.put(b'wanted again')
  assert local.delete(names) == names[1:]
  assert list(local.sizes()) == names[:1]


def test_only_old_temporary_files_are_swept(local):
  local.put(b'object')
  young, old = (
    local.root / 'objects' / f'.name.{digit * 16}.tmp' for digit in '12'
  )
  young.write_bytes(b'')
  old.write_bytes(b'')
  _age(old, 3600)
  assert len(local.sizes()) == 1
  local.delete([], grace_s=0)
  assert young.exists() and not old.exists()
  assert len(local.sizes()) == 1


def test_what_is_no_file_is_refused_at_once(local):
  data = b'an object'
  path = local.root / 'objects' / local.put(data)
  for make in (os.mkfifo, os.mkdir, lambda p: os.symlink('/dev/zero', p)):
    path.rmdir() if path.is_dir() else path.unlink()
    make(path)
    with pytest.raises(OSError, match='regular|directory'):
      local.get(path.name, length=len(data))


def test_a_pointer_that_is_no_file_is_replaced(local):
  path = local.root / 'refs' / 'run' / 'latest'
  for make in (os.mkfifo, os.mkdir, lambda p: os.symlink(p, p)):
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    data, tag = local.read_pointer('run')
    assert data == b''
    local.move_pointer('run', b'sound', tag)
    assert local.read_pointer('run')[0] == b'sound'
    path.unlink()


def test_a_disk_that_fails_is_not_taken_for_a_damaged_pointer(
  local, monkeypatch
):
  def fail(path, flags):
    raise OSError(errno.EIO, 'Input/output error', path)

  with monkeypatch.context() as patch:
    patch.setattr(folder, '_no_wait', fail)
    with pytest.raises(OSError, match='Input/output'):
      local.read_pointer('run')
  assert local.read_pointer('run') is None


def test_a_folder_that_goes_during_a_look_is_no_trouble(local, monkeypatch):
  local.put(b'object')
  gone = local.root / 'objects' / 'gone'
  gone.mkdir()
  scandir = os.scandir

  def scan(path):
    if pathlib.Path(path) == gone and gone.exists():
      gone.rmdir()
    return scandir(path)

  monkeypatch.setattr(os, 'scandir', scan)
  for look in local.sizes, lambda: local.delete([]):
    look()
    gone.mkdir(exist_ok=True)


ABSENT_EXTRAS = """
import sys
from composer_jax.delta.store import objects as store
sys.modules.update(dict.fromkeys(('obstore', 'urllib3')))
for url in ('s3://b', 'gs://b', 'az://b', 'http://h', 'nosuch://x'):
  try:
    store.Store(url)
  except ValueError as error:
    print(error)
assert not {'jax', 'starlette'} & set(sys.modules)
"""


def test_a_missing_extra_is_named_with_its_cure():
  done = subprocess.run(
    [sys.executable, '-c', ABSENT_EXTRAS],
    capture_output=True,
    text=True,
    check=True,
  )
  lines = done.stdout.splitlines()
  for line in lines[:4]:
    assert "pip install -e '.[stores]'" in line
  assert "'nosuch://x' names no store" in lines[4]
