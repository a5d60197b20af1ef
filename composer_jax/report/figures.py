"""Draws the report's curves and heat maps as SVG, and picks what is in them.

Matplotlib takes half a second to import, so that only drawing imports it.
"""

import dataclasses
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.report import html, run_data

_WIDTH, _HEIGHT = 4.4, 2.55  # inches
_INK, _SOFT, _LINE = '#1c2733', '#5d6b7a', '#e3e8ee'
COLORS = ('#2563b0', '#d97706', '#1d7a4f', '#8a3fa0')
_MAX_POINTS = 800
# Drawn as they are: an evaluation is few points, and the mean of steps that
# differ in kind (a keyframe among deltas) is none of them.
_EXACT = (
  *('heldout_loss', 'staleness'),
  *('bytes', 'full_bytes', 'keyframe_bytes', 'skip_bytes'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """One curve.

  Attributes:
    label: '' where a figure has only one.
    steps: of the values.
    values: NaN leaves a gap.
    is_noisy: drawn faintly, with its running mean on top.
    has_marks: a dot at every value, for the few that evaluations give.
  """

  label: str
  steps: Sequence[int] | np.ndarray
  values: Sequence[float] | np.ndarray
  is_noisy: bool = False
  has_marks: bool = False


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
  """Returns the mean of the last `window` values, NaN left out.

  It looks only backwards, so a step's mean does not change later.
  """
  finite = np.isfinite(values)
  sums = np.cumsum(np.where(finite, values, 0.0))
  counts = np.cumsum(finite).astype(float)
  sums[window:] = sums[window:] - sums[:-window]
  counts[window:] = counts[window:] - counts[:-window]
  return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def thin(array: np.ndarray) -> np.ndarray:
  """Keeps every n-th entry and the last, so that a long run stays small."""
  stride = math.ceil(len(array) / _MAX_POINTS)
  if stride <= 1:
    return array
  return np.concatenate([array[:-1:stride], array[-1:]])


def _new_figure(title: str, height: float = _HEIGHT) -> tuple[Any, Any]:
  # Not pyplot: it keeps figures alive and is not meant for threads.
  import matplotlib.figure

  figure = matplotlib.figure.Figure(
    figsize=(_WIDTH, height), layout='constrained'
  )
  axes = figure.add_subplot()
  axes.set_title(title, loc='left', fontsize=9.5, color=_INK, fontweight='bold')
  for side in ('top', 'right'):
    axes.spines[side].set_visible(False)
  for side in ('left', 'bottom'):
    axes.spines[side].set_color('#c5cdd6')
  axes.tick_params(labelsize=8, colors=_SOFT, length=2.5)
  return figure, axes


def _svg(figure: Any) -> str:
  import matplotlib

  buffer = io.StringIO()
  # The salt and the missing date make equal figures equal bytes.
  with matplotlib.rc_context({'svg.hashsalt': 'composer_jax'}):
    figure.savefig(buffer, format='svg', metadata={'Date': None})
  return buffer.getvalue()


def _draw(axes: Any, line: Curve, color: str) -> None:
  steps = np.asarray(line.steps)
  values = np.asarray(line.values, float)
  label = line.label or None
  if line.is_noisy and len(values) >= 8:
    mean = running_mean(values, max(3, len(values) // 30))
    axes.plot(thin(steps), thin(values), color=color, alpha=0.25, lw=1)
    axes.plot(thin(steps), thin(mean), color=color, lw=1.8, label=label)
    return
  few = line.has_marks or len(values) < 3
  marker = {'marker': 'o', 'ms': 3.5} if few else {}
  axes.plot(
    thin(steps), thin(values), color=color, lw=1.6, label=label, **marker
  )


def curves(
  title: str,
  lines: Sequence[Curve],
  *,
  is_log: bool = False,
  bounds: tuple[float | None, float | None] = (None, None),
  unit: str = '',
) -> str:
  """Draws curves over steps and returns SVG text.

  Args:
    title: above the axes.
    lines: at least one value among them.
    is_log: a logarithmic value axis; values that are not positive are left
      out, since they have no place on it.
    bounds: of the value axis, None for what fits.
    unit: written beside the value axis.
  """
  import matplotlib.ticker

  figure, axes = _new_figure(title)
  for line, color in zip(lines, COLORS, strict=False):
    values = np.asarray(line.values, float)
    if is_log:
      values = np.where(values > 0, values, np.nan)
    if np.isfinite(values).any():
      _draw(axes, dataclasses.replace(line, values=values), color)
  if is_log:
    axes.set_yscale('log')
  axes.grid(axis='y', color=_LINE, lw=0.8)
  axes.set_axisbelow(True)
  if not is_log:
    axes.set_ylim(*bounds)
  axes.xaxis.set_major_locator(
    matplotlib.ticker.MaxNLocator(6, integer=True, min_n_ticks=1)
  )
  axes.set_xlabel('step', fontsize=8, color=_SOFT)
  axes.set_ylabel(unit, fontsize=8, color=_SOFT)
  if len(axes.get_legend_handles_labels()[0]) > 1:
    axes.legend(fontsize=7.5, frameon=False, labelcolor=_INK)
  return _svg(figure)


def heat_map(title: str, load_ME: np.ndarray) -> str:
  """Draws each layer's load of its experts over the even load.

  Args:
    title: above the axes.
    load_ME: tokens sent to each expert; a layer without any shows as 0.
  """
  mean_M1 = load_ME.mean(-1, keepdims=True)
  ratio_ME = load_ME / np.maximum(mean_M1, 1e-9)
  num_layers, num_experts = ratio_ME.shape
  figure, axes = _new_figure(title, height=max(1.7, 1.0 + 0.3 * num_layers))
  picture = axes.imshow(ratio_ME, cmap='PuOr_r', vmin=0, vmax=2, aspect='auto')
  if ratio_ME.size <= 128:
    for (layer, expert), value in np.ndenumerate(ratio_ME):
      color = 'white' if abs(value - 1) > 0.75 else _INK
      axes.text(
        *(expert, layer, f'{value:.1f}'),
        ha='center', va='center', fontsize=7, color=color,
      )  # fmt: skip
  axes.set_xticks(range(0, num_experts, math.ceil(num_experts / 16)))
  axes.set_yticks(range(0, num_layers, math.ceil(num_layers / 12)))
  axes.set_xlabel('expert', fontsize=8, color=_SOFT)
  axes.set_ylabel('MoE layer', fontsize=8, color=_SOFT)
  bar = figure.colorbar(picture, ax=axes, ticks=[0, 1, 2], pad=0.02)
  bar.ax.tick_params(labelsize=7.5, colors=_SOFT, length=2)
  bar.outline.set_visible(False)
  return _svg(figure)


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
    **options: of `curves`.
  """
  lines = []
  for stage, name, label in wanted:
    steps, values = run.series(stage, name)
    if np.isfinite(values).any():
      lines.append(
        Curve(
          label=label,
          steps=steps,
          values=values,
          is_noisy=name not in _EXACT,
          has_marks=name == 'heldout_loss',
        )
      )
  if not lines:
    return html.element('div', html.not_yet(title))
  return drawn(title, curves(title, lines, **options))


def drawn(title: str, svg: str) -> html.Markup:
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
  if values_SM.shape[1] <= len(COLORS):
    wanted = {f'layer {m}': v for m, v in enumerate(values_SM.T)}
  else:
    wanted = {
      'highest layer': values_SM.max(1),
      'mean of layers': values_SM.mean(1),
      'lowest layer': values_SM.min(1),
    }
  lines = [
    Curve(label=label, steps=steps, values=values)
    for label, values in wanted.items()
  ]
  return drawn(title, curves(title, lines, **options))
