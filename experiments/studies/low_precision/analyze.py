"""Turns results/ into table.md; runs nothing.

python -m experiments.studies.low_precision.analyze
"""

import pathlib
import statistics

from experiments import start
from experiments.studies import results

ROOT = pathlib.Path(__file__).parent
_HEAD = (
  '| routes | forward | backward | held-out loss, by seed '
  '| gap to bf16 in nats: mean | by seed |',
  '| --- | --- | --- | --- | --- | --- |',
)


_BUNDLES = (
  '| learning rate | experts | keyframe, kB | deltas of the steps, kB |',
  '| --- | --- | --- | --- |',
)


def table(rows: list[results.Row]) -> str:
  bundles = [r for r in rows if r['stage'] == 'bundles']
  rows = [r for r in rows if r['stage'] != 'bundles']
  return _losses(rows) + '\n' + _sizes(bundles)


def _sizes(rows: list[results.Row]) -> str:
  lines, sizes = list(_BUNDLES), {}
  for row in rows:
    pair = f'{row["rate"]:g}', row['held']
    sizes.setdefault(pair, []).append(f'{row["bytes"] / 1000:.1f}')
  for pair, (first, *deltas) in sizes.items():
    lines.append(f'| {" | ".join([*pair, first, ", ".join(deltas)])} |')
  return '\n'.join(lines) + '\n'


def _losses(rows: list[results.Row]) -> str:
  lines = list(_HEAD)
  by_run = {
    (r['stage'], r['forward'], r['backward'], r['seed']): r['heldout_loss']
    for r in rows
  }
  arms = dict.fromkeys(run[:3] for run in by_run)
  for stage, forward, backward in arms:
    losses = {
      seed: loss
      for (*arm, seed), loss in by_run.items()
      if arm == [stage, forward, backward]
    }
    base = {s: by_run[stage, 'bf16', 'dequantised', s] for s in losses}
    gaps = [losses[seed] - base[seed] for seed in losses]
    cells = [
      stage,
      forward,
      backward if forward != 'bf16' else '',
      ', '.join(f'{loss:.3f}' for loss in losses.values()),
      f'{statistics.mean(gaps):+.4f}' if forward != 'bf16' else '',
      ', '.join(f'{gap:+.4f}' for gap in gaps) if forward != 'bf16' else '',
    ]
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines) + '\n'


def main() -> None:
  results.tabulate(ROOT, table)


if __name__ == '__main__':
  start.run(main)
