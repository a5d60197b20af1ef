"""Turns results/ into table.md; computes nothing else.

python -m experiments.studies.real_code.analyze
"""

import math
import pathlib
import statistics
from collections.abc import Sequence

from composer_jax.rl import behaviour
from composer_jax.telemetry import intervals
from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent


def _of(
  rows: Sequence[results.Row], stage: str, seed: int
) -> list[results.Row]:
  return [r for r in rows if (r['stage'], r.get('seed')) == (stage, seed)]


def _rate(about: results.Row, policy: str) -> behaviour.PassRate | None:
  evaluation = about.get(f'evaluation_{policy}')
  return None if evaluation is None else behaviour.PassRate(**evaluation)


def _shown(rate: behaviour.PassRate | None) -> str:
  if rate is None:
    return 'not run'
  return (
    f'{rate.passed} of {rate.episodes}, '
    f'{rate.rate:.3f} [{rate.low:.3f}, {rate.high:.3f}]'
  )


def _gain(about: results.Row) -> str:
  sft, rl = _rate(about, 'sft'), _rate(about, 'rl')
  if sft is None or rl is None:
    return 'not run'
  low, high = intervals.difference(
    (sft.passed, sft.episodes), (rl.passed, rl.episodes)
  )
  by_task = about['by_task']
  changes = [
    passed / count - by_task['sft'][task][0] / by_task['sft'][task][1]
    for task, (passed, count) in by_task['rl'].items()
  ]
  gain = f'{rl.rate - sft.rate:+.3f} [{low:+.3f}, {high:+.3f}]'
  if len(changes) < 2:
    return gain
  # Tasks are drawn at random; a mean of them is nearly normal.
  mean = statistics.fmean(changes)
  half = intervals.Z_95 * statistics.stdev(changes) / math.sqrt(len(changes))
  return f'{gain}, over tasks [{mean - half:+.3f}, {mean + half:+.3f}]'


def _last(rows: Sequence[results.Row], name: str) -> str:
  values = [row[name] for row in rows if row.get(name) is not None]
  return f'{values[-1]:.2f}' if values else 'not run'


def _trained(rows: Sequence[results.Row]) -> str:
  """Pass rate of RL's own episodes over the first and the last tenth."""
  rates = [row['pass_rate'] for row in rows]
  if not rates:
    return 'not run'
  part = max(1, len(rates) // 10)
  first, last = rates[:part], rates[-part:]
  return f'{sum(first) / part:.3f} -> {sum(last) / part:.3f}'


def _chance(rows: Sequence[results.Row], policy: str) -> str:
  """Probability of the body that was deleted: a median, and the mean."""
  found = [
    row['logprob']
    for row in rows
    if (row['policy'], row['split']) == (policy, 'held_out')
  ]
  if not found:
    return 'not run'
  mean = sum(map(math.exp, found)) / len(found)
  return f'e^{statistics.median(found):.0f}, {mean:.0e}'


def table(rows: Sequence[results.Row]) -> str:
  """The results as Markdown: the tasks, then one row a seed."""
  (tasks,) = (r for r in rows if r['stage'] == 'tasks')
  lines = []
  for name, split in (('Training', 'train'), ('Held-out', 'held_out')):
    counts = tasks[split]
    each = ', '.join(f'{n} {count}' for n, count in sorted(counts.items()))
    lines.append(
      f'{name}: {sum(counts.values())} tasks of {len(counts)} packages, '
      f'{tasks[f"{split}_lines"]:.1f} lines on average ({each}).'
    )
  lines += [
    '',
    '| seed | steps of pretraining, SFT, RL | held-out loss after pretraining '
    '| after SFT | never-seen packages after SFT | after RL | gain '
    '| probability of the deleted body after SFT: median, mean | after RL '
    "| invalid calls after SFT, RL | RL's own episodes | minutes |",
    '|' + ' --- |' * 12,
  ]
  for seed in sorted({r['seed'] for r in rows if 'seed' in r}):
    (about,) = _of(rows, 'run', seed)
    rates = [_rate(about, policy) for policy in ('sft', 'rl')]
    cells = [
      str(seed),
      ', '.join(str(about['steps'][s]) for s in ('cpt', 'sft', 'rl')),
      *(_last(_of(rows, s, seed), 'heldout_loss') for s in ('cpt', 'sft')),
      *map(_shown, rates),
      _gain(about),
      *(_chance(_of(rows, 'chance', seed), p) for p in ('sft', 'rl')),
      ', '.join(
        'not run' if r is None else f'{r.invalid_rate:.2f}' for r in rates
      ),
      _trained(_of(rows, 'rl', seed)),
      f'{sum(about.get("stages", {}).values()) / 60:.0f}',
    ]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines) + '\n'


def main() -> None:
  results.tabulate(ROOT, table)


if __name__ == '__main__':
  start.run(main)
