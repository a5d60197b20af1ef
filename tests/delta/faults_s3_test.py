"""Publishers that die between requests to S3, and one of several that dies."""

import json
import subprocess
import sys

import pytest


def run(module, *arguments):
  done = subprocess.run(
    [sys.executable, '-m', f'tests.delta.{module}', *map(str, arguments)],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed_between_any_two_requests(tmp_path):
  points, committed = run('faults_s3', 1, 1, tmp_path)
  # A version takes nine requests, each of them two points. Before the pointer
  # moved the old version stood, and then the new one.
  assert points > 15
  assert 0 < committed < points


@pytest.mark.parametrize(
  'victim, step, first',
  [
    pytest.param(0, 1000, 10, marks=pytest.mark.slow),
    (1, 1000, 5),
    pytest.param(0, 4, 1, marks=pytest.mark.slow),
    pytest.param(1, 4, 1, marks=pytest.mark.slow),
  ],
)
def test_one_of_two_publishing_processes_dies(tmp_path, victim, step, first):
  points, told = run('faults_parts', tmp_path, victim, step, first)
  assert points * step + first > 50
  # The other one says so, unless what it waits for is a keyframe, which a
  # version can do without, or nothing.
  assert told > 0
