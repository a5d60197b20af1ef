"""Keeps a number of rollout workers going, each in a process of its own.

A worker ends with the run; one that ends otherwise is started again, as long as
it has restarts left. Then the crew ends, once the others have drained. Where
the processes are, here or in a cluster, is a matter of who starts them
(`ray_workers`).

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
    restarts: Callable[[], supervisor.Restarts],
    *,
    say: Callable[[str], None],
    settled_s: float = 600.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts nothing yet.

    Args:
      start: number of a worker -> the worker, started.
      count: number of workers to keep going.
      restarts: makes the budget of one worker: how often it is started again
        after an error. A worker that ran on for `settled_s` has a new one.
      say: told of workers that are started again or given up.
      settled_s: seconds after which a worker has shown that it can go on.
    """
    self._start, self._count, self._restarts = start, count, restarts
    self._say, self._sleep = say, sleep
    self._settled_s, self._clock = settled_s, clock
    self._budgets: dict[int, supervisor.Restarts] = {}
    self._since: dict[int, float] = {}
    self._reason: str | None = None
    self._is_stopping = False
    self._workers: dict[int, WorkerProcess] = {}

  def stop(self) -> None:
    """Gives all notice; may be called by a signal's handler."""
    self._is_stopping = True

  def run(self) -> str | None:
    """Returns why no worker is left, None if the run is over or `stop` came."""
    for number in range(self._count):
      self._begin(number)
    has_told = False
    while True:
      if self._is_stopping and not has_told:
        has_told = True
        self._give_notice()
      self._look()
      if not self._workers:
        return self._reason
      self._sleep(_POLL_S)

  def _give_notice(self) -> None:
    for worker in self._workers.values():
      worker.terminate()

  def _begin(self, number: int) -> None:
    self._since[number] = self._clock()
    self._workers[number] = self._start(number)

  def _look(self) -> None:
    for number, worker in list(self._workers.items()):
      code = worker.poll()
      if code is None:
        continue
      if code == 0 or self._is_stopping:
        del self._workers[number]
        continue
      if self._clock() - self._since[number] >= self._settled_s:
        self._budgets.pop(number, None)
      if number not in self._budgets:
        self._budgets[number] = self._restarts()
      left = self._budgets[number].take()
      if left is None:
        # The others save what they have before all end.
        self._is_stopping = True
        del self._workers[number]
        self._reason = (
          f'worker {number} ended with exit code {code}; no restarts are left '
          '(--restarts, --refill_s). Its output says why.'
        )
        self._say(f'{self._reason} The others get notice.')
        continue
      self._say(
        f'worker {number} ended with exit code {code}; starting it again, '
        f'{left} restarts left'
      )
      self._begin(number)

  def close(self) -> None:
    """Gives notice to all that are left, and forgets them."""
    self._give_notice()
    self._workers.clear()
