"""What a kill leaves is gone on with, and never taken for anything else."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

from composer_jax.core import files
from composer_jax.hf import exporting, importing, making, staging
from composer_jax.hf.tensors import files as hf_io
from tests.hf import checkpoints, tiny

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DEEPSEEK = tiny.MODELS['deepseek_v3']
QWEN = tiny.MODELS['qwen3_moe']

# Each child kills itself at the n-th call of a function, in the middle of its
# work. Children are forked before jax has threads, so it is imported once.
_KILLED = """
  import json, os, pathlib, signal, sys
  from composer_jax.hf import exporting as hf_export, importing as hf_import
  from composer_jax.hf.tensors import files as hf_io

  def kill(out, name, count):
    module = hf_io if hasattr(hf_io, name) else os
    original, left = getattr(module, name), count

    def killed(*args, **kwargs):
      nonlocal left
      left -= name != 'replace' or str(args[-1]) == out
      if left:
        return original(*args, **kwargs)
      if name == 'write_fully':
        os.pwrite(args[0], args[1][: len(args[1]) // 2], args[2])
      os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, killed)

  for source, out, name, count in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
      kill(out, name, count)
      if pathlib.Path(source, hf_import.RECORD).exists():
        hf_export.write(hf_export.of_import(source), out)
      else:
        hf_import.convert(source, out)
      os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, (source, name)
"""


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
  """Kills imports and an export; a source, its import, and their folder."""
  root = tmp_path_factory.mktemp('killed')
  arrays = checkpoints.tensors(DEEPSEEK) | checkpoints.EXTRA
  source = checkpoints.write(root / 'hf', DEEPSEEK, arrays, num_files=2)
  importing.convert(source, root / 'whole')
  runs = [
    # Import: the 70th chunk, the 5th array that moves to orbax, the last steps.
    *((source, 'write_fully', 70), (source, 'rename', 5)),
    *((source, 'sync_tree', 1), (source, 'replace', 1)),
    # Export: the 30th piece of a tensor, the last step.
    *((root / 'whole', 'write_fully', 30), (root / 'whole', 'sync_tree', 1)),
  ]
  listed = [
    (str(a), str(root / f'{a.name}_{name}'), name, n) for a, name, n in runs
  ]
  run = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(_KILLED), json.dumps(listed)],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    timeout=120,
  )
  assert run.returncode == 0, run.stderr
  return source, root / 'whole', root


@pytest.mark.parametrize(
  'function', ['write_fully', 'rename', 'sync_tree', 'replace']
)
def test_a_killed_import_goes_on_where_it_was(killed, monkeypatch, function):
  source, whole, root = killed
  out = root / f'hf_{function}'
  assert not out.exists()
  with pytest.raises(ValueError, match='not a finished import'):
    importing.open_weights(out)
  begun = []
  begin = staging.Staging.begin

  def spy(self, tensor):
    begun.append(tensor)
    begin(self, tensor)

  monkeypatch.setattr(staging.Staging, 'begin', spy)
  # Another source, whose files have the same sizes and headers, is refused.
  other = root / f'other_{function}'
  arrays = checkpoints.tensors(DEEPSEEK, seed=1) | checkpoints.EXTRA
  checkpoints.write(other, DEEPSEEK, arrays, num_files=2)
  with pytest.raises(ValueError, match='partial was begun from another'):
    importing.convert(other, out)
  assert not begun
  importing.convert(source, out)
  assert checkpoints.content(out) == checkpoints.content(whole)
  assert not out.with_name(f'{out.name}.partial').exists()
  # Finished tensors are not repeated, unless they had moved to orbax.
  is_within = function in ('write_fully', 'rename')
  num_tensors = len(checkpoints.tensors(DEEPSEEK))
  assert len(begun) in (range(1, num_tensors - 20) if is_within else (0,))


@pytest.mark.parametrize('function', ['write_fully', 'sync_tree'])
def test_a_killed_export_begins_anew(killed, monkeypatch, function):
  """Also if there is room only after the old content was deleted."""
  source, whole, root = killed
  out = root / f'whole_{function}'
  left = root / f'{out.name}.exporting' / 'composer_jax_export'
  assert not out.exists() and os.listdir(left)
  total = sum(path.stat().st_size for path in source.iterdir())
  usage = shutil.disk_usage(root)

  def free(_):
    return usage._replace(free=0 if left.exists() else total)

  with monkeypatch.context() as patch:
    patch.setattr(shutil, 'disk_usage', free)
    exporting.write(exporting.of_import(whole), out)
  for path in source.iterdir():
    assert (out / path.name).read_bytes() == path.read_bytes()
  assert len(os.listdir(out)) == len(os.listdir(source))
  assert not left.parent.exists()


def _make(kind, killed, out):
  source, whole, _ = killed
  if kind == 'partial':
    importing.convert(source, out)
  else:
    exporting.write(exporting.of_import(whole), out)


@pytest.mark.parametrize('kind', ['partial', 'exporting'])
def test_a_folder_of_others_is_not_worked_in(tmp_path, killed, kind):
  """Nothing is deleted there either."""
  foreign = tmp_path / f'out.{kind}' / 'thesis.txt'
  files.write_atomic(foreign, b'mine')
  with pytest.raises(ValueError, match=f"out.{kind} .*holds 'thesis.txt'"):
    _make(kind, killed, tmp_path / 'out')
  assert [p for p in tmp_path.rglob('*') if p.is_file()] == [foreign]


@pytest.mark.parametrize('kind', ['partial', 'exporting'])
def test_of_two_processes_the_second_is_refused(tmp_path, killed, kind):
  """Also if the first finished between the check and the lock."""
  out = tmp_path / 'out'
  with (
    files.alone(tmp_path / f'out.{kind}'),
    pytest.raises(ValueError, match='Another process'),
  ):
    _make(kind, killed, out)
  partial = tmp_path / f'out.{kind}'
  (partial / 'lock').unlink()
  partial.rmdir()
  out.mkdir()
  with (
    pytest.raises(ValueError, match='out exists; choose another --out'),
    making.alone(partial, out),
  ):
    raise AssertionError
  assert os.listdir(tmp_path) == ['out']
  out.rmdir()
  out.symlink_to('nowhere')
  with pytest.raises(ValueError, match='out exists; choose another --out'):
    _make(kind, killed, out)


@pytest.mark.parametrize('kind', ['partial', 'exporting'])
def test_a_full_disk_says_what_to_do_and_that_helps(
  tmp_path, killed, monkeypatch, kind
):
  write, calls = hf_io.write_fully, []

  def fill(*args):
    calls.append(args)
    if len(calls) == 9:
      raise OSError(errno.ENOSPC, 'No space left on device')
    write(*args)

  monkeypatch.setattr(hf_io, 'write_fully', fill)
  with pytest.raises(
    OSError, match=f'space and run the same command.*out.{kind}'
  ) as error:
    _make(kind, killed, tmp_path / 'out')
  assert error.value.errno == errno.ENOSPC
  _make(kind, killed, tmp_path / 'out')
  assert os.listdir(tmp_path) == ['out']


def test_a_source_that_changed_meanwhile_is_refused(tmp_path, monkeypatch):
  """Its config, or bytes of a tensor, which sizes and headers do not tell."""
  source = checkpoints.write(tmp_path / 'hf', QWEN, checkpoints.tensors(QWEN))

  def stop(*_):
    raise KeyError('killed')

  with monkeypatch.context() as patch:
    patch.setattr(staging.Staging, 'save', stop)
    with pytest.raises(KeyError):
      importing.convert(source, tmp_path / 'ours')
  text = (source / 'config.json').read_text()
  (source / 'config.json').write_text(text.replace('100.0', '200.0'))
  with pytest.raises(ValueError, match='ours.partial was begun from another'):
    importing.convert(source, tmp_path / 'ours')
  (source / 'config.json').write_text(text)
  data = bytearray((source / hf_io.SINGLE).read_bytes())
  data[-1] ^= 1
  (source / hf_io.SINGLE).write_bytes(data)
  with pytest.raises(ValueError, match='ours.partial was begun from another'):
    importing.convert(source, tmp_path / 'ours')
