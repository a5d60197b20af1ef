"""Republishing, rewinding, collecting, and being killed at any moment."""

import json
import subprocess
import sys

import numpy as np
import pytest

from composer_jax.delta import publish, subscribe
from composer_jax.delta import store as store_lib


def weights(version, seed=0):
  rng = np.random.default_rng(seed)
  return {
    'a': (rng.normal(size=300) + version).astype(np.float32),
    'b': np.full((3, 4), version, np.float16),
  }


def blocks(arrays):
  for name, array in arrays.items():
    ends = tuple((0, length) for length in array.shape)
    yield name, str(array.dtype), array.shape, ends, array


@pytest.fixture
def store(tmp_path):
  return store_lib.Store(tmp_path / 'store')


def files_of(store):
  paths = [p for p in store.root.rglob('*') if p.is_file()]
  return {p: p.read_bytes() for p in paths}


def served(store):
  subscriber = subscribe.Subscriber(store, 'run')
  update = subscriber.poll()
  assert update is not None, subscriber.problem
  return update


def test_republishing_changes_nothing(store):
  publisher = publish.Publisher(store, 'run')
  infos = [publisher.publish(blocks(weights(v)), v) for v in range(3)]
  before = files_of(store)
  for p in (publisher, publish.Publisher(store, 'run')):
    for v in (0, 2):
      assert p.publish(blocks(weights(v)), v) == infos[v]
  assert files_of(store) == before


def test_other_weights_under_a_version_are_refused(store):
  publisher = publish.Publisher(store, 'run')
  for v in range(3):
    publisher.publish(blocks(weights(v)), v)
  before = files_of(store)
  for v in (1, 2):
    with pytest.raises(ValueError, match=rf'version {v} with other.*rewind'):
      publisher.publish(blocks(weights(v, seed=1)), v)
  assert files_of(store) == before
  assert publisher.publish(blocks(weights(3)), 3).kind == 'delta'


@pytest.mark.parametrize('given', [True, False])
def test_reopened_publisher_continues_the_chain(store, given):
  info = publish.Publisher(store, 'run').publish(blocks(weights(0)), 0)
  base = blocks(weights(0)) if given else None
  publisher = publish.Publisher(store, 'run', base_blocks=base)
  assert publisher.version == 0
  after = publisher.publish(blocks(weights(1)), 1)
  assert (after.kind, after.base_id) == ('delta', info.target_id)


def test_given_base_blocks_of_other_weights_are_ignored(store):
  publish.Publisher(store, 'run').publish(blocks(weights(0)), 0)
  publisher = publish.Publisher(store, 'run', base_blocks=blocks(weights(9)))
  assert publisher.publish(blocks(weights(1)), 1).kind == 'delta'
  np.testing.assert_array_equal(served(store).weights['a'], weights(1)['a'])


def test_rewind_voids_later_versions_and_receivers_follow(store):
  publisher = publish.Publisher(store, 'run')
  ids = [publisher.publish(blocks(weights(v)), v).target_id for v in range(4)]
  subscriber = subscribe.Subscriber(store, 'run')
  assert subscriber.poll().version == 3
  resumed = publish.Publisher(store, 'run')
  resumed.rewind(1)
  update = subscriber.poll()
  assert (update.version, update.target_id) == (1, ids[1])
  # Bit-equal training gives the same identity again, other training another.
  assert resumed.publish(blocks(weights(2)), 2).target_id == ids[2]
  assert subscriber.poll().target_id == ids[2]
  other = resumed.publish(blocks(weights(3, seed=5)), 3)
  assert other.base_id == ids[2] != ids[3]
  assert subscriber.poll().target_id == other.target_id
  resumed.rewind(7)  # nothing later was published
  assert resumed.version == 3


def test_rewind_past_all_kept_versions_starts_a_new_chain(store):
  publisher = publish.Publisher(store, 'run')
  for v in (5, 6):
    publisher.publish(blocks(weights(v)), v)
  subscriber = subscribe.Subscriber(store, 'run')
  subscriber.poll()
  publisher.rewind(2)
  assert publisher.version is None
  assert subscriber.poll() is None and subscriber.held.version == 6
  info = publisher.publish(blocks(weights(2)), 2)
  assert (info.kind, info.base_id) == ('key', '')
  assert subscriber.poll().target_id == info.target_id


