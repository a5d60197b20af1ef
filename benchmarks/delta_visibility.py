"""How many elements of a policy a step changes, said from the masters alone.

A weight w of a grid of spacing ulp(w) lies anywhere in its cell. An update of
|dw| then carries it over the cell's edge with probability min(1, |dw| / ulp),
so that the share of a policy that changes is the mean of that over its
weights. It follows that small weights change first, which is why a codec gains
by knowing the base's exponent.

The law is one of masters that have left the grid, as those of a running
optimizer have: the first steps after a load of bfloat16 weights change fewer.
"""

import math

import ml_dtypes
import numpy as np

_PART = 2**20  # elements at a time: their temporaries are of 8 bytes


def spacing(values: np.ndarray, dtype: np.typing.DTypeLike) -> np.ndarray:
  """Returns the distance of neighbours in a floating dtype, by element.

  Args:
    values: finite, of any real dtype; unit in the last place of the binade
      they lie in, or of the denormals.
    dtype: whose grid it is.

  Raises:
    ValueError: the dtype is no float.
  """
  try:
    info = ml_dtypes.finfo(dtype)
  except ValueError:
    raise ValueError(
      f'{np.dtype(dtype)} has no exponents and so no spacing of its own; '
      'count in units of its scale: expected_share_of(update, scale).'
    ) from None
  # frexp says m * 2**e with m in [0.5, 1): a binade's exponent is e - 1.
  exponents = np.frexp(np.asarray(values, np.float64))[1] - 1
  lowest = int(info.minexp)
  # Zero has no exponent of its own (frexp says 0 of it).
  exponents = np.where(np.asarray(values) == 0, lowest, exponents)
  return np.ldexp(1.0, np.maximum(exponents, lowest) - int(info.nmant))


def expected_share_of(update: np.ndarray, units: np.ndarray | float) -> float:
  """Mean of min(1, |update| / units): the law itself."""
  ratio = np.abs(np.asarray(update, np.float64)) / units
  return float(np.minimum(ratio, 1.0).mean()) if ratio.size else 0.0


def expected_share(
  masters: np.ndarray,
  update: np.ndarray | float,
  dtype: np.typing.DTypeLike,
) -> float:
  """Predicts the share of elements that an update changes in a dtype.

  Args:
    masters: before the update, in a wider dtype.
    update: what is added, of the same shape; or its root mean square alone, a
      number: then of normal updates, as steps of Adam nearly are.
    dtype: that the masters are rounded to.
  """
  masters = np.asarray(masters).reshape(-1)
  update = np.asarray(update)
  is_rms = update.ndim == 0
  if not is_rms and update.size != masters.size:
    raise ValueError(
      f'the update has {update.size} elements and the masters '
      f'{masters.size}; give one of each, or the update as one number, its '
      'root mean square.'
    )
  if not masters.size:
    return 0.0
  update = update.reshape(-1)
  total = 0.0
  for start in range(0, masters.size, _PART):
    part = slice(start, start + _PART)
    units = spacing(masters[part], dtype)
    if is_rms:
      total += _of_normal(float(update[0]), units) * units.size
    else:
      total += expected_share_of(update[part], units) * units.size
  return total / masters.size


def _of_normal(rms: float, units: np.ndarray) -> float:
  """Mean over the units of E[min(1, |x| / unit)], x normal of this rms."""
  if rms == 0:
    return 0.0
  mean = 0.0
  for unit, count in zip(*np.unique(units, return_counts=True), strict=True):
    edge = float(unit) / rms
    inside = math.sqrt(2 / math.pi) / edge * -math.expm1(-(edge**2) / 2)
    mean += count * (inside + math.erfc(edge / math.sqrt(2)))
  return mean / units.size
