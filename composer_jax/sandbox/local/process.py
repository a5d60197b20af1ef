"""A zygote process on the host's side: its start, its requests, its end."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from composer_jax.sandbox import base, results
from composer_jax.sandbox.inside import wire
from composer_jax.sandbox.local import cgroups

# Factor by which a machine, such as an emulated one, is slower than others.
PATIENCE = float(os.environ.get('COMPOSER_SANDBOX_PATIENCE', '1'))
_START_S = 10.0 * PATIENCE
_SETUP_S = 10.0 * PATIENCE
_GRACE_S = _SETUP_S + 2.0 * PATIENCE  # beyond the wall limit
_CLOSE_S = 2.0
serials = itertools.count()


class ZygoteError(Exception):
  """The zygote died, hung or could not prepare a call."""


def scheduling() -> dict[str, Any]:
  """Returns cores (None where unknown) and priority of this thread."""
  cores = None
  if hasattr(os, 'sched_getaffinity'):
    cores = sorted(os.sched_getaffinity(0))
  return {'cores': cores, 'priority': os.getpriority(os.PRIO_PROCESS, 0)}


class PipeReader:
  """Reads two pipes and keeps at most `cap` bytes of each.

  Further output is read and dropped, so that a program with much output still
  ends by itself.
  """

  def __init__(self, result_fd: int, output_fd: int, cap: int):
    self.result, self.output = bytearray(), bytearray()
    self.truncated = False
    self.descriptors = [result_fd, output_fd]
    self._result_fd, self._cap = result_fd, cap
    for descriptor in self.descriptors:
      os.set_blocking(descriptor, False)

  def __enter__(self) -> 'PipeReader':
    return self

  def __exit__(self, *unused) -> None:
    for descriptor in self.descriptors:
      os.close(descriptor)

  def read(self, descriptor: int) -> bool:
    """Reads once; false when nothing more will come or is there now."""
    try:
      piece = os.read(descriptor, 65536)
    except BlockingIOError:
      return False
    is_result = descriptor == self._result_fd
    kept = self.result if is_result else self.output
    room = self._cap - len(kept)
    kept += piece[:room]
    if not is_result:
      self.truncated |= len(piece) > room
    return bool(piece)

  def close(self, descriptor: int) -> None:
    self.descriptors.remove(descriptor)
    os.close(descriptor)

  def drain(self) -> None:
    for descriptor in self.descriptors:
      while self.read(descriptor):
        pass


class Process:
  """One zygote process, which takes one request at a time.

  Attributes:
    about: facts that the zygote stated at its start.
    control: socket to the zygote.
    keeper: socket to the process that keeps the boxes' files.
    serial: number of this zygote, unique in the host process.
  """

  def __init__(
    self,
    level: str,
    limits: base.Limits,
    scheduling: dict[str, Any],
    options: dict[str, Any],
  ):
    """Starts it.

    Args:
      level: isolation.
      limits: limits of each program.
      scheduling: what `scheduling` returned.
      options: folders of images and packages; whether /proc is mounted.

    Raises:
      ZygoteError: the zygote could not start.
    """
    self.level, self.limits = level, limits
    self._scheduling = scheduling
    self.about: dict = {}
    # Names the cgroup, and gives the zygote a uid that no other of this process
    # has, because processes are counted by uid.
    self.serial = next(serials)
    self._group = cgroups.make(
      f'{self.serial}', limits.memory_bytes, limits.processes
    )
    self._scratch = None
    self._process: subprocess.Popen | None = None
    self.control, control = socket.socketpair()
    self.keeper, keeper = socket.socketpair()
    inner_ends = {'control': control, 'keeper': keeper}
    with contextlib.ExitStack() as unless_started:
      unless_started.callback(self.close)
      if level == 'rlimits':  # the others mount a workspace of their own
        self._scratch = tempfile.mkdtemp(prefix=f'composer-{os.getpid()}-')
        # The user that the code becomes can enter it but not list it.
        os.chmod(self._scratch, 0o711)
      self._start(options, inner_ends)
      unless_started.pop_all()

  def _start(
    self, options: dict[str, Any], inner_ends: dict[str, socket.socket]
  ) -> None:
    with tempfile.TemporaryFile() as errors:
      passed = {name: end.fileno() for name, end in inner_ends.items()}
      config = {
          'level': self.level, 'host_pid': os.getpid(), **passed,
          'uid': 60000 + (os.getpid() * 16 + self.serial) % 5000,
          'scratch': self._scratch, 'counts_memory': self.counts_memory,
          'cgroup': self._group.version,
          'cgroup_procs': self._group.entrances(), **options,
          'setup_s': _SETUP_S, **self._scheduling,
          'limits': dataclasses.asdict(self.limits),
      }  # fmt: skip
      script = pathlib.Path(__file__).with_name('launcher.py')
      python = getattr(sys, '_base_executable', None) or sys.executable
      with contextlib.ExitStack() as closing:
        for end in inner_ends.values():
          closing.enter_context(end)
        self._process = subprocess.Popen(
            [python, '-I', '-S', str(script), json.dumps(config)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            pass_fds=passed.values(), env={}, start_new_session=True,
        )  # fmt: skip
      self._inbox = b''
      self.control.settimeout(_START_S)
      try:
        self.about = self._next_message()
      except (OSError, ZygoteError) as error:
        self._stop()
        errors.seek(0)
        text = errors.read(2000).decode('utf-8', 'replace').strip()
        reason = text.splitlines()[-1] if text else str(error)
        raise ZygoteError(reason) from error

  @property
  def counts_memory(self) -> bool:
    """True if cgroups that are made here limit memory."""
    return self._group.counts_memory

  def run(
    self,
    request: dict,
    blobs: Sequence[bytes] = (),
    *,
    entrances: Sequence[str] = (),
    wall_s: float,
  ) -> base.CommandResult:
    """Sends a request and reads its pipes until all that it started is dead.

    Args:
      request: header of the request.
      blobs: bytes of the request.
      entrances: `cgroup.procs` files of cgroups that its processes join.
      wall_s: wall limit that the zygote enforces.

    Raises:
      ZygoteError: the sandbox failed, which says nothing about the code.
    """
    start = time.monotonic()
    result_read, result_write = os.pipe()
    output_read, output_write = os.pipe()
    cap = self.limits.output_bytes
    with PipeReader(result_read, output_read, cap) as reader:
      descriptors = [result_write, output_write]
      try:
        descriptors += [os.open(path, os.O_WRONLY) for path in entrances]
        self.control.settimeout(_GRACE_S)
        wire.send(self.control, request, blobs, descriptors)
      except OSError as error:
        raise ZygoteError(f'cannot send the request: {error}') from error
      finally:
        for descriptor in descriptors:
          os.close(descriptor)
      message = self._attend(reader, start + wall_s + _GRACE_S)
    report = dict(line.partition(' ')[::2] for line in message['report'])
    if 'error' in report:
      raise ZygoteError(f'the call could not be prepared: {report["error"]}')
    if 'started' not in report:
      raise ZygoteError('the call was not prepared in time')
    status, error = 'ok', ''
    code = int(report['status']) if 'status' in report else None
    if message['timed_out']:
      status, error = 'timeout', f'wall limit of {wall_s} s'
    elif code is None:  # its init was killed too
      status, error = 'killed', 'killed, out of memory most likely'
    elif os.WIFSIGNALED(code):
      status, error = self._signalled(os.WTERMSIG(code))
    exited = status == 'ok' and code is not None
    return base.CommandResult(
        level=self.level, status=status, error=error,
        exit_code=os.waitstatus_to_exitcode(code) if exited else None,
        output=results.clean(bytes(reader.output)), report=bytes(reader.result),
        truncated=reader.truncated, wall_s=time.monotonic() - start,
    )  # fmt: skip

  def _signalled(self, number: int) -> tuple[str, str]:
    if number == signal.SIGXCPU:
      return 'timeout', f'CPU limit of {self.limits.cpu_s} s'
    name = signal.Signals(number).name if number < 32 else f'signal {number}'
    return 'killed', f'killed by {name}'

  def _next_message(self) -> dict:
    while b'\n' not in self._inbox:
      piece = self.control.recv(65536)
      if not piece:
        raise ZygoteError('the zygote ended')
      self._inbox += piece
    line, _, self._inbox = self._inbox.partition(b'\n')
    return json.loads(line)

  def _attend(self, reader: PipeReader, deadline: float) -> dict:
    """Reads the pipes until the zygote says that the request is done."""
    with selectors.DefaultSelector() as selector:
      selector.register(self.control, selectors.EVENT_READ)
      for descriptor in reader.descriptors:
        selector.register(descriptor, selectors.EVENT_READ)
      while True:
        ready = selector.select(deadline - time.monotonic())
        if not ready:
          raise ZygoteError('the zygote does not answer')
        for key, _ in ready:
          if key.fileobj is not self.control and not reader.read(key.fd):
            selector.unregister(key.fd)
            reader.close(key.fd)
        if any(key.fileobj is self.control for key, _ in ready):
          try:
            message = self._next_message()
          except OSError as error:
            raise ZygoteError(f'the zygote broke off: {error}') from error
          # All writers are dead; the pipes may still hold data.
          reader.drain()
          return message

  def close(self) -> None:
    self._stop()
    self._group.remove()
    if self._scratch:
      shutil.rmtree(self._scratch, ignore_errors=True)

  def _stop(self) -> None:
    """Closes the sockets, upon which the zygote ends, or else kills it."""
    self.control.close()
    self.keeper.close()
    if self._process is None:
      return
    try:
      self._process.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
