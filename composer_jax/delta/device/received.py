"""What whoever samples received, one JSON line for each policy served.

`received.jsonl` is the rollout side's: `metrics.jsonl` has one writer, the
trainer. Its lines have the form of that file, with the stage 'received' and the
version as the step, so that a report draws both alike; `report.metrics` says
what each metric means.
"""

import json
import os
import pathlib
import time
from typing import Any

from composer_jax.telemetry import append, writer

STAGE = 'received'


def truncate(workdir: str | os.PathLike, step: int) -> None:
  """Drops the lines of versions after `step`, which became void.

  Other weights may be published under their numbers, and not all of them be
  received. Nobody may be writing to the file.
  """
  writer.keep(
    pathlib.Path(workdir) / writer.RECEIVED, lambda row: row['step'] <= step
  )


class Received:
  """Appends to the file; one process at a time does."""

  def __init__(self, workdir: str | os.PathLike):
    """Opens the file, cutting off a line that a kill tore."""
    path = pathlib.Path(workdir) / writer.RECEIVED
    self._file = append.AppendFile(path, 'a line of received policies')
    self._file.cut_torn_line()

  def write(self, version: int, **fields: Any) -> None:
    """Appends one line; fields that are None are left out."""
    row = {'stage': STAGE, 'step': version, 'time': time.time()}
    row |= {name: v for name, v in fields.items() if v is not None}
    self._file.append((json.dumps(row) + '\n').encode())

  def close(self) -> None:
    self._file.close()
