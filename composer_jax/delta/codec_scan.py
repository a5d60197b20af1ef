"""Compiled kernels between weights and their changes by class.

Weights go by in blocks of vectors; only those that changed are looked at one by
one.
"""

import functools

import numba
import numpy as np
from numba import types

from composer_jax.delta import codec_compile as compiler
from composer_jax.delta import codec_vectors as vectors

BLOCK = vectors.BLOCK
WORD = vectors.WORD
PIECE = 4096
NEVER = 1 << 30  # more than a chunk can count down
_U8 = types.Array(types.uint8, 1, 'C', readonly=True)
_I64 = types.Array(types.int64, 1, 'C', readonly=True)
_one = np.uint64(1)


@compiler.part(inline='always')
def _classify(base, start, valid, shift, mask, low, top, classes):
  """Fills `classes` for a block; 255 is padding, from `valid` on."""
  for to in range(0, BLOCK, WORD):
    vectors.classify(base, start + to, shift, mask, low, top, classes, to)
  if valid < start + BLOCK:
    for at in range(valid - start, BLOCK):
      classes[at] = 255


@compiler.part(inline='always')
def _members(classes, which):
  """How many of the block are of the class."""
  total = np.int64(0)
  for word in range(0, BLOCK, WORD):
    total += vectors.popcount(vectors.match(classes, word, which))
  return total


def count(values, base):
  count = 0
  for start in range(0, base.size, WORD):
    count += vectors.popcount(vectors.differ(values, base, start))
  return count


@compiler.part(inline='always')
def _list(changed, start, count, found):
  """Writes where bits are set to found[count:]; needs room for 64."""
  # Most words have fewer than three: those are written without a branch, which
  # would be mispredicted.
  for _ in range(2):
    found[count] = start + vectors.lowest(changed)
    changed &= changed - _one
    count += 1
  while changed:
    found[count] = start + vectors.lowest(changed)
    changed &= changed - _one
    count += 1


@compiler.part(inline='always')
def _step(new, old, is_float, top_bit):
  half = np.int64(1) << top_bit
  full = 2 * half - 1
  if is_float:
    # Without branches, which random signs would mispredict.
    new ^= (-(new >> top_bit) & full) | half
    old ^= (-(old >> top_bit) & full) | half
  return ((new - old + half) & full) - half


def scan_flat(values, base, before, is_float, count, ranks_W, steps_W):
  """`scan` where all weights are of one class, `before` of which went by."""
  top_bit = 8 * base.itemsize - 1
  room = steps_W.size
  # In pieces that stay in the nearest cache.
  for start in range(0, base.size, PIECE):
    first = count
    for word in range(start, min(start + PIECE, base.size), WORD):
      changed = vectors.differ(values, base, word)
      if count + WORD <= room:
        _list(changed, before + word, count, ranks_W)
      count += vectors.popcount(changed)
    if count + WORD <= room:
      for n in range(first, count):
        at = ranks_W[n] - before
        new, old = np.int64(values[at]), np.int64(base[at])
        steps_W[n] = _step(new, old, is_float, top_bit)
  return count


def scan(
  values,
  base,
  valid,
  shift,
  mask,
  low,
  top,
  is_float,
  seen,
  count,
  classes_W,
  ranks_W,
  steps_W,
):
  """Lists class, rank in the class and step of each changed weight.

  `seen` holds how many of each class went by before and is moved on; `count`
  changes are listed already. Weights from `valid` on are padding. The lists
  need room for 64 changes more than there are: beyond it changes are counted
  and the caller comes back with more.
  """
  top_bit = 8 * base.itemsize - 1
  classes = np.zeros(BLOCK, np.uint8)
  found = np.zeros(BLOCK + WORD, np.int64)
  num_classes = np.int64(top) + 1
  for start in range(0, base.size, BLOCK):
    _classify(base, start, valid, shift, mask, low, top, classes)
    num_found = 0
    for word in range(0, BLOCK, WORD):
      changed = vectors.differ(values, base, start + word)
      _list(changed, word, num_found, found)
      num_found += vectors.popcount(changed)
    if count + num_found > steps_W.size:
      count += num_found
      continue
    for n in range(num_found):
      place = found[n]
      at = start + place
      new, old = np.int64(values[at]), np.int64(base[at])
      step = _step(new, old, is_float, top_bit)
      which = classes[place]
      word = place & -WORD
      earlier = vectors.match(classes, word, which)
      earlier &= (_one << np.uint64(place - word)) - _one
      rank = seen[which] + vectors.popcount(earlier)
      for other in range(0, word, WORD):
        rank += vectors.popcount(vectors.match(classes, other, which))
      classes_W[count] = which
      ranks_W[count] = rank
      steps_W[count] = step
      count += 1
    for c in range(num_classes):
      seen[c] += _members(classes, np.uint8(c))
  return count


