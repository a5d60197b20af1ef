"""The format of FLAT and CLASS, and the model that they code by.

Weights are sorted into classes by the exponent of the base (`Kind.low`), or,
for FLAT, are of one class. A class has two sequences: how many weights of it
lie between two changed ones, and the changed ones' steps. Both are cut into
symbols of small alphabets and coded by rANS under tables that start from a
parametric guess and are rebuilt, as the class goes on, from what was seen. A
blob, little-endian and the lowest bit first, is

  counts     changes and level (density) of each class: `pack_counts`
  states     u32, what each lane of the coder starts with; `num_lanes` of them
  words      u16, in the order in which the decoder asks for them

Classes follow one another; those without changes have nothing. A class has k
plain bits of each gap (`plain_bits` of its level), the values of its gaps, the
first one from the start of the chunk, and the values of its steps:

  gap g      its k lowest bits are plain, its value is g >> k
  step s     has the value 2 * (|s| - 1) + (s < 0)

A sequence of values has a symbol for each, then one for each that is far, then
the plain bits of those:

  value v    has the symbol v, but at most ESCAPE (31 of gaps, 14 of steps)
  far value  v - ESCAPE + 1 = (2 | b) << k | r has the symbol 2 * (k + 1) + b,
             and 1 has 0; r is plain, 15 bits at a time from the lowest

Symbols and plain bits take turns at the lanes, the first of the blob at lane 0.
A lane with state x gives the symbol whose range of a `table` holds x % 4096 =
range start + n, and goes on with x = frequency * (x // 4096) + n; or it gives k
plain bits, x % 2**k, and goes on with x // 2**k. If x is then under 2**16 it
becomes x << 16 | word. All lanes end at 2**16, without words to spare. Each
sequence has tables of its own: from its guess (`guesses` of the level) and,
after 32, 128, 512, ... symbols, from the guess plus 16 for each symbol seen.
The code of both is in `rans`.

Everything here is integers: a table that differs by one in the encoder and the
decoder would garble all that follows.
"""

import dataclasses
import functools
import hashlib
import math
import pathlib

import ml_dtypes
import numpy as np

# Weights as integers in the order of their values.
#
# A float's bits are sign and magnitude; read as an integer, -0 and +0 lie half
# the number line apart. The order map makes neighbours of neighbouring values:
# it is a bijection of all bit patterns, so NaN payloads, both zeros, infinities
# and denormals are numbers like any other, and differences that wrap around are
# exact for every pair. Integers, and floats without a sign, are in order as
# they are.

