"""Checkpoints are whole and verified, and never destroy earlier ones."""

import contextlib
import errno
import gc
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.delta import checkpoints as bundle_checkpoints
from composer_jax.hf.tensors import stored as hf_stored
from composer_jax.train.checkpoints import manager

# A refused restore leaves coroutines that warn when they are collected.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning',
  'ignore:coroutine .* was never awaited:RuntimeWarning',
)

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]


def _tree(seed=0):
  values = np.random.default_rng(seed).normal(size=(8, 64)).astype(np.float32)
  return {
    'params': {'layers': {'up': jnp.asarray(values)}},
    'half': jnp.asarray(values[0], jnp.bfloat16),
    'step': jnp.int32(seed),
  }


def _like(tree):
  return jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
    tree,
  )


@pytest.fixture(autouse=True)
def collected():
  """Collects what a restore left, so that no other code does.

  It holds descriptors, and printing its traceback while Python 3.11 compiles a
  module ends the process (cpython issue 106905).
  """
  yield
  gc.collect()


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Two checkpoints, of steps 1 and 2."""
  checkpoints = manager.Checkpoints(tmp_path_factory.mktemp('two'), keep=2)
  for step in (1, 2):
    checkpoints.save(step, _tree(step), {'position': [step, 'x']})
  checkpoints.wait()
  yield checkpoints
  checkpoints.close()


def test_round_trip(written):
  assert written.steps() == [1, 2]
  for step in (1, 2):
    tree, data = written.restore(step, _like(_tree()))
    jax.tree.map(np.testing.assert_array_equal, tree, _tree(step))
    assert data == {'position': [step, 'x']}


def test_restores_onto_another_mesh(written):
  mesh = jax.make_mesh((len(jax.devices()),), ('fsdp',))
  sharding = NamedSharding(mesh, P('fsdp'))
  like = _like(_tree())
  up = like['params']['layers']['up']
  like['params']['layers']['up'] = jax.ShapeDtypeStruct(
    up.shape, up.dtype, sharding=sharding
  )
  tree, _ = written.restore(2, like)
  restored = tree['params']['layers']['up']
  assert restored.sharding == sharding
  np.testing.assert_array_equal(restored, _tree(2)['params']['layers']['up'])


def test_donation_after_save_does_not_reach_the_checkpoint(tmp_path):
  bump = jax.jit(lambda t: jax.tree.map(lambda a: a + 1, t), donate_argnums=0)
  checkpoints = manager.Checkpoints(tmp_path, keep=1)
  tree, expected = _tree(3), _tree(3)
  checkpoints.save(3, tree)
  jax.block_until_ready(bump(tree))
  restored, _ = checkpoints.restore(3, _like(expected))
  jax.tree.map(np.testing.assert_array_equal, restored, expected)
  checkpoints.close()


def test_only_the_newest_are_kept(tmp_path):
  checkpoints = manager.Checkpoints(tmp_path, keep=2)
  for step in (1, 2, 3):
    checkpoints.save(step, {'a': jnp.full(3, step)})
  checkpoints.close()
  assert manager.Checkpoints(tmp_path, keep=2).steps() == [2, 3]


def test_parts_of_an_array_can_be_read_without_the_whole(tmp_path):
  checkpoints = manager.Checkpoints(tmp_path, keep=1)
  tree = {'a': jnp.arange(2**19, dtype=jnp.float32).reshape(512, 1024)}
  checkpoints.save(1, tree, chunk_bytes=2**20)
  checkpoints.wait()
  stored = hf_stored.Stored(checkpoints, 1)
  stored.verify('a')
  chunk = stored._array('a').chunk_layout.read_chunk.shape
  assert 4 * chunk[0] * chunk[1] == 2**20
  restored, _ = checkpoints.restore(1, _like(tree))
  np.testing.assert_array_equal(restored['a'], tree['a'])
  checkpoints.close()


def test_a_reader_changes_nothing(tmp_path):
  """A reader leaves a partial checkpoint of another process alone."""
  reader = manager.Checkpoints(tmp_path / 'none', keep=None)
  assert reader.latest_step() is None
  reader.close()
  assert not os.listdir(tmp_path)
  checkpoints = manager.Checkpoints(tmp_path, keep=1)
  checkpoints.save(1, _tree(1))
  checkpoints.close()
  (tmp_path / '2.orbax-checkpoint-tmp').mkdir()
  reader = manager.Checkpoints(tmp_path, keep=None)
  assert reader.steps() == [1]
  tree, _ = reader.restore(1, _like(_tree()))
  reader.close()
  jax.tree.map(np.testing.assert_array_equal, tree, _tree(1))
  assert sorted(os.listdir(tmp_path)) == ['1', '2.orbax-checkpoint-tmp']


def test_flipped_bytes_in_any_file_never_restore_other_arrays(written):
  folder = written.directory / '2'
  refused = []
  for path in sorted(p for p in folder.rglob('*') if p.is_file()):
    original = path.read_bytes()
    damaged = bytearray(original)
    for at in range(0, len(damaged), max(len(damaged) // 8, 1)):
      damaged[at] ^= 1
    path.write_bytes(damaged)
    try:
      tree, data = written.restore(2, _like(_tree()))
    except manager.DamagedCheckpoint as error:
      refused.append(str(error))
    else:  # Bytes without effect: timestamps, superseded index nodes.
      jax.tree.map(np.testing.assert_array_equal, tree, _tree(2))
      assert data == {'position': [2, 'x']}
      assert len(original) < tree['params']['layers']['up'].nbytes, path
    path.write_bytes(original)
  assert len(refused) >= 3
  for part in ('step 2', str(folder), 'Delete', 'continues from step 1'):
    assert all(part in message for message in refused), part
  written.restore(2, _like(_tree()))


@pytest.mark.parametrize('text', ['null', '[]', '{"text": 1}', '{}'])
@pytest.mark.parametrize('part', ['data', 'hashes'])
def test_other_json_is_damage(written, part, text):
  path = written.directory / '2' / part / 'metadata'
  original = path.read_bytes()
  path.write_text(text)
  try:
    with pytest.raises(manager.DamagedCheckpoint, match='has changed'):
      written.restore(2, _like(_tree()))
  finally:
    path.write_bytes(original)


def test_the_cure_names_what_the_run_goes_on_from(tmp_path):
  checkpoints = manager.Checkpoints(tmp_path, keep=1, fallback='the moon')
  checkpoints.save(1, _tree(1))
  checkpoints.wait()
  (tmp_path / '1' / 'hashes' / 'metadata').write_text('{}')
  with pytest.raises(manager.DamagedCheckpoint, match='continues from the moo'):
    checkpoints.restore(1, _like(_tree()))
  checkpoints.close()


@contextlib.contextmanager
def _no_descriptors_left():
  """Takes every descriptor below the limit, gaps between open files too."""
  before = resource.getrlimit(resource.RLIMIT_NOFILE)
  highest = max(map(int, os.listdir('/proc/self/fd')))
  resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
  held = []
  try:
    while True:
      try:
        held.append(os.open(os.devnull, os.O_RDONLY))
      except OSError:
        break
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for descriptor in held:
      os.close(descriptor)


def test_too_many_open_files_are_not_called_damage(written):
  with (
    _no_descriptors_left(),
    pytest.raises(OSError, match='does not mean') as caught,
  ):
    written.restore(2, _like(_tree()))
  assert caught.value.errno == errno.EMFILE
  written.restore(2, _like(_tree()))


@pytest.fixture(scope='module')
def shared():
  """A checkpoint that another user may read."""
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o755)
    checkpoints = manager.Checkpoints(folder, keep=1)
    checkpoints.save(1, _tree(1))
    checkpoints.wait()
    yield checkpoints
    checkpoints.close()


@contextlib.contextmanager
def _ordinary_user():
  """Runs as an ordinary user, since root may read everything."""

  uid = os.geteuid()
  os.seteuid(uid or 65001)
  try:
    yield
  finally:
    os.seteuid(uid)


@pytest.mark.parametrize(
  'part', ['data', 'data/metadata', 'state', 'state/_METADATA', 'state/d']
)
def test_what_may_not_be_read_is_not_called_damage(shared, part):
  path = shared.directory / '1' / part
  mode = path.stat().st_mode
  path.chmod(0)
  try:
    with _ordinary_user(), pytest.raises(PermissionError, match='1'):
      shared.restore(1, _like(_tree()))
  finally:
    path.chmod(mode)
  with _ordinary_user():
    shared.restore(1, _like(_tree()))


def test_a_sharding_that_does_not_divide_is_not_called_damage(written):
  mesh = jax.make_mesh((3,), ('fsdp',), devices=jax.devices()[:3])
  like = _like(_tree())
  like['half'] = jax.ShapeDtypeStruct(
    (64,), jnp.bfloat16, sharding=NamedSharding(mesh, P('fsdp'))
  )
  with pytest.raises(ValueError, match='divi') as caught:
    written.restore(2, like)
  assert not isinstance(caught.value, manager.DamagedCheckpoint)


def test_changed_content_that_decodes_is_found_by_hash(tmp_path):
  # Orbax itself would accept this: another whole checkpoint's arrays.
  checkpoints = manager.Checkpoints(tmp_path, keep=2)
  for step in (1, 2):
    checkpoints.save(step, _tree(step), None)
  checkpoints.wait()
  (tmp_path / '2' / 'state').rename(tmp_path / 'away')
  (tmp_path / '1' / 'state').rename(tmp_path / '2' / 'state')
  with pytest.raises(manager.DamagedCheckpoint, match='the content of'):
    checkpoints.restore(2, _like(_tree()))
  checkpoints.close()


def test_other_shapes_are_named_not_called_damage(written):
  like = _like(_tree())
  like['extra'] = like['half']
  with pytest.raises(ValueError, match=r'1 differ, the first is extra') as e:
    written.restore(2, like)
  assert not isinstance(e.value, manager.DamagedCheckpoint)


def test_too_little_space_is_refused_before_writing(tmp_path, monkeypatch):
  checkpoints = manager.Checkpoints(tmp_path, keep=2)
  checkpoints.save(1, _tree(1))
  checkpoints.wait()
  monkeypatch.setattr(manager, '_DISK_MARGIN', 2**62)
  with pytest.raises(OSError, match=r'step 2 needs .*steps \[1\] are intact'):
    checkpoints.save(2, _tree(2))
  assert sorted(p.name for p in tmp_path.iterdir()) == ['1']
  checkpoints.close()


_FULL_DISK = """
import sys, jax, jax.numpy as jnp, numpy as np
from composer_jax.train.checkpoints import manager
manager._DISK_MARGIN = -2**40  # The space check passes: the write must fail.
def tree(seed):
  return {'a': jnp.asarray(np.random.default_rng(seed).normal(size=2**17))}
