"""Turns results/ into table.md and curves.png; computes nothing else.

python -m experiments.studies.hint.analyze
"""

import collections
import pathlib
import statistics
from typing import Any

from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent

# Steps over which a figure is the mean, to reduce noise.
_WINDOW = 5
_SHOWN = (0, 20, 40, 80)
_GATE = 0.05

_NAMES = {
  'grpo': 'GRPO, terminal reward',
  'hint': '+ hints: reverse KL, frozen teacher',
  'wrong_hint': '+ hints of tools that do not exist',
  'live_teacher': '+ hints: reverse KL, live teacher',
  'ema_teacher': '+ hints: reverse KL, average of 0.05',
  'forward': '+ hints: forward KL, frozen teacher',
  'jsd': '+ hints: JSD, frozen teacher',
  'dense_grpo': 'GRPO, every failed call costs',
  'rare_hint': '+ hints, hardly demonstrated: frozen teacher',
  'rare_live_teacher': '+ hints, hardly demonstrated: live teacher',
  'dense_hint': '+ hints: reverse KL, frozen teacher (dense)',
}


def runs_of(
  rows: list[dict[str, Any]],
) -> dict[str, dict[int, list[dict[str, Any]]]]:
  """{arm: {seed: rows of its steps}}."""
  runs: dict[str, dict[int, list[dict[str, Any]]]] = collections.defaultdict(
    lambda: collections.defaultdict(list)
  )
  for row in rows:
    if row['stage'] == 'rl':
      runs[row['arm']][row['seed']].append(row)
  assert runs.keys() <= _NAMES.keys(), runs.keys()
  return {arm: runs[arm] for arm in _NAMES if arm in runs}


def near(rows: list[dict[str, Any]], step: int, name: str) -> float:
  """Returns the mean over the window that ends with this step."""
  first = max(step - _WINDOW + 1, 0)
  # fsum is exact; plain sums differ between Python 3.11 and 3.12.
  return statistics.fmean(r[name] for r in rows[first : step + 1])


def steps_to_gate(rows: list[dict[str, Any]]) -> int | None:
  """Returns the first step from which the windowed mean is below the gate."""
  held = [
    near(rows, r['step'], 'invalid_rate') < _GATE for r in rows[_WINDOW - 1 :]
  ]
  return held.index(True) + _WINDOW - 1 if any(held) else None


def _range(values: list[float], digits: int = 3) -> str:
  low, high = min(values), max(values)
  texts = sorted({f'{low:.{digits}f}', f'{high:.{digits}f}'})
  return '–'.join(texts)


def table(rows: list[dict[str, Any]]) -> str:
  """The results as Markdown, a line an arm, lowest to highest of its seeds."""
  head = [
    'arm',
    'seeds',
    *(f'invalid at {step}' for step in _SHOWN),
    'steps to < 5 %',
    'no call at all, at the end',
    'argument errors',
    'passed',
  ]
  lines = [head, ['---'] * len(head)]
  for arm, by_seed in runs_of(rows).items():
    runs = list(by_seed.values())
    gates = [steps_to_gate(steps) for steps in runs]
    reached = sorted(g for g in gates if g is not None)
    gate = ', '.join(map(str, reached)) or 'never'
    if reached and len(reached) < len(gates):
      gate += f', {len(gates) - len(reached)} never'
    last_step = len(runs[0]) - 1
    lines.append(
      [
        _NAMES[arm],
        str(len(runs)),
        *(
          _range([near(steps, step, 'invalid_rate') for steps in runs])
          for step in _SHOWN
        ),
        gate,
        *(
          _range([near(steps, last_step, name) for steps in runs])
          for name in ('share_not_a_call', 'share_bad_arguments', 'pass_rate')
        ),
      ]
    )
  return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)


def _plot(rows: list[dict[str, Any]]) -> None:
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  runs = runs_of(rows)
  split = {
    'what teaches': ('grpo', 'hint', 'wrong_hint', 'dense_grpo', 'dense_hint'),
    'which teacher': (
      *('hint', 'live_teacher', 'ema_teacher', 'forward', 'jsd'),
      *('rare_hint', 'rare_live_teacher'),
    ),
  }
  figure, axes = plt.subplots(
    1, 2, figsize=(11, 5), sharey=True, layout='constrained'
  )
  for axis, (title, arms) in zip(axes, split.items(), strict=True):
    for i, arm in enumerate(a for a in arms if a in runs):
      for j, steps in enumerate(runs[arm].values()):
        axis.plot(
          [r['step'] for r in steps],
          [near(steps, r['step'], 'invalid_rate') for r in steps],
          color=f'C{i}',
          linewidth=1,
          label=None if j else _NAMES[arm],
        )
    axis.axhline(_GATE, color='black', linewidth=0.5)
    axis.set_title(title)
    axis.set_xlabel('optimizer steps')
    axis.legend(fontsize=7, loc='upper center', bbox_to_anchor=(0.5, -0.12))
  axes[0].set_ylabel(f'invalid calls, mean of {_WINDOW} steps')
  figure.savefig(ROOT / 'curves.png', dpi=100)


def main() -> None:
  _plot(results.tabulate(ROOT, table))


if __name__ == '__main__':
  start.run(main)
