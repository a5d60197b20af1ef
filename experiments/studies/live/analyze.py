"""Turns results/ into table.md; computes nothing else.

python -m experiments.studies.live.analyze
"""

import pathlib

from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent
_HEAD = (
  *('arm', 'seed', 'cycle', 'episodes', 'satisfied', 'reward', 'decision'),
  *('held by', 'train, s', 'gate, s', 'trial, s', 'whole, s'),
)
_PLANTED = (
  *('planted', 'seed', 'rows drawn anew', 'count', 'passed the gate'),
  *('shipped', 'share'),
)


def _line(cells) -> str:
  return '| ' + ' | '.join(map(str, cells)) + ' |\n'


def _seconds(row: results.Row, name: str) -> str:
  return f'{row[name]:.0f}' if row.get(name) is not None else ''


def _held(names: list[str]) -> str:
  """Lists what held a version back; of canaries of domains only the others."""
  return ', '.join(
    n for n in names if ' in ' not in n or n.partition(' in ')[0] not in names
  )


def table(rows: list[results.Row]) -> str:
  """A line for each cycle of each arm, and one for each kind of planted."""
  lines = [_line(_HEAD), _line(['---'] * len(_HEAD))]
  for row in rows:
    if row['stage'] == 'cycle':
      lines.append(
        _line(
          (
            *(row['arm'], row['seed'], row['cycle'], row['episodes']),
            *(f'{row["satisfied"]:.3f}', f'{row["reward"]:+.3f}'),
            *(row['decision'], _held(row['held_by'])),
            *(_seconds(row, n) for n in ('train_s', 'gate_s', 'trial_s')),
            _seconds(row, 'cycle_s'),
          )
        )
      )
  lines += ['\n', _line(_PLANTED), _line(['---'] * len(_PLANTED))]
  for row in rows:
    if row['arm'] == 'planted':
      share = row['shipped'] / row['count']
      counts = (row['seed'], row['drawn_anew'], row['count'])
      counts += (row['passed_gate'], row['shipped'])
      lines.append(_line((row['stage'], *counts, f'{share:.3f}')))
  return ''.join(lines)


def main() -> None:
  results.tabulate(ROOT, table)


if __name__ == '__main__':
  start.run(main)
