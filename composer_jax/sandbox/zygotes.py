"""The host's side: a pool of zygotes, and one call through one of them."""

import array
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import pathlib
import queue
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

from composer_jax.sandbox import base, cgroups, results

_START_S = 10.0
_GRACE_S = 12.0  # beyond the wall limit: the zygote's own time for its setup
_MAX_REQUEST = 16 << 20
_CLOSE_S = 2.0
_serials = itertools.count()


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


class Zygote:
  """One zygote process; one call at a time."""

  def __init__(self, level: str, limits: base.Limits, place: Place):
    self.level, self.limits, self.place = level, limits, place
    self.about: dict = {}
    # Unique in this process: names the group, and makes the uid, by which
    # processes are counted, one that no other zygote of ours uses.
    self._serial = next(_serials)
    self._group = cgroups.make(
      f'{self._serial}', limits.memory_bytes, limits.processes
    )
    self._scratch = None
    self._process: subprocess.Popen | None = None
    self._control, self._theirs = socket.socketpair()
    with contextlib.ExitStack() as unless_started:
      unless_started.callback(self.close)
      if level == 'rlimits':  # the others mount a workspace of their own
        self._scratch = tempfile.mkdtemp(prefix=f'composer-{os.getpid()}-')
        # The user that the code becomes passes through, and sees no names.
        os.chmod(self._scratch, 0o711)
      self._start()
      unless_started.pop_all()

  def _start(self) -> None:
    with self._theirs as theirs, tempfile.TemporaryFile() as errors:
      config = {
        'level': self.level,
        'control': theirs.fileno(),
        'host_pid': os.getpid(),
        'uid': 60000 + (os.getpid() * 16 + self._serial) % 5000,
        'scratch': self._scratch,
        'bwrap': shutil.which('bwrap'),
        'cgroup': self._group.version,
        'cgroup_procs': self._group.entrances(),
        **dataclasses.asdict(self.place),
        'limits': {
          field: getattr(self.limits, field)
          for field in base.Limits.__dataclass_fields__
        },
      }
      script = pathlib.Path(__file__).with_name('launcher.py')
      python = getattr(sys, '_base_executable', None) or sys.executable
      self._process = subprocess.Popen(
          [python, '-I', '-S', str(script), json.dumps(config)],
          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
          pass_fds=[theirs.fileno()], env={}, start_new_session=True,
      )  # fmt: skip
      theirs.close()
      self._inbox = b''
      self._control.settimeout(_START_S)
      try:
        self.about = self._next_message()
      except (OSError, ZygoteError) as error:
        self._stop()
        errors.seek(0)
        text = errors.read(2000).decode('utf-8', 'replace').strip()
        reason = text.splitlines()[-1] if text else str(error)
        raise ZygoteError(reason) from error

  def _next_message(self) -> dict:
    while b'\n' not in self._inbox:
      piece = self._control.recv(65536)
      if not piece:
        raise ZygoteError('the zygote ended')
      self._inbox += piece
    line, _, self._inbox = self._inbox.partition(b'\n')
    return json.loads(line)

  def run(self, request: bytes, num_calls: int) -> base.Result:
    """Sends a request and reads its pipes until the call is dead.

    Raises:
      ZygoteError: when the call says nothing about the code.
    """
    start = time.monotonic()
    result_read, result_write = os.pipe()
    output_read, output_write = os.pipe()
    with _Reader(result_read, output_read, self.limits.output_bytes) as reader:
      try:
        self._control.settimeout(_GRACE_S)
        self._send(request, (result_write, output_write))
      except OSError as error:
        raise ZygoteError(f'cannot send the request: {error}') from error
      finally:
        os.close(result_write)
        os.close(output_write)
      message = self._attend(reader, start)
    return self._judge(message, reader, num_calls, time.monotonic() - start)

  def _send(self, request: bytes, descriptors: tuple[int, int]) -> None:
    rights = array.array('i', descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    self._control.sendmsg([struct.pack('!I', len(request))], ancillary)
    self._control.sendall(request)

  def _attend(self, reader: '_Reader', start: float) -> dict:
    deadline = start + self.limits.wall_s + _GRACE_S
    with selectors.DefaultSelector() as selector:
      selector.register(self._control, selectors.EVENT_READ)
      for descriptor in reader.descriptors:
        selector.register(descriptor, selectors.EVENT_READ)
      while True:
        ready = selector.select(deadline - time.monotonic())
        if not ready:
          raise ZygoteError('the zygote does not answer')
        for key, _ in ready:
          if key.fileobj is not self._control and not reader.read(key.fd):
            selector.unregister(key.fd)
            reader.close(key.fd)
        if any(key.fileobj is self._control for key, _ in ready):
          try:
            message = self._next_message()
          except OSError as error:
            raise ZygoteError(f'the zygote broke off: {error}') from error
          # All writers are dead: what is left lies in the pipes.
          reader.drain()
          return message

  def _judge(self, message, reader, num_calls, wall_s) -> base.Result:
    report = dict(line.partition(' ')[::2] for line in message['report'])
    if 'error' in report:
      raise ZygoteError(f'the call could not be prepared: {report["error"]}')
    if 'started' not in report:
      raise ZygoteError('the call was not prepared in time')
    status, value, error = 'ok', None, ''
    code = int(report['status']) if 'status' in report else None
    if message['timed_out']:
      status, error = 'timeout', f'wall limit of {self.limits.wall_s} s'
    elif reader.result_too_large:
      status = 'exit'
      error = f'result larger than {self.limits.output_bytes} bytes'
    elif code is None:  # its init went too
      status, error = 'killed', 'killed, out of memory most likely'
    elif os.WIFSIGNALED(code):
      status, error = _signalled(os.WTERMSIG(code), self.limits)
    else:
      try:
        value = results.parse(bytes(reader.result), num_calls)
      except ValueError as reason:
        status = 'exit'
        error = f'exit code {os.waitstatus_to_exitcode(code)}: {reason}'
    return base.Result(
        level=self.level, status=status, value=value, error=error,
        stdout=reader.output.decode('utf-8', 'replace'), wall_s=wall_s,
    )  # fmt: skip

  def close(self) -> None:
    self._stop()
    self._group.remove()
    if self._scratch:
      shutil.rmtree(self._scratch, ignore_errors=True)

  def _stop(self) -> None:
    """Asks by closing the socket, then kills; the namespaces follow."""
    self._control.close()
    self._theirs.close()
    if self._process is None:
      return
    try:
      self._process.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()


class _Reader:
  """Keeps a bounded part of two pipes; owns their read ends.

  Output beyond the cap is read and dropped, so that a talkative program ends by
  itself. A result beyond it closes the pipe: its writer fails at once.
  """

  def __init__(self, result_fd: int, output_fd: int, cap: int):
    self.result, self.output = bytearray(), bytearray()
    self.result_too_large = False
    self.descriptors = [result_fd, output_fd]
    self._result_fd = result_fd
    self._cap = cap
    for descriptor in self.descriptors:
      os.set_blocking(descriptor, False)

  def __enter__(self) -> '_Reader':
    return self

  def __exit__(self, *unused) -> None:
    for descriptor in self.descriptors:
      os.close(descriptor)

  def read(self, descriptor: int) -> bool:
    """Reads once; false when nothing more will come or lies there now."""
    try:
      piece = os.read(descriptor, 65536)
    except BlockingIOError:
      return False
    is_result = descriptor == self._result_fd
    kept = self.result if is_result else self.output
    room = self._cap - len(kept)
    kept += piece[:room]
    if is_result and len(piece) > room:
      self.result_too_large = True
      return False
    return bool(piece)

  def close(self, descriptor: int) -> None:
    self.descriptors.remove(descriptor)
    os.close(descriptor)

  def drain(self) -> None:
    for descriptor in self.descriptors:
      while self.read(descriptor):
        pass


def _signalled(number: int, limits: base.Limits) -> tuple[str, str]:
  if number == signal.SIGXCPU:
    return 'timeout', f'CPU limit of {limits.cpu_s} s'
  name = signal.Signals(number).name if number < 32 else f'signal {number}'
  return 'killed', f'killed by {name}'


class ZygotePool:
  """A sandbox of `size` zygotes; further threads wait their turn.

  All zygotes run where the thread that opened the pool ran, also those that
  replace a dead one: the thread that finds it dead may be pinned to a core.
  """

  def __init__(self, level: str, limits: base.Limits, size: int):
    self.level = level
    self._limits = limits
    self._lock = threading.Lock()
    self._closed = False
    self._idle: queue.LifoQueue = queue.LifoQueue()
    self._size = size
    self._place = Place.current()
    started = []
    with contextlib.ExitStack() as unless_started:
      for _ in range(size):
        started.append(Zygote(level, limits, self._place))
        unless_started.callback(started[-1].close)
      unless_started.pop_all()
    self.about = started[0].about
    for zygote in started:
      self._idle.put(zygote)

  def call(
    self,
    files: dict[str, str],
    module: str,
    function: str,
    arguments: list[list],
  ) -> base.Result:
    """Calls `module.function(*arguments[i])` for each i in a fresh process.

    Args:
      files: relative path -> text; the whole workspace of the call.
      module: dotted name, imported from the workspace.
      function: attribute of the module.
      arguments: JSON values only. Expected results have no place here: they
        are compared by the caller.
    """
    request = _encode(files, module, function, arguments)
    zygote = self._idle.get()
    try:
      if self._closed:
        raise ValueError('the sandbox is closed; open another one.')
      for attempt in range(2):
        try:
          zygote = zygote or Zygote(self.level, self._limits, self._place)
          return zygote.run(request, len(arguments))
        except (ZygoteError, OSError) as error:
          reason = str(error)
          logging.warning(
            'Sandbox zygote failed (%s), attempt %d of 2: restarting it.',
            reason,
            attempt + 1,
          )
          if zygote:
            zygote.close()
          zygote = None
      return base.Result(
        level=self.level, status='infrastructure', error=reason
      )
    finally:
      self._idle.put(zygote)

  def close(self) -> None:
    """Waits for running calls, then ends all zygotes; may be called twice."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
    for _ in range(self._size):
      zygote = self._idle.get()
      if zygote:
        zygote.close()
    for _ in range(self._size):  # callers that wait get their error
      self._idle.put(None)

  def __enter__(self) -> 'ZygotePool':
    return self

  def __exit__(self, *unused) -> None:
    self.close()


def _encode(files, module, function, arguments) -> bytes:
  for name, text in files.items():
    parts = pathlib.PurePosixPath(name).parts
    if not parts or parts[0] == '/' or '..' in parts or '\0' in name:
      raise ValueError(
        f'file name {name!r} must be relative and stay in the workspace.'
      )
    if not isinstance(text, str):
      raise ValueError(f'file {name!r} must be text, not {type(text)}.')
  request = json.dumps({
      'files': files, 'module': module, 'function': function,
      'arguments': [list(each) for each in arguments],
  }).encode()  # fmt: skip
  if len(request) > _MAX_REQUEST:
    raise ValueError(
      f'the request ({len(request)} bytes) must not exceed {_MAX_REQUEST}.'
    )
  return request
