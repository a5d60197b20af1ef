"""Starts, watches and restarts the rollout process of a run."""

import contextlib
import os
import pathlib
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence

# Environment variable with the process id of a worker's parent.
PARENT = 'COMPOSER_JAXPARENT'


class RolloutProcess:
  """A rollout worker in a process of its own, restarted when it dies.

  The worker's whole state is in the store, so a restart loses only the episodes
  in flight. Each start has a name of its own: what the last one still does is
  nobody's lease.

  Consumes: nothing; the worker reads the store itself.
  Woken by: `check`, which the trainer calls while it waits.
  Produces: restarts, each reported; an error once the worker died more often
    than `max_restarts` with no result of any worker in between.
  """

  def __init__(
    self,
    command: Sequence[str],
    *,
    log: pathlib.Path,
    cores: Sequence[int],
    max_restarts: int,
    report: Callable[[str], None],
    number: int = 0,
  ):
    """Starts it.

    Args:
      command: command of a worker, which `--name=NAME` is added to.
      number: number of this worker among those of the run.
    """
    self._command, self._number = list(command), number
    self._log = log
    self._cores = list(cores)
    self._restarts_left = self._max_restarts = max_restarts
    self._progress = 0
    self._report = report
    self._process = self._start()

  def _start(self) -> subprocess.Popen:
    self.name = f'worker{self._number}-{secrets.token_hex(4)}'
    with self._log.open('ab') as log:
      process = subprocess.Popen(
        [*self._command, f'--name={self.name}'],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, PARENT: str(os.getpid())},
      )
    if self._cores and hasattr(os, 'sched_setaffinity'):
      os.sched_setaffinity(process.pid, self._cores)
    return process

  def check(
    self,
    progress: int = 0,
    *,
    is_given_up: Callable[[str], bool] = lambda name: False,
    blame: Callable[[str], None] = lambda name: None,
  ) -> None:
    """Restarts a worker that died, or that hangs.

    Args:
      progress: number that rises with the results of any worker.
      is_given_up: name -> whether the fleet gave a worker up.
      blame: told the name of a worker that has ended.

    Raises:
      RuntimeError: it died more often than `max_restarts`; the message ends
        with the tail of its log.
    """
    if self._process.poll() is None and is_given_up(self.name):
      self._process.kill()  # Also one that is stopped.
      self._process.wait()
    code = self._process.poll()
    if code is None:
      return
    blame(self.name)
    if progress > self._progress:
      self._progress, self._restarts_left = progress, self._max_restarts
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
    """Kills the worker, which has nothing left that anybody wants."""
    if self._process.poll() is None:
      self._process.kill()
      self._process.wait()


def tail_of(path: pathlib.Path, lines: int = 15) -> str:
  """The last lines of a text file; '' if there is no file."""
  text = path.read_text(errors='replace') if path.exists() else ''
  return '\n'.join(text.splitlines()[-lines:])


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
