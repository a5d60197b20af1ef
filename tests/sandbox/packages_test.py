"""Distributions that programs in boxes can import."""

import importlib.metadata
import subprocess
import sys

import pytest

from composer_jax.sandbox import packages


def test_a_distribution_comes_with_what_it_needs(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  folder = packages.gather(['JINJA2'])
  code = (
    'import sys; sys.path.insert(0, sys.argv[1])\n'
    'import jinja2, markupsafe as other\n'
    'print(jinja2.__version__, other.__file__)\n'
    'import importlib.metadata\nprint(importlib.metadata.version("jinja2"))'
  )
  command = [sys.executable, '-I', '-S', '-c', code, str(folder)]
  run = subprocess.run(command, capture_output=True, text=True, check=True)
  version = importlib.metadata.version('jinja2')
  first, second = run.stdout.splitlines()
  assert first.startswith(version) and str(folder) in first
  assert second == version
  assert not (folder / 'jax').exists()
  # Found again by names and versions.
  before = folder.stat().st_mtime_ns
  assert packages.gather(['jinja2', 'MarkupSafe']) == folder
  assert folder.stat().st_mtime_ns == before
  assert [x.name for x in folder.parent.iterdir()] == [folder.name]


def test_a_distribution_that_is_missing_is_named():
  with pytest.raises(ValueError, match="no distribution 'no-such-thing'"):
    packages.gather(['pytest', 'no-such-thing'])
