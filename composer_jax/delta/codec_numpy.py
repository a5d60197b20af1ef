"""The kernels of the codec in numpy: the same bytes as `codec_numba`, slower.

Scanning is vectorised; only the coder itself is a loop over symbols.
"""

import numpy as np

from composer_jax.delta import codec_model as model
from composer_jax.delta import order

NAME = 'numpy'


def count(values, base):
  return int(np.count_nonzero(values != base))


def scan(values, base, shape):
  """Class, rank, and step of the changes by position, and the class sizes."""
  number = shape.number
  at_W = np.flatnonzero(values != base)
  steps_W = order.steps(values[at_W], base[at_W], number.is_float)
  if shape.num_classes == 1:
    zeros = np.zeros(at_W.size, np.uint8)
    return zeros, at_W, steps_W, np.array([base.size])
  if shape.history is not None:
    steps_W[shape.history[at_W] >= 128] *= -1
    # The step of half the line is its own opposite.
    half = 1 << (number.width - 1)
    steps_W[steps_W == half] = -half
  classes = shape.of(base)
  sizes = np.bincount(classes, minlength=shape.num_classes)
  classes_W = classes[at_W]
  ranks_W = np.empty(at_W.size, np.int64)
  for c in np.unique(classes_W):
    which = classes_W == c
    ranks_W[which] = np.searchsorted(np.flatnonzero(classes == c), at_W[which])
  return classes_W, ranks_W, steps_W, sizes


def arrange(classes_W, ranks_W, steps_W, starts):
  """Ranks and steps by class."""
  del starts
  by_class = np.argsort(classes_W, kind='stable')
  return ranks_W[by_class], steps_W[by_class]


def apply(base, shape, starts, ranks_W, steps_W, out):
  """Writes the base with its changes to `out`; False if a rank is too high."""
  np.copyto(out, base)
  classes = None if starts.size == 2 else shape.of(base)
  good = True
  for c in np.flatnonzero(np.diff(starts)):
    changes = slice(starts[c], starts[c + 1])
    at_W, steps = ranks_W[changes], steps_W[changes]
    if classes is not None:
      members = np.flatnonzero(classes == c)
      good = good and bool(at_W[-1] < members.size)
      at_W = members[at_W] if good else at_W
    if not good or at_W[-1] >= base.size:
      return False
    if shape.history is not None:
      steps = np.where(shape.history[at_W] >= 128, -steps, steps)
    out[at_W] = order.moved(base[at_W], steps, shape.number.is_float)
  return True


# ---- coding


def _symbol_operations(symbols, guess, ops):
  counts = guess.copy()
  done, rebuild = 0, model.FIRST_REBUILD
  while done < symbols.size:
    frequencies, first = model.table(counts)
    batch = symbols[done:rebuild]
    ops.append(first[batch] << 16 | frequencies[batch])
    counts += model.SEEN * np.bincount(batch, minlength=counts.size)
    done += batch.size
    rebuild *= model.GROWTH


def _plain_operations(values, bits):
  return values << 16 | model.RAW | bits


def _bit_lengths(values):
  return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def _gap_symbols(gaps):
  escapes = gaps // model.GAP_ESCAPE
  last = np.cumsum(escapes + 1) - 1
  symbols = np.full(int((escapes + 1).sum()), model.GAP_ESCAPE)
  symbols[last] = gaps % model.GAP_ESCAPE
  return symbols


