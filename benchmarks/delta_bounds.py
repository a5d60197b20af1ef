"""How few bytes a step of a policy holds, by its own frequencies.

Nothing here is the codec's: the order of the codes and the entropies are
counted anew, so that a codec is measured against something else than itself.

The bounds are of coders that know the frequencies for nothing. Bound M knows
nothing of an element; bound E knows the exponent of its base, which both ends
hold. Both are the entropy of 'changed?' plus that of the step of what changed.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

# Exponents told apart, from the largest down; what lies below is one class.
CLASSES = 20


def bits_of(array: np.ndarray) -> np.ndarray:
  """Flat unsigned integers of an array's bits; copies only what it must."""
  flat = np.ascontiguousarray(array).reshape(-1)
  return flat.view(f'u{flat.dtype.itemsize}')


def ordered(bits: np.ndarray) -> np.ndarray:
  """Numbers floats in their order, one by one, as int64; -0 below +0."""
  sign = np.int64(1) << (8 * bits.dtype.itemsize - 1)
  codes = bits.astype(np.int64)
  return np.where(codes & sign, sign - 1 - (codes ^ sign), codes + sign)


def classes(base: np.ndarray) -> np.ndarray:
  """Exponents of the base's elements, the largest 0, as int64."""
  values = base.astype(np.float32).reshape(-1)
  exponents = ((values.view(np.uint32) >> 23) & 255).astype(np.int64)
  finite = exponents[exponents < 255]
  top = int(finite.max()) if finite.size else 0
  return np.clip(top - exponents, 0, CLASSES - 1)


def _bits(counts: np.ndarray) -> float:
  """Entropy of a table times its total."""
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
  """Bytes of bounds M and E, each array by frequencies of its own."""
  bounds = [of_array(base[name], policy[name]) for name in policy]
  return sum(b[0] for b in bounds) / 8, sum(b[1] for b in bounds) / 8


def of_whole(
  base: Mapping[str, np.ndarray], policy: Mapping[str, np.ndarray]
) -> float:
  """Bytes of bound E by one table of frequencies for all bfloat16 arrays."""
  names = [n for n in policy if policy[n].dtype.itemsize == 2]

  def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([a.reshape(-1) for a in arrays])

  old, new = (joined(d[n] for n in names) for d in (base, policy))
  return of_array(old, new)[1] / 8


def changed(
  base: Mapping[str, np.ndarray], policy: Mapping[str, np.ndarray]
) -> tuple[int, int]:
  """Returns how many elements differ in their bits, and of how many."""
  differ = sum(
    int((bits_of(base[n]) != bits_of(policy[n])).sum()) for n in policy
  )
  return differ, sum(math.prod(a.shape) for a in policy.values())
