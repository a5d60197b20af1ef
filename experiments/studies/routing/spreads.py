"""How much more uneven loads are than chance makes them."""

import numpy as np


def spread(loads_RE: np.ndarray, chances_E: np.ndarray) -> float:
  """Returns the standard deviation of the log of an expert's relative load.

  `loads_RE` are copies of rows, and `chances_E` those of an expert by chance,
  with the sum 1. What chance alone makes uneven is subtracted; the load is
  taken to be log-normal.
  """
  expected_RE = loads_RE.sum(1, keepdims=True) * chances_E
  seen = expected_RE > 0
  ratio, expected = loads_RE[seen] / expected_RE[seen], expected_RE[seen]
  variance = np.average((ratio - 1) ** 2, weights=expected)
  variance -= np.average(1 / expected, weights=expected)
  return float(np.sqrt(np.log1p(max(variance, 0.0))))