def damage(store, part):
  """Damages a part of the last version."""
  pointer = store.pointer('run')
  path = store.objects / pointer.manifest
  if part == 'pack':
    path = store.objects / store.manifest(pointer.manifest).objects[0][0]
  elif part == 'base':
    previous = store.manifest(pointer.manifest).previous
    path = store.objects / store.manifest(previous).objects[0][0]
  elif part == 'pointer':
    path = store.pointer_path('run')
  path.write_bytes(b'rot')


@pytest.mark.parametrize('last', [1, 2])
@pytest.mark.parametrize('part', ['manifest', 'pack', 'base', 'pointer'])
def test_a_resumed_trainer_heals_the_version_it_resumes_from(store, part, last):
  publisher = publish.Publisher(store, 'run')
  for v in range(last + 1):
    publisher.publish(blocks(weights(v)), v)
  subscriber = subscribe.Subscriber(store, 'run')
  subscriber.poll()
  damage(store, part)
  resumed = publish.Publisher(store, 'run')
  resumed.rewind(1)
  info = resumed.publish(blocks(weights(1)), 1)
  joined = served(store)
  assert (joined.version, joined.target_id) == (1, info.target_id)
  np.testing.assert_array_equal(joined.weights['a'], weights(1)['a'])
  # So does who followed all along, and nothing stands in the way of the next.
  update = subscriber.poll()
  assert subscriber.problem is None and update.target_id == info.target_id
  assert resumed.publish(blocks(weights(2)), 2).kind == 'delta'
  assert subscriber.poll().version == served(store).version == 2


@pytest.mark.parametrize('given', [True, False])
def test_publishing_the_last_version_again_heals_it(store, given):
  publisher = publish.Publisher(store, 'run')
  for v in range(2):
    publisher.publish(blocks(weights(v)), v)
  damage(store, 'pack')
  if given:
    base = blocks(weights(1))
    publisher = publish.Publisher(store, 'run', base_blocks=base)
  with pytest.raises(ValueError, match='version 1 with other.*rewind'):
    publisher.publish(blocks(weights(1, seed=1)), 1)
  assert publisher.publish(blocks(weights(1)), 1).kind == 'key'
  assert served(store).version == 1


def test_live_publisher_replaces_a_damaged_pointer(store):
  publisher = publish.Publisher(store, 'run')
  publisher.publish(blocks(weights(0)), 0)
  subscriber = subscribe.Subscriber(store, 'run')
  subscriber.poll()
  damage(store, 'pointer')
  assert subscriber.poll() is None and 'damaged' in subscriber.problem
  publisher.publish(blocks(weights(1)), 1)
  assert subscriber.poll().version == 1


def test_second_publisher_is_noticed(store):
  one, two = (publish.Publisher(store, 'run') for _ in range(2))
  one.publish(blocks(weights(0)), 0)
  with pytest.raises(ValueError, match='another publisher moved the pointer'):
    two.publish(blocks(weights(1)), 1)


def test_gc_keeps_what_the_last_versions_need(store):
  publisher = publish.Publisher(store, 'run', keyframe_every=3)
  for v in range(8):  # keyframes 0, 3, 6
    publisher.publish(blocks(weights(v)), v)
  (store.objects / '.torn.tmp').write_bytes(b'torn')
  other = publish.Publisher(store, 'other')
  other.publish(blocks(weights(50)), 0)
  assert publisher.gc(3) > 0  # 7, 6, 5, and 4 and 3 below 5
  # Manifests and packs of five versions, of which one is the other run's.
  assert len(list(store.objects.iterdir())) == 2 * 6
  assert publisher.gc(3) == 0
  np.testing.assert_array_equal(served(store).weights['a'], weights(7)['a'])
  assert publisher.publish(blocks(weights(8)), 8).kind == 'delta'
  with pytest.raises(ValueError, match='nor kept .the oldest is 3'):
    publisher.publish(blocks(weights(1)), 1)
  publisher.rewind(4)
  assert served(store).version == 4
  with pytest.raises(ValueError, match='keep must be at least 1'):
    publisher.gc(0)


