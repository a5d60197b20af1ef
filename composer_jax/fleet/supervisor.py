"""Keeps a trainer of many processes going, on each of its hosts.

A supervisor never imports jax, so that nothing can abort or block it. Those of
several hosts meet in a folder of the workdir, which all see:

  gang.json          the present start: number (epoch), address, identity, end
  leader             a number that host 0 raises: its supervisor is alive
  epoch_N/           of start N: what processes decide, logs, failures of hosts

Host 0 leads. If a process anywhere dies or makes no progress, every host ends
its processes, and host 0 begins the next start, with another port and another
folder: nothing of an old start can be mistaken for an answer in the new one.
The trainer resumes from its last checkpoint.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from composer_jax.core import checks, files
from composer_jax.fleet import gang as gangs
from composer_jax.fleet import hosts as hosts_lib
from composer_jax.fleet import identity

FOLDER = 'fleet'
_GANG, _LEADER = 'gang.json', 'leader'
_POLL_S = 0.1
_ALIVE_S = 1.0
# After the first failure, in which others show what led to it.
_SETTLE_S = 1.0
_GRACE_S = 15.0
_CACHE = 'JAX_COMPILATION_CACHE_DIR'


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
  """How a supervisor watches and restarts.

  Attributes:
    launch: processes of the trainer: local:2x4 (here, with emulated devices),
      env (one for each task of SLURM, JobSet or a TPU pod), ray:2 (hosts of a
      Ray cluster); '' for one process without a supervisor.
    stall_s: seconds without progress of a process after which all are ended; it
      must cover the longest compilation and the longest wait for a file.
    restarts: number of starts that may fail in a row.
    refill_s: seconds after which one more may.
    start_s: seconds in which all processes must have started.
    dry_run: true to print what would be started, and to start nothing.
  """

  launch: str = ''
  stall_s: float = 600.0
  restarts: int = 5
  refill_s: float = 3600.0
  start_s: float = 1800.0
  dry_run: bool = False

  def __post_init__(self):
    checks.at_least(self, 0, 'restarts')
    for name in ('stall_s', 'refill_s', 'start_s'):
      checks.require(self, name, getattr(self, name) > 0, 'be positive')


class Restarts:
  """A number of restarts that grows back over time, up to where it began."""

  def __init__(
    self,
    limit: int,
    refill_s: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._limit, self._refill_s, self._clock = limit, refill_s, clock
    self._left, self._since = float(limit), clock()

  def take(self) -> int | None:
    """Uses one and returns how many are left; None if there is none."""
    now = self._clock()
    gained = (now - self._since) / self._refill_s
    self._left, self._since = min(self._limit, self._left + gained), now
    if self._left < 1:
      return None
    self._left -= 1
    return int(self._left)


class Supervisor:
  """Runs the processes of one host until the trainer ends.

  Consumes: exits and progress of its processes; files of the other hosts.
  Waits for: the end of the trainer, or the next start.
  Woken by: its clock, ten times a second.
  Produces: starts; an exit code for the scheduler.
  """

  def __init__(
    self,
    command: list[str],
    hosts: hosts_lib.Hosts,
    options: SupervisorOptions,
    *,
    workdir: pathlib.Path,
    own_identity: dict[str, Any],
    say: Callable[[str], None],
    spawn: Callable[..., Any] = subprocess.Popen,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._spawn, self._clock = spawn, clock
    self._command, self._hosts, self._options = command, hosts, options
    self._folder, self._identity = workdir / FOLDER, own_identity
    self._restarts = Restarts(options.restarts, options.refill_s)
    self._say = say
    self._shown = 0.0

  def run(self) -> str | None:
    """Returns why the trainer failed, None if it ended well.

    Raises:
      ValueError: this host may not join, or another supervisor runs here.
    """
    if self._hosts.index:
      return self._follow()
    with files.alone(self._folder):
      return self._lead()

  # Host 0.

  def _lead(self) -> str | None:
    path, epoch = self._folder / _GANG, 0
    if path.exists():
      epoch = files.read_json(path)['epoch']
    while True:
      epoch += 1
      for old in self._folder.glob('epoch_*'):
        # The logs of the last start show why it failed.
        if old != self._folder_of(epoch - 1):
          shutil.rmtree(old, ignore_errors=True)
      self._folder_of(epoch).mkdir(parents=True)
      where, own = hosts_lib.address(), self._identity
      start = dict(epoch=epoch, address=where, identity=own, end=None)
      files.write_json(path, start)
      with self._gang(start) as gang:
        failure = self._watch_all(gang, self._folder_of(epoch))
      left = self._restarts.take() if failure else None
      if failure is None or failure.is_lasting or left is None:
        reason = None
        if failure:
          used = '; no restarts are left (--restarts, --refill_s)'
          used = '' if failure.is_lasting else used
          reason = f'{failure.reason}{used}{failure.log}'
        files.write_json(path, start | {'end': {'reason': reason}})
        return reason
      text = f'{failure.reason}; starting again, {left} restarts left'
      self._say(text + failure.log)

  def _watch_all(
    self, gang: gangs.Gang, folder: pathlib.Path
  ) -> gangs.GangFailure | None:
    """Waits for the end of a start, on whatever host it shows."""
    settled = None
    while True:
      self._show_life()
      found = gang.failure(self._options.stall_s)
      failures = [found] if found else []
      for path in sorted(folder.glob('failed_*.json')):
        failures.append(gangs.GangFailure(**files.read_json(path)))
      if failures:
        settled = settled or time.monotonic() + _SETTLE_S
        passing = [f for f in failures if not f.is_lasting]
        if passing or time.monotonic() > settled:
          return (passing or failures)[0]
      elif gang.is_done():
        return None
      time.sleep(_POLL_S)

  def _show_life(self) -> None:
    if self._hosts.count > 1 and time.monotonic() - self._shown > _ALIVE_S:
      self._shown = time.monotonic()
      path = self._folder / f'.{_LEADER}'
      path.write_text(str(time.time_ns()))
      path.replace(self._folder / _LEADER)

  # Other hosts.

  def _follow(self) -> str | None:
    life, last, seen = self._life(), 0, time.monotonic()
    while time.monotonic() - seen < self._options.start_s:
      # What a leader wrote that is dead by now is of no use.
      if life != (life := self._life()):
        start = files.read_json(self._folder / _GANG)
        if start['epoch'] != last and start['end'] is None:
          identity.check(self._identity, start['identity'], self._hosts.index)
          last = start['epoch']
          with self._gang(start) as gang:
            end = self._watch_own(gang, last)
          if end is not None:
            return end['reason']
        life, seen = self._life(), time.monotonic()
      time.sleep(_POLL_S)
    return (
      f'host 0 gave no sign of life in {self._folder} within '
      f'{self._options.start_s:g} s (--start_s)'
    )

  def _watch_own(self, gang: gangs.Gang, epoch: int) -> dict[str, Any] | None:
    """Returns the end of the trainer, None once another start is due."""
    path = self._folder_of(epoch) / f'failed_{self._hosts.index}.json'
    failure, since = None, time.monotonic()
    while True:
      now = files.read_json(self._folder / _GANG)
      if now['epoch'] != epoch:
        return None
      if now['end'] is not None:
        failed = failure or now['end']['reason']
        deadline = time.monotonic() + (0 if failed else _GRACE_S)
        while not gang.is_done() and time.monotonic() < deadline:
          time.sleep(_POLL_S)
        return now['end']
      if failure is None:
        failure, since = gang.failure(self._options.stall_s), time.monotonic()
        if failure is not None:
          self._say(failure.reason)
          gang.end()
          # Host 0 may have gone on, and this folder with it.
          with contextlib.suppress(OSError):
            files.write_json(path, dataclasses.asdict(failure))
      elif time.monotonic() - since > self._options.start_s:
        return {'reason': 'host 0 begins no other start'}
      time.sleep(_POLL_S)

  def _life(self) -> str:
    path = self._folder / _LEADER
    return path.read_text() if path.exists() else ''

  # All hosts.

  @contextlib.contextmanager
  def _gang(self, start: dict[str, Any]) -> Iterator[gangs.Gang]:
    """Starts this host's processes, which end with the block."""
    hosts, address = self._hosts, start['address']
    shared = dict(
      folder=str(self._folder_of(start['epoch'])),
      address=address,
      count=hosts.total,
      devices=hosts.devices,
      start_s=self._options.start_s,
    )
    # Or a restart would compile everything again.
    added = {_CACHE: os.environ.get(_CACHE, str(self._folder / 'compiled'))}
    if hosts.devices:  # Emulated, whatever this machine has.
      added['JAX_PLATFORMS'] = 'cpu'
    gang = gangs.Gang(
      *(self._command, hosts, shared, added, self._spawn, self._clock)
    )
    self._say(
      f'start {start["epoch"]}: {hosts.total} processes at {address}, here '
      f'{gang.pids()}'
    )
    grace_s = 0.0
    try:
      yield gang
    except BaseException:
      grace_s = _GRACE_S  # Someone ends this supervisor.
      raise
    finally:
      gang.end(grace_s)

  def _folder_of(self, epoch: int) -> pathlib.Path:
    return self._folder / f'epoch_{epoch}'