def _operations(starts, ranks_W, steps_W, levels, shape):
  gaps_, nears, fars = model.guesses(shape.number.width)
  num_contexts = shape.num_contexts
  ops, bits = [], []
  lean = [(0, 0)] * num_contexts
  for c in range(starts.size - 1):
    begin, end = starts[c], starts[c + 1]
    if begin == end:
      continue
    level = int(levels[c])
    plain = model.plain_bits(level)
    gaps = np.diff(ranks_W[begin:end], prepend=-1) - 1
    _symbol_operations(_gap_symbols(gaps >> plain), gaps_[level], ops)
    bits.append((gaps[:, None] >> np.arange(plain) & 1).reshape(-1))
    steps = np.abs(steps_W[begin:end])
    negative = steps_W[begin:end] < 0
    is_far = steps > model.NEAR
    near = np.where(is_far, model.STEP_ESCAPE, 2 * (steps - 1))
    guess = model.leaning(nears[level], *lean[c % num_contexts])
    lean[c % num_contexts] = int(negative.sum()), negative.size
    _symbol_operations(near + negative, guess, ops)
    if is_far.any():
      far = steps[is_far]
      length = _bit_lengths(far) - 2
      symbols = 2 * (length - 2) + ((far >> length) & 1)
      _symbol_operations(symbols, fars[level], ops)
      lower = np.minimum(length, model.RAW_BITS)
      upper = length - lower
      both = np.stack(
        [
          _plain_operations(far & ((1 << lower) - 1), lower),
          _plain_operations((far >> lower) & ((1 << upper) - 1), upper),
        ],
        -1,
      )
      ops.append(both[np.stack([lower, upper], -1) > 0])
  plain = np.packbits(np.concatenate(bits), bitorder='little')
  return np.concatenate(ops), plain.tobytes()


