"""Shares of time that trainer and rollouts wait for each other, from metrics.

The trainer waits for groups; the rollouts wait, with no episode open, for the
policy that admits the next groups to be trained, published and received.
Where they take turns on the same devices (placement `colocated`), each waits
while the other works, and the two shares add up to nearly one. In processes of
their own, what both have beside their waiting is work done at the same time.
"""

from collections.abc import Iterable
from typing import Any

# Stage of the metrics, and those that add up to all of a side's time; the first
# one is its waiting.
SIDES = {
  'trainer': ('rl', ('wait_s', 'train_s', 'publish_s')),
  'rollouts': ('received', ('wait_s', 'sample_s')),
}


def seconds(
  rows: Iterable[dict[str, Any]], side: str
) -> list[tuple[int, float, float]]:
  """Returns (step, seconds waited, all seconds) of the lines that tell them."""
  stage, names = SIDES[side]
  measured = []
  for row in rows:
    parts = [row.get(name) for name in names if row['stage'] == stage]
    if parts and all(isinstance(part, (int, float)) for part in parts):
      measured.append((row['step'], parts[0], sum(parts)))
  return [each for each in measured if each[2] > 0]


def summary(rows: list[dict[str, Any]]) -> str:
  """Returns both shares in words; '' if none was measured."""
  texts = []
  for side, cause in (('trainer', 'groups'), ('rollouts', 'policies')):
    if measured := seconds(rows, side):
      _, waited, total = (sum(parts) for parts in zip(*measured, strict=True))
      texts.append(f'{side} {100 * waited / total:.1f} % for {cause}')
  if not texts:
    return ''
  return f'time spent waiting, compilation included: {", ".join(texts)}'
