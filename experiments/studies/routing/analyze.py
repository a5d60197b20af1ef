"""Turns results/ into table.md; computes nothing else.

python -m experiments.studies.routing.analyze
"""

import pathlib

from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent
_HEAD = (
  *('seed', 'stage', 'layer', 'spread of the layer', 'of a trajectory'),
  'busiest expert over mean',
)


def table(rows: list[results.Row]) -> str:
  """A line for each layer of each stage."""
  lines = [_HEAD, ('---',) * len(_HEAD)]
  for row in rows:
    own = row.get('rows_spread')
    lines.append(
      (
        str(row['seed']),
        row['stage'],
        str(row['layer']),
        f'{row["layer_spread"]:.2f}',
        '' if own is None else f'{own:.2f}',
        f'{row["busiest"]:.2f}',
      )
    )
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def main():
  results.tabulate(ROOT, table)


if __name__ == '__main__':
  start.run(main)