def code(starts, ranks_W, steps_W, levels, shape, limit):
  """The coded changes, or None if they take more than `limit` bytes."""
  ops, plain = _operations(starts, ranks_W, steps_W, levels, shape)
  num_lanes = model.num_lanes(ranks_W.size)
  lane_of = [n % num_lanes for n in range(num_lanes)]
  states = [model.STATE_LOW] * num_lanes
  words = []
  lane = ops.size % num_lanes
  for op in reversed(ops.tolist()):
    lane = lane_of[lane - 1]
    state = states[lane]
    if op & model.RAW:
      length = op & 31
      if state >> (32 - length):
        words.append(state & 0xFFFF)
        state >>= 16
      states[lane] = state << length | op >> 16
    else:
      frequency = op & 0x7FFF
      if state >> 20 >= frequency:
        words.append(state & 0xFFFF)
        state >>= 16
      states[lane] = (
        (state // frequency << model.SCALE_BITS)
        + state % frequency
        + (op >> 16)
      )
  head = np.array(states, '<u4').tobytes()
  blob = plain + head + np.array(words[::-1], '<u2').tobytes()
  return blob if len(blob) <= limit else None


# ---- decoding


class _Bad(Exception):
  """The bytes are none that `code` makes."""


def _slots(counts):
  """Symbol and place in its range of each slot, and the symbols' ranges."""
  frequencies, first = model.table(counts)
  slots = np.repeat(np.arange(counts.size), frequencies)
  bias = np.arange(model.SCALE) - first[slots]
  return slots.tolist(), bias.tolist(), frequencies.tolist()


class _Reader:
  """The states of the coder and its place in the words."""

  def __init__(self, blob, at, num_lanes):
    if at + 4 * num_lanes > len(blob) or (len(blob) - at) % 2:
      raise _Bad
    self.states = np.frombuffer(blob, '<u4', num_lanes, at).tolist()
    words = np.frombuffer(blob, '<u2', offset=at + 4 * num_lanes)
    self.words = iter(words.tolist())
    self.lane = 0

  def symbols(self, table, count):
    slots, bias, frequencies = table
    states, lane, words = self.states, self.lane, self.words
    num_lanes = len(states)
    symbols = []
    for _ in range(count):
      state = states[lane]
      slot = state & (model.SCALE - 1)
      symbol = slots[slot]
      state = frequencies[symbol] * (state >> model.SCALE_BITS) + bias[slot]
      if state < model.STATE_LOW:
        word = next(words, None)
        if word is None:
          raise _Bad
        state = state << 16 | word
      states[lane] = state
      lane += 1
      if lane == num_lanes:
        lane = 0
      symbols.append(symbol)
    self.lane = lane
    return np.array(symbols, np.int64)

  def rebuilt_symbols(self, guess, count):
    counts = guess.copy()
    done, rebuild = 0, model.FIRST_REBUILD
    parts = []
    while done < count:
      parts.append(self.symbols(_slots(counts), min(rebuild, count) - done))
      counts += model.SEEN * np.bincount(parts[-1], minlength=counts.size)
      done += parts[-1].size
      rebuild *= model.GROWTH
    return np.concatenate(parts)

  def plain(self, bits_W):
    states, lane = self.states, self.lane
    num_lanes = len(states)
    values = []
    for bits in bits_W:
      state = states[lane]
      values.append(state & ((1 << bits) - 1))
      state >>= bits
      if state < model.STATE_LOW:
        word = next(self.words, None)
        if word is None:
          raise _Bad
        state = state << 16 | word
      states[lane] = state
      lane += 1
      if lane == num_lanes:
        lane = 0
    self.lane = lane
    return np.array(values, np.int64)

  def is_finished(self):
    spent = next(self.words, None) is None
    return spent and set(self.states) == {model.STATE_LOW}


def _ranks(reader, guess, plain, low_W, size):
  changed = low_W.size
  counts = guess.copy()
  parts = []
  found = seen = rank = 0
  rebuild = model.FIRST_REBUILD
  while found < changed:
    table = _slots(counts)
    while seen < rebuild and found < changed:
      batch = min(rebuild - seen, changed - found)
      symbols = reader.symbols(table, batch)
      seen += batch
      is_change = symbols != model.GAP_ESCAPE
      after = rank + np.cumsum((symbols << plain) + is_change)
      parts.append((symbols, after[is_change] - 1))
      found += parts[-1][1].size
      rank = int(after[-1])
      if rank > size:
        raise _Bad
    counts = guess + model.SEEN * np.bincount(
      np.concatenate([symbols for symbols, _ in parts]), minlength=guess.size
    )
    rebuild *= model.GROWTH
  ranks = np.concatenate([part for _, part in parts]) + np.cumsum(low_W)
  if ranks[-1] >= size:
    raise _Bad
  return ranks


def _steps(reader, near_guess, far_guess, changed):
  near = reader.rebuilt_symbols(near_guess, changed)
  steps = (near >> 1) + 1
  is_far = near >= model.STEP_ESCAPE
  if is_far.any():
    symbols = reader.rebuilt_symbols(far_guess, int(is_far.sum()))
    bits = (symbols >> 1) + 2
    lower = np.minimum(bits, model.RAW_BITS)
    both = np.stack([lower, bits - lower], -1)
    plain = np.zeros(both.shape, np.int64)
    plain[both > 0] = reader.plain(both[both > 0].tolist())
    lead = (2 | (symbols & 1)) << bits
    steps[is_far] = lead | plain[:, 0] | plain[:, 1] << lower
  return np.where(near & 1, -steps, steps)


def decode(blob, at, size, starts, levels, shape):
  """Ranks and steps by class, or None if the bytes are none of `code`'s."""
  gaps, nears, fars = model.guesses(shape.number.width)
  num_contexts = shape.num_contexts
  ranks, steps = [], []
  lean = [(0, 0)] * num_contexts
  begin = at + model.plain_bytes(starts, levels)
  bits = np.unpackbits(
    np.frombuffer(blob, np.uint8)[at:begin], bitorder='little'
  ).astype(np.int64)
  try:
    if begin > len(blob):
      raise _Bad
    reader = _Reader(blob, begin, model.num_lanes(int(starts[-1])))
    for c in np.flatnonzero(np.diff(starts)):
      level, changed = int(levels[c]), int(starts[c + 1] - starts[c])
      plain = model.plain_bits(level)
      low, bits = np.split(bits, [plain * changed])
      low_W = low.reshape(changed, plain) @ (1 << np.arange(plain))
      ranks.append(_ranks(reader, gaps[level], plain, low_W, size))
      # No two classes share a weight, nor the patience with escapes.
      size -= int(ranks[-1][-1]) + 1
      guess = model.leaning(nears[level], *lean[c % num_contexts])
      steps.append(_steps(reader, guess, fars[level], changed))
      lean[c % num_contexts] = int((steps[-1] < 0).sum()), changed
  except _Bad:
    return None
  if not reader.is_finished():
    return None
  return np.concatenate(ranks), np.concatenate(steps)
