"""What a sandbox promises: limits, results and the levels of isolation.

No level executes anything here; `open.open_sandbox` picks one.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol, Self

LEVELS = ('bwrap', 'unshare', 'rlimits')
# A machine of its own, in which one of the others runs.
OUTER_LEVELS = ('microvm',)
STATUSES = ('ok', 'timeout', 'killed', 'exit', 'infrastructure')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
  """Bounds of one call.

  Attributes:
    wall_s: seconds until everything that the call started is killed.
    cpu_s: seconds of processor time of one process, rounded up to whole ones.
    memory_bytes: address space of one process and, where a memory cgroup can
      be made, everything that the call holds together, its files included. Of
      a box: what its programs and its files hold together; address space alone
      where there is no cgroup.
    processes: processes and threads that may exist at once.
    file_bytes: size of one file, and what the workspace holds beyond the files
      that the call was given.
    output_bytes: kept of what the code prints (the rest is read and dropped),
      and the largest result.
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
  """What one call gave.

  Attributes:
    level: isolation that produced it, one of `LEVELS`.
    status: 'ok' (a well-formed result), 'timeout' (wall or CPU limit), 'killed'
      (a signal: out of memory, a crash), 'exit' (ended without a well-formed
      result), 'infrastructure' (the sandbox failed: says nothing on the code).
    value: with 'ok', for each argument list `['ok', value]` or `['raised',
      'TypeError: ...']`; values hold only None, bool, int, float, str, list and
      dict with str keys.
    stdout: what the code printed on both streams, capped.
    error: one line of explanation when the status is not 'ok'.
    wall_s: seconds from the request to the death of the last process.
  """

  level: str
  status: str
  value: Any = None
  stdout: str = ''
  error: str = ''
  wall_s: float = 0.0

  def __post_init__(self):
    if (
      self.level not in (*LEVELS, *OUTER_LEVELS) or self.status not in STATUSES
    ):
      raise ValueError(
        f'level ({self.level}) must be one of {LEVELS + OUTER_LEVELS} and '
        f'status ({self.status}) one of {STATUSES}.'
      )


class Closing:
  """What is closed at the end of a `with`."""

  def close(self) -> None:
    raise NotImplementedError

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused) -> None:
    self.close()


class SandboxLost(RuntimeError):
  """The sandbox that kept a box is gone, the box's files with it."""


class FileRefused(ValueError):
  """A path that leaves the workspace, or no regular file of bounded size."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Command:
  """One program to run in a box.

  Attributes:
    argv: the program and its arguments; with `warm` what follows `python -I`.
    warm: run it in a copy of an interpreter that waits with pytest imported
      (where the sandbox holds it) instead of starting one.
    stdin: given to the program, which otherwise reads an empty file.
    environment: added to the sandbox's own few variables.
    given: name -> bytes, laid read-only under /given for this run alone; the
      program cannot change them, and later runs do not see them. At level
      'rlimits' there is no /given: the text stands for the folder in `argv` and
      `environment`, and a program with the rights of its user can write there.
    folder: to run in, relative to the workspace.
    wall_s: a wall limit below that of the sandbox; None for that one.
  """

  argv: tuple[str, ...]
  warm: bool = False
  stdin: bytes = b''
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  given: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  folder: str = '.'
  wall_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
  """What one program did.

  Attributes:
    level: isolation that produced it.
    status: 'ok' (it ended by itself, whatever its exit code), 'timeout',
      'killed' or 'infrastructure', as of `Result`.
    exit_code: with 'ok'.
    output: both streams in the order of writing, capped, as text that is safe
      to show: what is not UTF-8 and all terminal escapes replaced.
    truncated: more output was read and dropped.
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
  names no regular file is a `FileRefused`; nothing the programs left there can
  make the host read or write elsewhere, hang, or hold more than asked for.
  """

  level: str

  def run(self, command: Command) -> CommandResult:
    """Runs a program; whatever it started is dead when this returns."""

  def read(self, path: str, max_bytes: int) -> bytes:
    """The content of a regular file; `FileRefused` beyond `max_bytes`."""

  def write(self, path: str, data: bytes) -> None:
    """Writes a file and the folders above it."""

  def remove(self, path: str) -> None:
    """Removes a regular file; an unknown one is a `FileRefused`."""

  def files(self, folder: str = '.') -> tuple[str, ...]:
    """Regular files below a folder, sorted, links not followed."""

  def changes(self) -> dict[str, str]:
    """path -> 'added', 'changed', 'removed' or 'special', against the image.

    'special' is a link, pipe or device, which no artefact may be.
    """

  def snapshot(self) -> bytes:
    """The workspace's difference to its image; survives the box."""

  def restore(self, snapshot: bytes) -> None:
    """Makes the workspace what it was at the snapshot.

    Bytes that are no snapshot are a `FileRefused` and change nothing.
    """

  def fork(self) -> 'Box':
    """Another box that begins as this one is."""

  def close(self) -> None:
    """Forgets the box; may be called twice."""


class Sandbox(Protocol):
  """What every backend and placement offers; safe to call from threads.

  Attributes:
    level: of isolation.
    about: what it gives here: seccomp, cgroup version, uid, accelerator.
  """

  level: str
  about: dict[str, Any]

  def call(
    self,
    files: dict[str, str],
    module: str,
    function: str,
    arguments: list[list],
  ) -> Result:
    """Calls `module.function(*arguments[i])` for each i in a fresh process."""

  def open(
    self, image: str, changes: Mapping[str, bytes | None] | None = None
  ) -> Box:
    """A box that begins as a folder below the sandbox's folder of images.

    Args:
      image: the folder, relative; '' for an empty workspace. Copied when it is
        first used: it may not change while the sandbox is open.
      changes: path -> content, or None for a file that is removed.

    Raises:
      FileRefused: for an image or a change that cannot be.
      SandboxLost: when no place for a box can be had.
    """

  def close(self) -> None: ...
