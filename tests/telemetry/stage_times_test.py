"""Seconds of stages add up, over nesting, restarts and kills."""

import subprocess
import sys

import pytest

from composer_jax.core import files
from composer_jax.telemetry import stage_times


class Clock:
  """A clock that only the test moves."""

  def __init__(self):
    self.now = 100.0

  def __call__(self) -> float:
    return self.now


@pytest.fixture
def clock():
  return Clock()


def read(workdir):
  return files.read_json(workdir / stage_times.STAGES)


def test_a_second_counts_for_the_innermost_stage(tmp_path, clock):
  times = stage_times.StageTimes(tmp_path, clock=clock)
  clock.now += 1000
  with times.stage('cpt'):
    assert read(tmp_path) == {'cpt': 0}
    clock.now += 1
    with times.stage('tokenizer'):
      clock.now += 20
      with times.stage('corpus'):
        clock.now += 300
      clock.now += 40
    clock.now += 5
  clock.now += 1000
  assert read(tmp_path) == {'cpt': 6, 'tokenizer': 60, 'corpus': 300}


def test_a_resumed_stage_adds_up_its_pieces(tmp_path, clock):
  times = stage_times.StageTimes(tmp_path, clock=clock)
  with pytest.raises(KeyboardInterrupt), times.stage('rl'):
    clock.now += 7
    raise KeyboardInterrupt
  clock.now += 1000
  times = stage_times.StageTimes(tmp_path, clock=clock)
  with times.stage('rl'):
    clock.now += 0.5
  assert read(tmp_path) == {'rl': 7.5}


def test_a_killed_stage_keeps_its_time(tmp_path):
  program = (
    'import sys, time\n'
    'from composer_jax.telemetry import stage_times\n'
    'times = stage_times.StageTimes(sys.argv[1], every_s=0.05)\n'
    'with times.stage("cpt"):\n'
    '  time.sleep(1)\n'
    '  print("go", flush=True)\n'
    '  time.sleep(60)\n'
  )
  with subprocess.Popen(
    [sys.executable, '-c', program, str(tmp_path)], stdout=subprocess.PIPE
  ) as process:
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
  # At least half of it, however late the writing thread gets its turns.
  assert 0.5 <= read(tmp_path)['cpt'] < 30


def test_what_ends_a_stage_is_not_hidden_by_its_time(tmp_path):
  times = stage_times.StageTimes(tmp_path / 'run')
  with pytest.raises(ZeroDivisionError), times.stage('rl'):
    (tmp_path / 'run' / stage_times.STAGES).unlink()
    # Nothing can be written below a file.
    (tmp_path / 'run').rmdir()
    (tmp_path / 'run').touch()
    raise ZeroDivisionError


def test_damage_is_named(tmp_path):
  (tmp_path / stage_times.STAGES).write_text('{"cpt": ')
  with pytest.raises(ValueError, match=r'stages\.json is not valid JSON'):
    stage_times.StageTimes(tmp_path)
