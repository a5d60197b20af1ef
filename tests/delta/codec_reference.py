"""A plain decoder of chunks: the specification of the format, in Python.

It follows `codec.model`'s description word by word, symbol by symbol, and takes
blobs for the encoder's own. It shares with the library how the bits of a dtype
are read (`model.kind`) and the guessed tables, which `codec_test` pins.
"""

import itertools
import struct

import numpy as np
import zstandard

from composer_jax.delta.codec import coding, model


def decode(codec_id, blob, size, dtype, base):
  """Returns the chunk that `coding.encode` coded."""
  kind = model.kind(dtype)
  bits = kind.bits.newbyteorder('<')
  if codec_id == coding.SAME:
    return base.copy()
  old = None if base is None else base.view(bits).tolist()
  made = _planes if codec_id == coding.PLANES else _steps
  return np.array(made(codec_id, blob, size, kind, old), bits).view(dtype)


def _width(kind):
  return 8 * kind.bits.itemsize


def _key(bits, kind):
  """Where the bits lie on the number line."""
  negative = kind.is_float and bits >> _width(kind) - 1
  return ~bits if negative else bits + kind.is_float * 2 ** (_width(kind) - 1)


def _moved(bits, step, kind):
  key = (_key(bits, kind) + step) % 2 ** _width(kind)
  if not kind.is_float:
    return key
  half = 2 ** (_width(kind) - 1)
  return key - half if key >= half else 2 ** _width(kind) - 1 - key


def _planes(_, blob, size, kind, old):
  words = [0] * size
  for n in range(_width(kind) // 8):
    (length,) = struct.unpack_from('<I', blob)
    plane, blob = blob[4 : 4 + length], blob[4 + length :]
    if length != size:
      plane = zstandard.ZstdDecompressor().decompress(plane)
    words = [word | byte << 8 * n for word, byte in zip(words, plane)]
  return [word >> 1 | (word & 1) << _width(kind) - 1 for word in words]


def _steps(codec_id, blob, size, kind, old):
  low, number = max(0, kind.exponent_mask // 2 - 19), 1
  if codec_id == coding.CLASS:
    number = min(20, kind.exponent_mask + 1)
  members = [[] for _ in range(number)]
  for place, bits in enumerate(old):
    exponent = (bits >> kind.shift) & kind.exponent_mask
    members[min(max(exponent - low, 0), number - 1)].append(place)
  head = _Bits(blob)
  classes = _counts(head, number)
  lanes = 4 if sum(count for count, _ in classes) >= 1024 else 1
  coder = _Coder(blob[head.num_bytes :], lanes)
  gaps, nears, far = model.guesses()
  values = list(old)
  for inside, (count, level) in zip(members, classes):
    if not count:
      continue
    k = model.plain_bits(level)
    lows = [coder.plain(k) for _ in range(count)]
    rank, places = -1, []
    for low, high in zip(lows, coder.values(count, gaps[level], far)):
      rank += 1 + (high << k | low)
      places.append(inside[rank])
    for place, value in zip(places, coder.values(count, nears[level], far)):
      step = value // 2 + 1
      step = -step if value & 1 else step
      values[place] = _moved(old[place], step, kind)
  assert coder.is_finished() and len(values) == size
  return values


def _counts(head, number):
  """Changes and level of each class."""
  classes, length, guess = [], 0, 0
  for _ in range(number):
    length += head.take_signed()
    count = level = 0
    if length:
      count = 1 << length - 1 | head.take(length - 1)
      level = guess + head.take_signed()
      guess = level + 4
    classes.append((count, level))
  return classes


class _Bits:
  """An integer's bits, the lowest first."""

  def __init__(self, data):
    self._left, self._taken = int.from_bytes(data, 'little'), 0

  @property
  def num_bytes(self):
    return (self._taken + 7) // 8

  def take(self, count):
    value = self._left % 2**count
    self._left >>= count
    self._taken += count
    return value

  def take_signed(self):
    length = 0
    while self.take(1):
      length += 1
    rest = 1 << length | self.take(length)
    return rest >> 1 if rest & 1 else -(rest >> 1)


class _Coder:
  """The lanes of rANS, which take turns, and the words that refill them."""

  def __init__(self, data, lanes):
    self._states = list(struct.unpack_from(f'<{lanes}I', data))
    words = data[4 * lanes :]
    self._words = iter(struct.unpack(f'<{len(words) // 2}H', words))
    self._turn = 0

  def is_finished(self):
    return set(self._states) == {2**16} and next(self._words, None) is None

  def symbols(self, guess):
    """Yields symbols without end, under tables that learn from them."""
    counts, rebuild = guess.tolist(), 32
    table = _table(counts)
    for seen in itertools.count():
      if seen == rebuild:
        table, rebuild = _table(counts), 4 * rebuild
      state = self._states[self._turn]
      symbol, n, frequency = table[state % 4096]
      self._next(frequency * (state // 4096) + n)
      counts[symbol] += 16
      yield symbol

  def values(self, count, near, far):
    """A sequence of values: symbols, symbols of far ones, their plain bits."""
    escape = len(near) - 1
    found = list(itertools.islice(self.symbols(near), count))
    number = found.count(escape)
    beyond = list(itertools.islice(self.symbols(far), number))
    beyond = iter([self._far(symbol) for symbol in beyond])
    return [v if v < escape else escape - 1 + next(beyond) for v in found]

  def _far(self, symbol):
    if symbol == 0:
      return 1
    k = symbol // 2 - 1
    parts = (self.plain(min(k - at, 15)) << at for at in range(0, k, 15))
    return (2 | symbol & 1) << k | sum(parts)

  def plain(self, bits):
    if not bits:
      return 0
    state = self._states[self._turn]
    self._next(state >> bits)
    return state % 2**bits

  def _next(self, state):
    if state < 2**16:
      state = state << 16 | next(self._words)
    self._states[self._turn] = state
    self._turn = (self._turn + 1) % len(self._states)


def _table(counts):
  """Returns the symbol, its place n and its frequency for each of 4096."""
  spare, total = 4096 - len(counts), sum(counts)
  frequencies = [1 + count * spare // total for count in counts]
  frequencies[counts.index(max(counts))] += 4096 - sum(frequencies)
  return [(s, n, f) for s, f in enumerate(frequencies) for n in range(f)]


def steps(values, base, is_float):
  """Signed differences on the ordered line, the shorter way around."""
  width = 8 * base.dtype.itemsize
  wrapped = ordered(values, is_float) - ordered(base, is_float)
  return wrapped.view(f'i{width // 8}').astype(np.int64)


def moved(base, steps_W, is_float):
  """Undoes `steps`: the bits that lie so many steps from the base."""
  wrapped = steps_W.astype(base.dtype)  # modulo the width of the bits
  keys = ordered(base, is_float) + wrapped
  if not is_float:
    return keys
  top = keys.dtype.type(1 << (8 * keys.dtype.itemsize - 1))
  return keys ^ (_sign(~keys) | top)


def ordered(bits, is_float):
  """Where bits lie on the number line: a bijection of all patterns."""
  if not is_float:
    return bits
  top = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
  return bits ^ (_sign(bits) | top)


def to_bits(values):
  """The values as unsigned integers, flat."""
  flat = np.ascontiguousarray(values).reshape(-1)
  return flat.view(f'u{values.dtype.itemsize}')


def _sign(bits):
  """All bits set where the top one is, else none."""
  return -(bits >> bits.dtype.type(8 * bits.dtype.itemsize - 1))