checkpoints = manager.Checkpoints(sys.argv[1] + '/run', keep=9)
try:
  for step in range(1, 9):
    checkpoints.save(step, tree(step))
  checkpoints.wait()
except OSError as error:
  print('errno', error.errno)
  print(error.strerror)
like = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
    tree(0))
again = manager.Checkpoints(sys.argv[1] + '/run', keep=9)
for step in again.steps():
  restored, _ = again.restore(step, like)
  assert (restored['a'] == tree(step)['a']).all()
print('intact', len(again.steps()))
"""


def test_full_disk_while_writing_keeps_earlier_checkpoints(tmp_path):
  probe = ['unshare', '-rm', 'mount', '-t', 'tmpfs', 'tmpfs', str(tmp_path)]
  if not sys.platform.startswith('linux') or (
    subprocess.run(probe, capture_output=True, check=False).returncode
  ):
    pytest.skip('no namespaces: cannot mount a tmpfs')
  script = tmp_path / 'fill.py'
  script.write_text(textwrap.dedent(_FULL_DISK))
  mounted = tmp_path / 'small'
  mounted.mkdir()
  command = (
    f'mount -t tmpfs -o size=2m tmpfs {mounted} && '
    f'exec {sys.executable} {script} {mounted}'
  )
  result = subprocess.run(
    ['unshare', '-rm', 'sh', '-c', command],
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, 'PYTHONPATH': str(REPOSITORY)},
  )
  assert result.returncode == 0, result.stderr[-2000:]
  assert f'errno {errno.ENOSPC}' in result.stdout
  assert 'are intact' in result.stdout
  assert int(result.stdout.split()[-1]) >= 1


def test_a_keyframe_and_a_checkpoint_begin_one_after_the_other(
  tmp_path, monkeypatch
):
  """Otherwise orbax confuses their numbers, and both wait five minutes."""
  inside, counts = [], []

  def save(*unused, **fields):
    inside.append(fields)
    counts.append(len(inside))
    time.sleep(0.1)
    inside.pop()

  checkpoints = manager.Checkpoints(tmp_path / 'checkpoints', keep=2)
  with contextlib.closing(checkpoints), monkeypatch.context() as patches:
    patches.setattr(ocp.Checkpointer, 'save', save)
    patches.setattr(ocp.CheckpointManager, 'save', save)
    arrays = jax.tree.map(np.asarray, trees.flatten_names(_tree()))
    thread = threading.Thread(
      target=bundle_checkpoints.write, args=(arrays, tmp_path / 'other')
    )
    thread.start()
    checkpoints.save(1, _tree())
    thread.join()
  assert counts == [1, 1]
