"""Interfaces of a sandbox: limits, results, boxes and levels of isolation.

Nothing is executed here; `open.open_sandbox` picks an implementation.
"""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from typing import Any, Protocol, Self

from composer_jax.sandbox import results
from composer_jax.sandbox.inside import runner

_MAX_REQUEST = 16 << 20
LEVELS = ('unshare', 'rlimits')
# Machines of their own, in which one of the other levels runs: QEMU's micro VM,
# slow where KVM does not work, and an actor of a Ray cluster.
OUTER_LEVELS = ('microvm', 'ray')
STATUSES = ('ok', 'timeout', 'killed', 'exit', 'infrastructure')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
  """Limits of one call or program.

  Attributes:
    wall_s: seconds until everything that the call started is killed.
    cpu_s: seconds of processor time of one process, rounded up.
    memory_bytes: memory of the programs and files of a box together, where a
      memory cgroup can be made; otherwise, and in calls, also the address space
      of one process.
    processes: processes and threads that may exist at once.
    file_bytes: size of one file, and growth of the workspace beyond the files
      that it began with.
    output_bytes: printed bytes that are kept (further ones are read and
      dropped), and size of the largest result.
  """

  wall_s: float
  cpu_s: float
  memory_bytes: int
  processes: int
  file_bytes: int
  output_bytes: int

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not value > 0 or not math.isfinite(value):
        raise ValueError(
          f'sandbox limit {field.name} ({value}) must be positive and finite.'
        )
    if self.memory_bytes < 64 << 20:
      raise ValueError(
        f'sandbox limit memory_bytes ({self.memory_bytes}) must be at least '
        f'{64 << 20}: the interpreter alone needs most of it.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
  """Result of one call.

  Attributes:
    level: isolation under which the call ran.
    status: 'ok' (a well-formed result), 'timeout' (wall or CPU limit), 'killed'
      (a signal: out of memory, a crash), 'exit' (ended without a well-formed
      result), 'infrastructure' (the sandbox failed; the code is not judged).
    value: with 'ok', for each argument list `['ok', value]` or `['raised',
      'TypeError: ...']`; values hold only None, bool, int, float, str, list and
      dict with str keys.
    stdout: text that the code printed on both streams, capped.
    error: one line of explanation when the status is not 'ok'.
    wall_s: seconds from the request to the death of the last process.
  """

  level: str
  status: str
  value: Any = None
  stdout: str = ''
  error: str = ''
  wall_s: float = 0.0


class Closing:
  """A context manager that calls `close` at its end."""

  def close(self) -> None:
    raise NotImplementedError

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused) -> None:
    self.close()


class SandboxLost(RuntimeError):
  """The sandbox that kept a box is gone, and the box's files with it."""


class NoSandbox(ValueError):
  """No level of isolation that was asked for works on this machine."""


