"""Compiled kernels between changes by class and bytes: the rANS coder.

`model` says what is coded and how. Of bytes to decode every position that they
could have a say in is checked, and a negative number is the answer instead of a
read or a write there.
"""

import numpy as np
from numba import types

from composer_jax.delta.codec import model
from composer_jax.delta.codec import scan as compiler

plain_bits = compiler.part(model.plain_bits)
_U8 = types.Array(types.uint8, 1, 'C', readonly=True)
_U16 = types.Array(types.uint16, 1, 'C', readonly=True)
_U32 = types.Array(types.uint32, 1, 'C', readonly=True)
_I64 = types.Array(types.int64, 1, 'C', readonly=True)
_I64_2 = types.Array(types.int64, 2, 'C', readonly=True)
_GUESSES = types.Tuple((_I64_2, _I64_2, _I64_2))
_one32 = np.uint32(1)
_FAR = 1 << 40  # stands for a step that is still to be decoded


@compiler.part
def table(counts, frequencies, first):
  """Fills in frequencies that sum to `SCALE`, none of them zero, and starts."""
  total = 0
  most = 0
  for s in range(counts.size):
    total += counts[s]
    if counts[s] > counts[most]:
      most = s
  spare = model.SCALE - counts.size
  rest = model.SCALE
  for s in range(counts.size):
    frequencies[s] = 1 + counts[s] * spare // total
    rest -= frequencies[s]
  frequencies[most] += rest
  start = 0
  for s in range(counts.size):
    first[s] = start
    start += frequencies[s]


@compiler.part
def leaning(guess, negative, changed):
  """A guess of near steps whose signs fall as they did one exponent below.

  Of `changed` steps there, `negative` were.
  """
  counts = np.empty(guess.size, np.int64)
  for s in range(0, guess.size, 2):
    pair = guess[s] + guess[s + 1]
    counts[s + 1] = pair * (negative + model.LEAN) // (changed + 2 * model.LEAN)
    counts[s] = pair - counts[s + 1]
  return counts


@compiler.compiled(
  types.int64(_U8, _I64, _I64, _I64, types.int64[::1], types.int64[::1])
)
def by_class(classes_W, ranks_W, steps_W, starts, ranks_to, steps_to):
  cursors = starts.copy()
  for n in range(classes_W.size):
    at = cursors[classes_W[n]]
    cursors[classes_W[n]] = at + 1
    ranks_to[at] = ranks_W[n]
    steps_to[at] = steps_W[n]
  return 0


@compiler.part
def _symbol_operations(symbols, count, counts, ops, num_ops):
  """Appends the operations that code the symbols under rebuilt

  `counts` are what the first table is made of, and are moved on.
  """
  frequencies = np.empty(counts.size, np.int64)
  first = np.empty(counts.size, np.int64)
  ops_of = np.empty(counts.size, np.uint32)
  done = 0
  rebuild = model.FIRST_REBUILD
  while done < count:
    table(counts, frequencies, first)
    for s in range(counts.size):
      ops_of[s] = first[s] << 16 | frequencies[s]
    for n in range(done, min(rebuild, count)):
      ops[num_ops] = ops_of[symbols[n]]
      num_ops += 1
    if rebuild < count:
      for n in range(done, rebuild):
        counts[symbols[n]] += model.SEEN
    done = min(rebuild, count)
    rebuild *= model.GROWTH
  return num_ops


@compiler.part
def _bit_length(value):
  length = 0
  while value:
    value >>= 1
    length += 1
  return length


