"""Turns results/ into table.md and curves.png; runs nothing.

python -m experiments.studies.muon.analyze
"""

import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from composer_jax.telemetry import writer
from experiments import start

ROOT = pathlib.Path(__file__).parent
NAMES = {'adam': 'AdamW', 'muon': 'Muon'}
# Rule for the learning rate of parameters that are no matrices.
RULES = {'': 'One rate for all', '_fixed': 'The rest at 0.01'}

Row = dict[str, Any]


def key(row: Row) -> tuple[str, float, int, int]:
  """Returns the fields that identify a run of a stage."""
  return row['optimizer'], row['learning_rate'], row['seed'], row['step']


def last(row: Row) -> float:
  """Returns the final held-out loss, infinite for a run that diverged."""
  loss = float(row['heldout_loss'][-1])
  return loss if math.isfinite(loss) else math.inf


def _of(rows: Sequence[Row], optimizer: str) -> list[Row]:
  return [r for r in rows if r['optimizer'] == optimizer]


def sweep_of(rows: Sequence[Row], rule: str) -> list[Row]:
  """Returns the sweep of a rule: '' (one rate for all) or '_fixed' (others).

  A run whose two rates are equal belongs to both sweeps.
  """
  rule_rows = [r for r in rows if r['stage'] == 'sweep' + rule]
  if not rule:
    return rule_rows
  rates = {r['rest_rate'] for r in rule_rows}
  return rule_rows + [
    r for r in rows if r['stage'] == 'sweep' and r['learning_rate'] in rates
  ]


def best_rate(sweep: Sequence[Row], optimizer: str) -> float:
  return min(_of(sweep, optimizer), key=last)['learning_rate']


def beyond(sweep: Sequence[Row]) -> tuple[float, ...]:
  """Returns rates to add, beyond ends at which an optimizer is at its best."""
  rates = [r['learning_rate'] for r in sweep]
  best = {best_rate(sweep, optimizer) for optimizer in NAMES}
  extensions = {min(rates): min(rates) / 2, max(rates): max(rates) * 2}
  return tuple(new for end, new in extensions.items() if end in best)


def step_ratio(rows: Sequence[Row]) -> float:
  """Returns CPU time of Muon's steps over AdamW's, from runs in turns.

  It is the median over turns, so that a disturbed turn counts once.
  """
  pairs = []
  adam = {
    (r['learning_rate'], r['seed'], r['step']): r
    for r in rows
    if r['optimizer'] == 'adam'
  }
  for muon in _of(rows, 'muon'):
    adam_row = adam[muon['learning_rate'], muon['seed'], muon['step']]
    pairs += zip(_turns(muon), _turns(adam_row), strict=True)
  return statistics.median(a / b for a, b in pairs)


def _turns(row: Row) -> list[float]:
  seconds = row['cpu_s']
  return [b - a for a, b in zip(seconds, seconds[1:], strict=False)]


def passes(row: Row, loss: float) -> tuple[float, float]:
  """Returns (steps, CPU seconds) at which a run's held-out loss reaches `loss`.

  Linear between two measurements; infinite if it never does.
  """
  values = [float(v) for v in row['heldout_loss']]
  for i in range(1, len(values)):
    if values[i] <= loss:
      part = (values[i - 1] - loss) / (values[i - 1] - values[i])
      return tuple(
        row[name][i - 1] + part * (row[name][i] - row[name][i - 1])
        for name in ('eval_steps', 'cpu_s')
      )
  return math.inf, math.inf


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  every = [head, ['---'] * len(head), *lines]
  return ''.join('| ' + ' | '.join(line) + ' |\n' for line in every)


def sweep_table(sweep: Sequence[Row]) -> str:
  """Held-out loss by learning rate; each optimizer's best in bold."""
  rates = sorted({r['learning_rate'] for r in sweep})
  lines = []
  for optimizer in NAMES:
    best = best_rate(sweep, optimizer)
    at = {r['learning_rate']: last(r) for r in _of(sweep, optimizer)}
    cells = [f'**{at[r]:.3f}**' if r == best else f'{at[r]:.3f}' for r in rates]
    lines.append([NAMES[optimizer], *cells])
  return _table(['optimizer', *(f'{r:g}' for r in rates)], lines)


def _spread(values: Sequence[float], digits: int = 3) -> str:
  mean, deviation = statistics.mean(values), statistics.stdev(values)
  return f'{mean:.{digits}f} ± {deviation:.{digits}f}'


def seeds_table(seeds: Sequence[Row]) -> str:
  """A line a seed: all three arms, and when Muon passes AdamW's final loss."""
  lines, columns = [], []
  for seed in sorted({r['seed'] for r in seeds}):
    adam, muon, longer = _three([r for r in seeds if r['seed'] == seed])
    steps, seconds = passes(muon, last(adam))
    figures = [
      last(adam),
      last(muon),
      last(muon) - last(adam),
      last(longer),
      last(muon) - last(longer),
    ]
    columns.append(figures)
    lines.append(
      [
        str(seed),
        *(f'{v:.3f}' for v in figures),
        *(f'{r["cpu_s"][-1]:.1f}' for r in (adam, muon, longer)),
        f'{steps / adam["step"]:.2f}',
        f'{seconds / adam["cpu_s"][-1]:.2f}',
      ]
    )
  means = [_spread(column) for column in zip(*columns, strict=True)]
  lines.append(['mean ± deviation', *means, '', '', '', '', ''])
  head = (
    *('seed', 'AdamW', 'Muon', 'difference', 'AdamW, longer', 'difference'),
    *('CPU s: AdamW', 'Muon', 'AdamW, longer'),
    *("Muon passes AdamW's end at steps", 'at CPU time'),
  )
  return _table(head, lines)


