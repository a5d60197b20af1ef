"""Turns results/ into table.md; computes nothing else.

python -m experiments.studies.speculation.analyze
"""

import pathlib

from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent
_DEPTHS = (1, 2, 3, 4)
_NAMES = {
  'session': 'n-grams of the session',
  'earlier': 'and of earlier episodes',
  'siblings': 'and of all others of the task',
  'aged': 'of 128 episodes',
  'sft': 'SFT policy',
  'heads': 'heads',
}


def row_of(by_depth: dict[int, results.Row]) -> results.Row:
  """Returns the row of the largest depth."""
  return by_depth[max(by_depth)]


def table(rows: list[results.Row]) -> str:
  """A line for each stage, drafter and kind of turn.

  Columns 1 to 4 are tokens a pass with so many drafts. The last one is the
  share of passes, with the most drafts, in which the first k are right.
  """
  head = (
    'run',
    'stage',
    'drafter',
    'turns',
    *map(str, _DEPTHS),
    'right drafts',
  )
  lines = [head, ('---',) * len(head)]
  groups: dict[tuple, dict[int, results.Row]] = {}
  for row in rows:
    name = _NAMES[row['drafter']]
    if row['drafter'] == 'aged':
      name += f', {row["age"]} versions old'
    key = (str(row['run']), row['stage'], name, row['kind'])
    groups.setdefault(key, {})[row['depth']] = row
  for key, by_depth in groups.items():
    if key[3] == 'other' or (row_of(by_depth)['age'] and key[3] != 'all'):
      continue
    rates = [
      f'{by_depth[k]["tokens"] / by_depth[k]["passes"]:.2f}'
      if k in by_depth
      else ''
      for k in _DEPTHS
    ]
    last = row_of(by_depth)
    shares = ' '.join(f'{n / last["passes"]:.2f}' for n in last['right'])
    lines.append((*key, *rates, shares))
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def main():
  results.tabulate(ROOT, table)


if __name__ == '__main__':
  start.run(main)