def test_gc_deletes_nothing_when_the_chain_is_damaged(store):
  publisher = publish.Publisher(store, 'run')
  for v in range(3):
    publisher.publish(blocks(weights(v)), v)
  newest = store.manifest(store.pointer('run').manifest)
  (store.objects / newest.previous).write_bytes(b'rot')
  before = files_of(store)
  with pytest.raises(ValueError, match='manifest is damaged'):
    publisher.gc(1)
  assert files_of(store) == before


# Each child is killed by the kernel at its k-th file operation: an audit hook
# counts what really happens, nothing is replaced by a stand-in.
CRASH = """
import json, os, resource, signal, sys

from tests.delta import publish_test as t
from composer_jax.delta import publish, store as store_lib

def child(work):
  pid = os.fork()
  if not pid:
    work()
    os._exit(0)
  return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def killed(root, at, version):
  def work():
    publisher = publish.Publisher(store_lib.Store(root), 'run')
    count = [0]
    def hook(event, arguments):
      if event in ('open', 'os.rename', 'os.mkdir'):
        count[0] += 1
        if count[0] == at:
          os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    publisher.publish(t.blocks(t.weights(version)), version)
  return child(work)

results = []
for version in (0, 1):
  at = 1
  while True:
    store = store_lib.Store(f'{root}/{{version}}-{{at}}')
    if version:
      publish.Publisher(store, 'run').publish(t.blocks(t.weights(0)), 0)
    code = killed(store.root, at, version)
    seen = store.pointer('run')
    standing = seen and t.served(store).version
    again = publish.Publisher(store, 'run')
    info = again.publish(t.blocks(t.weights(version)), version)
    after = again.publish(t.blocks(t.weights(version + 1)), version + 1)
    update = t.served(store)
    again.gc(99)
    results.append(dict(
        version=version, code=code, committed=seen and seen.version,
        target=info.target_id, chained=after.base_id, served=update.target_id,
        last=after.target_id, kind=after.kind, standing=standing,
        rewinds=store.pointer('run').rewinds,
        torn=len(list(store.objects.glob('.*')))))
    if code == 0:
      break
    at += 1
print(json.dumps(results))
"""


def run_python(code):
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def test_kill_at_any_file_operation_then_publish_again(tmp_path):
  code = CRASH.format(root=str(tmp_path))
  results = run_python(code)
  for version in (0, 1):
    rows = [r for r in results if r['version'] == version]
    assert [r['code'] for r in rows] == [-9] * (len(rows) - 1) + [0]
    assert len(rows) > 8
    assert len({r['target'] for r in rows}) == 1
    # Before the rename of the pointer the old version stands, then the new.
    before = None if version == 0 else 0
    assert {r['committed'] for r in rows} == {before, version}
    for r in rows:
      assert (r['standing'], r['rewinds']) == (r['committed'], 0)
      assert (r['chained'], r['served']) == (r['target'], r['last'])
      assert (r['kind'], r['torn']) == ('delta', 0)


FULL = """
import json, resource, signal
from tests.delta import publish_test as t
from composer_jax.delta import publish, store as store_lib
store = store_lib.Store({root!r})
publisher = publish.Publisher(store, 'run')
publisher.publish(t.blocks(t.weights(0)), 0)
before = t.files_of(store)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
try:
  publisher.publish(t.blocks(t.weights(1, seed=3)), 1)
except OSError as error:
  message = str(error)
same = t.files_of(store) == before
served = t.served(store).version
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
kind = publisher.publish(t.blocks(t.weights(1, seed=3)), 1).kind
print(json.dumps([message, same, served, kind, t.served(store).version]))
"""


def test_full_disk_is_a_clear_error_and_loses_nothing(tmp_path):
  message, same, served_version, kind, last = run_python(
    FULL.format(root=str(tmp_path))
  )
  assert 'Cannot write' in message and 'untouched' in message
  assert (same, served_version, kind, last) == (True, 0, 'delta', 1)
