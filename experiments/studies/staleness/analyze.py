"""Turns results/ into table.md; computes nothing else.

python -m experiments.studies.staleness.analyze
"""

import pathlib

import numpy as np

from experiments import start
from experiments.studies import results
from experiments.studies.staleness import run

ROOT = pathlib.Path(__file__).parent
SEEDS = (14, 15)

_HEAD = (
  *('arm', 'seed', 'staleness', 'mean k3', 'largest', 'replayed', 'afresh'),
  *('routes kept', 'gradient error', 'cosine', 'largest norm', 'entropy'),
  *('flagged', 'pass rate before', 'after'),
)


def _mean(steps: list[results.Row], name: str) -> str:
  values = [row[name] for row in steps if name in row]
  return f'{np.mean(values):.2g}' if values else ''


def _largest(steps: list[results.Row], name: str, least: bool = False) -> str:
  values = [row[name] for row in steps if name in row]
  return f'{(min if least else max)(values):.3g}' if values else ''


def _cells(about: results.Row, steps: list[results.Row]) -> list[str]:
  rate = lambda evaluation: (
    f'{evaluation["passed"] / evaluation["episodes"]:.3f}'
  )
  return [
    about['arm'],
    str(about['seed']),
    _mean(steps, 'staleness_mean'),
    _mean(steps, 'mismatch_kl'),
    _largest(steps, 'mismatch_kl'),
    _mean(steps, 'mismatch_kl_replay'),
    _mean(steps, 'mismatch_kl_no_replay'),
    _largest(steps, 'route_agreement', least=True),
    *(
      f'{about.get(k, np.nan):.3g}'
      for k in ('gradient_error', 'gradient_cosine')
    ),
    _largest(steps, 'grad_norm'),
    f'{steps[-1]["entropy"]:.3g}' if steps else '',
    str(sum(row.get('gate_breaches', 0) > 0 for row in steps)),
    rate(about['start']),
    rate(about['evaluation']),
  ]


def table(rows: list[results.Row]) -> str:
  """A line for each arm and seed, in their order; arms not run say so."""
  lines = [list(_HEAD), ['---'] * len(_HEAD)]
  for arm in run.ARMS:
    for seed in SEEDS:
      own = [r for r in rows if (r['arm'], r['seed']) == (arm, seed)]
      about = [r for r in own if r['stage'] == 'arm']
      steps = [r for r in own if r['stage'] == 'rl']
      if about:
        lines.append(_cells(about[0], steps))
      else:
        missing = ['not finished', *[''] * (len(_HEAD) - 3)]
        lines.append([arm, str(seed), *missing])
  return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)


def main() -> None:
  results.tabulate(ROOT, table)


if __name__ == '__main__':
  start.run(main)
