"""What the report says of policies on their way from trainer to engine."""

import collections
from typing import Any

import numpy as np

from composer_jax.report import run_data
from composer_jax.telemetry import progress

# Number of versions named of those that differ.
_SHOWN = 8


def summary(run: run_data.RunData) -> list[str]:
  """Says in numbers what was published and received."""
  return [text for text in (_published(run), _received(run)) if text]


def _published(run: run_data.RunData) -> str:
  rows = run.rows('delta')
  deltas = [row for row in rows if row.get('kind') == 'delta']
  sizes = _numbers(deltas, 'bytes')
  full = _numbers(rows, 'full_bytes')
  if not sizes or not full:
    return ''
  mean = float(np.mean(sizes))
  text = (
    f'{len(sizes)} deltas of {progress.number(mean)}B on average, '
    f'{np.mean(full) / max(mean, 1):.1f} times smaller than the policy'
  )
  changed = _numbers(deltas, 'changed')
  if changed:
    text += f', with {100 * np.mean(changed):.2f} % of weights changed'
  totals = {
    'keyframes': sum(_numbers(rows, 'keyframe_bytes')),
    'skip deltas': sum(_numbers(rows, 'skip_bytes')),
  }
  extra = [
    f'{progress.number(n)}B of {kind}' for kind, n in totals.items() if n
  ]
  return text + (f'. Beside them {" and ".join(extra)}.' if extra else '.')


def _received(run: run_data.RunData) -> str:
  rows = run.rows('received')
  if not rows:
    return ''
  chains = collections.Counter(_chain(row.get('route')) for row in rows)
  counts = ', '.join(f'{n} by {kinds}' for kinds, n in chains.most_common(6))
  text = f'{len(rows)} versions were received: {counts}.'
  swaps = _numbers(rows, 'swap_s')
  if swaps:
    text += (
      f' A swap took {1e3 * float(np.median(swaps)):.2g} ms in the median, '
      f'{1e3 * max(swaps):.2g} ms at most.'
    )
  return text


def _chain(bundles: object) -> str:
  """Names the kinds of bundles that a version was made of."""
  if not isinstance(bundles, list):
    return 'unknown bundles'
  kinds = []
  for bundle in map(str, bundles):
    kind, _, versions = bundle.partition(' ')
    base, _, version = versions.partition('-')
    if kind == 'delta' and base.isdigit() and version.isdigit():
      kind = 'delta' if int(version) == int(base) + 1 else 'skip delta'
    kinds.append(kind)
  return ' + '.join(dict.fromkeys(kinds)) or 'weights already held'


def identities(run: run_data.RunData) -> tuple[int, str]:
  """Compares the identities of published and received policies.

  Returns:
    Number of versions that both ends name; a sentence about those that differ,
    '' if none do.
  """
  published, received = (
    {row['step']: row.get('target_id') for row in run.rows(stage)}
    for stage in ('delta', 'received')
  )
  common = sorted(published.keys() & received.keys())
  differing = [v for v in common if published[v] != received[v]]
  if not differing:
    return len(common), ''
  return len(common), (
    f'{len(differing)} versions were received with other weights than were '
    f'published, the last of them {", ".join(map(str, differing[-_SHOWN:]))}.'
  )


def _numbers(rows: list[dict[str, Any]], name: str) -> list[float]:
  values = [run_data.number(row.get(name)) for row in rows]
  return [v for v in values if v is not None and np.isfinite(v)]
