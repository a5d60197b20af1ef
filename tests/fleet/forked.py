"""Runs a main under a supervisor whose processes are forks of this one.

`tests.programs` runs it in a process that has imported what mains need, so that
several processes cost as much to start as one. No process is ended for being
slow: time in which one counts as stalled passes only while one is stopped.
"""

import atexit
import functools
import json
import os
import pathlib
import signal
import sys
import time

import psutil

from composer_jax.core import processes
from composer_jax.fleet import hosts, supervisor
from composer_jax.train.checkpoints import manager
from tests import zygote

_LAST = 3
_STALL_S = 1e6


class Clock:
  """Real time, which flies while a process is stopped.

  Attributes:
    forks: processes that may be stopped.
  """

  def __init__(self):
    self.forks: list[Fork] = []
    self._ahead_s = 0.0

  def __call__(self):
    if any(fork.is_stopped() for fork in self.forks):
      self._ahead_s += _STALL_S
    return time.monotonic() + self._ahead_s


class Fork:
  """Of `subprocess.Popen` what a gang uses."""

  def __init__(
    self, args, *, victim, clock, env, stdout=None, stderr=None, **unused
  ):
    clock.forks.append(self)
    self.returncode = None
    sys.stdout.flush()
    self.pid = os.fork()
    if not self.pid:
      out = os.dup(stdout.fileno() if stdout else 1)
      err = os.dup(stdout.fileno() if stderr else 2)
      code = 1
      try:
        if json.loads(env[processes.TICKET])['process'] == victim:
          _die_before_saving(_LAST)
        zygote.become({'command': args[1:], 'env': env}, [out, err], {})
        code = 0
      except SystemExit as error:
        code = error.code if isinstance(error.code, int) else bool(error.code)
      except Exception:  # noqa: BLE001  As an interpreter ends.
        sys.excepthook(*sys.exc_info())
      finally:
        # Not further up, into the supervisor of which this is a copy.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)

  def poll(self):
    if self.returncode is None:
      ended, status = os.waitpid(self.pid, os.WNOHANG)
      if ended:
        self.returncode = os.waitstatus_to_exitcode(status)
    return self.returncode

  def is_stopped(self):
    if self.returncode is not None:
      return False
    return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

  def wait(self):
    if self.returncode is None:
      _, status = os.waitpid(self.pid, 0)
      self.returncode = os.waitstatus_to_exitcode(status)
    return self.returncode


def _die_before_saving(last: int) -> None:
  """Kills this process where it would save a checkpoint of step `last`."""
  save = manager.Checkpoints.save

  def save_or_die(checkpoints, step, *arguments, **options):
    if step == last:
      os.kill(os.getpid(), signal.SIGKILL)
    save(checkpoints, step, *arguments, **options)

  manager.Checkpoints.save = save_or_die


def run(
  launch: str, workdir: str, victim: str, restarts: str, *command: str
) -> None:
  """Runs `python COMMAND` as --launch says; ends the program as a main does.

  Process number `victim` dies before it saves its third step; '' for none.
  """
  clock = Clock()
  kept = supervisor.Supervisor(
    [sys.executable, *command],
    hosts.parse(launch),
    supervisor.SupervisorOptions(restarts=int(restarts), stall_s=_STALL_S),
    workdir=pathlib.Path(workdir),
    own_identity={},
    say=lambda text: print(f'[fleet] {text}', flush=True),
    spawn=functools.partial(Fork, victim=int(victim or -1), clock=clock),
    clock=clock,
  )
  reason = kept.run()
  sys.exit(reason and f'error: {reason}')
