"""Turns results/ into table.md and a plot; computes nothing else.

python -m experiments.studies.summary.analyze
"""

import pathlib

import numpy as np

from composer_jax.telemetry import intervals
from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent
NAMES = {
  'sft': 'before RL',
  'chain': 'chain',
  'masked': 'summaries masked',
}
_MARKS = (10, 50, 100, 150)

Row = results.Row


def curve(rows: list[Row], arm: str, seed: int) -> np.ndarray:
  """Returns the rate of right answers of RL's rollouts, by step."""
  rates = {
    r['step']: r['pass_rate']
    for r in rows
    if r['stage'] == 'rl' and (r['arm'], r['seed']) == (arm, seed)
  }
  return np.array([rates[step] for step in sorted(rates)])


def _of(rows: list[Row], arm: str, seed: int, name: str) -> Row | None:
  """Returns the last evaluation of that name; None without any."""
  matches = [
    r
    for r in rows
    if r['stage'] == 'eval'
    and (r['arm'], r['seed'], r['name']) == (arm, seed, name)
  ]
  return matches[-1] if matches else None


def _shown(row: Row | None, what: str) -> str:
  if row is None:
    return 'not run'
  passed = round(row[what] * row['episodes'])
  low, high = intervals.wilson(passed, row['episodes'])
  return f'{row[what]:.3f} [{low:.3f}, {high:.3f}]'


def table(rows: list[Row]) -> str:
  """Held-out rates of every seed and arm, and means of ten steps of RL."""
  marks = ' | '.join(f'steps to {m}' for m in _MARKS)
  lines = [
    '| arm | seed | short streams | carried | long streams | random summaries '
    f'| {marks} |',
    '| --- ' * (6 + len(_MARKS)) + '|',
  ]
  seeds = sorted({r['seed'] for r in rows if 'seed' in r and 'arm' in r})
  for arm, words in NAMES.items():
    for seed in seeds:
      judged = [
        _shown(_of(rows, arm, seed, name), what)
        for name, what in (
          ('short', 'pass_rate'),
          ('short', 'carried'),
          ('long', 'pass_rate'),
          ('amnesic', 'pass_rate'),
        )
      ]
      rates = curve(rows, arm, seed)
      means = [
        f'{rates[m - 10 : m].mean():.3f}' if len(rates) >= m else ''
        for m in _MARKS
      ]
      cells = ' | '.join([words, str(seed), *judged, *means])
      lines.append(f'| {cells} |')
  return '\n'.join(lines) + '\n'


def _plot(rows: list[Row]) -> None:
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(6, 4), layout='constrained')
  for color, arm in (('C0', 'chain'), ('C1', 'masked')):
    for seed in sorted({r['seed'] for r in rows if r.get('arm') == arm}):
      rates = curve(rows, arm, seed)
      smooth = np.convolve(rates, np.ones(5) / 5, 'valid')
      label = NAMES[arm] if seed == 0 else None
      axes.plot(np.arange(5, len(rates) + 1), smooth, color=color, label=label)
  axes.axhline(1 / 8, color='grey', linestyle=':', label='last window alone')
  axes.set(xlabel='step of RL', ylabel='right answers (5 steps)', ylim=(0, 1))
  axes.legend()
  figure.savefig(ROOT / 'curves.png', dpi=100)
  plt.close(figure)


def main() -> None:
  _plot(results.tabulate(ROOT, table))


if __name__ == '__main__':
  start.run(main)
