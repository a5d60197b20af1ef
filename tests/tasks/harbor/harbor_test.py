"""Harbor itself reads what is exported, and runs it in our boxes.

Harbor needs Python 3.12: the test looks for one, and makes an environment with
Harbor's package (`tests.environments`).
"""

import json
import os
import pathlib
import shutil
import subprocess

import pytest

from composer_jax.tasks.harbor import export
from composer_jax.tasks.repository import task_set
from tests import environments

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent.parent


@pytest.fixture(scope='module')
def python(tmp_path_factory):
  found = [
    *sorted(pathlib.Path.home().glob('.pyenv/versions/3.1[2-9].*/bin/python')),
    *filter(None, map(shutil.which, ('python3.12', 'python3.13'))),
  ]
  if not found:
    pytest.skip('no Python of 3.12 or later, which Harbor needs')
  packages = ['harbor', 'pytest', 'numpy']
  return environments.python(packages, tmp_path_factory, str(found[0]))


@pytest.fixture(scope='module')
def exported(larder, tmp_path_factory):
  """The five tasks of the small package, under four names each."""
  out = tmp_path_factory.mktemp('harbor')
  for name in ('larder', 'cellar', 'pantry', 'attic'):
    root = tmp_path_factory.mktemp(name)
    for path in sorted(p for p in larder.root.rglob('*') if p.is_file()):
      inner = path.relative_to(larder.root).as_posix()
      target = root / inner.replace('larder', name)
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_text(path.read_text().replace('larder', name))
    tasks = task_set.load(root)
    assert len(export.export(tasks, tasks.tasks, out)) == 5
  return out


def test_harbors_own_parser_reads_them_and_gold_alone_passes(python, exported):
  done = subprocess.run(
    [python, HERE / 'by_harbor.py', exported],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=1500,
    cwd=exported,
  )
  assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
  outcomes = json.loads(done.stdout.splitlines()[-1])
  assert len(outcomes) == 20
  for name, (gold, empty) in outcomes.items():
    assert (gold, empty) == (1.0, 0.0), (name, gold, empty)
