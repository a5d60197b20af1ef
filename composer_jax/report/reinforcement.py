"""What the report says of reinforcement learning."""

import collections

import numpy as np

from composer_jax.report import run_data

# Number of steps named of those that left the bands of the gate.
_SHOWN = 8


def summary(run: run_data.RunData) -> list[str]:
  """Says in numbers how large the mismatch is, and what monitors found."""
  words = []
  _, replayed = run.series('rl', 'mismatch_kl')
  _, afresh = run.series('rl', 'mismatch_kl_no_replay')
  if replayed and afresh:
    words.append(
      f'Median mismatch KL: {np.nanmedian(replayed):.2g} with routes '
      f'replayed, {np.nanmedian(afresh):.2g} routed afresh.'
    )
  totals: collections.Counter[str] = collections.Counter()
  for row in run.rows('rl'):
    kinds = row.get('flag_kinds')
    for item in kinds if isinstance(kinds, list) else ():
      if isinstance(item, list) and len(item) == 2 and run_data.number(item[1]):
        totals[str(item[0])] += int(item[1])
  if totals:
    counts = ', '.join(f'{kind} {n}' for kind, n in totals.most_common())
    words.append(f'Rollouts that monitors flagged: {counts}.')
  return words


def breaches(run: run_data.RunData) -> list[str]:
  """Names the steps whose mismatch left its band, and the last gate's texts."""
  rows = [r for r in run.rows('rl') if run_data.number(r.get('gate_breaches'))]
  if not rows:
    return []
  steps = ', '.join(str(row['step']) for row in rows[-_SHOWN:])
  gate = rows[-1].get('gate')
  return [
    f'The mismatch left its band in {len(rows)} steps, the last of them '
    f'{steps}.',
    *(map(str, gate) if isinstance(gate, list) else ()),
  ]
