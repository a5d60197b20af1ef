"""What a run measured, one JSON line at a time.

`metrics.jsonl` is the record that everything else (the report, the studies,
TensorBoard) is derived from. Appending is one write of whole lines, so `kill
-9` loses at most the line being written, which `read` skips and the next
`Writer` cuts off. TensorBoard and Weights & Biases receive the same numbers.

Metrics, by stage (`expert_load` is tokens per expert of each MoE layer, a list
of lists, and may be absent from a line):

| stage    | name                  | meaning                                   |
|----------|-----------------------|-------------------------------------------|
| cpt, sft | loss                  | mean over weighted tokens, nats           |
| cpt, sft | heldout_loss          | same, on documents that training skips    |
| cpt, sft | grad_norm             | global, before clipping                   |
| cpt, sft | tokens_per_s          | real tokens, padding excluded             |
| cpt, sft | mfu                   | share of peak FLOP/s (`telemetry.mfu`)    |
| cpt, sft | lr                    | learning rate of the step                 |
| all      | expert_load_max       | busiest expert over the mean, worst layer |
| rl       | reward                | mean over the step's rollouts             |
| rl       | pass_rate             | share of rollouts that passed             |
| rl       | entropy               | of the sampled distribution, nats a token |
| rl       | staleness             | trainer version minus sampled, largest    |
| rl       | invalid_rate          | invalid tool calls over all calls         |
| rl       | mismatch_kl           | rollout to training log-probs, replayed   |
| rl       | mismatch_kl_no_replay | the same batch, every token routed afresh |
| rl       | bundle_bytes          | published for the step                    |
| rl       | full_bytes            | of the whole policy                       |
| rl       | grad_norm             | global, before clipping                   |
| rl       | turns                 | tool calls per rollout                    |
| rl       | sandbox_ms            | wall time in the sandbox per rollout      |
| eval     | pass_rate             | on held-out tasks                         |
| eval     | pass_low, pass_high   | 95 % interval (`telemetry.intervals`)     |
| eval     | episodes              | judged                                    |
| eval     | name                  | text: which policy, 'sft' or 'rl'         |
"""

import contextlib
import errno
import json
import math
import os
import pathlib
import time
from typing import Any

from composer_jax.core import files

METRICS = 'metrics.jsonl'
_OWN_FIELDS = ('stage', 'step', 'time')


def _plain(value: Any) -> Any:
  """Turns numpy and device scalars and arrays into JSON values.

  JSON has no NaN or infinity; they become their names, which `float` reads.
  """
  if hasattr(value, 'tolist'):
    value = value.tolist()
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  return value


def _whole_lines(path: pathlib.Path) -> tuple[list[str], int]:
  """Returns the complete lines of a JSONL file and their length in bytes."""
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    return [], 0
  end = data.rfind(b'\n') + 1
  return data[:end].decode().splitlines(), end


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads a JSONL file, without the line that a crash tore, if any.

  Args:
    path: the file, or a workdir that holds `metrics.jsonl`; absent reads as
      empty.

  Raises:
    ValueError: a line other than the last is damaged, with its number.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    path = path / METRICS
  lines, _ = _whole_lines(path)
  rows = []
  for number, line in enumerate(lines, 1):
    try:
      rows.append(json.loads(line))
    except ValueError as error:
      raise ValueError(
        f'{path}, line {number} is not JSON ({error}); delete that line.'
      ) from error
  return rows


