"""Writes report.html: one self-contained page about the run in a workdir.

It shows what is there. Missing pieces say "not yet", damaged files are named,
and a run that was interrupted or is still going has a report like any other.
"""

import collections
import os
import pathlib
import time
from typing import Any

import numpy as np

from composer_jax.core import files
from composer_jax.report import episodes as episode_sections
from composer_jax.report import figures, html, metrics, run_data
from composer_jax.report import policies as delta_sections
from composer_jax.report import reinforcement as rl_sections
from composer_jax.telemetry import intervals, progress

REPORT = 'report.html'

STAGES = {
  'cpt': 'Continued pretraining',
  'sft': 'Supervised fine-tuning',
  'rl': 'Reinforcement learning',
  'eval': 'Evaluation',
}

# Of what wall time was measured, in the order of a run.
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

# Metrics of which the latest value is shown, and what a table calls them.
_LAST = {
  'loss': 'last loss',
  'heldout_loss': 'held-out loss',
  'tokens_per_s': 'tokens/s',
  'mfu': 'MFU',
  'lr': 'lr',
}
_MUON = {
  'muon_matrices': 'matrices',
  'muon_groups': 'groups',
  'muon_flops': 'FLOP a device',
  'muon_flops_ideal': 'even share, standard method',
  'muon_bytes': 'bytes received',
}

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
  return html.document(
    f'{run.workdir.name}: composer_jax run',
    _header(run),
    _result(run),
    _language_model(run),
    rl_sections.reinforcement(run, STAGES['rl']),
    delta_sections.bundles(run),
    _experts(run),
    episode_sections.verdicts(run),
    episode_sections.episodes(run),
    _corpus(run),
    _run_details(run),
    _meanings(run),
  )


def _meanings(run: run_data.RunData) -> html.Markup:
  """Explains the metrics that the run has, by stage."""
  there = {(row['stage'], name) for row in run.metrics for name in row}
  told = {k: v for k, v in metrics.meanings().items() if k in there}
  parts = [
    html.titled(
      STAGES.get(stage, stage),
      html.pairs({name: told[s, name] for s, name in told if s == stage}),
    )
    for stage in dict.fromkeys(stage for stage, _ in told)
  ]
  return html.details('What the metrics of metrics.jsonl mean', *parts)


def _header(run: run_data.RunData) -> html.Markup:
  chips = []
  for stage in _TRAINED:
    steps = [row['step'] for row in run.metrics if row['stage'] == stage]
    words = f'step {max(steps)}' if steps else 'not yet'
    if steps and stage in run.seconds:
      words += f', {progress.duration(run.seconds[stage])}'
    kind = 'good' if steps else 'warn'
    chips.append(html.chip(f'{STAGES[stage]}: {words}', kind))
  chips.append(_sandbox_chip(run))
  written = time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())
  return html.element(
    'header',
    html.element('h1', run.workdir.name),
    html.element(
      'p', f'composer_jax run, page written {written}', class_='sub'
    ),
    html.element('div', *chips, class_='chips'),
    html.notes(run.problems, 'problem'),
  )


def _sandbox_chip(run: run_data.RunData) -> html.Markup:
  levels = {run.run['sandbox_level']} if 'sandbox_level' in run.run else set()
  levels |= set(episode_sections.levels(run))
  if not levels:
    return html.chip('Sandbox: not yet', 'warn')
  return html.chip(f'Sandbox: {", ".join(sorted(map(str, levels)))}')


def _share(row: dict[str, Any], name: str) -> float | None:
  value = run_data.number(row.get(name))
  return value if value is not None and 0 <= value <= 1 else None


def _card(title: str, row: dict[str, Any] | None) -> html.Markup:
  """Returns a pass rate with its interval drawn below it."""
  heading = html.element('div', title, class_='sub')
  rate = _share(row, 'pass_rate') if row else None
  if row is None or rate is None:
    return html.element('div', heading, html.not_yet('Result'), class_='card')
  value = html.element('div', f'{100 * rate:.1f} %', class_='value')
  low, high = _share(row, 'pass_low'), _share(row, 'pass_high')
  words, mark = f'{row.get("episodes", "?")} held-out episodes', ''
  if low is not None and high is not None:
    words += f', 95 % interval {100 * low:.1f} to {100 * high:.1f} %'
    span = f'left:{100 * low:.2f}%;width:{100 * max(0.0, high - low):.2f}%'
    mark = html.element('i', style=span)
  mark = html.join([mark, html.element('em', style=f'left:{100 * rate:.2f}%')])
  bar = html.element('div', mark, class_='bar')
  note = html.element('div', words, class_='sub')
  return html.element('div', heading, value, bar, note, class_='card')


