"""A sandbox with Harbor's folders at its root, and directories of tasks."""

import contextlib

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as open_lib
from composer_jax.tasks.harbor import prepared

BASES = ('python:3.*',)


@pytest.fixture(scope='session')
def harbor_sandbox():
  limits = base.Limits(
    wall_s=60.0,
    cpu_s=30.0,
    memory_bytes=1 << 30,
    processes=64,
    file_bytes=16 << 20,
    output_bytes=1 << 20,
  )
  sandbox = open_lib.open_sandbox(
    'auto', limits, packages=('pytest',), folders=prepared.ROOT_FOLDERS
  )
  with contextlib.closing(sandbox):
    yield sandbox


@pytest.fixture
def directory(tmp_path):
  """directory(files) -> a task directory, of usual files but for those."""

  def make(files=None, toml='', name='task'):
    folder = tmp_path / name
    contents = {
      'task.toml': toml,
      'instruction.md': 'Write 42 to answer.txt.\n',
      'environment/Dockerfile': 'FROM python:3.11-slim\nWORKDIR /app\n',
      'tests/test.sh': (
        'if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi '
        '> /logs/verifier/reward.txt\n'
      ),
      'solution/solve.sh': 'echo 42 > answer.txt\n',
      **(files or {}),
    }
    for path, text in contents.items():
      if text is None:
        continue
      (folder / path).parent.mkdir(parents=True, exist_ok=True)
      data = text if isinstance(text, bytes) else text.encode()
      (folder / path).write_bytes(data)
    return folder

  return make
