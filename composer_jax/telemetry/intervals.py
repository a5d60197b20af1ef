"""Confidence intervals of pass rates."""

import math

# Two-sided 95 % quantile of the normal distribution.
Z_95 = 1.959963984540054


def wilson(
  passed: int, episodes: int, *, z: float = Z_95
) -> tuple[float, float]:
  """Returns the Wilson score interval of a share (Wilson, 1927).

  Unlike `p +- z * sqrt(p (1 - p) / n)` it keeps its coverage near 0 and 1,
  where pass rates start and end, and it never leaves [0, 1].

  Args:
    passed: number of successes.
    episodes: number of independent trials; none gives (0, 1).
    z: quantile of the normal distribution.

  Raises:
    ValueError: passed does not lie in 0..episodes.
  """
  if not 0 <= passed <= episodes:
    raise ValueError(f'passed ({passed}) must lie in 0..episodes ({episodes}).')
  if episodes == 0:
    return 0.0, 1.0
  share = passed / episodes
  scale = 1 + z * z / episodes
  center = (share + z * z / (2 * episodes)) / scale
  spread = share * (1 - share) / episodes + z * z / (4 * episodes**2)
  half = z * math.sqrt(spread) / scale
  # At the ends the bound is exact; rounding would leave 1e-17 instead.
  low = 0.0 if passed == 0 else center - half
  high = 1.0 if passed == episodes else center + half
  return low, high