def _change(run: run_data.RunData) -> list[html.Markup]:
  """Returns the card of RL's gain, once both sides are measured."""
  counts, rows = [], _by_name(run)
  for name in _EVALUATIONS:
    rate = _share(rows.get(name, {}), 'pass_rate')
    episodes = run_data.number(rows.get(name, {}).get('episodes'))
    if rate is None or not episodes or episodes < 1:
      return []
    counts.append((round(rate * episodes), int(episodes)))
  change = counts[1][0] / counts[1][1] - counts[0][0] / counts[0][1]
  low, high = intervals.difference(counts[0], counts[1])
  words = (
    f'95 % interval {100 * low:+.1f} to {100 * high:+.1f}, the episodes taken '
    'as independent'
  )
  parts = [
    html.element('div', text, class_=kind)
    for text, kind in (
      ('Change by RL', 'sub'),
      (f'{100 * change:+.1f} points', 'value'),
      (words, 'sub'),
    )
  ]
  return [html.element('div', *parts, class_='card')]


def _by_name(run: run_data.RunData) -> dict[str, dict[str, Any]]:
  return {str(row.get('name', '')): row for row in run.evaluations()}


def _result(run: run_data.RunData) -> html.Markup:
  rows = _by_name(run)
  cards = [_card(t, rows.pop(n, None)) for n, t in _EVALUATIONS.items()]
  cards += [_card(name, row) for name, row in rows.items()]
  cards += _change(run)
  return html.section(
    'Pass rate on held-out tasks',
    html.element('div', *cards, class_='cards'),
    note=(
      'An episode passes when the policy finishes it and every hidden test '
      'passes. The functions of these tasks are in no training data.'
    ),
  )


def _language_model(run: run_data.RunData) -> html.Markup:
  parts = []
  for stage in ('cpt', 'sft'):
    wanted = [(stage, 'loss', 'training'), (stage, 'heldout_loss', 'held out')]
    title = f'{STAGES[stage]}: loss'
    parts.append(figures.curve(run, title, wanted, unit='nats per token'))
  shown = [
    ('tokens_per_s', 'Speed', 'tokens/s'),
    ('grad_norm', 'Gradient norm before clipping', ''),
  ]
  if any(run.last(stage, 'max_logit') is not None for stage in ('cpt', 'sft')):
    shown.append(('max_logit', 'Largest attention logit', ''))
  for name, title, unit in shown:
    wanted = [(s, name, s.upper()) for s in ('cpt', 'sft')]
    options = {'bounds': (0, None)} if name == 'tokens_per_s' else {}
    parts.append(figures.curve(run, title, wanted, unit=unit, **options))
  return html.section(
    'Pretraining and fine-tuning',
    html.element('div', *parts, class_='grid two'),
    _last_values(run, _LAST),
    _last_values(run, _MUON, 'Muon, by its plan of a step'),
  )


def _last_values(
  run: run_data.RunData, names: dict[str, str], title: str = ''
) -> html.Markup | str:
  """Returns a table of each stage's latest values; '' before the first."""
  rows = []
  for stage in ('cpt', 'sft'):
    values = [run_data.number(run.last(stage, name)) for name in names]
    if any(value is not None for value in values):
      texts = ['' if v is None else progress.number(v) for v in values]
      rows.append([STAGES[stage], *texts])
  if not rows:
    return ''
  heading = html.element('h3', title) if title else ''
  return html.join([heading, html.table(rows, ('', *names.values()))])


