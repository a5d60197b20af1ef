"""A crew keeps its number of workers, until the run or the crew ends."""

import signal
import subprocess
import sys
import time

import pytest

from composer_jax.fleet import crew, ray_workers, supervisor


class Puppet:
  """A worker that ends when it is told how."""

  def __init__(self):
    self.code, self.is_told, self.is_slow = None, False, False

  def poll(self):
    return self.code

  def terminate(self):
    self.is_told = True
    if not self.is_slow:
      self.code = -signal.SIGTERM


class Stage:
  """Starts puppets, and acts between two looks of the crew."""

  def __init__(self, count, restarts, *acts):
    self.started, self.said, self._acts = [], [], list(acts)
    self.time = 0.0
    self.crew = crew.Crew(
      self._start,
      count,
      lambda: supervisor.Restarts(restarts, 1e9),
      say=self.said.append,
      settled_s=10.0,
      sleep=self._sleep,
      clock=lambda: self.time,
    )

  def _start(self, number):
    self.started.append((number, Puppet()))
    return self.started[-1][1]

  def _sleep(self, seconds):
    del seconds
    assert self._acts, 'nothing ends it'
    self._acts.pop(0)(self)

  def end(self, code, *places):
    for place in places:
      self.started[place][1].code = code


def test_who_dies_is_started_again_until_the_run_is_over():
  stage = Stage(
    3,
    2,
    lambda s: s.end(-9, 1),
    lambda s: s.end(0, 0),
    lambda s: s.end(1, 3),
    lambda s: s.end(0, 2, 4),
  )
  assert stage.crew.run() is None
  assert [number for number, _ in stage.started] == [0, 1, 2, 1, 1]
  assert stage.said == [
    'worker 1 ended with exit code -9; starting it again, 1 restarts left',
    'worker 1 ended with exit code 1; starting it again, 0 restarts left',
  ]


def test_restarts_run_out_by_name_and_others_get_notice():
  stage = Stage(2, 1, lambda s: s.end(3, 0), lambda s: s.end(3, 2))
  # The other takes its time to end, and has it.
  drained = []
  stage._acts += [lambda s: drained.append(s.started[1][1].is_told)] * 3
  stage._acts.append(lambda s: s.end(0, 1))
  stage._acts.insert(0, lambda s: setattr(s.started[1][1], 'is_slow', True))
  reason = stage.crew.run()
  assert reason.startswith('worker 0 ended with exit code 3; no restarts are')
  assert drained == [False, True, True] and not stage._acts


def test_every_worker_has_its_own_restarts_and_all_of_them_after_a_while():
  def at(time, code, place):
    return lambda s: (setattr(s, 'time', time), s.end(code, place))

  # Each of three dies once, as when a store is away; then one that ran long.
  stage = Stage(3, 1, lambda s: s.end(1, 0, 1, 2), at(10.0, 1, 3))
  stage._acts.append(lambda s: s.end(0, 4, 5, 6))
  assert stage.crew.run() is None
  assert [number for number, _ in stage.started] == [0, 1, 2, 0, 1, 2, 0]


def test_a_notice_reaches_all_and_starts_none():
  stage = Stage(3, 9, lambda s: s.end(0, 1), lambda s: s.crew.stop())
  stage._acts.append(lambda s: None)
  assert stage.crew.run() is None
  told = [worker.is_told for _, worker in stage.started]
  assert told == [True, False, True] and not stage.said


def test_who_is_left_by_an_error_gets_notice():
  stage = Stage(2, 1, lambda s: s.end(1, 9))
  with pytest.raises(IndexError):
    stage.crew.run()
  stage.crew.close()
  assert [worker.is_told for _, worker in stage.started] == [True, True]


def test_processes_here_end_with_a_notice():
  code = 'import time; print("up", flush=True); time.sleep(600)'
  start = crew.local([sys.executable, '-c', code])
  workers = []

  def begin(number):
    workers.append(start(number))
    return workers[-1]

  kept = crew.Crew(
    begin,
    2,
    lambda: supervisor.Restarts(1, 1e9),
    say=print,
    sleep=lambda s: (time.sleep(0.05), kept.stop()),
  )
  assert kept.run() is None
  assert [w.returncode for w in workers] == [-signal.SIGTERM] * 2
  assert all(isinstance(w, subprocess.Popen) for w in workers)


def test_the_extra_is_named_where_ray_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  with (
    pytest.raises(
      ValueError, match=r"--ray=auto .* pip install -e '\.\[ray\]'"
    ),
    ray_workers.starting('auto', [], '', 1),
  ):
    raise AssertionError
