"""Turns results/ into table.md and plot.png; computes nothing else.

python -m experiments.studies.deletion.analyze
"""

import collections
import pathlib
import statistics
from collections.abc import Sequence

from composer_jax.tasks.repository import task_set
from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent

Row = results.Row


def of(rows: Sequence[Row], stage: str) -> list[Row]:
  return [r for r in rows if r['stage'] == stage]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  every = [head, ['---'] * len(head), *lines]
  return ''.join('| ' + ' | '.join(line) + ' |\n' for line in every)


def packages_table(rows: Sequence[Row]) -> str:
  """Valid tasks and tried candidates, by package and tier."""
  lines = []
  for row in of(rows, 'package'):
    name = f'{row["name"]} {row["version"]}'
    name += ', held out' if row['held_out'] else ''
    head = [name, row['licence']]
    if row['refused']:
      reason = f'refused: {row["refused"]}'
      lines.append([*head, '', *[''] * len(task_set.TIERS), reason])
      continue
    counts = [row['candidates'].get(tier, {}) for tier in task_set.TIERS]
    valid = [c.get('valid', 0) for c in counts]
    cells = [f'{v}/{sum(c.values())}' for v, c in zip(valid, counts)]
    lines.append([*head, str(row['tests']), *cells, str(sum(valid))])
  head = ('package', 'licence', 'tests', *task_set.TIERS, 'tasks')
  return _table(head, lines)


def tiers_table(rows: Sequence[Row]) -> str:
  """Results of candidates and properties of their tasks, by tier."""
  lines = []
  for tier in task_set.TIERS:
    counts: collections.Counter = collections.Counter()
    for row in of(rows, 'package'):
      counts.update(row.get('candidates', {}).get(tier, {}))
    tasks = [r for r in of(rows, 'task') if r['tier'] == tier]
    valid, tried = counts.pop('valid', 0), sum(counts.values())
    reasons = ', '.join(f'{n} {name}' for name, n in counts.most_common())
    lines.append(
      [
        tier,
        f'{valid}/{tried + valid}',
        f'{valid / max(tried + valid, 1):.0%}',
        reasons,
        *(
          str(round(statistics.median([t[name] for t in tasks] or [0])))
          for name in ('deleted_lines', 'fail_to_pass', 'hidden')
        ),
        str(sum(t['collateral'] > 0 for t in tasks)),
        f'{statistics.median([t["difficulty"] for t in tasks] or [0]):.2f}',
      ]
    )
  head = (
    *('tier', 'valid', 'share', 'why others are not', 'lines deleted'),
    *('fail to pass', 'hidden', 'with collateral', 'difficulty'),
  )
  return _table(head, lines)


def table(rows: Sequence[Row]) -> str:
  """All results as Markdown."""
  tasks, (setup,) = of(rows, 'task'), of(rows, 'setup')
  held_out = {r['name'] for r in of(rows, 'package') if r['held_out']}
  packages = {t['package'] for t in tasks}
  minutes = setup['cpu_s'] / 60
  summary = (
    f'{len(tasks)} tasks of {len(packages)} packages '
    f'({sum(t["package"] in held_out for t in tasks)} of '
    f'{len(packages & held_out)} held-out ones) in {minutes:.1f} minutes of '
    f'processors, {setup["cpu_s"] / max(len(tasks), 1):.1f} s a task; '
    f'{setup["cores"]} cores, {setup["machine"]["processor"]}.'
  )
  parts = [
    summary,
    'Valid tasks of candidates tried.',
    packages_table(rows),
    'By tier; medians of the tasks.',
    tiers_table(rows),
  ]
  return '\n\n'.join(part.rstrip('\n') for part in parts) + '\n'


def _plot(rows: Sequence[Row]) -> None:
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  figure, (size, hard) = plt.subplots(
    1, 2, figsize=(10, 4), layout='constrained'
  )
  for number, tier in enumerate(task_set.TIERS):
    tasks = [r for r in of(rows, 'task') if r['tier'] == tier]
    size.plot(
      [t['deleted_lines'] for t in tasks],
      [t['fail_to_pass'] for t in tasks],
      'o',
      ms=3,
      color=f'C{number}',
      label=tier,
    )
  size.set_xscale('log')
  size.set_yscale('log')
  size.set_xlabel('lines of code deleted')
  size.set_ylabel('tests that fail')
  size.legend(fontsize=7)
  hard.hist(
    [
      [r['difficulty'] for r in of(rows, 'task') if r['tier'] == tier]
      for tier in task_set.TIERS
    ],
    bins=20,
    stacked=True,
  )
  hard.set_xlabel('estimated difficulty')
  hard.set_ylabel('tasks')
  figure.savefig(ROOT / 'plot.png', dpi=100)
  plt.close(figure)


def main() -> None:
  _plot(results.tabulate(ROOT, table))


if __name__ == '__main__':
  start.run(main)
