"""What the report says of reinforcement learning."""

import collections

import numpy as np

from composer_jax.report import figures, run_data
from composer_jax.telemetry import waiting

# Number of steps named of those that left the bands of the gate.
_SHOWN = 8

# (step, value) of each curve.
_Points = dict[str, list[tuple[int, float]]]


def alarms(run: run_data.RunData) -> list[str]:
  totals: collections.Counter[str] = collections.Counter()
  for row in run.rows('rl'):
    kinds = row.get('flag_kinds')
    for item in kinds if isinstance(kinds, list) else ():
      if isinstance(item, list) and len(item) == 2 and run_data.number(item[1]):
        totals[str(item[0])] += int(item[1])
  if not totals:
    return []
  counts = ', '.join(f'{kind} {n}' for kind, n in totals.most_common())
  return [f'Rollouts that monitors flagged: {counts}.']


def breaches(run: run_data.RunData) -> list[str]:
  """Names the steps whose mismatch left its band, and the last gate's texts."""
  rows = [r for r in run.rows('rl') if run_data.number(r.get('gate_breaches'))]
  if not rows:
    return []
  steps = ', '.join(str(row['step']) for row in rows[-_SHOWN:])
  gate = rows[-1].get('gate')
  return [
    f'The mismatch left its band in {len(rows)} steps, the last of them '
    f'{steps}.',
    *(map(str, gate) if isinstance(gate, list) else ()),
  ]


def heads(run: run_data.RunData, stage: str) -> figures.Figure:
  """Returns a drawing of how often heads agree with the main one, by depth."""
  title = f'Words that heads guess as the main head does: {stage}'
  points: _Points = collections.defaultdict(list)
  for row in run.rows(stage):
    shares = row.get('mtp_agreement')
    for depth, share in enumerate(
      shares if isinstance(shares, list) else (), 1
    ):
      value = run_data.number(share)
      if value is not None:
        points[f'depth {depth}'].append((row['step'], value))
  return _shares(title, points)


def scores(run: run_data.RunData) -> figures.Figure:
  """Returns a drawing of the mean scores by a rubric, a curve a criterion."""
  title = 'Mean scores by the rubric'
  points: _Points = collections.defaultdict(list)
  for row in run.rows('rl'):
    entries = row.get('scores')
    for entry in entries if isinstance(entries, list) else ():
      if isinstance(entry, list) and len(entry) == 2:
        value = run_data.number(entry[1])
        if value is not None:
          points[str(entry[0])].append((row['step'], value))
  return _shares(title, points)


def _shares(title: str, points: _Points) -> figures.Figure:
  """Draws curves between 0 and 1; an empty drawing without points."""
  if not points:
    return figures.Figure(title, '')
  lines = [
    figures.Curve(
      label=name,
      steps=np.array([s for s, _ in measured]),
      values=np.array([v for _, v in measured]),
      is_noisy=True,
    )
    for name, measured in list(points.items())[: len(figures.COLORS)]
  ]
  return figures.curves(title, lines, bounds=(-0.03, 1.03))


def waits(run: run_data.RunData) -> tuple[figures.Figure, str]:
  """Returns a drawing of the shares of time waited, and their sums in words."""
  title, lines = 'Share of time spent waiting', []
  for side in waiting.SIDES:
    if measured := waiting.seconds(run.metrics, side):
      step, waited, total = np.array(measured).T
      lines.append(
        figures.Curve(
          label=side,
          steps=step.astype(int),
          values=waited / total,
          is_noisy=True,
        )
      )
  if not lines:
    return figures.Figure(title, ''), ''
  drawing = figures.curves(title, lines, bounds=(-0.03, 1.03))
  return drawing, waiting.summary(run.metrics)
