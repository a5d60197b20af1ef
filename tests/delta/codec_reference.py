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
  if codec_id == coding.RAW:
    return np.frombuffer(blob, bits).view(dtype)
  old = None if base is None else base.view(bits).tolist()
  made = _planes if codec_id == coding.PLANES else _steps
  return np.array(made(codec_id, blob, size, kind, old), bits).view(dtype)


def _key(bits, kind):
  """Where the bits lie on the number line."""
  negative = kind.is_float and bits >> kind.width - 1
  return ~bits if negative else bits + kind.is_float * 2 ** (kind.width - 1)


def _moved(bits, step, kind):
  key = (_key(bits, kind) + step) % 2**kind.width
  if not kind.is_float:
    return key
  half = 2 ** (kind.width - 1)
  return key - half if key >= half else 2**kind.width - 1 - key


def _planes(_, blob, size, kind, old):
  is_steps, at = blob[0], 1
  words = [0] * size
  for n in range(kind.width // 8):
    (length,) = struct.unpack_from('<I', blob, at)
    plane, at = blob[at + 4 : at + 4 + length], at + 4 + length
    if length != size:
      plane = zstandard.ZstdDecompressor().decompress(plane)
    words = [word | byte << 8 * n for word, byte in zip(words, plane)]
  if is_steps:
    steps = [word >> 1 ^ -(word & 1) for word in words]
    return [_moved(*pair, kind) for pair in zip(old, steps)]
  return [word >> 1 | (word & 1) << kind.width - 1 for word in words]


def _steps(codec_id, blob, size, kind, old):
  low, number = 0, 1
  if codec_id == coding.CLASS:
    low, blob = blob[0], blob[1:]
    number = min(model.EXPONENTS, kind.exponent_mask + 1)
  members = [[] for _ in range(number)]
  for place, bits in enumerate(old):
    exponent = (bits >> kind.shift) & kind.exponent_mask
    members[min(max(exponent - low, 0), number - 1)].append(place)
  head = _Bits(blob)
  classes = _counts(head, number)
  blob = blob[head.num_bytes :]
  gap_bits = _Bits(blob)
  plain = [model.plain_bits(level) for _, level in classes]
  total = sum(count * k for (count, _), k in zip(classes, plain))
  lanes = 4 if sum(count for count, _ in classes) >= 1024 else 1
  coder = _Coder(blob[(total + 7) // 8 :], lanes)
  gaps, nears, fars = model.guesses(kind.width)
  values, lean = list(old), (0, 0)
  for inside, (count, level), k in zip(members, classes, plain):
    if not count:
      continue
    symbols, places, rank = coder.symbols(gaps[level]), [], -1
    for _ in range(count):
      while (symbol := next(symbols)) == 31:
        rank += 31 << k
      rank += 1 + (symbol << k) + gap_bits.take(k)
      places.append(inside[rank])
    symbols = coder.symbols(_leaning(nears[level], *lean))
    near = list(itertools.islice(symbols, count))
    lean = sum(symbol & 1 for symbol in near), count
    num_far = sum(symbol >= 14 for symbol in near)
    far = itertools.islice(coder.symbols(fars[level]), num_far)
    far = iter([_far(symbol, coder) for symbol in list(far)])
    for place, symbol in zip(places, near):
      step = next(far) if symbol >= 14 else symbol // 2 + 1
      step = -step if symbol & 1 else step
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


def _leaning(guess, negative, changed):
  pairs = (guess[0::2] + guess[1::2]).tolist()
  odd = [pair * (negative + 8) // (changed + 16) for pair in pairs]
  both = zip(pairs, odd)
  return np.array([n for pair, o in both for n in (pair - o, o)])


def _far(symbol, coder):
  k = symbol // 2 + 2
  lower = coder.plain(min(k, 15))
  return (2 | symbol & 1) << k | lower | coder.plain(max(k - 15, 0)) << 15


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
  ordered = model.ordered
  wrapped = ordered(values, is_float) - ordered(base, is_float)
  return wrapped.view(f'i{width // 8}').astype(np.int64)


def moved(base, steps_W, is_float):
  """Undoes `steps`: the bits that lie so many steps from the base."""
  wrapped = steps_W.astype(base.dtype)  # modulo the width of the bits
  keys = model.ordered(base, is_float) + wrapped
  return model.unordered(keys, is_float)
