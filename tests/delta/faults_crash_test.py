"""Processes killed at every file operation recover, and so do refused ones.

The driver is `faults_crash`; here is what of it runs when. Without --slow a
few operations of each scenario have their turn, with it every one.
"""

import json
import subprocess
import sys

import pytest

# Operations of each at least, so that nobody thins a scenario out unseen.
FEWEST = {
  'first': 25,
  'delta': 25,
  'packed': 60,
  'collect': 70,
  'rewind': 80,
  'heal': 40,
  'follow': 30,  # a receiver keeps no file but the last pointer
  'store': 38,
}


def points(folder, jobs):
  """Runs jobs in one driver; returns at how many points each did something."""
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'tests.delta.faults_crash',
      str(folder),
      json.dumps(jobs),
    ],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize('action', ['kill', 'error', 'full'])
@pytest.mark.parametrize('scenario', sorted(FEWEST))
def test_at_every_file_operation(tmp_path, scenario, action):
  (found,) = points(tmp_path, [(scenario, action, 1, 1)])
  assert found >= FEWEST[scenario], found


@pytest.mark.slow
@pytest.mark.parametrize('scenario', sorted(FEWEST))
def test_torn_at_any_byte(tmp_path, scenario):
  (found,) = points(tmp_path, [(scenario, 'tear', 7, 0)])
  # A collection writes no file that could be torn.
  assert found == 0 if scenario == 'collect' else found > 20


def test_at_some_file_operations(tmp_path):
  jobs = [
    ('packed', 'kill', 23, 1),
    ('rewind', 'full', 59, 3),
    ('heal', 'error', 35, 4),
    ('store', 'kill', 19, 3),
    ('follow', 'tear', 400, 0),
  ]
  found = points(tmp_path, jobs)
  for (scenario, action, step, first), number in zip(jobs, found, strict=True):
    if action != 'tear':
      assert number >= (FEWEST[scenario] - first) // step, scenario
