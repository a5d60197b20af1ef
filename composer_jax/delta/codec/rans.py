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
_U16 = types.Array(types.uint16, 1, 'C', readonly=True)
_U32 = types.Array(types.uint32, 1, 'C', readonly=True)
_I64 = types.Array(types.int64, 1, 'C', readonly=True)
_I64_2 = types.Array(types.int64, 2, 'C', readonly=True)
_GUESSES = types.Tuple((_I64_2, _I64_2, _I64))
_one32 = np.uint32(1)


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


@compiler.part
def _plain_operation(value, bits, ops, num_ops):
  ops[num_ops] = (value & ((1 << bits) - 1)) << 16 | model.RAW | bits
  return num_ops + 1


@compiler.part
def _value_operations(values, near, far, ops, num_ops, symbols):
  """Appends the operations that code values; at most five for each."""
  escape, num_far = near.size - 1, 0
  for n in range(values.size):
    symbols[n] = min(values[n], escape)
  num_ops = _symbol_operations(symbols, values.size, near.copy(), ops, num_ops)
  for n in range(values.size):
    if values[n] >= escape:
      beyond = values[n] - escape + 1
      length = _bit_length(beyond)
      symbols[num_far] = 2 * (length - 1)
      if length > 1:
        symbols[num_far] |= (beyond >> (length - 2)) & 1
      num_far += 1
  if num_far:
    num_ops = _symbol_operations(symbols, num_far, far.copy(), ops, num_ops)
    for n in range(values.size):
      if values[n] >= escape:
        beyond = values[n] - escape + 1
        length = _bit_length(beyond) - 2
        for low in range(0, length, model.RAW_BITS):
          bits = min(length - low, model.RAW_BITS)
          num_ops = _plain_operation(beyond >> low, bits, ops, num_ops)
  return num_ops


@compiler.compiled(
  types.int64(
    *(types.Tuple((_I64, _I64, _I64)), _I64, _GUESSES),
    *(types.uint32[::1], types.uint8[::1], types.int64[::1]),
  )
)
def operations(changes, levels, guesses, ops, symbols, values):
  """Lists the coding operations of all classes; returns their number.

  There are at most 11 for each change. `symbols` and `values` are work space.
  """
  starts, ranks_W, steps_W = changes
  gaps, nears, far = guesses
  num_ops = 0
  for c in range(starts.size - 1):
    begin, count = starts[c], starts[c + 1] - starts[c]
    if not count:
      continue
    level = levels[c]
    plain = plain_bits(level)
    before = -1
    for n in range(count):
      gap = ranks_W[begin + n] - before - 1
      before = ranks_W[begin + n]
      values[n] = gap >> plain
      if plain:
        num_ops = _plain_operation(gap, plain, ops, num_ops)
    num_ops = _value_operations(
      values[:count], gaps[level], far, ops, num_ops, symbols
    )
    for n in range(count):
      step = steps_W[begin + n]
      values[n] = 2 * (abs(step) - 1) + np.int64(step < 0)
    num_ops = _value_operations(
      values[:count], nears[level], far, ops, num_ops, symbols
    )
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
def _symbols(stream, at, lane, counts, lookup, count, out):
  """Decodes what `_symbol_operations` coded; the new place.

  The last word is padding, to be read again and again by bytes that end early;
  a place beyond it tells the caller.
  """
  words, states = stream
  slots, ranges = lookup
  lanes, last = states.size - 1, words.size - 1
  frequencies = np.empty(counts.size, np.int64)
  first = np.empty(counts.size, np.int64)
  done, rebuild = 0, model.FIRST_REBUILD
  while done < count:
    _slots(counts, frequencies, first, lookup)
    for n in range(done, min(rebuild, count)):
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
      out[n] = symbol
    if rebuild < count:
      for n in range(done, rebuild):
        counts[out[n]] += model.SEEN
    done = min(rebuild, count)
    rebuild *= model.GROWTH
  return at


