"""Measures recordings: what changes in a step, and what bundles make of it.

  python -m experiments.studies.delta.measure --recordings=runs/delta/recordings

Replaces results/. Two kinds of rows: 'steps' has a case's training, step by
step from its start, as `record` noted it; 'coded' has the last deltas of a
case, in bytes: our bundles in all tiers, the peers, and the bounds of
benchmarks/delta.py.
"""

import os
import pathlib
import statistics
from typing import Any

from absl import flags, logging

from benchmarks import (
  delta_bounds,
  delta_data,
  delta_peers,
  delta_recordings,
  delta_sizes,
)
from composer_jax.telemetry import machine
from experiments import start
from experiments.studies import results

_RECORDINGS = flags.DEFINE_string(
  'recordings', 'runs/delta/recordings', 'Folder that `record` wrote.'
)
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder to replace.',
)
# Deltas that count for a case.
LAST = slice(4, 8)


def main() -> None:
  logging.set_verbosity(logging.WARNING)  # A publisher logs each version.
  folder = pathlib.Path(_RECORDINGS.value)
  names = delta_recordings.names(folder)
  if not names:
    raise SystemExit(
      f'error: {folder} holds no recordings; make them with `python -m '
      f'experiments.studies.delta.record --out={folder}`.'
    )
  cases = {c.name: c for c in delta_data.recorded(folder)}
  setup = {'machine': machine.describe(), 'cores': os.cpu_count()}
  rows: list[results.Row] = [{'stage': 'setup', 'step': 0, **setup}]
  for path in names:
    about = delta_recordings.about(path)
    facts = {k: about[k] for k in ('optimizer', 'learning_rate', 'is_cold')}
    facts |= {'name': path.name, 'training': about['stage']}
    for step, metrics in enumerate(about['metrics'], start=1):
      rows.append({'stage': 'steps', 'step': step, **facts, **metrics})
    line = coded(cases[path.name])
    sizes = {k: about[k] for k in ('parameters', 'cpu_s')}
    key = {'stage': 'coded', 'step': about['steps']}
    rows.append({**key, **facts, **sizes, **line})
    print(path.name, line, flush=True)
  results.write(_RESULTS.value, rows, by=('stage', 'name'))


def coded(case: delta_data.Case) -> dict[str, Any]:
  """Returns bytes of a step in every encoding, medians over the last deltas."""
  pairs = list(zip(case.policies, case.policies[1:], strict=False))[LAST]
  counts = [delta_bounds.changed(*pair) for pair in pairs]
  bounds = [delta_bounds.of_policy(*pair) for pair in pairs]
  line: dict[str, Any] = {
    'elements': counts[0][1],
    'full_bytes': sum(a.nbytes for a in case.policies[0].values()),
    'changed_elements': statistics.median(n for n, _ in counts),
    'bound_m': statistics.median(m for m, _ in bounds),
    'bound_e': statistics.median(e for _, e in bounds),
    'peers': {
      name: statistics.median(
        delta_peers.policy_bytes(peer, *pair) for pair in pairs
      )
      for name, peer in delta_peers.SIZED.items()
    },
  }
  for name, options in delta_sizes.TIERS.items():
    bundles = delta_sizes.bundles(case.policies, **options)
    line[name] = statistics.median(i.bytes for i in bundles.infos[1:][LAST])
    line[f'{name}_blobs'] = statistics.median(bundles.blobs[1:][LAST])
  return line


if __name__ == '__main__':
  start.run(main)