def _three(rows: Sequence[Row]) -> tuple[Row, Row, Row]:
  """AdamW, Muon with as many steps, AdamW with as much CPU time."""
  adam, longer = sorted(_of(rows, 'adam'), key=lambda r: r['step'])
  (muon,) = _of(rows, 'muon')
  return adam, muon, longer


def pairs_table(rows: Sequence[Row]) -> str:
  """A line a seed of two arms; the head names their rates."""
  lines, columns = [], []
  for seed in sorted({r['seed'] for r in rows}):
    runs = [r for r in rows if r['seed'] == seed]
    figures = [last(_of(runs, optimizer)[0]) for optimizer in NAMES]
    figures.append(figures[1] - figures[0])
    columns.append(figures)
    lines.append([str(seed), *(f'{v:.3f}' for v in figures)])
  means = [_spread(column) for column in zip(*columns, strict=True)]
  lines.append(['mean ± deviation', *means])
  heads = [_arm(_of(rows, optimizer)[0]) for optimizer in NAMES]
  return _table(['seed', *heads, 'difference'], lines)


def _arm(row: Row) -> str:
  rest_text = f', rest at {row["rest_rate"]:g}' if 'rest_rate' in row else ''
  return f'{NAMES[row["optimizer"]]} at {row["learning_rate"]:g}{rest_text}'


def cost_table(cost: Sequence[Row]) -> str:
  """CPU milliseconds by part: median, least and most over rounds."""
  lines = []
  for optimizer in NAMES:
    parts = {r['part']: r['cpu_ms'] for r in _of(cost, optimizer)}
    share = statistics.median(parts['update']) / statistics.median(
      parts['step']
    )
    cells = [
      f'{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})'
      for v in (parts['step'], parts['gradients'], parts['update'])
    ]
    lines.append([NAMES[optimizer], *cells, f'{share:.1%}'])
  head = ('optimizer', 'step, ms', 'gradients alone', 'update alone')
  return _table([*head, 'update / step'], lines)


def table(rows: Sequence[Row]) -> str:
  """All results as Markdown."""
  parts = []
  for rule, words in RULES.items():
    sweep = sweep_of(rows, rule)
    seeds = [r for r in rows if r['stage'] == 'seeds' + rule]
    parts += [
      f'{words}: held-out loss by peak learning rate, seed {sweep[0]["seed"]}.',
      sweep_table(sweep),
      f'{words}: the best of each, other seeds.',
      seeds_table(seeds),
    ]
  parts += [
    "At the best rates of the first table, the rest at the other's.",
    pairs_table([r for r in rows if r['stage'] == 'controls']),
    'CPU time of a step.',
    cost_table([r for r in rows if r['stage'] == 'cost']),
  ]
  return '\n\n'.join(part.rstrip('\n') for part in parts) + '\n'


def _plot(rows: Sequence[Row]) -> None:
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(
    2, 3, figsize=(13, 7), sharey='row', layout='constrained'
  )
  for (rule, words), row in zip(RULES.items(), axes, strict=True):
    seeds = [r for r in rows if r['stage'] == 'seeds' + rule]
    _plot_rule(row, sweep_of(rows, rule), seeds)
    row[0].set_title(words)
  figure.savefig(ROOT / 'curves.png', dpi=100)
  plt.close(figure)


def _plot_rule(axes: Any, sweep: Sequence[Row], seeds: Sequence[Row]) -> None:
  """Final loss by rate, and loss by step and by CPU time at the best."""
  rate, step, time = axes
  shortest = min(r['step'] for r in seeds)
  for color, (optimizer, name) in zip(('C0', 'C1'), NAMES.items(), strict=True):
    points = sorted(
      (r['learning_rate'], last(r)) for r in _of(sweep, optimizer)
    )
    rate.plot(*zip(*points, strict=True), 'o-', color=color, label=name)
    for row in _of(seeds, optimizer):
      style = '-' if row['step'] == shortest else ':'
      losses = [float(v) for v in row['heldout_loss']]
      label = name if style == '-' else f'{name}, longer'
      label = label if row['seed'] == seeds[0]['seed'] else None
      for axis, x in ((step, row['eval_steps']), (time, row['cpu_s'])):
        # The first losses are those of nearly random weights.
        axis.plot(x[2:], losses[2:], style, color=color, lw=1, label=label)
  rate.set_xscale('log')
  rates = sorted({r['learning_rate'] for r in sweep})
  rate.set_xticks(rates, [f'{r:g}' for r in rates])
  rate.minorticks_off()
  rate.set_xlabel('peak learning rate of matrices')
  step.set_xlabel('optimizer step')
  time.set_xlabel('CPU seconds of training steps')
  for axis in axes:
    axis.set_ylabel('held-out loss, nats a token')
    axis.legend(fontsize=7)


def main() -> None:
  rows = writer.read(ROOT / 'results')
  text = table(rows)
  (ROOT / 'table.md').write_text(text)
  print(text)
  _plot(rows)


if __name__ == '__main__':
  start.run(main)
