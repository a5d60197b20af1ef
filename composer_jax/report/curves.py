"""The report's figures of metrics over steps."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.report import figures, html, run_data

# Drawn as they are: an evaluation is few points, and the mean of steps that
# differ in kind (a keyframe among deltas) is none of them.
_EXACT = (
  *('heldout_loss', 'staleness'),
  *('bytes', 'full_bytes', 'keyframe_bytes', 'skip_bytes'),
)


def curve(
  run: run_data.RunData,
  title: str,
  wanted: Sequence[tuple[str, str, str]],
  **options: Any,
) -> html.Markup:
  """Returns one figure, or a note that nothing of it was measured yet.

  Args:
    run: to take it from.
    title: of the figure.
    wanted: (stage, metric, label) of each curve.
    **options: of `figures.curves`.
  """
  lines = []
  for stage, name, label in wanted:
    steps, values = run.series(stage, name)
    if np.isfinite(values).any():
      lines.append(
        figures.Curve(
          label=label,
          steps=steps,
          values=values,
          is_noisy=name not in _EXACT,
          has_marks=name == 'heldout_loss',
        )
      )
  if not lines:
    return html.element('div', html.not_yet(title))
  svg = figures.curves(title, lines, **options)
  return html.element('div', html.image(svg, title))


def layers(
  run: run_data.RunData, title: str, stage: str, name: str, **options: Any
) -> html.Markup:
  """Returns a figure of a metric that is a list, one value for each layer.

  More layers than a figure has colors are drawn as their range and mean.
  """
  steps, rows = [], []
  for row in run.metrics:
    values = row.get(name)
    if row['stage'] != stage or not isinstance(values, list) or not values:
      continue
    numbers = [run_data.number(v) for v in values]
    rows.append([math.nan if n is None else n for n in numbers])
    steps.append(row['step'])
  # Another number of layers: of another model, which no run has.
  if not rows or len({len(row) for row in rows}) > 1:
    return html.element('div', html.not_yet(title))
  values_SM = np.asarray(rows)
  if values_SM.shape[1] <= len(figures.COLORS):
    wanted = {f'layer {m}': v for m, v in enumerate(values_SM.T)}
  else:
    wanted = {
      'highest layer': values_SM.max(1),
      'mean of layers': values_SM.mean(1),
      'lowest layer': values_SM.min(1),
    }
  lines = [
    figures.Curve(label=label, steps=steps, values=values)
    for label, values in wanted.items()
  ]
  svg = figures.curves(title, lines, **options)
  return html.element('div', html.image(svg, title))
