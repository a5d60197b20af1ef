"""Turns results/ into table.md; computes nothing else.

python -m experiments.studies.rubric.analyze
"""

import pathlib

import numpy as np

from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent
_ARMS = ('plain', 'style')
_SPAN = 5  # Steps of a mean.
_HEAD = (
  *('seed', 'arm', 'tested, first steps', 'last steps', 'looked first', 'last'),
  *('passed after SFT', 'after RL', 'wordings after SFT', 'after RL'),
)


def _mean(steps: list[results.Row], name: str) -> str:
  return f'{np.mean([dict(row["scores"])[name] for row in steps]):.2f}'


def table(rows: list[results.Row]) -> str:
  """A line for each arm of each seed; shares of rollouts and of episodes."""
  lines = [_HEAD, ['---'] * len(_HEAD)]
  for seed in sorted({r['seed'] for r in rows}):
    for arm in _ARMS:
      own = [r for r in rows if (r['arm'], r['seed']) == (arm, seed)]
      steps = [r for r in own if r['stage'] == 'rl']
      if not steps:
        lines.append([str(seed), arm, 'not finished', *[''] * (len(_HEAD) - 3)])
        continue
      passed = next(r['passed'] for r in own if r['stage'] == 'arm')
      cells = [
        _mean(part, name)
        for name in ('tested', 'looked_first')
        for part in (steps[:_SPAN], steps[-_SPAN:])
      ]
      names = ('sft', 'rl', 'sft_unseen_wordings', 'rl_unseen_wordings')
      cells += [f'{passed[n]:.3f}' if n in passed else '' for n in names]
      lines.append([str(seed), arm, *cells])
  return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)


def main() -> None:
  results.tabulate(ROOT, table)


if __name__ == '__main__':
  start.run(main)