@compiler.part(inline='always')
def _select(bits, number):
  """Position of a set bit, counted from the lowest."""
  at = np.int64(0)
  # Without branches: each would be mispredicted every second time.
  for span in (32, 16, 8, 4, 2, 1):
    lower = (bits >> np.uint64(at)) & ((_one << np.uint64(span)) - _one)
    inside = vectors.popcount(lower)
    beyond = -np.int64(inside <= number)
    number -= inside & beyond
    at += span & beyond
  return at


def apply(
  base,
  out,
  valid,
  shift,
  mask,
  low,
  top,
  is_float,
  starts,
  ranks_W,
  steps_W,
  cursors,
  left,
):
  """Writes the base and its changes to `out`; the reverse of `scan`.

  `cursors` are the next change of each class and `left` how many of the class
  come before it (`NEVER` after the last one); both are moved on.
  """
  top_bit = 8 * base.itemsize - 1
  classes = np.zeros(BLOCK, np.uint8)
  num_classes = np.int64(top) + 1
  for start in range(0, base.size, BLOCK):
    _classify(base, start, valid, shift, mask, low, top, classes)
    vectors.copy(out, base, start, start + BLOCK)
    for group in range(0, num_classes, 64):
      due = np.uint64(0)
      for c in range(group, min(group + 64, num_classes)):
        left[c] -= _members(classes, np.uint8(c))
        due |= (np.uint64(left[c]) >> np.uint64(63)) << np.uint64(c - group)
      while due:
        c = group + vectors.lowest(due)
        due &= due - _one
        which = np.uint8(c)
        first = vectors.popcount(vectors.match(classes, 0, which))
        second = first + vectors.popcount(vectors.match(classes, 64, which))
        third = second + vectors.popcount(vectors.match(classes, 128, which))
        here = third + vectors.popcount(vectors.match(classes, 192, which))
        rank = left[c] + here
        cursor = cursors[c]
        while rank < here:
          beyond = (rank >= first, rank >= second, rank >= third)
          word = WORD * (beyond[0] + beyond[1] + beyond[2])
          passed = first * beyond[0]
          passed += (second - first) * beyond[1] + (third - second) * beyond[2]
          members = vectors.match(classes, word, which)
          at = start + word + _select(members, rank - passed)
          step = steps_W[cursor]
          out[at] = _moved(np.int64(base[at]), step, is_float, top_bit)
          cursor += 1
          if cursor < starts[c + 1]:
            rank += ranks_W[cursor] - ranks_W[cursor - 1]
          else:
            rank = NEVER
        cursors[c] = cursor
        left[c] = rank - here
  return 0


@compiler.part(inline='always')
def _moved(old, step, is_float, top_bit):
  half = np.int64(1) << top_bit
  full = 2 * half - 1
  if is_float:
    old ^= (-(old >> top_bit) & full) | half
  new = (old + step) & full
  if is_float:
    new ^= (-((new >> top_bit) ^ 1) & full) | half
  return new


def apply_flat(base, out, is_float, ranks_W, steps_W):
  """`apply` where all weights are of one class; -1 if a rank is too high."""
  top_bit = 8 * base.itemsize - 1
  count = ranks_W.size
  if count and ranks_W[count - 1] >= base.size:
    return -1
  n = 0
  # In pieces that stay in the nearest cache.
  for start in range(0, base.size, PIECE):
    stop = min(start + PIECE, base.size)
    vectors.copy(out, base, start, stop)
    while n < count and ranks_W[n] < stop:
      at = ranks_W[n]
      out[at] = _moved(np.int64(base[at]), steps_W[n], is_float, top_bit)
      n += 1
  return 0


@functools.cache
def kernel(which, bits):
  """Compiled for one type of bits, when first asked for."""
  t = numba.from_dtype(bits)
  array = types.Array(t, 1, 'C', readonly=True)
  u8, i64 = types.uint8, types.int64
  shape = (i64, t, t, t, t, i64)
  changes = (_I64, _I64)
  signature = {
    count: (array, array),
    scan: (
      *(array, array, *shape),
      *(i64[::1], i64, u8[::1], i64[::1], i64[::1]),
    ),
    scan_flat: (*(array, array, i64, i64, i64), *(i64[::1], i64[::1])),
    apply: (array, t[::1], *shape, _I64, *changes, i64[::1], i64[::1]),
    apply_flat: (array, t[::1], i64, *changes),
  }
  return compiler.kernel(i64(*signature[which]))(which)
