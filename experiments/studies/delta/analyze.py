"""Turns results/ into table.md and curves.png; computes nothing else.

python -m experiments.studies.delta.analyze
"""

import pathlib
import statistics
from collections.abc import Sequence

from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent
SETTLED = 8  # last steps of a case, over which its share is the median

Row = results.Row


def label(row: Row) -> str:
  """Returns the name of a case in tables and plots."""
  words = f'{row["training"].upper()}, {row["optimizer"].title()} at '
  cold = ', masters from bf16' if row['is_cold'] else ''
  return f'{words}{row["learning_rate"]:g}{cold}'


def by_case(rows: Sequence[Row]) -> dict[str, list[Row]]:
  """Returns rows by the name of their case."""
  cases: dict[str, list[Row]] = {}
  for row in rows:
    cases.setdefault(row['name'], []).append(row)
  return cases


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
  every = [head, ['---'] * len(head), *lines]
  return ''.join('| ' + ' | '.join(line) + ' |\n' for line in every)


def shares_table(steps: Sequence[Row]) -> str:
  """Share of bf16 weights that change: first step, last steps, and the law."""
  lines = []
  for rows in by_case(steps).values():
    last_steps = rows[-SETTLED:]
    worst = max(abs(r['expected'] / r['changed'] - 1) for r in last_steps)
    worst_of_all = max(abs(r['expected'] / r['changed'] - 1) for r in rows)
    lines.append(
      [
        label(rows[0]),
        f'{rows[0]["changed"]:.2%}',
        f'{statistics.median(r["changed"] for r in last_steps):.2%}',
        f'{statistics.median(r["update_rms"] for r in last_steps):.2e}',
        f'{worst:.1%}',
        f'{worst_of_all:.1%}',
      ]
    )
  head = (
    *('training', 'first step', f'last {SETTLED}', 'rms of their updates'),
    *(f'law off by, last {SETTLED}', 'all steps'),
  )
  return _table(head, lines)


def _ours(coded: Sequence[Row]) -> list[str]:
  """Our codecs; 'history' is of a variant that bundles do not have any more."""
  return [name for name in ('history', 'small', 'fast') if name in coded[0]]


def bytes_table(coded: Sequence[Row]) -> str:
  """Full bytes over bytes of a step, for every encoding."""
  peers = list(coded[0]['peers'])
  lines = []
  for row in coded:
    sizes = [row[name] for name in ('bound_e', *_ours(coded))]
    sizes += [row['peers'][name] for name in peers]
    lines.append(
      [
        label(row),
        f'{row["changed_elements"] / row["elements"]:.2%}',
        *(f'{row["full_bytes"] / size:.1f}' for size in sizes),
        f'{row["small"] / row["bound_e"]:.3f}',
        f'{row["small_blobs"] / row["bound_e"]:.3f}',
      ]
    )
  head = (
    *('training', 'changed', 'bound E', *_ours(coded), *peers),
    *('small / E', 'its blobs / E'),
  )
  return _table(head, lines)


def table(rows: Sequence[Row]) -> str:
  """All results as Markdown."""
  coded = [r for r in rows if r['stage'] == 'coded']
  parts = [
    'Share of the bf16 weights that a step changes.',
    shares_table([r for r in rows if r['stage'] == 'steps']),
    'Full bytes over bytes of a step; bundles with their manifest.',
    bytes_table(coded),
  ]
  return '\n\n'.join(part.rstrip('\n') for part in parts) + '\n'


def _plot(rows: Sequence[Row]) -> None:
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  figure, (share, size) = plt.subplots(
    1, 2, figsize=(12, 5), layout='constrained'
  )
  steps = by_case([r for r in rows if r['stage'] == 'steps'])
  for number, case_steps in enumerate(steps.values()):
    x, color = [r['step'] for r in case_steps], f'C{number}'
    measured = [100 * r['changed'] for r in case_steps]
    law = [100 * r['expected'] for r in case_steps]
    share.plot(x, measured, 'o', ms=3, color=color, label=label(case_steps[0]))
    share.plot(x, law, '-', lw=1, color=color)
  share.set_xlabel('step')
  share.set_ylabel('weights changed, % (line: the law)')
  share.set_yscale('log')
  share.legend(fontsize=7)
  coded = sorted(
    (r for r in rows if r['stage'] == 'coded'),
    key=lambda r: r['changed_elements'] / r['elements'],
  )
  x = [100 * r['changed_elements'] / r['elements'] for r in coded]
  ways = {name: [r['peers'][name] for r in coded] for name in coded[0]['peers']}
  ways = {k: [r[k] for r in coded] for k in _ours(coded)} | ways
  for name, sizes in ways.items():
    bits = [
      8 * n / r['changed_elements'] for n, r in zip(sizes, coded, strict=True)
    ]
    is_ours = name in _ours(coded)
    size.plot(x, bits, 'o-' if is_ours else 'x:', ms=4, label=name)
  for name, style in (('bound_e', 'k-'), ('bound_m', 'k--')):
    bits = [8 * r[name] / r['changed_elements'] for r in coded]
    size.plot(x, bits, style, lw=1, label=name.replace('_', ' ').upper())
  size.set_xscale('log')
  size.set_ylim(0, 34)
  size.set_xlabel('weights changed, %')
  size.set_ylabel('bits for each changed weight')
  size.legend(fontsize=7)
  figure.savefig(ROOT / 'curves.png', dpi=100)
  plt.close(figure)


def main() -> None:
  _plot(results.tabulate(ROOT, table))


if __name__ == '__main__':
  start.run(main)
