"""What the report says of a run that learns from live use."""

import json
from typing import Any

from composer_jax.report import run_data

HEAD = (
  *('cycle', 'episodes', '% satisfied', 'reward', 'decision', 'version'),
  *('collect, s', 'train, s', 'gate, s', 'trial, s', 'whole, s'),
)
_SECONDS = ('collect_s', 'train_s', 'gate_s', 'trial_s', 'cycle_s')


def _results(run: run_data.RunData) -> list[dict[str, Any]]:
  """Reads what became of each cycle; leaves out what is damaged."""
  found = []
  for path in sorted((run.workdir / 'live' / 'cycles').glob('*/result.json')):
    try:
      row = json.loads(path.read_text())
    except (OSError, ValueError):
      continue
    if isinstance(row, dict):
      found.append(row)
  return found


def cycles(run: run_data.RunData) -> list[tuple[Any, ...]]:
  """Returns a row for each cycle; `HEAD` names the columns."""
  rows = []
  for row in _results(run):
    numbers = {name: run_data.number(value) for name, value in row.items()}
    known = {k: v for k, v in numbers.items() if v is not None}
    known |= {k: round(known[k], 1) for k in _SECONDS if k in known}
    if 'satisfied' in known:
      known['satisfied'] *= 100
    of = lambda names, known=known: [known.get(name, '') for name in names]
    rows.append(
      (
        *of(('cycle', 'episodes', 'satisfied', 'reward')),
        str(row.get('decision', '')),
        *of(('version', *_SECONDS)),
      )
    )
  return rows


def sentences(run: run_data.RunData) -> list[str]:
  """Says why candidates were held back, and what became of events."""
  results = _results(run)
  texts = [
    f'Cycle {row.get("cycle")}: {row["reason"]}'
    for row in results
    if row.get('decision') != 'promote' and row.get('reason')
  ]
  fates = results[-1].get('fates') if results else None
  if isinstance(fates, dict) and fates:
    counts = ', '.join(f'{name} {fates[name]}' for name in sorted(fates))
    texts.append(f'Events and episodes by fate: {counts}.')
  return texts
