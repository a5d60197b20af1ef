"""Weights as integers in the order of their values.

A float's bits are sign and magnitude; read as an integer, -0 and +0 lie half
the number line apart. The order map makes neighbours of neighbouring values: it
is a bijection of all bit patterns, so NaN payloads, both zeros, infinities and
denormals are numbers like any other, and differences that wrap around are exact
for every pair. Integers, and floats without a sign, are in order as they are.
"""

import dataclasses
import functools

import ml_dtypes
import numpy as np

# More binary orders of magnitude than a delta tells apart: see `window`.
EXPONENTS = 20
_SAMPLES = 4096
# Exponents above all but this share of the weights are not told apart.
_OUTLIERS = 2**-10


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
  """How the bits of a dtype are read.

  Attributes:
    bits: the unsigned integer type of the same size.
    is_float: sign and magnitude, to be brought into order.
    shift: of the exponent; 0 where there is none.
    exponent_mask: of the exponent once shifted; 0 where there is none.
  """

  bits: np.dtype
  is_float: bool
  shift: int
  exponent_mask: int

  @property
  def width(self) -> int:
    return 8 * self.bits.itemsize


@functools.cache
def kind(dtype: np.dtype) -> Kind:
  """Raises ValueError for a dtype that is not plain numbers of 1-8 bytes."""
  dtype = np.dtype(dtype)
  if dtype.hasobject or dtype.itemsize not in (1, 2, 4, 8) or dtype.fields:
    raise ValueError(
      f'weights of dtype {dtype} have no codec; numbers of 1, 2, 4 or 8 bytes'
      ' do'
    )
  bits = np.dtype(f'u{dtype.itemsize}')
  try:
    info = ml_dtypes.finfo(dtype)
  except ValueError:
    return Kind(bits, False, 0, 0)
  if info.nmant + info.nexp + 1 != 8 * dtype.itemsize:
    # Unsigned exponents (e8m0) and floats of four or six bits in a byte.
    return Kind(bits, False, 0, 0)
  return Kind(bits, True, info.nmant, 2**info.nexp - 1)


def to_bits(values: np.ndarray) -> np.ndarray:
  """The values as unsigned integers, flat: the same memory where possible."""
  flat = np.require(values, requirements=['C', 'A']).reshape(-1)
  return flat.view(kind(values.dtype).bits)


def ordered(bits: np.ndarray, is_float: bool) -> np.ndarray:
  if not is_float:
    return bits
  top = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
  return bits ^ (_sign(bits) | top)


def unordered(keys: np.ndarray, is_float: bool) -> np.ndarray:
  if not is_float:
    return keys
  top = keys.dtype.type(1 << (8 * keys.dtype.itemsize - 1))
  return keys ^ (_sign(~keys) | top)


def _sign(bits: np.ndarray) -> np.ndarray:
  """All bits set where the top one is, else none."""
  return -(bits >> bits.dtype.type(8 * bits.dtype.itemsize - 1))


def steps(values: np.ndarray, base: np.ndarray, is_float: bool) -> np.ndarray:
  """Signed differences on the ordered line, the shorter way around."""
  width = 8 * base.dtype.itemsize
  wrapped = ordered(values, is_float) - ordered(base, is_float)
  return wrapped.view(f'i{width // 8}').astype(np.int64)


def moved(base: np.ndarray, steps_W: np.ndarray, is_float: bool) -> np.ndarray:
  """Undoes `steps`: the bits that lie so many steps from the base."""
  wrapped = steps_W.astype(base.dtype)  # modulo the width of the bits
  return unordered(ordered(base, is_float) + wrapped, is_float)


def window(base: np.ndarray, number: Kind) -> int:
  """The lowest exponent that gets a class of its own, from a sample.

  Classes count `EXPONENTS` binary orders of magnitude down from the largest
  weights, few outliers aside; smaller weights share the lowest class.
  """
  if not number.exponent_mask:
    return 0
  sample = base[:: max(1, base.size // _SAMPLES)] >> number.shift
  up_to = np.cumsum(np.bincount(sample & number.exponent_mask, minlength=1))
  largest = int(np.searchsorted(up_to, up_to[-1] * (1 - _OUTLIERS)))
  return max(0, largest + 1 - EXPONENTS)


@dataclasses.dataclass(frozen=True, slots=True)
class Classes:
  """How weights are sorted into classes, by the exponent of the base.

  Attributes:
    number: the dtype.
    low: exponents up to it share a class.
    num_classes: classes of exponents; those beyond share the highest.
  """

  number: Kind
  low: int
  num_classes: int
