"""Publishers that are killed, run out of space, or write a bad checkpoint."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from composer_jax.delta import chunking
from composer_jax.delta.store import objects as stores
from tests.delta import publish_test as t

# Each child is killed by the kernel at its k-th file operation: an audit hook
# counts what really happens, nothing is replaced by a stand-in. The second
# version has a keyframe besides.
CRASH = """
import json, os, signal, sys
from composer_jax.delta.store import objects as stores

from tests.delta import publish_test as t

OPTIONS = dict(keyframe_every=2)

def child(work):
  pid = os.fork()
  if not pid:
    work()
    os._exit(0)
  return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def killed(root, at, version):
  def work():
    publisher = t.open_publisher(stores.Store(root), **OPTIONS)
    for v in range(version):
      publisher.publish(t.blocks(t.weights(v)), v)
    count = [0]
    def hook(event, arguments):
      if event in ('open', 'os.rename', 'os.mkdir', 'os.link', 'os.utime'):
        count[0] += 1
        if count[0] == at:
          os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    publisher.publish(t.blocks(t.weights(version)), version)
  return child(work)

results = []
for version in {versions}:
  at = 1
  while True:
    root = f'{root}/{{version}}-{{at}}'
    code = killed(root, at, version)
    store = stores.Store(root)
    seen = store.read_pointer('run') and t.pointer(store)
    standing = seen and t.served(store).version
    again = t.open_publisher(store, **OPTIONS)
    info = again.publish(t.blocks(t.weights(version)), version)
    after = again.publish(t.blocks(t.weights(version + 1)), version + 1)
    update = t.served(store)
    t.assert_same_bits(update, t.weights(version + 1))
    again.gc()
    t.assert_same_bits(t.served(store), t.weights(version + 1))
    results.append(dict(
        version=version, code=code, committed=seen and seen.version,
        target=info.target_id, chained=after.base_id, served=update.target_id,
        last=after.target_id, kind=after.kind, standing=standing,
        rewinds=t.pointer(store).rewinds, keys=(None, version) in t.spans(store)
    ))
    if code == 0:
      break
    at += {step}
print(json.dumps(results))
"""


def run_python(code):
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
  'versions, step',
  [((2,), 15), pytest.param((0, 1, 2), 1, marks=pytest.mark.slow)],
)
def test_kill_at_file_operations_then_publish_again(tmp_path, versions, step):
  results = run_python(
    CRASH.format(root=str(tmp_path), versions=versions, step=step)
  )
  for version in versions:
    rows = [r for r in results if r['version'] == version]
    assert [r['code'] for r in rows] == [-9] * (len(rows) - 1) + [0]
    assert len(rows) * step > 15
    assert len({r['target'] for r in rows}) == 1
    # Before the rename of the pointer the old version stands, then the new.
    before = None if version == 0 else version - 1
    assert {r['committed'] for r in rows} == {before, version}
    for r in rows:
      assert (r['standing'], r['rewinds']) == (r['committed'], 0)
      assert (r['chained'], r['served']) == (r['target'], r['last'])
      assert r['kind'] == 'delta'


FULL = """
import json, resource, signal
from tests.delta import publish_test as t
from composer_jax.delta.store import objects as stores
store = stores.Store({root!r})
publisher = t.open_publisher(store)
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
  assert 'File too large' in message
  assert (same, served_version, kind, last) == (True, 0, 'delta', 1)


class Failing(stores.Store):
  """Refuses the n-th write from when it is told to."""

  left: int | None = None

  def _count(self):
    if self.left is not None:
      self.left -= 1
      if self.left < 0:
        raise OSError(28, 'No space left on device')

  def put(self, data):
    self._count()
    return super().put(data)

  def move_pointer(self, run_id, data, tag):
    self._count()
    return super().move_pointer(run_id, data, tag)


@pytest.mark.parametrize('allowed', range(3))
def test_an_error_at_any_write_leaves_a_publisher_that_can_go_on(
  tmp_path, allowed
):
  # Pack, manifest, pointer; then a keyframe, which may fail quietly.
  store = Failing(tmp_path)
  publisher = t.open_publisher(store, keyframe_every=2)
  follower = t.joiner(store)
  for v in range(2):
    publisher.publish(t.blocks(t.weights(v)), v)
  before = store.read_pointer('run')
  store.left = allowed
  with pytest.raises(OSError, match='No space'):
    publisher.publish(t.blocks(t.weights(2)), 2)
  assert store.read_pointer('run') == before
  assert follower.poll().version == 1
  store.left = None
  info = publisher.publish(t.blocks(t.weights(2)), 2)
  assert info.kind == 'delta' and info.keyframe_bytes
  t.assert_same_bits(follower.poll(), t.weights(2))
  t.assert_same_bits(t.served(store), t.weights(2))


class Deaf(stores.Store):
  """Moves the pointer, but the answer is lost."""

  mute = False

  def move_pointer(self, run_id, data, tag):
    tag = super().move_pointer(run_id, data, tag)
    if self.mute:
      raise stores.Conflict('another publisher moved the pointer')
    return tag

  def read_pointer(self, run_id):
    if self.mute == 'wholly':
      raise OSError(110, 'Connection timed out')
    return super().read_pointer(run_id)


@pytest.mark.parametrize('first', ['publish', 'gc'])
def test_a_lost_answer_is_asked_for(tmp_path, first):
  store = Deaf(tmp_path)
  publisher = t.open_publisher(store, keyframe_every=1)
  publisher.publish(t.blocks(t.weights(0)), 0)
  store.mute = True
  assert publisher.publish(t.blocks(t.weights(1)), 1).version == 1
  assert t.served(stores.Store(tmp_path)).version == 1

  class Cut:
    def __iter__(self):
      store.mute = 'wholly'
      yield from t.blocks(t.weights(2))

  with pytest.raises(ValueError, match='another publisher'):
    publisher.publish(Cut(), 2)
  # Nobody knew; the store does.
  store.mute = False
  if first == 'gc':
    publisher.gc(1)
    assert t.served(store).version == 2
  assert publisher.publish(t.blocks(t.weights(2)), 2).kind == 'delta'
  assert publisher.publish(t.blocks(t.weights(3)), 3).kind == 'delta'
  t.assert_same_bits(t.served(store), t.weights(3))


def test_an_error_leaves_no_thread_at_work(tmp_path, monkeypatch):
  """Not even while someone holds the error: in it are the frames it passed."""
  monkeypatch.setattr(chunking, 'PACK_BYTES', 1)
  store = Failing(tmp_path)
  publisher = t.open_publisher(store)

  def publish(version):
    named = {f'w{n}': np.full(3, version, np.float32) for n in range(30)}
    publisher.publish(t.blocks(named), version)

  publish(0)
  store.left = 0
  with pytest.raises(OSError, match='No space') as found:
    publish(1)
  names = [thread.name for thread in threading.enumerate()]
  assert found.value.__traceback__ is not None
  assert not [name for name in names if name.startswith('delta_')]