@compiler.part
def _values(stream, at, lane, near, far, lookup, symbols, values):
  """Decodes what `_value_operations` coded; the new place and lane."""
  escape, lanes = near.size - 1, stream[1].size - 1
  count, num_far = values.size, 0
  at = _symbols(stream, at, lane, near.copy(), lookup, count, symbols)
  lane += count
  for n in range(count):
    values[n] = symbols[n]
    num_far += values[n] == escape
  if num_far:
    at = _symbols(stream, at, lane, far.copy(), lookup, num_far, symbols)
    lane += num_far
    place = 0
    for n in range(count):
      if values[n] == escape:
        symbol = np.int64(symbols[place])
        place += 1
        length = (symbol >> 1) - 1
        beyond = np.int64(1)
        if length >= 0:
          beyond = (2 | (symbol & 1)) << length
        for low in range(0, length, model.RAW_BITS):
          bits = min(length - low, model.RAW_BITS)
          value, at = _plain(stream, at, lane & lanes, bits)
          lane += 1
          beyond |= value << low
        values[n] += beyond - 1
  return at, lane


@compiler.compiled(
  types.int64(
    *(types.Tuple((_U16, types.uint32[::1])), types.int64, _I64, _I64),
    *(_GUESSES, *[types.int64[::1]] * 3, types.uint8[::1]),
  )
)
def decode_changes(
  stream, size, starts, levels, guesses, ranks_W, steps_W, values, symbols
):
  """Fills ranks and steps by class; 0, or a negative number for bad bytes.

  `stream` are the words and the states of the lanes.
  """
  words, states = stream
  gaps, nears, far = guesses
  at = lane = 0
  lanes = states.size - 1
  slots = np.zeros(model.SCALE, np.uint8)
  ranges = np.zeros(256, np.uint32)
  lookup = slots, ranges
  for c in range(starts.size - 1):
    begin, count = starts[c], starts[c + 1] - starts[c]
    if not count:
      continue
    level = levels[c]
    plain = plain_bits(level)
    for n in range(begin, begin + count):
      ranks_W[n] = 0
      if plain:
        ranks_W[n], at = _plain(stream, at, lane & lanes, plain)
        lane += 1
    found = values[:count]
    at, lane = _values(
      stream, at, lane, gaps[level], far, lookup, symbols, found
    )
    rank = np.int64(-1)
    for n in range(count):
      if found[n] > size:
        return -2
      rank += 1 + (found[n] << plain) + ranks_W[begin + n]
      ranks_W[begin + n] = rank
    # No two classes share a weight.
    size -= rank + 1
    if size < 0:
      return -2
    at, lane = _values(
      stream, at, lane, nears[level], far, lookup, symbols, found
    )
    for n in range(count):
      # Without a branch, which random signs would mispredict.
      sign = -(found[n] & 1)
      steps_W[begin + n] = (((found[n] >> 1) + 1) ^ sign) - sign
    # Bytes that ended early are noticed once a class.
    if at > words.size - 1:
      return -1
  for n in range(states.size):
    if states[n] != model.STATE_LOW:
      return -3
  return 0 if at == words.size - 1 else -3


def code(changes, levels, limit):
  """The coded changes, or None if they take more than `limit` bytes."""
  changed = changes[1].size
  ops, symbols = np.empty(11 * changed, np.uint32), np.empty(changed, np.uint8)
  values = np.empty(changed, np.int64)
  num_ops = operations(changes, levels, model.guesses(), ops, symbols, values)
  lanes = model.num_lanes(changed)
  states = np.full(lanes, model.STATE_LOW, np.uint32)
  room = limit - 4 * lanes
  if room < 0:
    return None
  # One word more than may be kept, where words are tried out.
  words = np.empty(room // 2 + 1, np.uint16)
  at = code_operations(ops, num_ops, states, words)
  if at < 1:
    return None
  return states.astype('<u4').tobytes() + words[at:].astype('<u2').tobytes()


def decode(blob, at, size, starts, levels):
  """Ranks and steps by class, or None if the bytes are none of `code`'s."""
  changed = int(starts[-1])
  begin = at + 4 * model.num_lanes(changed)
  if begin > len(blob) or (len(blob) - begin) % 2:
    return None
  words = np.empty((len(blob) - begin) // 2 + 1, np.uint16)
  words[:-1] = np.frombuffer(blob, '<u2', offset=begin)
  words[-1] = 0
  states = np.frombuffer(blob[at:begin], '<u4').astype(np.uint32)
  ranks_W, steps_W, values = np.empty((3, changed), np.int64)
  to = ranks_W, steps_W, values, np.empty(changed, np.uint8)
  stream, guesses = (words, states), model.guesses()
  bad = decode_changes(stream, size, starts, levels, guesses, *to)
  return None if bad else (starts, ranks_W, steps_W)