@compiler.compiled(
  types.int64(
    *(types.Tuple((_I64, _I64, _I64)), _I64, _GUESSES),
    *(types.uint32[::1], types.uint8[::1], types.uint8[::1]),
  )
)
def operations(changes, levels, guesses, ops, symbols, bits):
  """Lists the coding operations of all classes; their number, or -1.

  The plain bits of gaps go to `bits`, which `model.plain_bytes` measures.
  """
  starts, ranks_W, steps_W = changes
  gaps, nears, fars = guesses
  num_ops = num_bytes = held = num_held = 0
  negatives = changed = 0
  for c in range(starts.size - 1):
    begin, end = starts[c], starts[c + 1]
    if begin == end:
      continue
    level = levels[c]
    plain = plain_bits(level)
    count = 0
    before = -1
    for n in range(begin, end):
      gap = ranks_W[n] - before - 1
      before = ranks_W[n]
      held |= (gap & ((1 << plain) - 1)) << num_held
      num_held += plain
      while num_held >= 8:
        bits[num_bytes] = held & 255
        num_bytes += 1
        held >>= 8
        num_held -= 8
      gap >>= plain
      while gap >= model.GAP_ESCAPE:
        if count >= symbols.size:
          return -1
        symbols[count] = model.GAP_ESCAPE
        count += 1
        gap -= model.GAP_ESCAPE
      if count >= symbols.size:
        return -1
      symbols[count] = gap
      count += 1
    if num_ops + count + 4 * (end - begin) > ops.size:
      return -1
    num_ops = _symbol_operations(
      symbols, count, gaps[level].copy(), ops, num_ops
    )
    guess = leaning(nears[level], negatives, changed)
    num_far = negatives = 0
    for n in range(begin, end):
      step = abs(steps_W[n])
      negative = np.int64(steps_W[n] < 0)
      negatives += negative
      if step <= model.NEAR:
        symbols[n - begin] = 2 * (step - 1) + negative
      else:
        symbols[n - begin] = model.STEP_ESCAPE + negative
        num_far += 1
    changed = end - begin
    num_ops = _symbol_operations(symbols, end - begin, guess, ops, num_ops)
    if num_far:
      count = 0
      for n in range(begin, end):
        step = abs(steps_W[n])
        if step > model.NEAR:
          length = _bit_length(step)
          symbols[count] = 2 * (length - 4) + ((step >> (length - 2)) & 1)
          count += 1
      num_ops = _symbol_operations(
        symbols, count, fars[level].copy(), ops, num_ops
      )
      for n in range(begin, end):
        step = abs(steps_W[n])
        if step > model.NEAR:
          length = _bit_length(step) - 2
          lower = min(length, model.RAW_BITS)
          value = step & ((1 << lower) - 1)
          ops[num_ops] = value << 16 | model.RAW | lower
          num_ops += 1
          if length > lower:
            value = (step >> lower) & ((1 << (length - lower)) - 1)
            ops[num_ops] = value << 16 | model.RAW | (length - lower)
            num_ops += 1
  if num_held:
    bits[num_bytes] = held
  return num_ops


