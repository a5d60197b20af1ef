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
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.core import processes
from composer_jax.fleet import hosts as hosts_lib
from composer_jax.pipeline import controller

_LOG_LINES = 15
# Exit codes that tell less of what happened first than all others do.
_RANKS = {processes.REFUSED: 1, processes.LOST: 2, -signal.SIGABRT: 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GangFailure:
  """Why the processes of a start must end.

  Attributes:
    reason: which process did what.
    log: text to add, with the end of its log; '' for none.
    is_lasting: true if the program itself refused to go on, which a restart
      would repeat.
  """

  reason: str
  is_lasting: bool
  log: str = ''


class _Member:
  """A process, and when it last made progress."""

  def __init__(
    self,
    spawn: Callable[..., Any],
    clock: Callable[[], float],
    ticket: processes.Ticket,
    **start: Any,
  ):
    self.number, self._start_s = ticket.process, ticket.start_s
    folder, self._beat = pathlib.Path(ticket.folder), pathlib.Path(ticket.beat)
    # The first shows the run on this terminal.
    self.log = folder / f'process_{self.number}.log' if self.number else None
    self._beat.touch()
    # Until it has joined the others, for whom it may wait long.
    self._changed, self._has_joined = self._beat.stat().st_mtime_ns, False
    self._clock, self._since = clock, clock()
    with contextlib.ExitStack() as stack:
      out = stack.enter_context(self.log.open('ab')) if self.log else None
      self.process = spawn(
        **start,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out and subprocess.STDOUT,
        # Ends with its rollout worker, which is of its group.
        start_new_session=True,
      )

  def is_stalled(self, stall_s: float) -> bool:
    now, changed = self._clock(), self._beat.stat().st_mtime_ns
    if changed != self._changed:
      self._changed, self._since, self._has_joined = changed, now, True
    limit_s = stall_s if self._has_joined else stall_s + self._start_s
    return self.process.returncode is None and now - self._since > limit_s


class Gang:
  """The processes of this host in one start of a trainer."""

  def __init__(
    self,
    command: Sequence[str],
    hosts: hosts_lib.Hosts,
    shared: dict[str, Any],
    environment: dict[str, str],
    spawn: Callable[..., Any] = subprocess.Popen,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Starts them.

    Args:
      shared: fields of a `Ticket` that all processes share.
      environment: variables to add.
      spawn: starts a process, with the arguments of `subprocess.Popen`.
      clock: function that returns the seconds by which stalls are found.
    """
    self._beats = tempfile.mkdtemp(prefix='composer_jax_')
    self._members: list[_Member] = []
    self._has_ended = False
    first = hosts.index * hosts.processes
    for number in range(first, first + hosts.processes):
      beat = f'{self._beats}/{number}'
      ticket = processes.Ticket(**shared, process=number, beat=beat)
      parent = {controller.PARENT: str(os.getpid())}
      env = {**os.environ, **environment, **ticket.to_environment(), **parent}
      self._members.append(_Member(spawn, clock, ticket, args=command, env=env))

  def is_done(self) -> bool:
    """Returns true once all processes ended well."""
    return all(m.process.poll() == 0 for m in self._members)

  def failure(self, stall_s: float) -> GangFailure | None:
    """Returns why this start must end, None while it need not."""
    ended = [m for m in self._members if m.process.poll() not in (None, 0)]
    if ended:
      # The death of one leads others to errors, and jax to abort them.
      member = min(ended, key=lambda m: _RANKS.get(m.process.returncode, 0))
      # A restart in vain costs less than a run that ends for a lost process.
      is_lasting = {m.process.returncode for m in ended} == {processes.REFUSED}
      tail = controller.tail_of(member.log, _LOG_LINES) if member.log else ''
      return GangFailure(
        reason=f'process {member.number} {_ending(member.process.returncode)}',
        is_lasting=is_lasting,
        log=f'. The end of its log:\n{tail}' if tail else '',
      )
    stalled = [m for m in self._members if m.is_stalled(stall_s)]
    if not stalled:
      return None
    numbers = ', '.join(map(_stuck, stalled))
    return GangFailure(
      reason=f'no progress of process {numbers} for {stall_s:g} s (--stall_s)',
      is_lasting=False,
    )

  def pids(self) -> dict[int, int]:
    return {m.number: m.process.pid for m in self._members}

  def end(self, grace_s: float = 0.0) -> None:
    """Ends all processes, those that hang too; asks first with a grace."""
    if self._has_ended:
      return  # By now the ids may be those of other processes.
    self._has_ended = True
    self._signal(signal.SIGTERM if grace_s else signal.SIGKILL)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and not all(
      m.process.poll() is not None for m in self._members
    ):
      time.sleep(0.05)
    self._signal(signal.SIGKILL)
    for member in self._members:
      member.process.wait()
    shutil.rmtree(self._beats, ignore_errors=True)

  def _signal(self, number: int) -> None:
    for member in self._members:
      # The group, also of a leader that has ended: its worker may live.
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(member.process.pid, number)


def _ending(code: int) -> str:
  if code == processes.LOST:
    return 'lost another process'
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
