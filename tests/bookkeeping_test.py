"""The test suite itself: which skips are allowed; how the XLA cache heals."""

import os
import sys

import pytest
import zstandard

from tests import conftest


def test_only_named_reasons_may_skip(pytestconfig, monkeypatch):
  skips = [
    ('a', 'no GPU'),
    ('b', 'no namespaces: refused'),
    ('c', 'takes too long'),
    ('d', 'unconditional skip'),
  ]

  def forbidden():
    allowed = conftest._allowed(pytestconfig)
    return [place for place, _ in conftest._forbidden(skips, allowed)]

  monkeypatch.setattr(pytestconfig.option, 'no_isolation', False)
  monkeypatch.setattr(sys, 'platform', 'linux')
  assert forbidden() == ['b', 'c', 'd']
  monkeypatch.setattr(pytestconfig.option, 'no_isolation', True)
  assert forbidden() == ['c', 'd']


def test_a_forbidden_skip_fails_the_run(tmp_path, monkeypatch):
  (tmp_path / 'one_test.py').write_text(
    'import os, pytest\n'
    'def test_skip(): pytest.skip(os.environ["REASON"])\n'
    'def test_pass(): pass\n'
  )
  codes = []
  for reason in ('no QEMU', 'not today'):
    monkeypatch.setenv('REASON', reason)
    codes.append(
      pytest.main(
        [
          str(tmp_path),
          '-q',
          f'--rootdir={tmp_path}',
          '-c=/dev/null',
          '-o',
          'python_files=*_test.py',
          '-p',
          'tests.conftest',
          '-p',
          'no:cacheprovider',
        ]
      )
    )
  assert codes == [0, 1]


def test_the_cache_loses_damaged_and_old_entries(tmp_path):
  data = zstandard.ZstdCompressor().compress(os.urandom(1000))
  entries = {'new': data, 'torn': data[:500], 'empty': b'', 'old': data}
  for age, (name, value) in enumerate(entries.items()):
    path = tmp_path / f'{name}-cache'
    path.write_bytes(value)
    os.utime(path, (1e9 - age, 1e9 - age))
  (tmp_path / 'other').write_bytes(b'not an entry')
  assert conftest.sweep_cache(tmp_path, max_bytes=5 * len(data)) == 2
  assert {p.name for p in tmp_path.iterdir()} == {
    'new-cache',
    'old-cache',
    'other',
  }
  assert conftest.sweep_cache(tmp_path, max_bytes=len(data)) == 1
  assert {p.name for p in tmp_path.iterdir()} == {'new-cache', 'other'}
