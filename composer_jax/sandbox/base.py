"""What a sandbox promises: limits, results and the levels of isolation.

No level executes anything here; `open.open_sandbox` picks one.
"""

import dataclasses
import math
from typing import Any

LEVELS = ('bwrap', 'unshare', 'rlimits')
STATUSES = ('ok', 'timeout', 'killed', 'exit', 'infrastructure')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
  """Bounds of one call.

  Attributes:
    wall_s: seconds until everything that the call started is killed.
    cpu_s: seconds of processor time of one process, rounded up to whole ones.
    memory_bytes: address space of one process and, where a memory cgroup can
      be made, everything that the call holds together, its files included.
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
    if self.level not in LEVELS or self.status not in STATUSES:
      raise ValueError(
        f'level ({self.level}) must be one of {LEVELS} and status '
        f'({self.status}) one of {STATUSES}.'
      )
