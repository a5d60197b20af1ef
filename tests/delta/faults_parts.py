"""Kills one of two processes that publish together, at its n-th operation.

  python -m tests.delta.faults_parts FOLDER VICTIM STEP FIRST

The other one has to notice and to end; then both start again. The last line of
output is JSON: the points, and at how many of them the other one noticed.
"""

import json
import logging
import os
import pathlib
import signal
import sys
import time

from composer_jax.delta import team
from composer_jax.delta.store import objects as stores
from tests.delta import faults, faults_crash, faults_scenarios

_TOLD = 4


class Clock:
  """Stands still for those who wait until the other one is dead.

  However busy the machine is, nobody who lives is too slow.
  """

  def __init__(self, root):
    self._dead, self._calls = root / 'dead', 0
    self.sleep = time.sleep

  def monotonic(self):
    self._calls += self._dead.exists()
    return 1e6 * self._calls


def _blocks(version, process):
  """Every second tensor, and some rows of another: a box is cut."""
  arrays = faults.weights('floats', version)
  kernel = arrays.pop('kernel')
  names = sorted(arrays)[process::2]
  yield from faults.blocks({name: arrays[name] for name in names})
  rows = (0, 4) if process == 0 else (4, 8)
  index = (rows, (0, 20))
  yield 'kernel', 'bfloat16', (8, 20), index, kernel[slice(*rows)]


def _publisher(root, process, attempt):
  peers = team.Peers(process=process, count=2, attempt=attempt)
  team.time = Clock(root)
  return faults.publisher_of(
    stores.Store(root / 'store'),
    peers=peers,
    keyframe_every=2,
  )


def _crash(root, process, victim, at):
  publisher = _publisher(root, process, 'first')
  for version in range(2):
    publisher.publish(_blocks(version, process), version)
  trigger = faults_crash.Trigger(str(root), 'kill', at)
  if process == victim:
    trigger.install()
    trigger.is_armed = True
  try:
    publisher.publish(_blocks(2, process), 2)
  except (ValueError, OSError) as error:
    if process == victim or f'process {victim}' not in str(error):
      raise
    os._exit(_TOLD)
  trigger.is_armed = False
  os._exit(faults_crash._NO_MORE)


def _go_on(root, process):
  publisher = _publisher(root, process, 'second')
  for version in (2, 3, 4):
    publisher.publish(_blocks(version, process), version)
  if process == 0:
    publisher.gc(2)


def _both(root, work):
  """Runs it in two processes at once; returns their exit codes."""
  pids, ends = [], {}
  for process in range(2):
    pid = os.fork()
    if not pid:
      code = faults_crash.child(lambda: work(process))  # noqa: B023
      os._exit(code if code >= 0 else 100 - code)
    pids.append(pid)
  while len(ends) < 2:
    pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    ends[pid] = 100 - code if code > 100 else code
    if ends[pid] < 0:
      (root / 'dead').touch()
  (root / 'dead').unlink(missing_ok=True)
  return [ends[pid] for pid in pids]


def main():
  folder = pathlib.Path(sys.argv[1])
  victim, step, at = map(int, sys.argv[2:5])
  logging.disable(logging.CRITICAL)
  points = told = 0
  with faults.small_chunks():
    faults.build('floats', versions=3)
    while True:
      root = folder / str(at)
      root.mkdir()
      ends = _both(root, lambda p: _crash(root, p, victim, at))  # noqa: B023
      alive = ends[1 - victim]
      assert alive in (_TOLD, faults_crash._NO_MORE), (at, ends)
      over = ends[victim] == faults_crash._NO_MORE
      assert over or ends[victim] == -signal.SIGKILL, (at, ends)
      faults_scenarios._served(root, {1, 2})
      ends = _both(root, lambda p: _go_on(root, p))  # noqa: B023
      assert ends == [0, 0], (at, ends)
      faults_scenarios._served(root, {4})
      left = sorted((root / 'store' / 'messages' / 'run').iterdir())
      # And what was torn as someone died, until it is old enough.
      left = {p.name.split('.')[1] for p in left if p.suffix != '.tmp'}
      assert left == {'3'}, left
      if over:
        break
      points, told, at = points + 1, told + (alive == _TOLD), at + step
  print(json.dumps([points, told]))


if __name__ == '__main__':
  main()
