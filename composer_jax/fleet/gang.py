"""The processes of a trainer that one host runs: start, watch, end.

All processes of a trainer live and die together, since those that are left
wait in collectives, in C++, for one that died or hangs. A process that hangs
looks alive to jax; hence the file that each must touch as it makes progress.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.core import processes
from composer_jax.fleet import hosts as hosts_lib
from composer_jax.pipeline import controller

_LOG_LINES = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
  """Why the processes of a start must end.

  Attributes:
    reason: a sentence.
    is_lasting: true if the program itself refused to go on, which a restart
      would repeat.
  """

  reason: str
  is_lasting: bool


@dataclasses.dataclass
class _Member:
  """A process, its log, and when it last made progress.

  `begun` once it has joined the others, for whom it may have waited long.
  """

  number: int
  process: Any  # a subprocess.Popen
  log: pathlib.Path | None
  beat: pathlib.Path
  changed: int
  since: float
  begun: bool = False


class Gang:
  """The processes of this host in one start of a trainer."""

  def __init__(
    self,
    command: Sequence[str],
    hosts: hosts_lib.Hosts,
    *,
    folder: pathlib.Path,
    address: str,
    start_s: float,
    environment: dict[str, str],
    spawn: Callable[..., Any] = subprocess.Popen,
  ):
    """Starts them.

    Args:
      folder: folder of this start, which all hosts see.
      address: where process 0 of the trainer will listen.
      environment: variables to add.
      spawn: starts a process, with the arguments of `subprocess.Popen`.
    """
    self._beats = tempfile.mkdtemp(prefix='composer_jax_')
    self._members: list[_Member] = []
    self._start_s = start_s
    first = hosts.index * hosts.processes
    for number in range(first, first + hosts.processes):
      beat = pathlib.Path(self._beats, str(number))
      beat.touch()
      ticket = processes.Ticket(
        folder=str(folder),
        address=address,
        process=number,
        count=hosts.total,
        devices=hosts.devices,
        beat=str(beat),
        start_s=start_s,
      )
      # The first shows the run on this terminal.
      log = folder / f'process_{number}.log' if number else None
      with contextlib.ExitStack() as stack:
        out = stack.enter_context(log.open('ab')) if log else None
        process = spawn(
          command,
          stdin=subprocess.DEVNULL,
          stdout=out,
          stderr=out and subprocess.STDOUT,
          env={
            **os.environ,
            **environment,
            **ticket.to_environment(),
            controller.PARENT: str(os.getpid()),
          },
          # Ends with its rollout worker, which is of its group.
          start_new_session=True,
        )
      self._members.append(
        _Member(
          number=number,
          process=process,
          log=log,
          beat=beat,
          changed=beat.stat().st_mtime_ns,
          since=time.monotonic(),
        )
      )

  def is_done(self) -> bool:
    """Returns true once all processes ended well."""
    return all(m.process.poll() == 0 for m in self._members)

  def failure(self, stall_s: float) -> Failure | None:
    """Returns why this start must end, None while it need not."""
    ended = [m for m in self._members if m.process.poll() not in (None, 0)]
    if ended:
      # What kills one leads others to errors; the first is not known.
      fatal = [m for m in ended if m.process.returncode == processes.REFUSED]
      member = next((m for m in ended if m not in fatal), ended[0])
      tail = controller.tail_of(member.log, _LOG_LINES) if member.log else ''
      return Failure(
        reason=f'process {member.number} {_ending(member.process.returncode)}'
        + (f'; the end of its log:\n{tail}' if tail else ''),
        is_lasting=len(fatal) == len(ended),
      )
    now = time.monotonic()
    for member in self._members:
      changed = member.beat.stat().st_mtime_ns
      if changed != member.changed:
        member.changed, member.since, member.begun = changed, now, True
    stalled = [
      m
      for m in self._members
      if m.process.returncode is None
      and now - m.since > (stall_s if m.begun else self._start_s + stall_s)
    ]
    if not stalled:
      return None
    numbers = ', '.join(_stuck(m) for m in stalled)
    return Failure(
      reason=f'no progress of process {numbers} for {stall_s:g} s (--stall_s)',
      is_lasting=False,
    )

  def pids(self) -> dict[int, int]:
    return {m.number: m.process.pid for m in self._members}

  def end(self, grace_s: float = 0.0) -> None:
    """Ends all processes, those that hang too; asks first with a grace."""
    if grace_s:
      self._signal(signal.SIGTERM)
      deadline = time.monotonic() + grace_s
      while time.monotonic() < deadline and self._alive():
        time.sleep(0.05)
    self._signal(signal.SIGKILL)
    for member in self._members:
      member.process.wait()
    shutil.rmtree(self._beats, ignore_errors=True)

  def _alive(self) -> bool:
    return any(m.process.poll() is None for m in self._members)

  def _signal(self, number: int) -> None:
    for member in self._members:
      # The group, also of a leader that has ended: its worker may live.
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(member.process.pid, number)


def _ending(code: int) -> str:
  if code == processes.LOST:
    return 'lost the others'
  if code < 0:
    return f'died by {signal.Signals(-code).name}'
  return f'ended with an error (exit code {code})'


def _stuck(member: _Member) -> str:
  """Returns a number, and that the process is stopped where that is seen."""
  status = pathlib.Path(f'/proc/{member.process.pid}/status')
  with contextlib.suppress(OSError):
    if '\nState:\tT' in status.read_text():
      return f'{member.number} (stopped)'
  return str(member.number)


def command_of(module: str, arguments: Sequence[str]) -> list[str]:
  return [sys.executable, '-m', module, *arguments]
