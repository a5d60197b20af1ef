"""One undisturbed run of the smoke job, for every test that needs one."""

import os
import pathlib

import pytest

from tests import programs
from tests.e2e import jobs


def _shared(tmp_path_factory) -> pathlib.Path:
  """Returns a folder that only the workers of this test run share."""
  base = tmp_path_factory.getbasetemp()
  return base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base


@pytest.fixture(scope='session')
def straight(tmp_path_factory):
  """Workdir of a whole run through the real command line; never change it.

  The run's output is in `straight.txt` beside it.
  """
  folder = _shared(tmp_path_factory)
  workdir = folder / 'straight'
  output = folder / 'straight.txt'
  with jobs.locked(folder / 'straight.lock'):
    if not output.exists():
      process = jobs.run(workdir, run=programs.run_fresh)
      assert process.returncode == 0, (
        process.stderr[-3000:] + process.stdout[-3000:]
      )
      output.write_text(process.stdout)
  return workdir
