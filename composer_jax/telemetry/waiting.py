"""Shares of time that trainer and rollouts wait for each other, from metrics.

The trainer waits for groups; the rollouts wait, with no episode open, for the
policy that admits the next groups to be trained, published and received.
Colocated, each waits while the other works.
"""

from typing import Any

# Of each side: what it waits for, and the stage and names of the metrics that
# add up to its time, waiting first.
SIDES = {
  'trainer': ('groups', 'rl', ('wait_s', 'train_s', 'publish_s')),
  'rollouts': ('policies', 'received', ('wait_s', 'sample_s')),
}


def seconds(
  rows: list[dict[str, Any]], side: str
) -> list[tuple[int, float, float]]:
  """Returns (step, seconds waited, all seconds) of the lines that have them."""
  _, stage, names = SIDES[side]
  measured = []
  for row in rows:
    if row['stage'] == stage and row.keys() >= {*names}:
      parts: list[Any] = [row[name] for name in names]
      if all(isinstance(p, (int, float)) and p >= 0 for p in parts):
        measured.append((row['step'], parts[0], max(sum(parts), 1e-9)))
  return measured


def summary(rows: list[dict[str, Any]]) -> str:
  """Returns both shares in words; '' if none was measured."""
  texts = []
  for side, (cause, *_) in SIDES.items():
    if measured := seconds(rows, side):
      share = sum(m[1] for m in measured) / sum(m[2] for m in measured)
      texts.append(f'{side} {100 * share:.1f} % for {cause}')
  if not texts:
    return ''
  return f'time spent waiting, compilation included: {", ".join(texts)}'
