"""Confidence intervals of pass rates."""

import math

# Two-sided 95 % quantile of the normal distribution.
Z_95 = 1.959963984540054


def wilson(passed: int, episodes: int) -> tuple[float, float]:
  """Returns the 95 % Wilson score interval of a share (Wilson, 1927).

  Unlike `p +- z * sqrt(p (1 - p) / n)` it keeps its coverage near 0 and 1,
  where pass rates start and end, and it never leaves [0, 1]. No episode gives
  (0, 1).
  """
  if not 0 <= passed <= episodes:
    raise ValueError(f'passed ({passed}) must lie in 0..episodes ({episodes}).')
  if episodes == 0:
    return 0.0, 1.0
  share, z = passed / episodes, Z_95
  scale = 1 + z * z / episodes
  center = (share + z * z / (2 * episodes)) / scale
  spread = share * (1 - share) / episodes + z * z / (4 * episodes**2)
  half = z * math.sqrt(spread) / scale
  # At the ends the bound is exact; rounding would leave 1e-17 instead.
  low = 0.0 if passed == 0 else center - half
  high = 1.0 if passed == episodes else center + half
  return low, high


def difference(
  before: tuple[int, int], after: tuple[int, int]
) -> tuple[float, float]:
  """Returns the 95 % interval of a change of share between two samples.

  Newcombe (1998), method 10: the Wilson bounds of both, added in quadrature.

  Args:
    before: number of episodes passed, and of all, at least one.
    after: the same numbers of an independent sample.
  """
  if not (before[1] and after[1]):
    raise ValueError(
      f'Each sample must have an episode; got {before[1]} and {after[1]}.'
    )
  (low_0, high_0), (low_1, high_1) = wilson(*before), wilson(*after)
  share_0, share_1 = before[0] / before[1], after[0] / after[1]
  change = share_1 - share_0
  below = math.hypot(share_1 - low_1, high_0 - share_0)
  above = math.hypot(high_1 - share_1, share_0 - low_0)
  return change - below, change + above
