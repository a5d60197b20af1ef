"""Compiled kernels from changes by class to bytes.

`codec_model` says what is coded and how.
"""

import numpy as np
from numba import types

from composer_jax.delta import codec_compile as compiler
from composer_jax.delta import codec_model as model
from composer_jax.delta import codec_tables as tables

SCALE_BITS = model.SCALE_BITS
RAW = model.RAW
RAW_BITS = model.RAW_BITS
GAP_ESCAPE = model.GAP_ESCAPE
STEP_ESCAPE = model.STEP_ESCAPE
NEAR = model.NEAR
SEEN = model.SEEN
FIRST_REBUILD = model.FIRST_REBUILD
GROWTH = model.GROWTH
_U8 = types.Array(types.uint8, 1, 'C', readonly=True)
_U32 = types.Array(types.uint32, 1, 'C', readonly=True)
_I64 = types.Array(types.int64, 1, 'C', readonly=True)
_I64_2 = types.Array(types.int64, 2, 'C', readonly=True)


@compiler.kernel(
  types.int64(_U8, _I64, _I64, _I64, types.int64[::1], types.int64[::1])
)
def arrange(classes_W, ranks_W, steps_W, starts, by_class_W, steps_by_class_W):
  cursors = starts.copy()
  for n in range(classes_W.size):
    at = cursors[classes_W[n]]
    cursors[classes_W[n]] = at + 1
    by_class_W[at] = ranks_W[n]
    steps_by_class_W[at] = steps_W[n]
  return 0


@compiler.part
def _symbol_operations(symbols, count, counts, ops, num_ops):
  """Appends the operations that code the symbols under rebuilt tables.

  `counts` are what the first table is made of, and are moved on.
  """
  frequencies = np.empty(counts.size, np.int64)
  first = np.empty(counts.size, np.int64)
  ops_of = np.empty(counts.size, np.uint32)
  done = 0
  rebuild = FIRST_REBUILD
  while done < count:
    tables.table(counts, frequencies, first)
    for s in range(counts.size):
      ops_of[s] = first[s] << 16 | frequencies[s]
    for n in range(done, min(rebuild, count)):
      ops[num_ops] = ops_of[symbols[n]]
      num_ops += 1
    if rebuild < count:
      for n in range(done, rebuild):
        counts[symbols[n]] += SEEN
    done = min(rebuild, count)
    rebuild *= GROWTH
  return num_ops


@compiler.part
def _bit_length(value):
  length = 0
  while value:
    value >>= 1
    length += 1
  return length


@compiler.kernel(
  types.int64(
    *(_I64, _I64, _I64, _I64, _I64_2, _I64_2, _I64_2),
    *(types.uint32[::1], types.uint8[::1], types.uint8[::1]),
  )
)
def operations(
  starts,
  ranks_W,
  steps_W,
  levels,
  gaps,
  nears,
  fars,
  ops,
  symbols,
  bits,
):
  """Lists the coding operations of all classes; their number, or -1.

  The plain bits of gaps go to `bits`, which `model.plain_bytes` measures.
  """
  num_ops = num_bytes = held = num_held = 0
  negatives = changed = 0
  for c in range(starts.size - 1):
    begin, end = starts[c], starts[c + 1]
    if begin == end:
      continue
    level = levels[c]
    plain = tables.plain_bits(level)
    count = 0
    before = -1
    for n in range(begin, end):
      gap = (ranks_W[n] - before - 1) >> plain
      before = ranks_W[n]
      while gap >= GAP_ESCAPE:
        if count >= symbols.size:
          return -1
        symbols[count] = GAP_ESCAPE
        count += 1
        gap -= GAP_ESCAPE
      if count >= symbols.size:
        return -1
      symbols[count] = gap
      count += 1
    if num_ops + count + 4 * (end - begin) > ops.size:
      return -1
    num_ops = _symbol_operations(
      symbols, count, gaps[level].copy(), ops, num_ops
    )
    if plain:
      before = -1
      for n in range(begin, end):
        gap = (ranks_W[n] - before - 1) & ((1 << plain) - 1)
        before = ranks_W[n]
        held |= gap << num_held
        num_held += plain
        while num_held >= 8:
          bits[num_bytes] = held & 255
          num_bytes += 1
          held >>= 8
          num_held -= 8
    guess = tables.leaning(nears[level], negatives, changed)
    num_far = negatives = 0
    for n in range(begin, end):
      step = abs(steps_W[n])
      negative = np.int64(steps_W[n] < 0)
      negatives += negative
      if step <= NEAR:
        symbols[n - begin] = 2 * (step - 1) + negative
      else:
        symbols[n - begin] = STEP_ESCAPE + negative
        num_far += 1
    changed = end - begin
    num_ops = _symbol_operations(symbols, end - begin, guess, ops, num_ops)
    if num_far:
      count = 0
      for n in range(begin, end):
        step = abs(steps_W[n])
        if step > NEAR:
          length = _bit_length(step)
          symbols[count] = 2 * (length - 4) + ((step >> (length - 2)) & 1)
          count += 1
      num_ops = _symbol_operations(
        symbols, count, fars[level].copy(), ops, num_ops
      )
      for n in range(begin, end):
        step = abs(steps_W[n])
        if step > NEAR:
          length = _bit_length(step) - 2
          lower = min(length, RAW_BITS)
          value = step & ((1 << lower) - 1)
          ops[num_ops] = value << 16 | RAW | lower
          num_ops += 1
          if length > lower:
            value = (step >> lower) & ((1 << (length - lower)) - 1)
            ops[num_ops] = value << 16 | RAW | (length - lower)
            num_ops += 1
  if num_held:
    bits[num_bytes] = held
  return num_ops


@compiler.kernel(
  types.int64(
    _U32,
    types.int64,
    types.uint32[::1],
    types.uint16[::1],
  )
)
def code(ops, num_ops, states, out):
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
    is_plain = op & np.uint32(RAW)
    plain = frequency = np.uint32(0)
    if is_plain:
      plain = op & np.uint32(31)
      over = (state >> (np.uint32(32) - plain)) != 0
    else:
      frequency = op & np.uint32(RAW - 1)
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
      state = np.uint32((quotient << np.uint32(SCALE_BITS)) + rest + high)
    states[n & lanes] = state
  return at
