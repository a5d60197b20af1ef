"""The trainer's control of its rollout worker, with real processes."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from composer_jax.pipeline import controller

CRASH = "import sys; print('no such device', flush=True); sys.exit(3)"


def _process(tmp_path, code, max_restarts=2):
  messages = []
  worker = controller.RolloutProcess(
    [sys.executable, '-S', '-c', code],
    log=tmp_path / 'worker.log',
    cores=[],
    max_restarts=max_restarts,
    report=messages.append,
  )
  return worker, messages


def _check_until_it_fails(worker):
  deadline = time.monotonic() + 60
  while time.monotonic() < deadline:
    worker.check()
    time.sleep(0.02)


def test_a_worker_that_keeps_dying_ends_the_run_with_its_log(tmp_path):
  worker, messages = _process(tmp_path, CRASH)
  with pytest.raises(RuntimeError, match=r'(?s)exit code 3.*no such device$'):
    _check_until_it_fails(worker)
  assert [line.split('; ')[1].split('.')[0] for line in messages] == [
    'restarting it, 1 restarts left',
    'restarting it, 0 restarts left',
  ]
  assert 'no such device' in messages[0]
  log = (tmp_path / 'worker.log').read_text()
  assert log.count('no such device') == 3


def test_close_ends_a_worker_that_ignores_being_asked(tmp_path):
  code = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(1, '
  worker, _ = _process(tmp_path, f'{code} flush=True); time.sleep(600)')
  worker.close()
  assert worker._process.poll() == -signal.SIGKILL


# A worker that imports slowly, as the real one does.
_SLOW_WORKER = """
import time
time.sleep({sleep_s})
from composer_jax.fleet import orphans
orphans.die_with_parent()
print('alive', flush=True)
time.sleep(600)
"""
_PARENT = """
import pathlib, sys, time
from composer_jax.pipeline import controller
worker = controller.RolloutProcess([sys.executable, '-c', sys.argv[1]],
  log=pathlib.Path(sys.argv[2]), cores=[], max_restarts=0, report=print)
print(worker._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
  'sleep_s, stops',
  [
    (0, False),
    pytest.param(
      *(0, True),
      marks=pytest.mark.skipif(sys.platform != 'linux', reason='by prctl'),
    ),
    pytest.param(1, False, marks=pytest.mark.slow),
  ],
)
def test_no_worker_outlives_a_killed_run(tmp_path, sleep_s, stops):
  """The run is killed while the worker serves, is stopped, or still imports."""
  log = tmp_path / 'worker.log'
  code = _SLOW_WORKER.format(sleep_s=sleep_s)
  parent = subprocess.Popen(
    [sys.executable, '-c', _PARENT, code, str(log)],
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, 'PYTHONPATH': os.getcwd()},
  )
  worker = psutil.Process(int(parent.stdout.readline()))
  deadline = time.monotonic() + 60
  while not sleep_s and 'alive' not in log.read_text():
    assert time.monotonic() < deadline
    time.sleep(0.02)
  if stops:
    worker.suspend()
  parent.kill()
  parent.wait()
  _, alive = psutil.wait_procs([worker], timeout=30)
  assert all(p.status() == psutil.STATUS_ZOMBIE for p in alive)


def test_restarts_count_only_while_nothing_is_finished(tmp_path):
  worker, messages = _process(tmp_path, CRASH, max_restarts=1)
  blamed, deadline = [], time.monotonic() + 60
  while len(messages) < 4:
    worker.check(len(messages), blame=blamed.append)
    assert time.monotonic() < deadline
    time.sleep(0.02)
  # Each start has another name.
  assert len(set(blamed)) == 4 and worker.name not in blamed
  with pytest.raises(RuntimeError, match='no restarts are left'):
    while time.monotonic() < deadline:
      worker.check(4)
      time.sleep(0.02)


def test_a_worker_that_is_given_up_is_killed_though_it_is_stopped(tmp_path):
  worker, messages = _process(tmp_path, 'import time; time.sleep(600)')
  stopped, name = psutil.Process(worker._process.pid), worker.name
  stopped.suspend()
  worker.check(is_given_up=lambda name: False)
  assert not messages
  worker.check(is_given_up=name.__eq__)
  assert not stopped.is_running() and 'exit code -9' in messages[0]
  assert worker._process.poll() is None and worker.name != name
  worker.close()


def test_cores_are_divided_without_overlap():
  cores = sorted(os.sched_getaffinity(0))
  trainer_cores, worker_cores = controller.divide_cores()
  if len(cores) > 1:
    assert sorted(trainer_cores + worker_cores) == cores
    assert (
      0 <= len(worker_cores) - len(trainer_cores) <= 1 <= len(trainer_cores)
    )
  try:
    os.sched_setaffinity(0, cores[:1])
    assert controller.divide_cores() == ([], [])
  finally:
    os.sched_setaffinity(0, cores)
