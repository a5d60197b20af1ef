"""Event files that TensorBoard shows.

tensorboardX gives the format. Its own writer is not used: it writes from a
thread, which a full disk ends, and the next call to add a scalar hangs.
"""

import pathlib
import struct
import time
from typing import Any

from composer_jax.telemetry import append


class Board(append.AppendFile):
  """Writes scalars to one folder, before `write` returns."""

  def __init__(self, folder: pathlib.Path, *, purge_step: int | None = None):
    """Begins a file; TensorBoard drops older events from `purge_step` on."""
    # Slow to import, and not every writer needs it.
    from tensorboardX import record_writer, summary
    from tensorboardX.proto import event_pb2

    # Its classes are made at import: type checkers see none.
    events: Any = event_pb2
    self._event = events.Event
    self._scalar = summary.scalar
    self._sum = record_writer.masked_crc32c
    # TensorBoard reads files in order of their names, and two files may begin
    # within a second.
    super().__init__(
      folder / f'events.out.tfevents.{time.time_ns()}',
      'TensorBoard events',
      cure=', set --config.telemetry.tensorboard=False',
    )
    data = self._record(file_version='brain.Event:2')
    if purge_step is not None:
      start = events.SessionLog(status=events.SessionLog.START)
      data += self._record(step=purge_step, session_log=start)
    self.append(data)

  def write(
    self, step: int, scalars: dict[str, float], *, walltime: float
  ) -> None:
    """Appends the scalars of a step; an OSError says that they do not fit."""
    values = [
      value
      for name, scalar in scalars.items()
      for value in self._scalar(name, scalar).value
    ]
    self.append(
      self._record(step=step, wall_time=walltime, summary={'value': values})
    )

  def _record(self, **fields: Any) -> bytes:
    """Returns an event as a TFRecord: length, data, a checksum of each."""
    fields = {'wall_time': time.time()} | fields
    data = self._event(**fields).SerializeToString()
    length = struct.pack('<Q', len(data))
    sums = [struct.pack('<I', self._sum(part)) for part in (length, data)]
    return length + sums[0] + data + sums[1]
