"""Compiled kernels from bytes to changes by class.

Every position that bytes could have a say in is checked, and a negative number
is the answer instead of a read or a write there.
"""

import numpy as np
from numba import types

from composer_jax.delta import codec_compile as compiler
from composer_jax.delta import codec_model as model
from composer_jax.delta import codec_tables as tables

SCALE_BITS = model.SCALE_BITS
SCALE = model.SCALE
STATE_LOW = model.STATE_LOW
RAW_BITS = model.RAW_BITS
GAP_SYMBOLS = model.GAP_SYMBOLS
GAP_ESCAPE = model.GAP_ESCAPE
STEP_ESCAPE = model.STEP_ESCAPE
SEEN = model.SEEN
FIRST_REBUILD = model.FIRST_REBUILD
GROWTH = model.GROWTH
_U8 = types.Array(types.uint8, 1, 'C', readonly=True)
_U16 = types.Array(types.uint16, 1, 'C', readonly=True)
_I64 = types.Array(types.int64, 1, 'C', readonly=True)
_I64_2 = types.Array(types.int64, 2, 'C', readonly=True)
_one32 = np.uint32(1)
_FAR = 1 << 40  # stands for a step that is still to be decoded


@compiler.part
def _slots(counts, frequencies, first, slots, ranges):
  """Which symbol each slot of the table is, and each symbol's part of it."""
  tables.table(counts, frequencies, first)
  for s in range(counts.size):
    ranges[s] = frequencies[s] << 16 | first[s]
    for n in range(first[s], first[s] + frequencies[s]):
      slots[n] = s


@compiler.part
def _symbols(words, at, states, lane, slots, ranges, count, out, begin):
  """Decodes symbols under one table to out[begin:]; the new place.

  The last word is padding, to be read again and again by bytes that end early;
  a place beyond it tells the caller.
  """
  lanes = states.size - 1
  last = words.size - 1
  for n in range(count):
    state = states[(lane + n) & lanes]
    slot = state & np.uint32(SCALE - 1)
    symbol = slots[slot]
    part = ranges[symbol]
    state = np.uint32(
      (part >> np.uint32(16)) * (state >> np.uint32(SCALE_BITS))
      + slot
      - (part & np.uint32(0xFFFF))
    )
    # Without a branch, which would be mispredicted every few symbols.
    due = np.uint32(state < np.uint32(STATE_LOW))
    word = np.uint32(words[min(at, last)])
    state = np.uint32(state << (due << np.uint32(4)) | (word * due))
    at += np.int64(due)
    states[(lane + n) & lanes] = state
    out[begin + n] = symbol
  return at


@compiler.part(inline='always')
def _plain(words, at, states, lane, bits):
  """Decodes up to 15 plain bits; they and the new place."""
  state = states[lane]
  value = np.int64(state & ((_one32 << np.uint32(bits)) - _one32))
  state = np.uint32(state >> np.uint32(bits))
  due = np.uint32(state < np.uint32(STATE_LOW))
  word = np.uint32(words[min(at, words.size - 1)])
  states[lane] = np.uint32(state << (due << np.uint32(4)) | (word * due))
  return value, at + np.int64(due)


@compiler.part
def _rebuilt_symbols(
  words, at, states, lane, counts, slots, ranges, count, out
):
  """Decodes what `_symbol_operations` coded; the new place."""
  frequencies = np.empty(counts.size, np.int64)
  first = np.empty(counts.size, np.int64)
  done = 0
  rebuild = FIRST_REBUILD
  while done < count:
    _slots(counts, frequencies, first, slots, ranges)
    batch = min(rebuild, count) - done
    at = _symbols(
      words, at, states, lane + done, slots, ranges, batch, out, done
    )
    if rebuild < count:
      for n in range(done, rebuild):
        counts[out[n]] += SEEN
    done += batch
    rebuild *= GROWTH
  return at


@compiler.kernel(
  types.int64(
    *(_U8, _U16, types.uint32[::1], types.int64, _I64, _I64),
    *(_I64_2, _I64_2, _I64_2),
    *(types.int64[::1], types.int64[::1], types.uint8[::1]),
  )
)
def decode(
  bits,
  words,
  states,
  size,
  starts,
  levels,
  gaps,
  nears,
  fars,
  ranks_W,
  steps_W,
  symbols,
):
  """Fills ranks and steps by class; 0, or a negative number for bad bytes.

  `bits` are the plain bits of the gaps and two bytes more.
  """
  at = 0
  negatives = before = 0
  slots = np.zeros(SCALE, np.uint8)
  ranges = np.zeros(256, np.uint32)
  frequencies = np.empty(GAP_SYMBOLS, np.int64)
  first = np.empty(GAP_SYMBOLS, np.int64)
  lane = bit = 0
  lanes = states.size - 1
  for c in range(starts.size - 1):
    begin, end = starts[c], starts[c + 1]
    if begin == end:
      continue
    changed = end - begin
    level = levels[c]
    plain = tables.plain_bits(level)
    # Gaps: every symbol ends one or is an escape, so that as many as changes
    # are missing can be decoded without looking.
    counts = gaps[level].copy()
    found = 0
    seen = 0
    rebuild = FIRST_REBUILD
    rank = 0
    while found < changed:
      _slots(counts, frequencies, first, slots, ranges)
      while seen < rebuild and found < changed:
        batch = min(rebuild - seen, changed - found)
        at = _symbols(words, at, states, lane, slots, ranges, batch, symbols, 0)
        lane += batch
        seen += batch
        for n in range(batch):
          symbol = symbols[n]
          counts[symbol] += SEEN
          rank += np.int64(symbol) << plain
          if symbol != GAP_ESCAPE:
            ranks_W[begin + found] = rank
            rank += 1
            found += 1
        if rank > size:
          return -2
      rebuild *= GROWTH
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
    guess = tables.leaning(nears[level], negatives, before)
    at = _rebuilt_symbols(
      words, at, states, lane, guess, slots, ranges, changed, symbols
    )
    lane += changed
    num_far = negatives = 0
    for n in range(changed):
      symbol = np.int64(symbols[n])
      negatives += symbol & 1
      if symbol < STEP_ESCAPE:
        # Without a branch, which random signs would mispredict.
        sign = -(symbol & 1)
        steps_W[begin + n] = (((symbol >> 1) + 1) ^ sign) - sign
      else:
        num_far += 1
        steps_W[begin + n] = -_FAR if symbol & 1 else _FAR
    before = changed
    if num_far:
      at = _rebuilt_symbols(
        words,
        at,
        states,
        lane,
        fars[level].copy(),
        slots,
        ranges,
        num_far,
        symbols,
      )
      lane += num_far
      n = begin
      for f in range(num_far):
        while abs(steps_W[n]) != _FAR:
          n += 1
        length = (np.int64(symbols[f]) >> 1) + 2
        step = (np.int64(2) | (np.int64(symbols[f]) & 1)) << length
        lower = min(length, RAW_BITS)
        value, at = _plain(words, at, states, lane & lanes, lower)
        lane += 1
        step |= value
        if length > lower:
          rest = length - lower
          value, at = _plain(words, at, states, lane & lanes, rest)
          lane += 1
          step |= value << lower
        steps_W[n] = -step if steps_W[n] < 0 else step
    # Bytes that ended early are noticed once a class.
    if at > words.size - 1:
      return -1
  for n in range(states.size):
    if states[n] != STATE_LOW:
      return -3
  return 0 if at == words.size - 1 else -3