# Binary orders of magnitude that a delta tells apart, up to that of 1.
EXPONENTS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
  """How the bits of a dtype are read.

  Attributes:
    bits: unsigned integer type of the same size.
    is_float: whether bits are sign and magnitude, to be brought into order.
    shift: lowest bit of the exponent; 0 where there is none.
    exponent_mask: mask of the exponent once shifted; 0 where there is none.
  """

  bits: np.dtype
  is_float: bool
  shift: int
  exponent_mask: int

  @property
  def low(self) -> int:
    """Highest exponent of the lowest class; those after the last share it."""
    return max(0, self.exponent_mask // 2 + 1 - EXPONENTS)


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


# Tables.

# Probabilities are multiples of 2**-12; states of the coder are 16 to 32 bits
# and are refilled by 16.
SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
STATE_LOW = 1 << 16
RAW = 0x8000  # marks plain bits in a list of coding operations
RAW_BITS = 15

GAP_SYMBOLS = 32
STEP_SYMBOLS = 15
FAR_SYMBOLS = 68

# What a table's guess weighs, and what a symbol seen: gaps follow their law
# closely, steps less so.
GAP_GUESS = 4096
STEP_GUESS = 256
SEEN = 16
# Tables are rebuilt after so many symbols, then each time they grew fourfold.
FIRST_REBUILD = 32
GROWTH = 4

# Densities are log odds in quarter octaves: level `EVEN` changes every second
# weight, level 0 all but one in 64.
OCTAVE = 4
_ROOTS = (1.0, math.sqrt(math.sqrt(2)), math.sqrt(2), math.sqrt(math.sqrt(8)))
EVEN = 24
LEVELS = 128
COUNT_BITS = 21


def level(changed: int, size: int) -> int:
  """How sparse the changes in a class are."""
  odds = (size - changed + 0.5) / (changed + 0.5)
  return min(LEVELS - 1, max(0, round(OCTAVE * math.log2(odds)) + EVEN))


def plain_bits(level_: int) -> int:
  """Low bits of a gap that are as good as random at this density."""
  return min(RAW_BITS, max(0, (level_ - EVEN) // OCTAVE - 2))


def num_lanes(changed: int) -> int:
  """Interleaved coders: more run faster, each costs two bytes."""
  return 4 if changed >= 1024 else 1


@functools.cache
def guesses() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Counts that tables of gaps and steps start from, by level, and of far ones.

  A step is a sum of many small pushes: nearly all are +-1 where few weights
  change, and they spread over 0.4 odds where most do.
  """
  gaps, near = [], []
  for level_ in range(LEVELS):
    # Nothing but operations that IEEE 754 rounds the same way everywhere:
    # powers and logarithms are a bit off, in another place on each machine.
    odds = math.ldexp(_ROOTS[level_ % OCTAVE], (level_ - EVEN) // OCTAVE)
    density = 1 / (1 + odds)  # of changes
    stay = 1 - density
    for _ in range(plain_bits(level_)):
      stay *= stay
    gaps.append(_geometric(stay, GAP_SYMBOLS, GAP_GUESS))
    spread = 0.4 / odds
    ratio = spread / (1 + spread) * min(1, density * density * 2)
    pairs = _geometric(max(0.003, ratio), (STEP_SYMBOLS + 1) // 2, STEP_GUESS)
    near.append([*np.repeat(pairs[:-1], 2), 2 * pairs[-1]])
  far = _geometric(0.8, FAR_SYMBOLS, STEP_GUESS)
  tables = np.stack(gaps), np.array(near), far
  for table_ in tables:
    table_.flags.writeable = False
  return tables


def _geometric(ratio: float, size: int, total: int) -> np.ndarray:
  """Counts whose last takes all the rest."""
  shares, rest = [], 1.0
  for _ in range(size - 1):
    shares.append(rest * (1 - ratio))
    rest *= ratio
  return np.array([round(total * share) for share in (*shares, rest)])


def pack_counts(counts: np.ndarray, levels: np.ndarray) -> bytes:
  """Changes and level of each class, by their distance from the last exponent.

  A count is its length in bits, then those below the highest; levels, which
  classes without changes do not have, are thought to rise by an octave.
  """
  total = place = 0

  def put(value, bits):
    nonlocal total, place
    total |= value << place
    place += bits

  def put_signed(value):
    rest = (value << 1 if value >= 0 else -2 * value - 1) + 1
    bits = rest.bit_length() - 1
    put((1 << bits) - 1, bits + 1)
    put(rest & ((1 << bits) - 1), bits)

  before = guess = 0
  for count, level_ in zip(counts.tolist(), levels.tolist(), strict=True):
    length = count.bit_length()
    put_signed(length - before)
    before = length
    if length:
      put(count & ((1 << length - 1) - 1), length - 1)
      put_signed(level_ - guess)
      guess = level_ + OCTAVE
  return total.to_bytes((place + 7) // 8, 'little')


def unpack_counts(
  blob: bytes | memoryview, num_classes: int
) -> tuple[np.ndarray, np.ndarray, int]:
  """Counts, levels and the place after them."""
  # No class takes more than 64 bits.
  total = int.from_bytes(blob[: 8 * num_classes], 'little')
  place = 0

  def take(bits):
    nonlocal total, place
    value = total & ((1 << bits) - 1)
    total >>= bits
    place += bits
    return value

  def take_signed():
    bits = 0
    while take(1):
      bits += 1
      if bits > 8:
        raise ValueError(f'blob of {len(blob)} bytes has no counts')
    rest = take(bits) | 1 << bits
    return rest >> 1 if rest & 1 else -(rest >> 1)

  counts = np.zeros(num_classes, np.int64)
  levels = np.zeros(num_classes, np.int64)
  length = guess = 0
  for c in range(num_classes):
    length += take_signed()
    if not 0 <= length <= COUNT_BITS:
      raise ValueError(f'count of {length} bits of class {c}')
    if length:
      counts[c] = 1 << length - 1 | take(length - 1)
      level_ = guess + take_signed()
      if not 0 <= level_ < LEVELS:
        raise ValueError(f'level {level_} of class {c}')
      levels[c] = level_
      guess = level_ + OCTAVE
  if (place + 7) // 8 > len(blob):
    raise ValueError(f'blob of {len(blob)} bytes ends inside its counts')
  return counts, levels, (place + 7) // 8


def digest_of_sources() -> bytes:
  """The digest of all files of the codec as they are now."""
  digest = hashlib.sha256()
  for file in sorted(pathlib.Path(__file__).parent.glob('*.py')):
    content = file.read_bytes()
    digest.update(f'{file.name} {len(content)}\n'.encode() + content)
  return digest.digest()


# What this process runs; see `scan`.
SOURCES = digest_of_sources()
