"""Files are whole or absent, readable as usual, and damage is named."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from composer_jax.core import files

KILLED = """
import os, signal, sys
from composer_jax.core import files
def hook(event, arguments):
  if event == 'os.rename':
    os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
files.write_atomic(sys.argv[1], b'torn')
"""


@pytest.mark.parametrize('umask', [0o022, 0o027, 0o077])
def test_a_file_has_the_mode_that_the_umask_leaves(tmp_path, umask):
  before = os.umask(umask)
  try:
    files.write_atomic(tmp_path / 'ours', b'1')
    (tmp_path / 'plain').write_bytes(b'1')
  finally:
    os.umask(before)
  modes = [
    stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ('ours', 'plain')
  ]
  assert modes == [0o666 & ~umask] * 2


def test_what_a_killed_write_leaves_is_swept_and_nothing_else(tmp_path):
  path = tmp_path / 'groups' / '00000003.npz'
  files.write_atomic(path, b'whole')
  done = subprocess.run([sys.executable, '-c', KILLED, str(path)], timeout=60)
  assert done.returncode == -9
  assert path.read_bytes() == b'whole'
  (torn,) = set(path.parent.iterdir()) - {path}
  kept = [path]
  for name in ('.notes.tmp', 'a.0123456789abcdef.tmp', '.a.0123456789ab.tmp'):
    kept.append(path.parent / name)
    kept[-1].write_bytes(b'')
  assert files.sweep(tmp_path) == [torn]
  assert set(path.parent.iterdir()) == set(kept)


@pytest.mark.parametrize('age', [None, 60.0])
def test_a_half_made_folder_is_swept_with_all_it_holds(tmp_path, age):
  building = tmp_path / 'keyframes' / '.made.0123456789abcdef.tmp'
  inner = building / '.file.0123456789abcdef.tmp'
  inner.parent.mkdir(parents=True)
  inner.write_bytes(b'half')
  made = tmp_path / 'keyframes' / 'made'
  made.mkdir()
  if age:
    assert files.sweep(tmp_path, age) == []
    for path in (inner, building):
      os.utime(path, (0, 0))
  assert files.sweep(tmp_path, age) == [building]
  assert list(made.parent.iterdir()) == [made]


def test_an_error_names_the_path_the_size_and_the_cure(tmp_path):
  files.write_atomic(tmp_path / 'file', b'whole')
  # A parent that is a file, a name that is too long, a target that is a folder.
  (tmp_path / 'folder').mkdir()
  for name in ('file/inner', 'x' * 300, 'folder'):
    with pytest.raises(OSError, match='Cannot write 4 bytes.*--workdir') as e:
      files.write_atomic(tmp_path / name, b'data')
    assert e.value.filename == str(tmp_path / name)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['file', 'folder']
  assert (tmp_path / 'file').read_bytes() == b'whole'


LOCKED = """
import os, signal, subprocess, sys
from composer_jax.core import files
with files.alone(sys.argv[1]):
  child = subprocess.Popen(['sleep', '60'], stdout=-3, close_fds=False)
  print(child.pid, flush=True)
  os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_kernel_frees_the_lock_of_a_killed_run(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', LOCKED, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
    timeout=60,
  )
  assert done.returncode == -signal.SIGKILL
  # A child process outlives the run and does not hold the lock.
  child = int(done.stdout)
  try:
    os.kill(child, 0)
    assert (tmp_path / 'lock').read_text()
    with files.alone(tmp_path):
      pass
  finally:
    os.kill(child, signal.SIGKILL)


def test_a_lock_is_held_by_one_and_names_it(tmp_path):
  with files.alone(tmp_path):
    actual = (
      rf'process \({os.getpid()} on .*runs in workdir {tmp_path}.*another'
    )
    with pytest.raises(ValueError, match=actual):
      with files.alone(tmp_path):
        pass
  # The file has nothing that differs between runs.
  assert (tmp_path / 'lock').read_bytes() == b''