class FileRefused(ValueError):
  """A path that leaves the workspace, or no regular file of bounded size."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Command:
  """One program to run in a box.

  Attributes:
    argv: program and arguments; with `warm` the arguments after `python -I`.
    warm: run `-c CODE` or `-m MODULE` in a copy of an interpreter that waits,
      with pytest imported if the sandbox has it, instead of starting one.
    stdin: standard input of the program.
    environment: variables added to the sandbox's own few.
    wall_s: wall limit if below that of the sandbox; None for the sandbox's.
  """

  argv: tuple[str, ...]
  warm: bool = False
  stdin: bytes = b''
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  wall_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
  """Result of one program.

  Attributes:
    level: isolation under which the program ran.
    status: 'ok' (it ended by itself, with any exit code), or 'timeout',
      'killed' or 'infrastructure' with the meaning they have in `Result`.
    exit_code: exit code with 'ok', else None.
    output: both streams in the order of writing, capped, as text that is safe
      to show: terminal escapes and bytes that are not UTF-8 are replaced.
    truncated: true if further output was read and dropped.
    report: bytes written to descriptor 3, capped like the output; nothing that
      the program prints can be mistaken for them.
    error: one line of explanation when the status is not 'ok'.
    wall_s: seconds from the request to the death of the last process.
  """

  level: str
  status: str
  exit_code: int | None = None
  output: str = ''
  truncated: bool = False
  report: bytes = b''
  error: str = ''
  wall_s: float = 0.0


class Box(Protocol):
  """A workspace with a file system of its own that outlives single programs.

  Paths are relative to the workspace. A path that leaves it, follows a link or
  names no regular file is a `FileRefused`. No file that programs leave there
  makes the host read or write elsewhere, hang, or hold more than it asked for.
  """

  level: str

  def run(self, command: Command) -> CommandResult:
    """Runs a program; every process that it started is dead at the return."""

  def read(self, path: str, max_bytes: int) -> bytes:
    """Reads a regular file; `FileRefused` beyond `max_bytes`."""

  def write(self, path: str, data: bytes) -> None:
    """Writes a file and makes the folders above it."""

  def remove(self, path: str) -> None:
    """Removes a regular file; `FileRefused` if there is none."""

  def files(self, folder: str = '.') -> tuple[str, ...]:
    """Lists regular files below a folder, sorted, links not followed."""

  def changes(self) -> dict[str, str]:
    """Compares with the image: 'added', 'changed', 'removed' or 'special'.

    'special' paths are links, pipes and devices, which no artefact may be.
    """

  def close(self) -> None:
    """Forgets the box; may be called twice."""


class Sandbox(Closing):
  """Interface of every level and placement; safe to call from threads.

  Attributes:
    level: level of isolation.
    about: facts about it here: seccomp, cgroup version, uid, accelerator.
    limits: limits of each call and program.
  """

  level: str
  about: dict[str, Any]
  limits: Limits

  def open(
    self, image: str, changes: Mapping[str, bytes | None] | None = None
  ) -> Box:
    """Opens a box that begins as a folder of the sandbox's images.

    Args:
      image: folder relative to the images; '' for an empty workspace. It is
        copied at its first use and may not change while the sandbox is open.
      changes: path -> content, or None for a file that is removed.

    Raises:
      FileRefused: the image or a change is not allowed.
      SandboxLost: no place for a box can be had.
    """
    raise NotImplementedError

  def call(
    self, files: dict[str, str], module: str, function: str, arguments: list
  ) -> Result:
    """Calls `module.function(*arguments[i])` for each i in a fresh box.

    The program is `inside.runner`; a sandbox that fails is tried once more.

    Args:
      files: relative path -> text: the whole workspace of the call.
      module: dotted name of a module of the workspace.
      function: name of the function in it.
      arguments: argument lists of JSON values. Expected results have no place
        here: the caller compares them.
    """
    request = json.dumps({
        'names': list(files), 'module': module, 'function': function,
        'arguments': [list(each) for each in arguments],
        'memory_bytes': self.limits.memory_bytes,
    }).encode()  # fmt: skip
    if len(request) > _MAX_REQUEST:
      raise ValueError(
        f'the request has {len(request)} bytes; {_MAX_REQUEST} are allowed: '
        'send less in arguments.'
      )
    contents = {name: text.encode() for name, text in files.items()}
    command = Command(argv=(runner.CALL,), warm=True, stdin=request)
    reason = ''
    for attempt in range(2):
      try:
        with contextlib.closing(self.open('', contents)) as box:
          ending = box.run(command)
        if ending.status != 'infrastructure':
          return self._result(ending, len(arguments))
        reason = ending.error
      except SandboxLost as error:
        reason = str(error)
      logging.warning(
        'A sandbox failed (%s), attempt %d of 2.', reason, attempt + 1
      )
    return Result(level=self.level, status='infrastructure', error=reason)

  def _result(self, ending: CommandResult, num_calls: int) -> Result:
    status, value, error = ending.status, None, ending.error
    if status == 'ok':
      try:
        if len(ending.report) == self.limits.output_bytes:
          raise ValueError(f'the result fills {len(ending.report)} bytes')
        value = results.parse(ending.report, num_calls)
      except ValueError as reason:
        status, error = 'exit', f'exit code {ending.exit_code}: {reason}'
    return Result(
        level=ending.level, status=status, value=value, error=error,
        stdout=ending.output, wall_s=ending.wall_s,
    )  # fmt: skip
