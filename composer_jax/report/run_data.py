"""Reads what a run left in its workdir, whole or interrupted.

| file             | holds                                                   |
|------------------|---------------------------------------------------------|
| config.json      | the run's configuration                                 |
| run.json         | optional: 'machine', 'command', 'sandbox_level'         |
| stages.json      | wall seconds of stages (`telemetry.stage_times`)        |
| metrics.jsonl    | metrics (`telemetry.writer`)                            |
| received.jsonl   | policies received (`delta.device.received`)             |
| episodes.jsonl   | {step, task_id, reward, verdict, turns}, each turn a    |
|                  | {role, text}; 'stage' if not of RL's training           |
| */manifest.json  | the corpus: documents kept and dropped                  |

Any of them may be missing. A damaged one becomes a problem that the report
shows, never an exception: the report matters most when a run failed.
"""

import dataclasses
import math
import pathlib
from typing import Any

from composer_jax.core import files
from composer_jax.telemetry import stage_times, writer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
  """Contents of a workdir; a field is empty where its file is missing.

  Attributes:
    seconds: wall seconds by stage.
    metrics: lines of metrics.jsonl in order, then the latest line of each
      received policy version.
    episodes: lines of episodes.jsonl, in order.
    problems: one sentence for each damaged file.
  """

  workdir: pathlib.Path
  config: dict[str, Any]
  run: dict[str, Any]
  seconds: dict[str, float]
  metrics: list[dict[str, Any]]
  episodes: list[dict[str, Any]]
  manifest: dict[str, Any]
  problems: tuple[str, ...]

  def rows(self, stage: str) -> list[dict[str, Any]]:
    return [row for row in self.metrics if row['stage'] == stage]

  def series(self, stage: str, name: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of a metric; NaN leaves a gap in a plot."""
    steps, values = [], []
    for row in self.rows(stage):
      value = number(row.get(name))
      if value is not None:
        steps.append(row['step'])
        values.append(value if math.isfinite(value) else math.nan)
    return steps, values

  def last(self, stage: str, name: str) -> Any:
    """Returns the latest value of a metric; None if there is none yet."""
    rows = [row for row in self.rows(stage) if name in row]
    return rows[-1][name] if rows else None

  def evaluations(self) -> dict[str, dict[str, Any]]:
    """Returns the latest evaluation of each name, in order of appearance."""
    return {
      str(row.get('name', '')): row
      for row in self.rows('eval')
      if 'pass_rate' in row
    }


def number(value: Any) -> float | None:
  """Returns a metric as a float, or None; 'nan' and 'inf' name floats."""
  if isinstance(value, bool):
    return None
  if isinstance(value, (int, float)) or value in ('nan', 'inf', '-inf'):
    return float(value)
  return None


def load(workdir: str | pathlib.Path) -> RunData:
  """Reads a workdir; a ValueError if it is not a directory."""
  workdir = pathlib.Path(workdir)
  if not workdir.is_dir():
    raise ValueError(f'{workdir} is not a directory, so there is no run in it.')
  problems: list[str] = []
  # A version comes twice to a restarted process, or after the trainer went back
  # to a checkpoint.
  received = {
    row['step']: row for row in _metrics(workdir / writer.RECEIVED, problems)
  }
  seconds = _object(workdir / stage_times.STAGES, problems)
  return RunData(
    workdir=workdir,
    config=_object(workdir / 'config.json', problems),
    run=_object(workdir / 'run.json', problems),
    seconds={
      stage: value
      for stage, value in seconds.items()
      if number(value) is not None and math.isfinite(value)
    },
    metrics=[
      *_metrics(workdir / writer.METRICS, problems),
      *(received[version] for version in sorted(received)),
    ],
    episodes=_lines(workdir / 'episodes.jsonl', problems),
    manifest=_manifest(workdir, problems),
    problems=tuple(problems),
  )


def _metrics(path: pathlib.Path, problems: list[str]) -> list[dict[str, Any]]:
  return [
    row
    for row in _lines(path, problems)
    if {'stage', 'step', 'time'} <= row.keys()
  ]


def _object(path: pathlib.Path, problems: list[str]) -> dict[str, Any]:
  if not path.is_file():
    return {}
  try:
    value = files.read_json(path)
  except (ValueError, OSError) as error:
    problems.append(str(error))
    return {}
  if not isinstance(value, dict):
    problems.append(f'{path} holds a {type(value).__name__}, not an object.')
    return {}
  return value


def _lines(path: pathlib.Path, problems: list[str]) -> list[dict[str, Any]]:
  try:
    rows = writer.read(path)
  except (ValueError, OSError) as error:
    problems.append(str(error))
    return []
  return [row for row in rows if isinstance(row, dict)]


def _manifest(workdir: pathlib.Path, problems: list[str]) -> dict[str, Any]:
  for pattern in ('manifest.json', '*/manifest.json', '*/*/manifest.json'):
    for path in sorted(workdir.glob(pattern)):
      value = _object(path, problems)
      # Bundles and checkpoints have manifests of another form.
      if {'documents', 'dropped'} <= value.keys():
        return value
  return {}
