"""Writes report.html: one self-contained page about the run in a workdir.

It shows what is there. Missing pieces say "not yet", damaged files are named,
and a run that was interrupted or is still going has a report like any other.
`page.html` is the template, which lays out and escapes what is computed here.
"""

import base64
import collections
import functools
import os
import pathlib
import time
from typing import Any

import jinja2
import numpy as np

from composer_jax.core import files
from composer_jax.report import (
  episodes,
  figures,
  metrics,
  reinforcement,
  run_data,
)
from composer_jax.telemetry import intervals, progress

REPORT = 'report.html'

STAGES = {
  'cpt': 'Continued pretraining',
  'sft': 'Supervised fine-tuning',
  'rl': 'Reinforcement learning',
  'eval': 'Evaluation',
}

# Stages whose wall time is measured, in the order of a run.
_TIMED = {
  'corpus': 'Corpus',
  'tokenizer': 'Tokenizer, and the corpus in its tokens',
  'cpt': STAGES['cpt'],
  'demonstrations': 'Demonstrations',
  'sft': STAGES['sft'],
  'eval_sft': 'Evaluation after SFT',
  'rl': STAGES['rl'],
  'eval_rl': 'Evaluation after RL',
}
_TRAINED = ('cpt', 'sft', 'rl')

_EVALUATIONS = {'sft': 'Before: after SFT', 'rl': 'After: after RL'}


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
  """Writes the report of whatever the workdir holds and returns its path.

  Raises:
    ValueError: there is no such directory.
    OSError: the page cannot be written; an older one is untouched.
  """
  run = run_data.load(pathlib.Path(workdir))
  path = run.workdir / REPORT
  files.write_atomic(path, build(run).encode())
  return path


def build(run: run_data.RunData) -> str:
  """Returns the page as text."""
  # Much of what the page shows was written by a policy: everything is escaped.
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.filters['shown'] = _shown
  environment.filters['base64'] = lambda text: base64.b64encode(
    str(text).encode()
  ).decode()
  evaluations, machine = run.evaluations(), run.run.get('machine')
  return environment.get_template('page.html').render(
    run=run,
    written=time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime()),
    stages=_stages(run),
    levels=episodes.levels(run),
    results=[
      _result(title, evaluations.pop(name, {}))
      for name, title in _EVALUATIONS.items()
    ]
    + [
      _result(name, row)
      for name, row in evaluations.items()
      if 'axis' not in row
    ],
    axes=_axes(run),
    change=_change(run),
    chart=functools.partial(figures.chart, run),
    latest=functools.partial(_latest, run),
    alarms=reinforcement.alarms(run),
    breaches=reinforcement.breaches(run),
    expert_loads=_expert_loads(run),
    episodes=episodes.shown(run),
    corpus=_corpus(run.manifest) if run.manifest else None,
    times=_times(run) if run.seconds else [],
    machine=machine if isinstance(machine, dict) else {},
    config=files.flatten(run.config) if run.config else {},
    meanings=_meanings(run),
  )


