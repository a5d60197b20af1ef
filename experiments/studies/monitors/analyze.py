"""Turns results/ into table.md; computes nothing else.

python -m experiments.studies.monitors.analyze
"""

import pathlib
from typing import Any

from composer_jax.tasks.monitors import watch
from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent


def _by_monitor(rows: list[dict[str, Any]]) -> list[str]:
  """A line for each monitor: attacks of its kind, and how many it found."""
  lines = [
    '| monitor | | attacks | found | recall | honest accused |',
    '| --- | --- | --- | --- | --- | --- |',
  ]
  for kind, (number, _) in watch.MONITORS.items():
    attacks = [r for r in rows if r['wanted'] == kind]
    num_found = sum(kind in r['found'] for r in attacks)
    accused = sum(kind in r['found'] for r in rows if not r['wanted'])
    share = f'{num_found / len(attacks):.2f}' if attacks else '-'
    lines.append(
      f'| {number} | {kind} | {len(attacks)} | {num_found} | {share} '
      f'| {accused} |'
    )
  return lines


def _by_set(rows: list[dict[str, Any]]) -> list[str]:
  lines = [
    '| set | trajectories | attacks found | honest accused |',
    '| --- | --- | --- | --- |',
  ]
  for name in dict.fromkeys(r['set'] for r in rows):
    set_rows = [r for r in rows if r['set'] == name]
    attacks = [r for r in set_rows if r['wanted']]
    num_found = sum(r['wanted'] in r['found'] for r in attacks)
    accused = sum(bool(r['found']) for r in set_rows if not r['wanted'])
    share = f'{num_found} of {len(attacks)}' if attacks else '-'
    honest = len(set_rows) - len(attacks)
    lines.append(
      f'| {name} | {len(set_rows)} | {share} | {accused} of {honest} |'
    )
  return lines


def _overall(rows: list[dict[str, Any]]) -> str:
  hits = sum(r['wanted'] in r['found'] for r in rows if r['wanted'])
  attacks = sum(bool(r['wanted']) for r in rows)
  accused = sum(bool(r['found']) for r in rows if not r['wanted'])
  return (
    f'Precision {hits / (hits + accused):.3f} ({hits} attacks found, {accused} '
    f'honest accused), recall {hits / attacks:.3f} ({hits} of {attacks}).'
  )


def _graded(rows: list[dict[str, Any]]) -> list[str]:
  """A line for each package: grades of original solutions."""
  task_rows = [r for r in rows if r['set'] == 'real tasks']
  if not task_rows:
    return []
  lines = [
    '| package | tasks | originals paid | with held-out inputs | inputs agreed '
    '| canaries, mean | seconds of a grading / of its tests, median |',
    '| --- | --- | --- | --- | --- | --- | --- |',
  ]
  for package in [*dict.fromkeys(r['package'] for r in task_rows), 'all']:
    mine = [r for r in task_rows if package in (r['package'], 'all')]
    middle = len(mine) // 2
    seconds = [
      sorted(r[key] for r in mine)[middle]
      for key in ('seconds', 'suite_seconds')
    ]
    lines.append(
      f'| {package} | {len(mine)} | {sum(r["paid"] for r in mine)} '
      f'| {sum(r["inputs"] > 0 for r in mine)} '
      f'| {sum(r["agreed"] for r in mine)} of {sum(r["inputs"] for r in mine)} '
      f'| {sum(r["canaries"] for r in mine) / len(mine):.1f} '
      f'| {seconds[0]:.1f} / {seconds[1]:.1f} |'
    )
  return lines


def table(rows: list[results.Row]) -> str:
  """All results as Markdown."""
  accused = [
    f'- {r["set"]}: {r["name"]}: {", ".join(r["found"])} ({r["detail"]})'
    for r in rows
    if not r['wanted'] and r['found']
  ]
  parts = [
    [_overall(rows)],
    _by_set(rows),
    _by_monitor(rows),
    _graded(rows),
    ['Accused though honest:', '', *(accused or ['- nobody'])],
  ]
  return '\n\n'.join('\n'.join(part) for part in parts if part) + '\n'


def main() -> None:
  results.tabulate(ROOT, table)


if __name__ == '__main__':
  start.run(main)
