"""The report's section about policies on their way to who samples."""

import collections

import numpy as np

from composer_jax.report import figures, html, run_data
from composer_jax.telemetry import progress

# Versions named of those that differ.
_SHOWN = 8
_PARTS = {
  'fetch_s': 'read',
  'decode_s': 'decode and verify',
  'transfer_s': 'to the device',
  'place_s': 'to the engine',
  'swap_s': 'swap',
}


def bundles(run: run_data.RunData) -> html.Markup:
  """Returns the section: bytes and seconds of each version, at both ends."""
  parts = [
    figures.curve(
      run,
      'Bytes of each version',
      [
        ('delta', 'full_bytes', 'whole policy'),
        ('delta', 'bytes', 'bundle'),
        ('received', 'bytes', 'received'),
      ],
      is_log=True,
    ),
    figures.curve(
      run,
      'Weights that changed',
      [('delta', 'changed', '')],
      unit='share of elements',
      bounds=(0, None),
    ),
    figures.curve(
      run,
      'Seconds of publishing, in the background',
      [
        ('delta', 'encode_s', 'encode and verify'),
        ('delta', 'upload_s', 'write'),
      ],
      bounds=(0, None),
    ),
    figures.curve(
      run,
      'Seconds of receiving',
      [('received', name, label) for name, label in _PARTS.items()],
      is_log=True,
    ),
  ]
  return html.section(
    'Delta bundles',
    html.element('div', *parts, class_='grid two'),
    html.notes(filter(None, (_published(run), _received(run)))),
    _identities(run),
    note=(
      'How each policy reached who samples. Only the swap keeps the engine '
      'waiting where that is a process of its own.'
    ),
  )


def _published(run: run_data.RunData) -> str:
  rows = [row for row in run.metrics if row['stage'] == 'delta']
  deltas = [row for row in rows if row.get('kind') == 'delta']
  sizes = _numbers(deltas, 'bytes')
  full = _numbers(rows, 'full_bytes')
  if not sizes or not full:
    return ''
  mean = float(np.mean(sizes))
  words = (
    f'{len(sizes)} deltas of {progress.number(mean)}B on average, '
    f'{np.mean(full) / max(mean, 1):.1f} times smaller than the policy'
  )
  changed = _numbers(deltas, 'changed')
  if changed:
    words += f', with {100 * np.mean(changed):.2f} % of weights changed'
  more = [
    f'{progress.number(sum(found))}B of {name}'
    for name, found in (
      ('keyframes', _numbers(rows, 'keyframe_bytes')),
      ('skip deltas', _numbers(rows, 'skip_bytes')),
    )
    if sum(found)
  ]
  beside = f' Beside them {" and ".join(more)}.' if more else ''
  return f'{words}.{beside}'


def _received(run: run_data.RunData) -> str:
  rows = [row for row in run.metrics if row['stage'] == 'received']
  if not rows:
    return ''
  routes = collections.Counter(_way(row.get('route')) for row in rows)
  ways = ', '.join(f'{count} by {way}' for way, count in routes.most_common(6))
  words = f'{len(rows)} versions were received: {ways}.'
  swaps = _numbers(rows, 'swap_s')
  if swaps:
    words += (
      f' A swap took {1e3 * float(np.median(swaps)):.2g} ms in the median, '
      f'{1e3 * max(swaps):.2g} ms at most.'
    )
  return words


def _way(route: object) -> str:
  """Says what kinds of bundles a version came by, whatever their versions."""
  if not isinstance(route, list):
    return 'ways unknown'
  kinds = []
  for bundle in map(str, route):
    kind, _, versions = bundle.partition(' ')
    base, _, version = versions.partition('-')
    if kind == 'delta' and base.isdigit() and version.isdigit():
      kind = 'delta' if int(version) == int(base) + 1 else 'skip delta'
    kinds.append(kind)
  return ' + '.join(dict.fromkeys(kinds)) or 'what was held'


def _identities(run: run_data.RunData) -> html.Markup:
  """Says whether what was received is what was published."""
  ends = {
    stage: {
      row['step']: row.get('target_id')
      for row in run.metrics
      if row['stage'] == stage
    }
    for stage in ('delta', 'received')
  }
  both = sorted(ends['delta'].keys() & ends['received'].keys())
  differing = [v for v in both if ends['delta'][v] != ends['received'][v]]
  if differing:
    words = ', '.join(map(str, differing[-_SHOWN:]))
    told = (
      f'{len(differing)} versions were received with other weights than were '
      f'published, the last of them {words}.'
    )
    return html.notes([told], 'problem')
  words = f'All {len(both)} that both ends name have one identity at both.'
  return html.notes([words] if both else [])


def _numbers(rows: list[dict], name: str) -> list[float]:
  values = [run_data.number(row.get(name)) for row in rows]
  return [v for v in values if v is not None and np.isfinite(v)]
