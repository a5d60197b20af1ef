"""Measures recordings: what changes in a step, and what bundles make of it.

  python -m experiments.studies.delta.measure --recordings=runs/delta/recordings

Writes results/; what is there is replaced. Two kinds of rows. 'steps' has a
case's training, step by step from its start, as `record` noted it. 'coded' has
the last deltas of a case: bytes of our bundles in all tiers, of the peers, and
the bounds, as in benchmarks/delta.py, in numbers of bytes.
"""

import os
import pathlib
import statistics
from typing import Any

from absl import app, flags, logging

from benchmarks import (
  delta_bounds,
  delta_data,
  delta_peers,
  delta_recordings,
  delta_sizes,
)
from composer_jax.telemetry import machine
from experiments.studies import results

_RECORDINGS = flags.DEFINE_string(
  'recordings', 'runs/delta/recordings', 'What `record` left.'
)
_RESULTS = flags.DEFINE_string(
  'results', str(pathlib.Path(__file__).parent / 'results'), 'Replaced.'
)
# Deltas of a case that are looked at: the last before the skip of a lag.
LAST = slice(delta_sizes.LAG - 4, delta_sizes.LAG)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments {argv[1:]}.')
  logging.set_verbosity(logging.WARNING)  # A publisher tells of each version.
  folder = pathlib.Path(_RECORDINGS.value)
  found = delta_recordings.names(folder)
  if not found:
    raise app.UsageError(
      f'{folder} holds no recordings; `python -m '
      f'experiments.studies.delta.record --out={folder}` makes them.'
    )
  cases = {c.name: c for c in delta_data.recorded(folder)}
  setup = {'machine': machine.describe(), 'cores': os.cpu_count()}
  rows: list[results.Row] = [{'stage': 'setup', 'step': 0, **setup}]
  for path in found:
    about = delta_recordings.about(path)
    told = {k: about[k] for k in ('optimizer', 'learning_rate', 'is_cold')}
    told |= {'name': path.name, 'training': about['stage']}
    for step, metrics in enumerate(about['metrics'], start=1):
      rows.append({'stage': 'steps', 'step': step, **told, **metrics})
    line = coded(cases[path.name])
    sizes = {k: about[k] for k in ('parameters', 'cpu_s')}
    last = {'stage': 'coded', 'step': about['steps']}
    rows.append({**last, **told, **sizes, **line})
    print(path.name, line, flush=True)
  results.write(_RESULTS.value, rows, by=('stage', 'name'))


def coded(case: delta_data.Case) -> dict[str, Any]:
  """Bytes of a step by every way, medians over the last deltas."""
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
    made = delta_sizes.bundles(case.policies, **options)
    line[name] = statistics.median(i.bytes for i in made.infos[1:][LAST])
    line[f'{name}_blobs'] = statistics.median(made.blobs[1:][LAST])
    if name == 'small' and made.catch_up:
      singles = sum(i.bytes for i in made.infos[1 : delta_sizes.LAG + 1])
      line['catch_up'] = made.catch_up / singles
  return line


if __name__ == '__main__':
  app.run(main)
