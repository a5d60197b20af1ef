"""Draws the report's curves and heat maps as SVG, and picks what is in them.

Curves lie in the page as SVG elements, with strips whose tooltips tell the
values at some steps: what hovering can do without scripts.

Matplotlib takes half a second to import, so only drawing imports it.
"""

import dataclasses
import html
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.report import run_data
from composer_jax.telemetry import progress

_WIDTH, _HEIGHT = 4.4, 2.55  # inches
_INK, _SOFT, _LINE = '#1c2733', '#5d6b7a', '#e3e8ee'
COLORS = ('#2563b0', '#d97706', '#1d7a4f', '#8a3fa0', '#b3372f', '#4b5563')
# Lines of the curves; through gaps, (offset, (ink, gap, ...)), one sees others.
_DASHES = (
  *('-', (0, (4, 2.5)), (0, (1.2, 2.2)), (0, (7, 2, 1.2, 2))),
  *((3, (2.5, 4)), (0, (1, 5))),
)
_MAX_POINTS = 800
_MAX_TOOLTIPS = 60
# Drawn without a running mean: evaluations are few, and the mean over a
# keyframe and its deltas is the size of neither.
_EXACT = (
  *('heldout_loss', 'staleness'),
  *('bytes', 'full_bytes', 'keyframe_bytes'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """One curve, with a gap where a value is NaN.

  A noisy one is drawn faintly, with its running mean on top; marks are for the
  few values that evaluations give.
  """

  label: str
  steps: Sequence[int] | np.ndarray
  values: Sequence[float] | np.ndarray
  is_noisy: bool = False
  has_marks: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
  """A drawing with its heading; its SVG is '' where nothing was measured."""

  title: str
  svg: str


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
  """Returns the mean of the last `window` values up to each, NaN left out."""
  finite = np.isfinite(values)
  sums = np.cumsum(np.where(finite, values, 0.0))
  counts = np.cumsum(finite).astype(float)
  sums[window:] = sums[window:] - sums[:-window]
  counts[window:] = counts[window:] - counts[:-window]
  return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def thin(array: np.ndarray, most: int = _MAX_POINTS) -> np.ndarray:
  """Keeps every n-th entry and the last, so that a long run stays small."""
  stride = math.ceil(len(array) / most)
  if stride <= 1:
    return array
  return np.concatenate([array[:-1:stride], array[-1:]])


def _new_figure(title: str, height: float = _HEIGHT) -> tuple[Any, Any]:
  # Not pyplot: it keeps figures alive and is not meant for threads.
  import matplotlib.figure

  # 72 dots per inch: one is a unit of the SVG.
  figure = matplotlib.figure.Figure(
    figsize=(_WIDTH, height), layout='constrained', dpi=72
  )
  axes = figure.add_subplot()
  axes.set_title(title, loc='left', fontsize=9.5, color=_INK, fontweight='bold')
  for side in ('top', 'right'):
    axes.spines[side].set_visible(False)
  for side in ('left', 'bottom'):
    axes.spines[side].set_color('#c5cdd6')
  axes.tick_params(which='both', labelsize=8, colors=_SOFT, length=2.5)
  return figure, axes


def _svg(title: str, figure: Any) -> str:
  """Returns an SVG element that can stand beside others in one page."""
  import matplotlib

  buffer = io.StringIO()
  # Salting with the title gives each figure of a page ids of its own, and equal
  # figures equal bytes.
  settings = {'svg.hashsalt': title, 'svg.fonttype': 'none'}
  with matplotlib.rc_context(settings | {'font.sans-serif': ['DejaVu Sans']}):
    figure.savefig(buffer, format='svg', metadata={'Date': None})
  text = buffer.getvalue()
  text = text[text.index('<svg ') :]
  # The page has the style; ids such as line2d_3 are not referred to.
  text = re.sub(r'(?s)<metadata>.*?</metadata>|<style.*?</style>', '', text)
  text = re.sub(r' id="[\w.]+_\d+"', '', text)
  text = re.sub(
    r' d="[^"]*"', lambda d: re.sub(r'(\.\d\d)\d+ ?\n?', r'\1 ', d[0]), text
  )
  name = f'<svg role="img" aria-label="{html.escape(title)}" '
  return text.replace('<svg ', name, 1)


def _tooltips(axes: Any, lines: Sequence[Curve]) -> str:
  """Returns a strip for each of some steps, with the values nearest to it."""
  measured = []
  for line in lines:
    values = np.asarray(line.values, float)
    finite = np.isfinite(values)
    if finite.any():
      measured.append((line, np.asarray(line.steps)[finite], values[finite]))
  steps = np.unique(np.concatenate([steps for _, steps, _ in measured]))
  steps = thin(steps, _MAX_TOOLTIPS)
  places = axes.transData.transform([(s, axes.get_ylim()[0]) for s in steps])
  box = axes.get_window_extent()
  middles = (places[1:, 0] + places[:-1, 0]) / 2
  edges = np.concatenate([[box.x0], middles, [box.x1]])
  strips = []
  for step, left, right in zip(steps, edges[:-1], edges[1:], strict=True):
    texts = [f'step {step}']
    for line, at, values in measured:
      nearest = np.abs(at - step).argmin()
      where = '' if at[nearest] == step else f' (step {at[nearest]})'
      name = f'{line.label}: ' if line.label else ''
      texts.append(f'{name}{progress.number(float(values[nearest]))}{where}')
    strips.append(
      f'<rect x="{left:.1f}" width="{right - left:.1f}" height="100%">'
      f'<title>{html.escape(chr(10).join(texts))}</title></rect>'
    )
  return f'<g class="tooltips">{"".join(strips)}</g>'


def _draw(axes: Any, line: Curve, values: np.ndarray, number: int) -> Any:
  steps, color = np.asarray(line.steps), COLORS[number]
  style: dict[str, Any] = {'color': color, 'ls': _DASHES[number]}
  if line.is_noisy and len(values) >= 8:
    axes.plot(thin(steps), thin(values), color=color, alpha=0.25, lw=1)
    values = running_mean(values, max(3, len(values) // 30))
    style['lw'] = 1.8
  else:
    style['lw'] = 1.6
    if line.has_marks or len(values) < 3:
      style |= {'marker': 'o', 'ms': 3.5}
  return axes.plot(thin(steps), thin(values), **style)[0]


def curves(
  title: str,
  lines: Sequence[Curve],
  *,
  is_log: bool = False,
  bounds: tuple[float | None, float | None] = (None, None),
  unit: str = '',
  axis: str = 'step',
) -> Figure:
  """Draws curves over steps, at least one of which has a finite value.

  A logarithmic axis leaves out values that are not positive; bounds of None fit
  the values. `axis` names another quantity than steps.
  """
  import matplotlib.ticker

  figure, axes = _new_figure(title)
  legend: dict[str, Any] = {}
  for number, line in enumerate(lines):
    values = np.asarray(line.values, float)
    if is_log:
      values = np.where(values > 0, values, np.nan)
    if np.isfinite(values).any():
      # A dollar sign would begin a formula.
      label = line.label.replace('$', r'\$')
      legend[label] = _draw(axes, line, values, number)
  if is_log:
    axes.set_yscale('log')
  else:
    axes.set_ylim(*bounds)
  axes.grid(axis='y', color=_LINE, lw=0.8)
  axes.set_axisbelow(True)
  axes.xaxis.set_major_locator(
    matplotlib.ticker.MaxNLocator(6, integer=True, min_n_ticks=1)
  )
  axes.set_xlabel(axis, fontsize=8, color=_SOFT)
  axes.set_ylabel(unit, fontsize=8, color=_SOFT)
  if len(lines) > 1:
    axes.legend(
      *(list(legend.values()), list(legend)),
      fontsize=7.5, frameon=False, labelcolor=_INK, handlelength=2.8,
    )  # fmt: skip
  svg = _svg(title, figure)
  # Once it is drawn, places are known.
  end = svg.rindex('</svg>')
  return Figure(title, svg[:end] + _tooltips(axes, lines) + svg[end:])


def bars(
  title: str, counts: Mapping[int, float], *, axis: str, unit: str
) -> Figure:
  """Draws a bar for each count, in the order of their numbers."""
  if not counts:
    return Figure(title, '')
  figure, axes = _new_figure(title)
  names, heights = zip(*sorted(counts.items()), strict=True)
  axes.bar([f'{name:,}' for name in names], heights, color=COLORS[0])
  axes.set_xlabel(axis, fontsize=8, color=_SOFT)
  axes.set_ylabel(unit, fontsize=8, color=_SOFT)
  return Figure(title, _svg(title, figure))


def heat_map(title: str, load_ME: np.ndarray) -> Figure:
  """Draws loads over the even load; a layer without any shows as 0."""
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
  return Figure(title, _svg(title, figure))


def _curve(run: run_data.RunData, tag: str, label: str) -> Curve:
  stage, name = tag.split('/')
  steps, values = run.series(stage, name)
  return Curve(
    label=label,
    steps=steps,
    values=values,
    is_noisy=name not in _EXACT,
    has_marks=name == 'heldout_loss',
  )


def _is_measured(line: Curve) -> bool:
  return bool(np.isfinite(line.values).any())


def chart(
  run: run_data.RunData, title: str, labels: dict[str, str], **options: Any
) -> Figure:
  """Draws metrics of a run, as far as they were measured.

  Args:
    labels: label of each curve by its stage and metric, such as 'rl/reward'.
    **options: keyword arguments of `curves`.
  """
  lines = [_curve(run, tag, label) for tag, label in labels.items()]
  lines = list(filter(_is_measured, lines))
  return curves(title, lines, **options) if lines else Figure(title, '')


def comparison(
  runs: Mapping[str, run_data.RunData], title: str, tag: str, **options: Any
) -> Figure:
  """Draws one metric of several runs, each of one colour in all figures."""
  lines = [_curve(run, tag, label) for label, run in runs.items()]
  is_measured = any(map(_is_measured, lines))
  return curves(title, lines, **options) if is_measured else Figure(title, '')
