"""Keeps a number of rollout workers going, each in a process of its own.

A worker ends with the run; one that ends otherwise is started again, as long as
restarts are left. Where the processes are, here or in a cluster, is a matter of
who starts them (`ray_workers`).

  Consumes: ends of the workers.
  Waits for: the end of all, or `stop`.
  Woken by: its clock.
  Produces: starts; notices at the end.
"""

import os
import subprocess
import time
from collections.abc import Callable
from typing import Protocol

from composer_jax.fleet import supervisor
from composer_jax.pipeline import controller

_POLL_S = 0.2


class WorkerProcess(Protocol):
  """A worker that was started."""

  def poll(self) -> int | None:
    """Returns its exit code, or None while it goes on."""

  def terminate(self) -> None:
    """Gives notice."""


def local(command: list[str]) -> Callable[[int], WorkerProcess]:
  """Returns a function that starts a worker on this machine."""
  # It ends with this process, however that ends.
  env = os.environ | {controller.PARENT: str(os.getpid())}
  return lambda number: subprocess.Popen(command, env=env)


class Crew:
  """A number of workers."""

  def __init__(
    self,
    start: Callable[[int], WorkerProcess],
    count: int,
    restarts: supervisor.Restarts,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
  ):
    """Starts nothing yet.

    Args:
      start: number of a worker -> the worker, started.
      restarts: how often one that ended with an error is started again.
    """
    self._start, self._restarts = start, restarts
    self._say, self._sleep = say, sleep
    self._is_stopping = False
    self._workers: dict[int, WorkerProcess | None] = dict.fromkeys(range(count))

  def stop(self) -> None:
    """Gives all notice; may be called by a signal's handler."""
    self._is_stopping = True

  def run(self) -> str | None:
    """Returns why no worker is left, None if the run is over or `stop` came."""
    for number in self._workers:
      self._workers[number] = self._start(number)
    has_told = False
    while True:
      if self._is_stopping and not has_told:
        has_told = True
        for worker in self._workers.values():
          if worker is not None:
            worker.terminate()
      reason = self._look()
      if reason or not self._workers:
        return reason
      self._sleep(_POLL_S)

  def _look(self) -> str | None:
    for number, worker in list(self._workers.items()):
      code = worker.poll() if worker is not None else 0
      if code is None:
        continue
      if code == 0 or self._is_stopping:
        del self._workers[number]
        continue
      left = self._restarts.take()
      if left is None:
        self.close()
        return (
          f'worker {number} ended with exit code {code}; no restarts are left '
          '(--restarts, --refill_s). Its output says why.'
        )
      self._say(
        f'worker {number} ended with exit code {code}; starting it again, '
        f'{left} restarts left'
      )
      self._workers[number] = self._start(number)
    return None

  def close(self) -> None:
    """Gives notice to all that are left, and forgets them."""
    for worker in self._workers.values():
      if worker is not None:
        worker.terminate()
    self._workers.clear()
