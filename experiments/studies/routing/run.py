"""Measures how unevenly the stages of a finished run route their tokens.

  python -m experiments.studies.routing.run --workdir=runs/tiny

CPT and SFT: loads of the last steps. RL: routes of the groups that the run
still has, by layer and by trajectory, since a device's rows are few documents.
"""

import pathlib
from collections.abc import Iterator

import numpy as np
from absl import flags

from composer_jax import wiring
from composer_jax.core import records
from composer_jax.telemetry import writer
from experiments import start
from experiments.studies import results
from experiments.studies.routing import spreads

ROOT = pathlib.Path(__file__).parent
_WORKDIR = flags.DEFINE_string('workdir', '', 'Of a finished run.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of that run, which results name.')
_STEPS = 10


def _of_stage(rows: list[results.Row], stage: str) -> Iterator[results.Row]:
  steps = [row for row in rows if row['stage'] == stage]
  steps = [row['expert_load'] for row in steps if 'expert_load' in row]
  if not steps:
    return
  load_ME = np.asarray(steps[-_STEPS:], float).sum(0)
  for layer, load_E in enumerate(load_ME):
    even_E = np.full(len(load_E), 1 / len(load_E))
    yield dict(
      stage=stage,
      layer=layer,
      layer_spread=spreads.spread(load_E[None], even_E),
      busiest=float(load_E.max() / load_E.mean()),
    )


def _of_groups(groups: list[records.Group], num: int) -> Iterator[results.Row]:
  """Yields a row for each layer, from the routes of trajectories."""
  loads = []
  for group in groups:
    for rollout in group.rollouts:
      for trajectory in rollout.trajectories:
        ids_MX = np.moveaxis(trajectory.expert_ids_TMA, 0, 1)
        ids_MX = ids_MX.reshape(len(ids_MX), -1)
        counted = [np.bincount(i, minlength=num)[:num] for i in ids_MX]
        loads.append(counted)
  loads_MRE = np.asarray(loads, float).swapaxes(0, 1)
  for layer, loads_RE in enumerate(loads_MRE):
    load_E = loads_RE.sum(0)
    even_E = np.full(num, 1 / num)
    yield dict(
      stage='rl',
      layer=layer,
      layer_spread=spreads.spread(load_E[None], even_E),
      rows_spread=spreads.spread(loads_RE, load_E / load_E.sum()),
      busiest=float(load_E.max() / load_E.mean()),
      trajectories=len(loads_RE),
    )


def main():
  if not _WORKDIR.value:
    raise ValueError('--workdir must name the folder of a finished run.')
  workdir = pathlib.Path(_WORKDIR.value)
  metrics = writer.read(workdir)
  rows = [*_of_stage(metrics, 'cpt'), *_of_stage(metrics, 'sft')]
  groups = wiring.kept_groups(workdir)
  if not rows or not groups:
    raise ValueError(
      f'--workdir={workdir} has {len(rows)} loads and {len(groups)} groups; it '
      'must be a finished run of experiments.composer.'
    )
  (num,) = {len(r['expert_load'][0]) for r in metrics if 'expert_load' in r}
  rows += _of_groups(groups, num)
  results.add(
    ROOT / 'results',
    [{'seed': _SEED.value, **row} for row in rows],
    by=('seed', 'stage'),
  )


if __name__ == '__main__':
  start.run(main)
