"""Writes what a run measures, one JSON line at a time.

`metrics.jsonl` is the record that everything else (the report, the studies,
TensorBoard) is derived from. Appending is one write of whole lines, so `kill
-9` loses at most the line being written, which `read` skips and the next
`Writer` cuts off. TensorBoard and Weights & Biases receive the same numbers.

`report.metrics` says what each metric means.
"""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from composer_jax.core import files
from composer_jax.telemetry import append, board

METRICS = 'metrics.jsonl'
# Lines of the same form with the stage 'received', by whoever samples.
RECEIVED = 'received.jsonl'
_OWN_FIELDS = ('stage', 'step', 'time')


def _plain(value: Any) -> Any:
  """Turns scalars and arrays into JSON values; 'nan' and 'inf' are texts."""
  if hasattr(value, 'tolist'):
    value = value.tolist()
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  return value


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads a JSONL file, or metrics.jsonl of a workdir.

  A last line that a crash tore is left out. An absent file reads as empty.

  Raises:
    ValueError: another line is damaged; names its number.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    path = path / METRICS
  data = path.read_bytes() if path.exists() else b''
  whole, rows = data[: data.rfind(b'\n') + 1], []
  for number, line in enumerate(whole.decode().splitlines(), 1):
    try:
      rows.append(json.loads(line))
    except ValueError as error:
      raise ValueError(
        f'{path}, line {number} is not JSON ({error}); delete that line.'
      ) from error
  return rows


def keep(path: pathlib.Path, is_kept: Callable[[dict[str, Any]], bool]) -> bool:
  """Drops other lines of a JSONL file; returns true if there were any."""
  rows = read(path)
  kept = [row for row in rows if is_kept(row)]
  if len(kept) < len(rows):
    text = ''.join(json.dumps(row) + '\n' for row in kept)
    files.write_atomic(path, text.encode())
  return len(kept) < len(rows)


class Writer(contextlib.AbstractContextManager):
  """Appends metrics of a run to its workdir, as the only process to do so."""

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    tensorboard: bool = True,
    wandb: bool = False,
  ):
    """Opens the workdir's metrics, cutting off a line that a crash tore."""
    self._workdir = pathlib.Path(workdir)
    self._path = self._workdir / METRICS
    self._tensorboard = tensorboard
    self._boards: dict[str, board.Board] = {}
    self._file = self._open()  # Makes the workdir.
    self._wandb_run = _open_wandb(self._workdir) if wandb else None

  def _open(self) -> append.AppendFile:
    file = append.AppendFile(self._path, 'a line of metrics')
    file.cut_torn_line()
    return file

  def write(self, stage: str, step: int, **metrics: Any) -> None:
    """Appends one line; values are scalars, text or (nested) lists.

    Raises:
      OSError: the disk is full; names the path. Earlier lines are untouched,
        and TensorBoard has no step that the lines lack.
    """
    now = time.time()
    row: dict[str, Any] = {'stage': stage, 'step': int(step), 'time': now}
    for name in row.keys() & metrics.keys():
      raise ValueError(f'A metric cannot be called {name!r}: lines use it.')
    row |= {name: _plain(value) for name, value in metrics.items()}
    self._file.add(row)
    scalars = {
      f'{stage}/{name}': float(value)
      for name, value in row.items()
      if name not in _OWN_FIELDS and isinstance(value, (int, float))
    }
    if self._tensorboard and scalars:
      self._board(stage).write(int(step), scalars, walltime=now)
    if self._wandb_run is not None:
      self._wandb_run.log(scalars | {f'{stage}/step': int(step)})

  def truncate(self, stage: str, step: int, name: str | None = None) -> None:
    """Drops the stage's lines after `step`, which a resumed run writes again.

    With a name, only lines whose metric 'name' equals it. TensorBoard is told
    to purge the same steps, unless a name is given: it would purge all names.
    """
    is_dropped = keep(
      self._path,
      lambda row: (
        row['stage'] != stage
        or row['step'] <= step
        or (name is not None and row.get('name') != name)
      ),
    )
    if not is_dropped:
      return
    self._file.close()
    self._file = self._open()
    if self._tensorboard and name is None:
      if stage in self._boards:
        self._boards.pop(stage).close()
      self._board(stage, purge_step=step + 1)

  def _board(self, stage: str, purge_step: int | None = None) -> board.Board:
    if stage not in self._boards:
      self._boards[stage] = board.Board(
        self._workdir / 'tensorboard' / stage, purge_step=purge_step
      )
    return self._boards[stage]

  def flush(self) -> None:
    self._file.sync()
    for each in self._boards.values():
      each.sync()

  def close(self) -> None:
    # Closes all of them, even if one fails.
    with contextlib.ExitStack() as stack:
      stack.callback(self._file.close)
      for each in self._boards.values():
        stack.callback(each.close)
      self._boards = {}
      if self._wandb_run is not None:
        stack.callback(self._wandb_run.finish)
        self._wandb_run = None

  def __exit__(self, kind: type[BaseException] | None, *unused) -> None:
    # The error that ended the run matters, not those that follow from it.
    with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
      self.close()


def _open_wandb(workdir: pathlib.Path) -> Any:
  try:
    import wandb
  except ImportError as error:
    raise ValueError(
      'wandb=True needs the Weights & Biases client, which is not installed; '
      "pip install -e '.[wandb]' in the checkout, or set wandb to False."
    ) from error
  # One id per workdir: a resumed run continues its own curves.
  return wandb.init(
    project='composer_jax',
    dir=str(workdir),
    id=files.sha256(str(workdir.resolve()).encode())[:16],
    resume='allow',
  )
