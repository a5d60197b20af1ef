"""Entropy bounds of the bytes that a step of a policy needs.

The code shares nothing with the codec that it bounds: order of codes and
entropies are computed anew.

The bounds assume coders that know all frequencies at no cost. Bound M knows
nothing about an element; bound E knows the exponent of its base, which both
ends hold. Each bound is the entropy of 'changed or not' plus the entropy of the
steps of changed elements.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

# Exponents told apart, from the largest down; all smaller ones are one class.
CLASSES = 20


def bits_of(array: np.ndarray) -> np.ndarray:
  """Returns an array's bits as flat unsigned integers, a view if possible."""
  flat = np.ascontiguousarray(array).reshape(-1)
  return flat.view(f'u{flat.dtype.itemsize}')


def ordered(bits: np.ndarray) -> np.ndarray:
  """Numbers floats consecutively in their order, as int64; -0 is below +0."""
  sign = np.int64(1) << (8 * bits.dtype.itemsize - 1)
  codes = bits.astype(np.int64)
  return np.where(codes & sign, sign - 1 - (codes ^ sign), codes + sign)


def classes(base: np.ndarray) -> np.ndarray:
  """Returns the exponents of the base's elements as int64, the largest as 0."""
  values = base.astype(np.float32).reshape(-1)
  exponents = ((values.view(np.uint32) >> 23) & 255).astype(np.int64)
  finite = exponents[exponents < 255]
  top = int(finite.max()) if finite.size else 0
  return np.clip(top - exponents, 0, CLASSES - 1)


def _bits(counts: np.ndarray) -> float:
  """Returns the entropy of a table of counts times their total, in bits."""
  counts = counts[counts > 0].astype(np.float64)
  total = counts.sum()
  return float((counts * np.log2(total / counts)).sum()) if total else 0.0


def _step_bits(steps: np.ndarray) -> float:
  return _bits(np.unique(steps, return_counts=True)[1])


def of_array(base: np.ndarray, array: np.ndarray) -> tuple[float, float]:
  """Returns the bits of bounds M and E of one array."""
  old, new = bits_of(base), bits_of(array)
  where = np.flatnonzero(old != new)
  steps = ordered(new[where]) - ordered(old[where])
  marginal = _bits(np.array([where.size, old.size - where.size]))
  marginal += _step_bits(steps)
  class_of = classes(base)
  sizes = np.bincount(class_of, minlength=CLASSES)
  moved = class_of[where]
  bits_given_exponent = 0.0
  for number in range(CLASSES):
    inside = moved == number
    count = int(inside.sum())
    bits_given_exponent += _bits(np.array([count, sizes[number] - count]))
    bits_given_exponent += _step_bits(steps[inside])
  return marginal, bits_given_exponent


def of_policy(
  base: Mapping[str, np.ndarray], policy: Mapping[str, np.ndarray]
) -> tuple[float, float]:
  """Returns bytes of bounds M and E, with frequencies counted by array."""
  bounds = [of_array(base[name], policy[name]) for name in policy]
  return sum(b[0] for b in bounds) / 8, sum(b[1] for b in bounds) / 8


def of_whole(
  base: Mapping[str, np.ndarray], policy: Mapping[str, np.ndarray]
) -> float:
  """Returns bytes of bound E with one table for all bfloat16 arrays."""
  names = [n for n in policy if policy[n].dtype.itemsize == 2]

  def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([a.reshape(-1) for a in arrays])

  old, new = (joined(d[n] for n in names) for d in (base, policy))
  return of_array(old, new)[1] / 8


def changed(
  base: Mapping[str, np.ndarray], policy: Mapping[str, np.ndarray]
) -> tuple[int, int]:
  """Returns the number of elements whose bits differ, and of all elements."""
  differ = sum(
    int((bits_of(base[n]) != bits_of(policy[n])).sum()) for n in policy
  )
  return differ, sum(math.prod(a.shape) for a in policy.values())