def _shown(value: Any) -> Any:
  """Formats a number of a table; anything else is left as it is."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return value
  return f'{value:,}' if isinstance(value, int) else f'{value:.4g}'


def _meanings(run: run_data.RunData) -> dict[str, dict[str, str]]:
  """Returns {stage: {metric: its meaning}} of the metrics that the run has."""
  names = {(row['stage'], name) for row in run.metrics for name in row}
  by_stage: dict[str, dict[str, str]] = {}
  for (stage, name), meaning in metrics.meanings().items():
    if (stage, name) in names:
      by_stage.setdefault(STAGES.get(stage, stage), {})[name] = meaning
  return by_stage


def _stages(run: run_data.RunData) -> list[tuple[str, bool]]:
  """Returns how far each stage is, and whether it has begun."""
  stages = []
  for stage in _TRAINED:
    steps = [row['step'] for row in run.rows(stage)]
    text = f'step {max(steps)}' if steps else 'not yet'
    if steps and stage in run.seconds:
      text += f', {progress.duration(run.seconds[stage])}'
    stages.append((f'{STAGES[stage]}: {text}', bool(steps)))
  return stages


def _share(row: dict[str, Any], name: str) -> float | None:
  value = run_data.number(row.get(name))
  return value if value is not None and 0 <= value <= 1 else None


def _result(title: str, row: dict[str, Any]) -> dict[str, Any]:
  """Returns an evaluation, whose interval is drawn below its pass rate."""
  low, high = _share(row, 'pass_low'), _share(row, 'pass_high')
  return {
    'title': title,
    'rate': _share(row, 'pass_rate'),
    'episodes': row.get('episodes', '?'),
    'interval': None if low is None or high is None else (low, high),
    'unfinished': _share(row, 'unfinished_rate'),
  }


def _axes(run: run_data.RunData) -> list[list[Any]]:
  """Returns rates in percent of every evaluation that names its axis."""
  names = ('pass_rate', 'pass_low', 'pass_high')
  names += ('first_edit_rate', 'unfinished_rate')
  rows = []
  for name, row in run.evaluations().items():
    if 'axis' in row:
      shares = [_share(row, metric) for metric in names]
      texts = ['' if s is None else f'{100 * s:.1f}' for s in shares]
      rows.append([name.split('_')[0], str(row['axis']), *texts])
  return rows


def _change(run: run_data.RunData) -> tuple[float, float, float] | None:
  """Returns RL's gain with its interval, once both sides are measured."""
  counts = []
  for name in _EVALUATIONS:
    row = run.evaluations().get(name, {})
    rate, count = _share(row, 'pass_rate'), run_data.number(row.get('episodes'))
    if rate is None or not count or count < 1:
      return None
    counts.append((round(rate * count), int(count)))
  (passed_0, num_0), (passed_1, num_1) = counts
  low, high = intervals.difference(*counts)
  return passed_1 / num_1 - passed_0 / num_0, low, high


def _latest(run: run_data.RunData, *names: str) -> list[list[str]]:
  """Returns the latest values of metrics of each stage that has the first."""
  rows = []
  for stage in ('cpt', 'sft'):
    values = [run.last(stage, name) for name in names]
    if values[0] is not None:
      texts = ['' if v is None else progress.number(v) for v in values]
      rows.append([STAGES[stage], *texts])
  return rows


def _expert_loads(run: run_data.RunData) -> list[figures.Figure]:
  maps = []
  for stage in _TRAINED:
    load_ME = np.asarray(run.last(stage, 'expert_load') or 0.0, float)
    if load_ME.ndim == 2 and load_ME.size and np.isfinite(load_ME).all():
      maps.append(figures.heat_map(f'{STAGES[stage]}: last step', load_ME))
  return maps


def _corpus(manifest: dict[str, Any]) -> dict[str, Any]:
  """Sums up what the corpus kept of which package, and what it dropped."""
  documents = [d for d in manifest['documents'] if isinstance(d, dict)]
  dropped = [d for d in manifest['dropped'] if isinstance(d, dict)]
  sizes: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
  for document in documents:
    key = str(document.get('package', '?')), str(document.get('split', ''))
    sizes[key].append(int(run_data.number(document.get('num_bytes')) or 0))
  licences = collections.Counter(
    str(document.get('licence') or 'unknown') for document in documents
  )
  reasons = collections.Counter(str(d.get('reason', '?')) for d in dropped)
  rows = [(*key, len(each), sum(each)) for key, each in sizes.items()]
  return {
    'num_documents': len(documents),
    'num_dropped': len(dropped),
    'num_packages': len({package for package, _ in sizes}),
    'megabytes': sum(row[-1] for row in rows) / 1e6,
    'licences': licences.most_common(12),
    'reasons': reasons.most_common(),
    'packages': sorted(rows, key=lambda row: -row[-1]),
  }


def _times(run: run_data.RunData) -> list[tuple[str, str]]:
  """Returns the measured stages in order, with sums."""
  names = [name for name in _TIMED if name in run.seconds]
  names += sorted(run.seconds.keys() - _TIMED.keys())
  rows = {_TIMED.get(name, name): run.seconds[name] for name in names}
  rows['The three trainings'] = sum(run.seconds.get(n, 0) for n in _TRAINED)
  rows['Sum'] = sum(run.seconds.values())
  return [(name, progress.duration(s)) for name, s in rows.items()]
