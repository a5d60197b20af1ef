"""Compiled kernels are cached, and never used after their sources changed."""

import os
import pathlib
import subprocess
import sys

import numba
import numpy as np
import pytest
from numba import types

from composer_jax.delta.codec import coding, model, scan

ADDEND = 1
SIGNATURE = types.int64(types.int64)


@scan.part
def addend():
  return ADDEND


def add(x):
  return x + addend()


def compiled(addend_=1):
  """The kernel, by a process in which another file has this constant."""
  global ADDEND
  ADDEND = addend_
  addend.recompile()
  return scan.compiled(SIGNATURE)(add)


def was_loaded(kernel):
  return bool(kernel.stats.cache_hits)


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setattr(numba.config, 'CACHE_DIR', str(tmp_path))
  return tmp_path


def test_kernels_are_compiled_once(cache):
  first, second = compiled(), compiled()
  assert (was_loaded(first), was_loaded(second)) == (False, True)
  assert first(1) == second(1) == 2


def test_change_in_another_file_compiles_anew(cache, monkeypatch):
  assert compiled()(1) == 2
  monkeypatch.setattr(model, 'SOURCES', b'changed')
  kernel = compiled(2)
  assert kernel(1) == 3 and not was_loaded(kernel)


def test_digest_covers_every_file_and_its_name(tmp_path, monkeypatch):
  folder = pathlib.Path(coding.__file__).parent
  names = [path.name for path in folder.glob('*.py')]
  assert {'scan.py', 'rans.py', 'model.py', 'coding.py'} <= set(names)
  for name in names:
    (tmp_path / name).write_bytes((folder / name).read_bytes())
  monkeypatch.setattr(model, '__file__', str(tmp_path / 'model.py'))
  assert model.digest_of_sources() == model.SOURCES
  digests = {model.SOURCES}
  for name in names:
    with (tmp_path / name).open('a') as file:
      file.write('#')
    digests.add(model.digest_of_sources())
  (tmp_path / names[0]).rename(tmp_path / 'other.py')
  digests.add(model.digest_of_sources())
  assert len(digests) == len(names) + 2


def test_signatures_do_not_share_a_file(cache):
  def indices():
    return {path.name for path in cache.rglob('*.nbi')}

  scan.compiled(SIGNATURE)(add)
  one = indices()
  scan.compiled(types.uint64(types.uint64))(add)
  two = indices()
  assert len(one) == 1 and len(two) == 2


def test_damaged_cache_is_not_needed(cache, caplog):
  compiled()
  for damage in (b'', b'\0' * 100, b'\x80\x05'):
    for path in cache.rglob('*.nb?'):
      path.write_bytes(damage)
    caplog.clear()
    assert compiled()(1) == 2
    assert 'compiled by every process anew' in caplog.text


def test_nowhere_to_cache_is_said_and_survived(monkeypatch, caplog):
  # As in a read-only installation without a home.
  monkeypatch.setattr(numba.config, 'CACHE_LOCATOR_CLASSES', 'ZipCacheLocator')
  assert compiled()(1) == 2
  assert 'NUMBA_CACHE_DIR names a folder' in caplog.text


def test_full_disk_is_survived(cache, monkeypatch, caplog):
  def replace(*args):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'replace', replace)
  assert compiled()(1) == 2
  assert 'No space left' in caplog.text


def check_bytes(env, processes):
  """Processes with these variables, at once, against this one's bytes."""
  code = (
    'import numpy as np; from composer_jax.delta.codec import coding;'
    'base = np.arange(5000, dtype=np.uint16);'
    'values = base ^ (base % 37 == 5); base, values = (a.view(np.float16) for'
    ' a in (base, values)); found = coding.encode(values, base);'
    'assert (coding.decode(*found, 5000, base.dtype, base).view(np.uint16) =='
    'values.view(np.uint16)).all(); print(found[0], found[1].hex())'
  )
  started = [
    subprocess.Popen(
      [sys.executable, '-c', code],
      env={**os.environ, **env},
      cwd=pathlib.Path(coding.__file__).parents[3],
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(processes)
  ]
  printed = {process.communicate()[0] for process in started}
  assert all(process.returncode == 0 for process in started)
  base = np.arange(5000, dtype=np.uint16)
  values = base ^ (base % 37 == 5)
  kind, blob = coding.encode(values.view(np.float16), base.view(np.float16))
  assert printed == {f'{kind} {blob.hex()}\n'}


@pytest.mark.slow
def test_plain_processors_make_the_same_bytes(tmp_path):
  check_bytes({'NUMBA_CPU_NAME': 'generic', 'NUMBA_OPT': '1'}, 1)


@pytest.mark.slow
def test_processes_may_fill_the_cache_at_once(tmp_path):
  check_bytes({'NUMBA_CACHE_DIR': str(tmp_path)}, 4)
  assert len(list(tmp_path.rglob('*.nbi'))) == len(
    list(tmp_path.rglob('*.nbc'))
  )
  assert not list(tmp_path.rglob('*.tmp*'))


def test_all_kernels_go_by_the_cache_of_this_module():
  folder = pathlib.Path(scan.__file__).parent
  for path in folder.glob('*.py'):
    if path.name != 'scan.py':
      assert 'jit' not in path.read_text(), path.name
