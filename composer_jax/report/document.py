"""Writes report.html: one self-contained page about the run in a workdir.

It shows what is there. Missing pieces say "not yet", damaged files are named,
and a run that was interrupted or is still going has a report like any other.
`page.html` is the template, which lays out and escapes what is computed here;
`comparison.html` is that of several runs.
"""

import collections
import functools
import os
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
import numpy as np

from composer_jax.core import files
from composer_jax.report import (
  episodes,
  figures,
  fleet,
  live,
  metrics,
  reinforcement,
  run_data,
)
from composer_jax.telemetry import intervals, progress
from composer_jax.text import tokenizer

REPORT = 'report.html'
COMPARISON = 'comparison.html'

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
  'eval_import': 'Evaluation of the import',
  'eval_sft': 'Evaluation after SFT',
  'rl': STAGES['rl'],
  'eval_rl': 'Evaluation after RL',
}
_TRAINED = ('cpt', 'sft', 'rl')

_EVALUATIONS = {'sft': 'Before: after SFT', 'rl': 'After: after RL'}

# Share of unfinished held-out episodes above which the page warns, and what to
# change, by the stage that the policy comes from.
_MOST_UNFINISHED = 0.05
_CURES = {
  'sft': 'end more demonstrations early (demonstrations.cut_short)',
  'rl': 'raise the price of not finishing (rewards.unfinished_penalty)',
}


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


def write_comparison(
  workdir: str | os.PathLike, others: Sequence[str | os.PathLike]
) -> pathlib.Path:
  """Writes a page with the curves of several runs into the first's workdir.

  Raises:
    ValueError: a folder has no metrics or is named twice, or there are more
      runs than colours; nothing is written.
    OSError: the page cannot be written; an older one is untouched.
  """
  paths = [pathlib.Path(path) for path in (workdir, *others)]
  if len(paths) > (most := len(figures.COLORS)):
    raise ValueError(f'At most {most} runs can be compared; got {len(paths)}.')
  if len({path.resolve() for path in paths}) < len(paths):
    raise ValueError(
      f'Each run must be named once; got {", ".join(map(str, paths))}.'
    )
  runs = [run_data.load(path) for path in paths]
  for run in runs:
    if not run.metrics:
      raise ValueError(
        f'{run.workdir} has no lines in metrics.jsonl that could be compared; '
        f'name workdirs of runs. {" ".join(run.problems)}'.rstrip()
      )
  names = [path.resolve().name for path in paths]
  is_clear = len(set(names)) == len(names)
  labels = names if is_clear else [str(path) for path in paths]
  path = paths[0] / COMPARISON
  page = _compared(dict(zip(labels, runs, strict=True)))
  files.write_atomic(path, page.encode())
  return path


def render(name: str, **fields: Any) -> str:
  """Returns a page made of the template of that name."""
  # Much of what the page shows was written by a policy: everything is escaped,
  # here or, in drawings, by `figures`.
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.filters['shown'] = _shown
  now = time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())
  page = environment.get_template(name).render(written=now, **fields)
  return tokenizer.without_surrogates(page)


def _compared(runs: dict[str, run_data.RunData]) -> str:
  configs = {n: files.flatten(run.config) for n, run in runs.items()}
  fields = dict.fromkeys(field for c in configs.values() for field in c)
  settings = [
    (field, *(str(c.get(field, '')) for c in configs.values()))
    for field in fields
  ]
  return render(
    'comparison.html',
    runs=runs,
    axes=_in_order(
      row | {'run': n} for n, r in runs.items() for row in _axes(r)
    ),
    chart=functools.partial(figures.comparison, runs),
    differences=[row for row in settings if len(set(row[1:])) > 1],
  )


def build(run: run_data.RunData) -> str:
  """Returns the page as text."""
  evaluations, machine = run.evaluations(), run.run.get('machine')
  titles = {'import': 'As imported'} if 'import' in evaluations else {}
  return render(
    'page.html',
    run=run,
    stages=_stages(run),
    levels=episodes.levels(run),
    results=[
      _result(title, evaluations.pop(name, {}))
      for name, title in (titles | _EVALUATIONS).items()
    ]
    + [
      _result(name, row)
      for name, row in evaluations.items()
      if 'axis' not in row
    ],
    axes=_in_order(_axes(run)),
    change=_change(run, *_EVALUATIONS),
    warnings=_warnings(run),
    waits=reinforcement.waits(run),
    scores=reinforcement.scores(run),
    heads=[reinforcement.heads(run, stage) for stage in _TRAINED],
    workers=fleet.workers(run),
    worker_head=fleet.HEAD,
    leases=fleet.sentences(run),
    histograms=fleet.histograms(run),
    cycles=live.cycles(run),
    cycle_head=live.HEAD,
    of_cycles=live.sentences(run),
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
    'first_edit': _share(row, 'first_edit_rate'),
    **_unfinished(row),
  }


def _unfinished(row: dict[str, Any]) -> dict[str, Any]:
  share = _share(row, 'unfinished_rate')
  is_high = share is not None and share > _MOST_UNFINISHED
  return {'unfinished': share, 'is_unfinished': is_high}


def _warnings(run: run_data.RunData) -> list[str]:
  """Names the policies that leave too many episodes unfinished, and cures."""
  worst: dict[str, float] = {}
  for name, row in run.evaluations().items():
    result, stage = _unfinished(row), name.split('_')[0]
    if result['is_unfinished'] and stage in _CURES:
      worst[stage] = max(worst.get(stage, 0.0), result['unfinished'])
  return [
    f'The policy after {stage.upper()} leaves up to {100 * share:.1f} % of '
    f'held-out episodes unfinished; more than {100 * _MOST_UNFINISHED:.0f} % '
    f'is too many. What helps: {_CURES[stage]}, or give room where good '
    'episodes run out of it (episode.max_tokens, episode.max_turns).'
    for stage, share in worst.items()
  ]


def _in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
  """Puts evaluations of one axis in a row, and within it those of a policy."""
  rows = list(rows)
  axes, policies = ([r[k] for r in rows] for k in ('axis', 'policy'))
  return sorted(
    rows,
    key=lambda r: (axes.index(r['axis']), policies.index(r['policy'])),
  )


def _axes(run: run_data.RunData) -> list[dict[str, Any]]:
  """Returns the evaluations that name their axis."""
  rows = []
  for name, row in run.evaluations().items():
    if 'axis' in row:
      policy, _, axis = name.partition('_')
      before = '_'.join(filter(None, ('sft', axis)))
      change = _change(run, before, name) if policy == 'rl' else None
      named = {'policy': policy, 'axis': str(row['axis']), 'change': change}
      rows.append(_result('', row) | named)
  return rows


def _change(
  run: run_data.RunData, before: str, after: str
) -> tuple[float, float, float] | None:
  """Returns the gain of pass rate, with its interval, if both are measured."""
  counts = []
  for name in (before, after):
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
