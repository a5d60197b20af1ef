"""Starts, watches and restarts the rollout process of a run."""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

# Environment variable with the process id of a worker's parent.
PARENT = 'COMPOSER_JAXPARENT'
_PR_SET_PDEATHSIG = 1  # In <sys/prctl.h>.


class RolloutProcess:
  """A rollout worker in a process of its own, restarted when it dies.

  The worker's whole state is on disk (the bundle store and the finished
  groups), so a restart loses only the episodes in flight.

  Consumes: nothing; the worker reads the store itself.
  Woken by: `check`, which the trainer calls while it waits.
  Produces: restarts, each reported; an error once `max_restarts` are used up.
  """

  def __init__(
    self,
    command: Sequence[str],
    *,
    log: pathlib.Path,
    cores: Sequence[int],
    max_restarts: int,
    report: Callable[[str], None],
  ):
    self._command = list(command)
    self._log = log
    self._cores = list(cores)
    self._restarts_left = max_restarts
    self._report = report
    self._process = self._start()

  def _start(self) -> subprocess.Popen:
    with self._log.open('ab') as log:
      process = subprocess.Popen(
        self._command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, PARENT: str(os.getpid())},
      )
    if self._cores and hasattr(os, 'sched_setaffinity'):
      os.sched_setaffinity(process.pid, self._cores)
    return process

  def check(self) -> None:
    """Restarts a dead worker.

    Raises:
      RuntimeError: the worker died more often than `max_restarts`; the message
        ends with the tail of its log.
    """
    code = self._process.poll()
    if code is None:
      return
    tail = tail_of(self._log)
    if self._restarts_left == 0:
      raise RuntimeError(
        f'The rollout worker died again (exit code {code}), and no restarts '
        f'are left (rl.max_restarts). The end of {self._log}:\n{tail}'
      )
    self._restarts_left -= 1
    self._report(
      f'rollout worker died (exit code {code}); restarting it, '
      f'{self._restarts_left} restarts left. Its last line: '
      f'{tail.splitlines()[-1] if tail else "(none)"}'
    )
    time.sleep(0.5)
    self._process = self._start()

  def close(self) -> None:
    """Terminates the worker; kills it after ten seconds."""
    if self._process.poll() is None:
      self._process.terminate()
      try:
        self._process.wait(timeout=10)
      except subprocess.TimeoutExpired:
        self._process.kill()
        self._process.wait()


def tail_of(path: pathlib.Path, lines: int = 15) -> str:
  """The last lines of a text file; '' if there is no file."""
  text = path.read_text(errors='replace') if path.exists() else ''
  return '\n'.join(text.splitlines()[-lines:])


def die_with_parent() -> None:
  """Makes this process end soon after the run that started it, however it dies.

  Does nothing in a worker that was not started by a `RolloutProcess`.
  """
  parent = int(os.environ.get(PARENT, '0'))
  if not parent:
    return
  if sys.platform == 'linux':
    # Also while this process is stopped, or a library holds the lock of Python.
    # It means the thread that started this process: the main one of its parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

  def watch():
    # Not os.getppid() at the start: the parent may have died while this process
    # was still importing.
    while os.getppid() == parent:
      time.sleep(0.5)
    os._exit(1)

  threading.Thread(target=watch, name='parent-watch', daemon=True).start()


def divide_cores() -> tuple[list[int], list[int]]:
  """Splits this process's cores between trainer and rollout worker.

  Returns:
    (trainer cores, rollout cores); both empty, which means shared, if there is
    one core or the system cannot pin.
  """
  if not hasattr(os, 'sched_getaffinity'):
    return [], []
  cores = sorted(os.sched_getaffinity(0))
  if len(cores) < 2:
    return [], []
  half = len(cores) // 2
  return cores[:half], cores[half:]


def pin(cores: Sequence[int]) -> None:
  """Moves all threads of this process to `cores`; without any, does nothing."""
  if not cores or not pathlib.Path('/proc/self/task').exists():
    return
  for task in pathlib.Path('/proc/self/task').iterdir():
    # A thread may have ended since it was listed.
    with contextlib.suppress(ProcessLookupError):
      os.sched_setaffinity(int(task.name), cores)