def _experts(run: run_data.RunData) -> html.Markup:
  parts = []
  for stage in ('cpt', 'sft', 'rl'):
    load = run.last(stage, 'expert_load')
    if load is None:
      continue
    load_ME = np.asarray(load, float)
    if load_ME.ndim == 2 and load_ME.size and np.isfinite(load_ME).all():
      title = f'{STAGES[stage]}: last step'
      parts.append(figures.drawn(title, figures.heat_map(title, load_ME)))
  wanted = [(s, 'expert_load_max', s.upper()) for s in ('cpt', 'sft', 'rl')]
  parts.append(figures.curve(run, 'Busiest expert over the mean', wanted))
  wanted = [(s, 'shard_load_max', s.upper()) for s in ('cpt', 'sft')]
  if any(run.last(s, name) is not None for s, name, _ in wanted):
    title = 'Busiest expert shard over the mean'
    parts.append(figures.curve(run, title, wanted))
  return html.section(
    'Expert load',
    html.element('div', *parts, class_='grid two'),
    _exchanges(run),
    note='Tokens of each expert over the mean of its layer; 1 is even.',
  )


def _exchanges(run: run_data.RunData) -> html.Markup | str:
  """Returns a table of what devices exchange; '' where none share experts."""
  rows = []
  for stage in ('cpt', 'sft'):
    if run.last(stage, 'transport') is None:
      continue
    repeated = [r for r in run.metrics if r['stage'] == stage and 'retry' in r]
    names = ('mesh', 'transport', 'needed_rows', 'received_rows')
    values = [run.last(stage, name) for name in names]
    texts = ['' if v is None else str(v) for v in values]
    rows.append([STAGES[stage], *texts, str(len(repeated))])
  if not rows:
    return ''
  titles = ('mesh', 'transport', 'rows needed', 'room for', 'repeated steps')
  return html.table(rows, ('', *titles))


def _corpus(run: run_data.RunData) -> html.Markup:
  """Sums the manifest up: what was kept of which package, what was not."""
  title = 'Corpus'
  if not run.manifest:
    return html.section(title, html.not_yet('Manifest'))
  documents = [d for d in run.manifest['documents'] if isinstance(d, dict)]
  dropped = [d for d in run.manifest['dropped'] if isinstance(d, dict)]
  packages: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
  for d in documents:
    key = (str(d.get('package', '?')), str(d.get('split', '')))
    packages[key].append(int(run_data.number(d.get('num_bytes')) or 0))
  licences = collections.Counter(
    str(d.get('licence') or 'unknown') for d in documents
  )
  reasons = collections.Counter(str(d.get('reason', '?')) for d in dropped)
  num_bytes = sum(map(sum, packages.values()))
  rows = [(*key, len(sizes), sum(sizes)) for key, sizes in packages.items()]
  rows.sort(key=lambda row: -row[-1])
  head = ('package', 'split', 'files', 'bytes')
  columns = html.element(
    'div',
    html.titled(
      'Licences of the files kept', html.table(licences.most_common(12))
    ),
    html.titled('Files dropped, by reason', html.table(reasons.most_common())),
    class_='columns',
  )
  return html.section(
    title,
    columns,
    html.element('h3', 'Packages'),
    html.table(rows[:12], head),
    html.details(f'All {len(rows)} packages', html.table(rows, head)),
    note=(
      f'{len(documents):,} files kept, {num_bytes / 1e6:.1f} MB, from '
      f'{len({name for name, _ in packages})} packages; '
      f'{len(dropped):,} files dropped.'
    ),
  )


def _times(run: run_data.RunData) -> list[list[str]]:
  """Returns the measured stages in order, with sums."""
  known = [name for name in _TIMED if name in run.seconds]
  known += sorted(run.seconds.keys() - _TIMED.keys())
  rows = {_TIMED.get(name, name): run.seconds[name] for name in known}
  rows['The three trainings'] = sum(run.seconds.get(n, 0) for n in _TRAINED)
  rows['Sum'] = sum(run.seconds.values())
  return [[name, progress.duration(s)] for name, s in rows.items()]


def _run_details(run: run_data.RunData) -> html.Markup:
  machine = run.run.get('machine')
  machine = machine if isinstance(machine, dict) else {}
  config = files.flatten(run.config) if run.config else {}
  columns = html.element(
    'div',
    html.titled(
      'Wall time',
      html.table(_times(run)) if run.seconds else html.not_yet('Wall time'),
    ),
    html.titled(
      'Machine', html.pairs(machine) if machine else html.not_yet('Machine')
    ),
    class_='columns',
  )
  command = run.run.get('command')
  lines = html.element('code', command) if command else ''
  return html.section(
    'Run',
    html.element('p', lines) if lines else '',
    columns,
    html.details(f'Configuration ({len(config)} values)', html.pairs(config))
    if config
    else html.not_yet('Configuration'),
  )