@compiler.compiled(
  types.int64(_U32, types.int64, types.uint32[::1], types.uint16[::1])
)
def code_operations(ops, num_ops, states, out):
  """Codes the operations into the end of `out`; where it starts.

  Backwards, as rANS does, so that the decoder reads forwards. 0 or less says
  that `out` is too short: its first word is only for trying out.
  """
  at = out.size
  lanes = states.size - 1
  for n in range(num_ops - 1, -1, -1):
    op = ops[n]
    high = op >> np.uint32(16)
    state = states[n & lanes]
    is_plain = op & np.uint32(model.RAW)
    plain = frequency = np.uint32(0)
    if is_plain:
      plain = op & np.uint32(31)
      over = (state >> (np.uint32(32) - plain)) != 0
    else:
      frequency = op & np.uint32(model.RAW - 1)
      over = (state >> np.uint32(20)) >= frequency
    if at <= 0:
      return -1
    # Without a branch, which would be mispredicted every few symbols: what is
    # not due is written over by the next word.
    due = np.uint32(over)
    out[at - 1] = state & np.uint32(0xFFFF)
    at -= np.int64(due)
    state = np.uint32(state >> (due << np.uint32(4)))
    if is_plain:
      state = np.uint32(state << plain | high)
    else:
      quotient = np.uint32(state // frequency)
      rest = np.uint32(state - quotient * frequency)
      state = np.uint32((quotient << np.uint32(model.SCALE_BITS)) + rest + high)
    states[n & lanes] = state
  return at


@compiler.part
def _slots(counts, frequencies, first, to):
  """Which symbol each slot of the table is, and each symbol's part of it."""
  slots, ranges = to
  table(counts, frequencies, first)
  for s in range(counts.size):
    ranges[s] = frequencies[s] << 16 | first[s]
    for n in range(first[s], first[s] + frequencies[s]):
      slots[n] = s


@compiler.part
def _symbols(stream, at, lane, table, count, out, begin):
  """Decodes symbols under one table to out[begin:]; the new place.

  The last word is padding, to be read again and again by bytes that end early;
  a place beyond it tells the caller.
  """
  words, states = stream
  slots, ranges = table
  lanes = states.size - 1
  last = words.size - 1
  for n in range(count):
    state = states[(lane + n) & lanes]
    slot = state & np.uint32(model.SCALE - 1)
    symbol = slots[slot]
    part = ranges[symbol]
    state = np.uint32(
      (part >> np.uint32(16)) * (state >> np.uint32(model.SCALE_BITS))
      + slot
      - (part & np.uint32(0xFFFF))
    )
    # Without a branch, which would be mispredicted every few symbols.
    due = np.uint32(state < np.uint32(model.STATE_LOW))
    word = np.uint32(words[min(at, last)])
    state = np.uint32(state << (due << np.uint32(4)) | (word * due))
    at += np.int64(due)
    states[(lane + n) & lanes] = state
    out[begin + n] = symbol
  return at


@compiler.part(inline='always')
def _plain(stream, at, lane, bits):
  """Decodes up to 15 plain bits; they and the new place."""
  words, states = stream
  state = states[lane]
  value = np.int64(state & ((_one32 << np.uint32(bits)) - _one32))
  state = np.uint32(state >> np.uint32(bits))
  due = np.uint32(state < np.uint32(model.STATE_LOW))
  word = np.uint32(words[min(at, words.size - 1)])
  states[lane] = np.uint32(state << (due << np.uint32(4)) | (word * due))
  return value, at + np.int64(due)


@compiler.part
def _rebuilt_symbols(stream, at, lane, counts, table, count, out):
  """Decodes what `_symbol_operations` coded; the new place."""
  frequencies = np.empty(counts.size, np.int64)
  first = np.empty(counts.size, np.int64)
  done = 0
  rebuild = model.FIRST_REBUILD
  while done < count:
    _slots(counts, frequencies, first, table)
    batch = min(rebuild, count) - done
    at = _symbols(stream, at, lane + done, table, batch, out, done)
    if rebuild < count:
      for n in range(done, rebuild):
        counts[out[n]] += model.SEEN
    done += batch
    rebuild *= model.GROWTH
  return at


@compiler.compiled(
  types.int64(
    *(types.Tuple((_U8, _U16, types.uint32[::1])), types.int64, _I64, _I64),
    *(_GUESSES, types.int64[::1], types.int64[::1], types.uint8[::1]),
  )
)
def decode_changes(
  coded, size, starts, levels, guesses, ranks_W, steps_W, symbols
):
  """Fills ranks and steps by class; 0, or a negative number for bad bytes.

  `coded` are the plain bits of the gaps and two bytes more, the words, and the
  states of the lanes.
  """
  bits, words, states = coded
  gaps, nears, fars = guesses
  stream = words, states
  at = 0
  negatives = before = 0
  slots = np.zeros(model.SCALE, np.uint8)
  ranges = np.zeros(256, np.uint32)
  lookup = slots, ranges
  frequencies = np.empty(model.GAP_SYMBOLS, np.int64)
  first = np.empty(model.GAP_SYMBOLS, np.int64)
  lane = bit = 0
  lanes = states.size - 1
  for c in range(starts.size - 1):
    begin, end = starts[c], starts[c + 1]
    if begin == end:
      continue
    changed = end - begin
    level = levels[c]
    plain = plain_bits(level)
    # Gaps: every symbol ends one or is an escape, so that as many as changes
    # are missing can be decoded without looking.
    counts = gaps[level].copy()
    found = 0
    seen = 0
    rebuild = model.FIRST_REBUILD
    rank = 0
    while found < changed:
      _slots(counts, frequencies, first, lookup)
      while seen < rebuild and found < changed:
        batch = min(rebuild - seen, changed - found)
        at = _symbols(stream, at, lane, lookup, batch, symbols, 0)
        lane += batch
        seen += batch
        for n in range(batch):
          symbol = symbols[n]
          counts[symbol] += model.SEEN
          rank += np.int64(symbol) << plain
          if symbol != model.GAP_ESCAPE:
            ranks_W[begin + found] = rank
            rank += 1
            found += 1
        if rank > size:
          return -2
      rebuild *= model.GROWTH
    if plain:
      low = 0
      for n in range(begin, end):
        byte = bit >> 3
        word = np.int64(bits[byte]) | np.int64(bits[byte + 1]) << 8
        word |= np.int64(bits[byte + 2]) << 16
        low += (word >> (bit & 7)) & ((1 << plain) - 1)
        bit += plain
        ranks_W[n] += low
    if ranks_W[end - 1] >= size:
      return -2
    # No two classes share a weight, nor the patience with escapes.
    size -= ranks_W[end - 1] + 1
    guess = leaning(nears[level], negatives, before)
    at = _rebuilt_symbols(stream, at, lane, guess, lookup, changed, symbols)
    lane += changed
    num_far = negatives = 0
    for n in range(changed):
      symbol = np.int64(symbols[n])
      negatives += symbol & 1
      if symbol < model.STEP_ESCAPE:
        # Without a branch, which random signs would mispredict.
        sign = -(symbol & 1)
        steps_W[begin + n] = (((symbol >> 1) + 1) ^ sign) - sign
      else:
        num_far += 1
        steps_W[begin + n] = -_FAR if symbol & 1 else _FAR
    before = changed
    if num_far:
      counts = fars[level].copy()
      at = _rebuilt_symbols(stream, at, lane, counts, lookup, num_far, symbols)
      lane += num_far
      n = begin
      for f in range(num_far):
        while abs(steps_W[n]) != _FAR:
          n += 1
        length = (np.int64(symbols[f]) >> 1) + 2
        step = (np.int64(2) | (np.int64(symbols[f]) & 1)) << length
        lower = min(length, model.RAW_BITS)
        value, at = _plain(stream, at, lane & lanes, lower)
        lane += 1
        step |= value
        if length > lower:
          rest = length - lower
          value, at = _plain(stream, at, lane & lanes, rest)
          lane += 1
          step |= value << lower
        steps_W[n] = -step if steps_W[n] < 0 else step
    # Bytes that ended early are noticed once a class.
    if at > words.size - 1:
      return -1
  for n in range(states.size):
    if states[n] != model.STATE_LOW:
      return -3
  return 0 if at == words.size - 1 else -3


def arrange(classes_W, ranks_W, steps_W, starts):
  """Ranks and steps by class."""
  if starts.size == 2:
    return ranks_W, steps_W
  arranged = np.empty_like(ranks_W), np.empty_like(steps_W)
  by_class(classes_W, ranks_W, steps_W, starts, *arranged)
  return arranged


def code(changes, levels, shape, limit):
  """The coded changes, or None if they take more than `limit` bytes."""
  starts, ranks_W, _ = changes
  some = starts[1:] > starts[:-1]
  last = ranks_W[starts[1:][some] - 1]
  plain = np.array([model.plain_bits(n) for n in levels[some].tolist()])
  escapes = int((last >> plain).sum()) // model.GAP_ESCAPE
  changed = ranks_W.size
  symbols = np.empty(changed + escapes, np.uint8)
  ops = np.empty(5 * changed + escapes, np.uint32)
  bits = np.empty(model.plain_bytes(starts, levels), np.uint8)
  guesses = model.guesses(shape.number.width)
  num_ops = operations(changes, levels, guesses, ops, symbols, bits)
  assert num_ops >= 0, 'more coding operations than there can be'
  lanes = model.num_lanes(changed)
  states = np.full(lanes, model.STATE_LOW, np.uint32)
  room = limit - 4 * lanes - bits.size
  if room < 0:
    return None
  # One word more than may be kept, where words are tried out.
  words = np.empty(room // 2 + 1, np.uint16)
  at = code_operations(ops, num_ops, states, words)
  if at < 1:
    return None
  head = bits.tobytes() + states.astype('<u4').tobytes()
  return head + words[at:].astype('<u2').tobytes()


def decode(blob, at, size, starts, levels, shape):
  """Ranks and steps by class, or None if the bytes are none of `code`'s."""
  changed = int(starts[-1])
  middle = at + model.plain_bytes(starts, levels)
  begin = middle + 4 * model.num_lanes(changed)
  if begin > len(blob) or (len(blob) - begin) % 2:
    return None
  bits = np.zeros(middle - at + 2, np.uint8)
  bits[:-2] = np.frombuffer(blob[at:middle], np.uint8)
  words = np.empty((len(blob) - begin) // 2 + 1, np.uint16)
  words[:-1] = np.frombuffer(blob, '<u2', offset=begin)
  words[-1] = 0
  ranks_W = np.empty(changed, np.int64)
  steps_W = np.empty(changed, np.int64)
  states = np.frombuffer(blob[middle:begin], '<u4').astype(np.uint32)
  coded, to = (bits, words, states), (ranks_W, steps_W)
  guesses, symbols = model.guesses(shape.number.width), np.empty(changed, 'u1')
  bad = decode_changes(coded, size, starts, levels, guesses, *to, symbols)
  return None if bad else (starts, *to)