class Writer:
  """Appends metrics of a run to its workdir.

  One process writes to a workdir; several stages of it may share a Writer.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    tensorboard: bool = True,
    wandb: bool = False,
    wandb_project: str = 'composer_jax',
  ):
    """Opens the workdir's metrics, cutting off a line that a crash tore.

    Raises:
      ValueError: wandb is wanted but not installed.
    """
    self._workdir = pathlib.Path(workdir)
    self._workdir.mkdir(parents=True, exist_ok=True)
    self._path = self._workdir / METRICS
    self._wandb_run = None
    if wandb:
      self._wandb_run = _open_wandb(self._workdir, wandb_project)
    self._tensorboard = tensorboard
    self._boards: dict[str, Any] = {}
    _, end = _whole_lines(self._path)
    # Unbuffered, so that one write is one line and a kill tears at most that.
    self._file = open(self._path, 'ab', buffering=0)  # noqa: SIM115
    self._file.truncate(end)

  def write(self, stage: str, step: int, **metrics: Any) -> None:
    """Appends one line; values are scalars, text or (nested) lists.

    Raises:
      ValueError: a metric takes the name of one of the line's own fields.
      OSError: the disk is full, with the path; earlier lines are untouched.
    """
    row = {'stage': stage, 'step': int(step), 'time': time.time()}
    for name in _OWN_FIELDS:
      if name in metrics:
        raise ValueError(f'A metric cannot be called {name!r}: lines use it.')
    row |= {name: _plain(value) for name, value in metrics.items()}
    self._append(json.dumps(row) + '\n')
    scalars = {
      f'{stage}/{name}': float(value)
      for name, value in row.items()
      if name not in _OWN_FIELDS and isinstance(value, (int, float))
    }
    if self._tensorboard and scalars:
      board = self._board(stage)
      for name, value in scalars.items():
        board.add_scalar(name, value, int(step), walltime=row['time'])
    if self._wandb_run is not None:
      self._wandb_run.log(scalars | {f'{stage}/step': int(step)})

  def _append(self, line: str) -> None:
    data = line.encode()
    start = self._file.seek(0, os.SEEK_END)
    try:
      written = self._file.write(data)
    except OSError as error:
      self._cut(start)
      raise OSError(
        error.errno,
        f'Cannot append a line of metrics ({error.strerror}); the lines '
        'before it are untouched. Free space or choose another --workdir',
        str(self._path),
      ) from error
    if written != len(data):  # A disk that fills up writes part of the line.
      self._cut(start)
      raise OSError(
        errno.ENOSPC,
        f'Only {written} of {len(data)} bytes of a line of metrics fitted; '
        'the lines before it are untouched. Free space or choose another '
        '--workdir',
        str(self._path),
      )

  def _cut(self, end: int) -> None:
    with contextlib.suppress(OSError):
      self._file.truncate(end)

  def truncate(self, stage: str, step: int) -> None:
    """Drops the stage's lines after `step`, those a resumed run writes again.

    TensorBoard is told to purge the same steps.
    """
    rows = read(self._path)
    kept = [r for r in rows if r['stage'] != stage or r['step'] <= step]
    if len(kept) == len(rows):
      return
    self._file.close()
    text = ''.join(json.dumps(row) + '\n' for row in kept)
    files.write_atomic(self._path, text.encode())
    self._file = open(self._path, 'ab', buffering=0)  # noqa: SIM115
    if self._tensorboard:
      if stage in self._boards:
        self._boards.pop(stage).close()
      self._board(stage, purge_step=step + 1)

  def _board(self, stage: str, purge_step: int | None = None) -> Any:
    if stage not in self._boards:
      # Slow to import, and not wanted by every writer.
      import tensorboardX

      self._boards[stage] = tensorboardX.SummaryWriter(
        str(self._workdir / 'tensorboard' / stage), purge_step=purge_step
      )
    return self._boards[stage]

  def flush(self) -> None:
    os.fsync(self._file.fileno())
    for board in self._boards.values():
      board.flush()

  def close(self) -> None:
    self._file.close()
    for board in self._boards.values():
      board.close()
    self._boards = {}
    if self._wandb_run is not None:
      self._wandb_run.finish()
      self._wandb_run = None

  def __enter__(self) -> 'Writer':
    return self

  def __exit__(self, *unused) -> None:
    self.close()


def _open_wandb(workdir: pathlib.Path, project: str) -> Any:
  try:
    import wandb
  except ImportError as error:
    raise ValueError(
      'wandb=True needs the Weights & Biases client, which is not installed; '
      'run `pip install -e .[wandb]`, or set wandb to False.'
    ) from error
  # One id per workdir: a resumed run continues its own curves.
  return wandb.init(
    project=project,
    dir=str(workdir),
    id=files.sha256(str(workdir.resolve()).encode())[:16],
    resume='allow',
  )
