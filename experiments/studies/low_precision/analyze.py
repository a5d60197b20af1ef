"""Turns results/ into table.md and a plot; runs nothing.

python -m experiments.studies.low_precision.analyze
"""

import functools
import pathlib
import statistics

import numpy as np

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


_REINFORCED = (
  '| RL | steps | pass rate, first and last 25 '
  '| exact k3: median, mean, largest '
  '| k1 ± standard error | ratio above 2 | routes kept, least | marked '
  '| gradient error: mean, largest | without weights |',
  '| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |',
)

AXES = ('', '_unseen_names', '_unseen_wordings', '_unseen_all')
_JOBS = (
  '| main job, seed | stage | compositions | names | wordings | all three |',
  '| --- | --- | --- | --- | --- | --- |',
)


def table(rows: list[results.Row]) -> str:
  """Losses, sizes of bundles, arms of RL, and runs of the main job."""
  by_stage: dict[str, list[results.Row]] = {}
  for row in rows:
    by_stage.setdefault(row['stage'], []).append(row)
  return '\n'.join(
    (
      _losses(by_stage.get('fixed', []) + by_stage.get('free', [])),
      _sizes(by_stage.get('bundles', [])),
      _reinforced(by_stage.get('rl', []), by_stage.get('probe', [])),
      _jobs(by_stage.get('job', [])),
    )
  )


def _series(rows: list[results.Row], arm: str, name: str) -> list[float]:
  return [row[name] for row in rows if row['arm'] == arm and name in row]


def _reinforced(rows: list[results.Row], probes: list[results.Row]) -> str:
  lines = list(_REINFORCED)
  for arm in dict.fromkeys(row['arm'] for row in rows):
    of, at = (functools.partial(_series, part, arm) for part in (rows, probes))
    passed, k3 = of('pass_rate'), of('mismatch_kl')
    sampled = np.array(at('probed_tokens'), float)
    k1 = np.average(at('k1'), weights=sampled)
    errors = np.array(at('k1_error')) * sampled
    k1_error = np.sqrt(np.sum(errors**2)) / sampled.sum()
    apart, alone = at('gradient_error'), at('gradient_error_of_weights')
    cells = (
      arm,
      str(len(passed)),
      f'{np.mean(passed[:25]):.3f}, {np.mean(passed[-25:]):.3f}',
      f'{np.median(k3):.1e}, {np.mean(k3):.1e}, {max(k3):.1e}',
      f'{k1:.1e} ± {k1_error:.1e}',
      f'{np.mean(of("mismatch_large")):.1e}',
      f'{min(of("replay_agreement")):.4f}',
      f'{np.mean(np.array(of("gate_breaches")) > 0):.2f}',
      f'{np.mean(apart):.2g}, {max(apart):.2g}',
      f'{np.mean(alone):.2g}, {max(alone):.2g}',
    )
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines) + '\n'


def _jobs(rows: list[results.Row]) -> str:
  lines = list(_JOBS)
  for row in rows:
    rates = [f'{row[f"passed{axis}"] / row["episodes"]:.3f}' for axis in AXES]
    lines.append(f'| {row["seed"]} | {row["after"]} | {" | ".join(rates)} |')
  return '\n'.join(lines) + '\n'


def _plot(rows: list[results.Row]) -> None:
  import matplotlib

  matplotlib.use('agg')
  import matplotlib.pyplot as plt

  steps = [row for row in rows if row['stage'] == 'rl']
  probes = [row for row in rows if row['stage'] == 'probe']
  figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout='constrained')
  for arm in dict.fromkeys(row['arm'] for row in steps):
    passed = np.array(_series(steps, arm, 'pass_rate'))
    # Mean of the last 20 steps, of fewer at first.
    sums = np.cumsum(np.insert(passed, 0, 0.0))
    ends = np.arange(1, len(sums))
    begins = np.maximum(ends - 20, 0)
    smooth = (sums[ends] - sums[begins]) / (ends - begins)
    axes[0].plot(_series(steps, arm, 'step'), smooth, label=arm)
    axes[1].semilogy(
      _series(steps, arm, 'step'), _series(steps, arm, 'mismatch_kl')
    )
    axes[2].plot(
      _series(probes, arm, 'step'), _series(probes, arm, 'gradient_error'), '.-'
    )
  titles = 'pass rate, mean of 20 steps', 'exact k3, nats', 'gradient error'
  for axis, title in zip(axes, titles, strict=True):
    axis.set_title(title)
    axis.set_xlabel('optimizer step of RL')
  axes[0].legend()
  figure.savefig(ROOT / 'reinforced.png', dpi=110)
  plt.close(figure)


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
  _plot(results.tabulate(ROOT, table))


if __name__ == '__main__':
  start.run(main)
