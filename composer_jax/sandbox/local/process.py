"""A zygote process as the host sees it: its start, its messages, its end."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from composer_jax.sandbox import base
from composer_jax.sandbox.local import cgroups, pipes

# How many times slower than others a machine is, an emulated one for example.
PATIENCE = float(os.environ.get('COMPOSER_SANDBOX_PATIENCE', '1'))
_START_S = 10.0 * PATIENCE
_SETUP_S = 10.0 * PATIENCE
GRACE_S = _SETUP_S + 2.0 * PATIENCE  # beyond the wall limit
_CLOSE_S = 2.0
serials = itertools.count()


class ZygoteError(Exception):
  """The zygote died, hung or could not prepare a call."""


@dataclasses.dataclass(frozen=True)
class Place:
  """Where zygotes run.

  Attributes:
    cores: None where a process cannot choose them.
    priority: the nice value.
  """

  cores: tuple[int, ...] | None
  priority: int

  @classmethod
  def current(cls) -> 'Place':
    """That of the calling thread."""
    cores = None
    if hasattr(os, 'sched_getaffinity'):
      cores = tuple(sorted(os.sched_getaffinity(0)))
    return cls(cores, os.getpriority(os.PRIO_PROCESS, 0))


@dataclasses.dataclass(frozen=True)
class Boxes:
  """What a zygote of boxes is given beyond that of calls.

  Attributes:
    images: the folder of images, or None.
    packages: the folder that becomes site-packages, or None.
    proc: whether to mount /proc.
  """

  images: str | None
  packages: str | None
  proc: bool


class Process:
  """One zygote process; one request at a time.

  Attributes:
    about: what it said of itself at its start.
    keeper: the socket to the process that keeps the boxes' files, or None.
  """

  def __init__(
    self,
    level: str,
    limits: base.Limits,
    place: Place,
    boxes: Boxes | None = None,
  ):
    self.level, self.limits, self.place = level, limits, place
    self.about: dict = {}
    # Unique in this process: names the group, and makes the uid, by which
    # processes are counted, one that no other zygote of ours uses.
    self.serial = next(serials)
    self._group = cgroups.make(
      f'{self.serial}', limits.memory_bytes, limits.processes
    )
    self._scratch = None
    self._process: subprocess.Popen | None = None
    self.control, self._theirs = socket.socketpair()
    self.keeper, self._its_keeper = None, None
    if boxes:
      self.keeper, self._its_keeper = socket.socketpair()
    with contextlib.ExitStack() as unless_started:
      unless_started.callback(self.close)
      if level == 'rlimits':  # the others mount a workspace of their own
        self._scratch = tempfile.mkdtemp(prefix=f'composer-{os.getpid()}-')
        # The user that the code becomes passes through, and sees no names.
        os.chmod(self._scratch, 0o711)
      self._start(boxes)
      unless_started.pop_all()

  def _start(self, boxes: Boxes | None) -> None:
    with tempfile.TemporaryFile() as errors:
      config = {
        'level': self.level,
        'control': self._theirs.fileno(),
        'host_pid': os.getpid(),
        'uid': 60000 + (os.getpid() * 16 + self.serial) % 5000,
        'scratch': self._scratch,
        'bwrap': shutil.which('bwrap'),
        'cgroup': self._group.version,
        'cgroup_procs': self._group.entrances(),
        'boxes': boxes is not None,
        'setup_s': _SETUP_S,
        **dataclasses.asdict(self.place),
        'limits': {
          field: getattr(self.limits, field)
          for field in base.Limits.__dataclass_fields__
        },
      }
      passed = [self._theirs.fileno()]
      if boxes and self._its_keeper:
        passed.append(self._its_keeper.fileno())
        config |= {
            **dataclasses.asdict(boxes), 'keeper': passed[-1],
            'counts_memory': self.counts_memory,
        }  # fmt: skip
      script = pathlib.Path(__file__).with_name('launcher.py')
      python = getattr(sys, '_base_executable', None) or sys.executable
      self._process = subprocess.Popen(
          [python, '-I', '-S', str(script), json.dumps(config)],
          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
          pass_fds=passed, env={}, start_new_session=True,
      )  # fmt: skip
      self._close_theirs()
      self._inbox = b''
      self.control.settimeout(_START_S)
      try:
        self.about = self.next_message()
      except (OSError, ZygoteError) as error:
        self._stop()
        errors.seek(0)
        text = errors.read(2000).decode('utf-8', 'replace').strip()
        reason = text.splitlines()[-1] if text else str(error)
        raise ZygoteError(reason) from error

  @property
  def counts_memory(self) -> bool:
    """Whether groups that are made here limit memory."""
    return self._group.counts_memory

  def next_message(self) -> dict:
    while b'\n' not in self._inbox:
      piece = self.control.recv(65536)
      if not piece:
        raise ZygoteError('the zygote ended')
      self._inbox += piece
    line, _, self._inbox = self._inbox.partition(b'\n')
    return json.loads(line)

  def attend(
    self, reader: pipes.Reader, start: float, wall_s: float
  ) -> dict[str, str]:
    """Reads the pipes until the zygote says that the request is done.

    Returns:
      The words of its report, 'timed_out' among them when it was.

    Raises:
      ZygoteError: when that says nothing about the code.
    """
    message = self._attend(reader, start + wall_s + GRACE_S)
    report = dict(line.partition(' ')[::2] for line in message['report'])
    if 'error' in report:
      raise ZygoteError(f'the call could not be prepared: {report["error"]}')
    if 'started' not in report:
      raise ZygoteError('the call was not prepared in time')
    return {**report, 'timed_out': 'yes'} if message['timed_out'] else report

  def _attend(self, reader: pipes.Reader, deadline: float) -> dict:
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
            message = self.next_message()
          except OSError as error:
            raise ZygoteError(f'the zygote broke off: {error}') from error
          # All writers are dead: what is left lies in the pipes.
          reader.drain()
          return message

  def close(self) -> None:
    self._stop()
    self._group.remove()
    if self._scratch:
      shutil.rmtree(self._scratch, ignore_errors=True)

  def _stop(self) -> None:
    """Asks by closing the socket, then kills; the namespaces follow."""
    self.control.close()
    if self.keeper:
      self.keeper.close()
    self._close_theirs()
    if self._process is None:
      return
    try:
      self._process.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()

  def _close_theirs(self) -> None:
    self._theirs.close()
    if self._its_keeper:
      self._its_keeper.close()
