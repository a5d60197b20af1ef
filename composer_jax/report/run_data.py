"""Reads what a run left in its workdir, whole or interrupted.

| file             | holds                                                   |
|------------------|---------------------------------------------------------|
| config.json      | the run's configuration                                 |
| run.json         | optional: 'machine', 'command', 'sandbox_level'         |
| stages.json      | `telemetry.stage_times`                                 |
| metrics.jsonl    | `telemetry.writer`                                      |
| received.jsonl   | `delta.device.received`                                 |
| episodes.jsonl   | {step, task_id, reward, verdict, turns}, turns being    |
|                  | [{role, text}]; 'stage' if not of RL's training         |
| */manifest.json  | of the corpus                                           |

Nothing here trusts a file to be there. A damaged one becomes a problem that the
report shows, never an exception: the report is most wanted when a run failed.
"""

import dataclasses
import math
import pathlib
from typing import Any

from composer_jax.core import files
from composer_jax.telemetry import stage_times, writer

# Of `delta.device.received`, which a report need not import.
_RECEIVED = 'received.jsonl'


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
  """What was found; empty where a file is not there yet.

  Attributes:
    workdir: it was read from.
    config: nested.
    run: of run.json.
    seconds: of wall time, by stage.
    metrics: lines, in order; those of policies received come last, the latest
      of each version.
    episodes: lines, in order.
    manifest: of the corpus.
    problems: one sentence for each file that is damaged.
  """

  workdir: pathlib.Path
  config: dict[str, Any]
  run: dict[str, Any]
  seconds: dict[str, float]
  metrics: list[dict[str, Any]]
  episodes: list[dict[str, Any]]
  manifest: dict[str, Any]
  problems: tuple[str, ...]

  def series(self, stage: str, name: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of a metric; lines without it are left out.

    Values that are not finite are kept as NaN, which leaves a gap in a plot.
    """
    steps, values = [], []
    for row in self.metrics:
      if row['stage'] != stage or name not in row:
        continue
      value = number(row[name])
      if value is not None:
        steps.append(row['step'])
        values.append(value if math.isfinite(value) else math.nan)
    return steps, values

  def last(self, stage: str, name: str) -> Any:
    """Returns the latest value of a metric, None before the first."""
    for row in reversed(self.metrics):
      if row['stage'] == stage and name in row:
        return row[name]
    return None

  def evaluations(self) -> list[dict[str, Any]]:
    """Returns the latest evaluation of each name, in order of appearance."""
    found = {}
    for row in self.metrics:
      if row['stage'] == 'eval' and 'pass_rate' in row:
        found[str(row.get('name', ''))] = row
    return list(found.values())


def number(value: Any) -> float | None:
  """Returns a metric as a float ('nan' and 'inf' are names of floats)."""
  if isinstance(value, bool) or value is None:
    return None
  if isinstance(value, (int, float)) or value in ('nan', 'inf', '-inf'):
    return float(value)
  return None


def load(workdir: str | pathlib.Path) -> RunData:
  """Reads a workdir.

  Raises:
    ValueError: it is not a directory.
  """
  workdir = pathlib.Path(workdir)
  if not workdir.is_dir():
    raise ValueError(f'{workdir} is not a directory, so there is no run in it.')
  problems: list[str] = []
  metrics = _metrics(workdir / writer.METRICS, problems)
  lines = _metrics(workdir / _RECEIVED, problems)
  # Some versions come twice: to a process that was started again, or after the
  # trainer went back.
  latest = {row['step']: row for row in lines}
  metrics += [latest[version] for version in sorted(latest)]
  return RunData(
    workdir=workdir,
    config=_object(workdir / 'config.json', problems),
    run=_object(workdir / 'run.json', problems),
    seconds=_seconds(workdir / stage_times.STAGES, problems),
    metrics=metrics,
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


def _seconds(path: pathlib.Path, problems: list[str]) -> dict[str, float]:
  found = {n: number(s) for n, s in _object(path, problems).items()}
  return {n: s for n, s in found.items() if s is not None and math.isfinite(s)}


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
      # Bundles and checkpoints have manifests, too.
      if {'documents', 'dropped'} <= value.keys():
        return value
  return {}
