"""Compiled kernels between weights and their changes by class.

Weights go by in batches; only those that changed are looked at one by one. The
intrinsics load 64 neighbours of an array, and most answer with one bit for
each: the compiler makes the vector instructions of the machine of them.
Nothing there checks an index, so kernels call them on whole batches only.
"""

import functools
import hashlib
import logging
import pickle
import types as python_types
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import registry

from composer_jax.delta.codec import model

# The decorator takes the first argument away, which no type checker sees.
intrinsic: Any = extending.intrinsic

WORD = 64  # weights that an integer has a bit for
BATCH = 256
NEVER = 1 << 30  # more than a chunk can count down
_I64 = types.Array(types.int64, 1, 'C', readonly=True)
_one = np.uint64(1)
_i1, _i8, _i32, _i64 = (ir.IntType(width) for width in (1, 8, 32, 64))


# Compilation.
#
# numba tells cached kernels apart by the file of the one function that it
# compiles, although constants and functions of other files are compiled in. A
# kernel's name in the cache therefore holds a digest of all sources of the
# codec and of the processor. One name serves one signature: numba's lists of
# several are torn by processes that compile at the same time.

# What a cache that cannot be placed, read or written raises: no writable
# folder (RuntimeError), a full disk, files cut short by a crash.
_CACHE_ERRORS = (OSError, RuntimeError, EOFError, pickle.UnpicklingError)

# Parts of kernels. They are compiled into those that call them and have no
# cache of their own, which could be older than its callers.
part: Any = functools.partial(numba.njit, nogil=True, error_model='numpy')


def compiled(signature: Any) -> Callable[[Callable], Callable]:
  """Compiles a function for one signature, or loads what was compiled."""

  def compile(function: Callable) -> Callable:
    target: Any = registry.cpu_target.target_context
    machine = target.codegen().magic_tuple()
    key = hashlib.sha256(f'{signature} {machine}'.encode())
    key.update(model.SOURCES)
    named = python_types.FunctionType(function.__code__, function.__globals__)
    named.__qualname__ = f'{function.__name__}-{key.hexdigest()[:16]}'
    try:
      return part(signature, cache=True)(named)
    except _CACHE_ERRORS as error:
      logging.getLogger(__name__).warning(
        'kernel %s is compiled by every process anew: numba cannot cache it '
        '(%s: %s); NUMBA_CACHE_DIR names a folder that it may write to',
        *(function.__name__, type(error).__name__, error),
      )
    return part(signature)(function)

  return compile


def _pointer(context, builder, array_type, array, index):
  data = context.make_array(array_type)(context, builder, array).data
  element = context.get_data_type(array_type.dtype)
  vector = ir.VectorType(element, WORD)
  return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _load(context, builder, array_type, array, index):
  pointer = _pointer(context, builder, array_type, array, index)
  return builder.load(pointer, align=1)


def _everywhere(builder, scalar):
  vector = ir.VectorType(scalar.type, WORD)
  undefined = ir.Constant(vector, ir.Undefined)
  first = builder.insert_element(undefined, scalar, ir.Constant(_i32, 0))
  zeros = ir.Constant(ir.VectorType(_i32, WORD), [0] * WORD)
  return builder.shuffle_vector(first, undefined, zeros)


@intrinsic
def differ(typingctx, a, b, start):
  """u64: which of the elements from `start` on differ."""

  def code(context, builder, signature, args):
    x, y = (
      _load(context, builder, signature.args[n], args[n], args[2])
      for n in (0, 1)
    )
    return builder.bitcast(builder.icmp_unsigned('!=', x, y), _i64)

  return types.uint64(a, b, types.intp), code


@intrinsic
def match(typingctx, classes, start, which):
  """u64: which of the 64 bytes from `start` on are `which`."""

  def code(context, builder, signature, args):
    x = _load(context, builder, signature.args[0], args[0], args[1])
    same = builder.icmp_unsigned('==', x, _everywhere(builder, args[2]))
    return builder.bitcast(same, _i64)

  return types.uint64(classes, types.intp, types.uint8), code


@intrinsic
def classify(typingctx, bits, start, shape, classes, to):
  """classes[to:] = clip((bits[start:] >> shift) & mask, low, low+top) - low.

  Of 64 weights; `shape` is that of `_shape_of`.
  """
  scalar = bits.dtype

  def code(context, builder, signature, args):
    x = _load(context, builder, signature.args[0], args[0], args[1])
    shift, mask, low, top = (
      _everywhere(builder, builder.extract_value(args[2], n))
      for n in range(1, 5)
    )
    x = builder.and_(builder.lshr(x, shift), mask)
    x = builder.select(builder.icmp_unsigned('>', x, low), x, low)
    x = builder.sub(x, low)
    x = builder.select(builder.icmp_unsigned('<', x, top), x, top)
    if scalar.bitwidth > 8:
      x = builder.trunc(x, ir.VectorType(_i8, WORD))
    to = _pointer(context, builder, signature.args[3], *args[3:])
    builder.store(x, to, align=1)
    return context.get_dummy_value()

  return types.void(bits, types.intp, shape, classes, types.intp), code


@intrinsic
def popcount(typingctx, mask):
  def code(context, builder, signature, args):
    return builder.ctpop(args[0])

  return types.int64(types.uint64), code


@intrinsic
def lowest(typingctx, mask):
  """Number of the lowest set bit; 64 where there is none."""

  def code(context, builder, signature, args):
    return builder.cttz(args[0], ir.Constant(_i1, 0))

  return types.int64(types.uint64), code


@part(inline='always')
def _classify(base, start, shape, classes):
  """Fills `classes` for a batch; 255 is padding."""
  for to in range(0, BATCH, WORD):
    classify(base, start + to, shape, classes, to)
  valid = shape[0]
  if valid < start + BATCH:
    for at in range(valid - start, BATCH):
      classes[at] = 255


@part(inline='always')
def _members(classes, which):
  """How many of the batch are of the class."""
  total = np.int64(0)
  for word in range(0, BATCH, WORD):
    total += popcount(match(classes, word, which))
  return total


@part(inline='always')
def _list(changed, start, count, found):
  """Writes where bits are set to found[count:]; needs room for 64."""
  # Most words have fewer than three: those are written without a branch, which
  # would be mispredicted.
  for _ in range(2):
    found[count] = start + lowest(changed)
    changed &= changed - _one
    count += 1
  while changed:
    found[count] = start + lowest(changed)
    changed &= changed - _one
    count += 1


@part(inline='always')
def _step(new, old, is_float, top_bit):
  half = np.int64(1) << top_bit
  full = 2 * half - 1
  if is_float:
    # Without branches, which random signs would mispredict.
    new ^= (-(new >> top_bit) & full) | half
    old ^= (-(old >> top_bit) & full) | half
  return ((new - old + half) & full) - half


def scan_classes(values, base, shape, seen, count, changes):
  """Lists class, rank in the class and step of each changed weight.

  `seen` holds how many of each class went by before and is moved on; `count`
  changes are listed already. The lists of `changes` need room for 64 more than
  there are.
  """
  classes_W, ranks_W, steps_W = changes
  is_float = shape[5]
  top_bit = 8 * base.itemsize - 1
  classes = np.zeros(BATCH, np.uint8)
  found = np.zeros(BATCH + WORD, np.int64)
  num_classes = np.int64(shape[4]) + 1
  for start in range(0, base.size, BATCH):
    _classify(base, start, shape, classes)
    num_found = 0
    for word in range(0, BATCH, WORD):
      changed = differ(values, base, start + word)
      _list(changed, word, num_found, found)
      num_found += popcount(changed)
    for n in range(num_found):
      place = found[n]
      at = start + place
      new, old = np.int64(values[at]), np.int64(base[at])
      step = _step(new, old, is_float, top_bit)
      which = classes[place]
      word = place & -WORD
      earlier = match(classes, word, which)
      earlier &= (_one << np.uint64(place - word)) - _one
      rank = seen[which] + popcount(earlier)
      for other in range(0, word, WORD):
        rank += popcount(match(classes, other, which))
      classes_W[count] = which
      ranks_W[count] = rank
      steps_W[count] = step
      count += 1
    for c in range(num_classes):
      seen[c] += _members(classes, np.uint8(c))
  return count


@part(inline='always')
def _select(bits, number):
  """Position of a set bit, counted from the lowest."""
  at = np.int64(0)
  # Without branches: each would be mispredicted every second time.
  for span in (32, 16, 8, 4, 2, 1):
    lower = (bits >> np.uint64(at)) & ((_one << np.uint64(span)) - _one)
    inside = popcount(lower)
    beyond = -np.int64(inside <= number)
    number -= inside & beyond
    at += span & beyond
  return at


def apply_classes(base, out, shape, changes, cursors, left):
  """Writes changes to `out`, a copy of the base; undoes `scan_classes`.

  `cursors` are the next change of each class and `left` how many of the class
  come before it (`NEVER` after the last one); both are moved on.
  """
  starts, ranks_W, steps_W = changes
  is_float = shape[5]
  top_bit = 8 * base.itemsize - 1
  classes = np.zeros(BATCH, np.uint8)
  num_classes = np.int64(shape[4]) + 1
  for start in range(0, base.size, BATCH):
    _classify(base, start, shape, classes)
    for group in range(0, num_classes, 64):
      due = np.uint64(0)
      for c in range(group, min(group + 64, num_classes)):
        left[c] -= _members(classes, np.uint8(c))
        due |= (np.uint64(left[c]) >> np.uint64(63)) << np.uint64(c - group)
      while due:
        c = group + lowest(due)
        due &= due - _one
        which = np.uint8(c)
        first = popcount(match(classes, 0, which))
        second = first + popcount(match(classes, 64, which))
        third = second + popcount(match(classes, 128, which))
        here = third + popcount(match(classes, 192, which))
        rank = left[c] + here
        cursor = cursors[c]
        while rank < here:
          beyond = (rank >= first, rank >= second, rank >= third)
          word = WORD * (beyond[0] + beyond[1] + beyond[2])
          passed = first * beyond[0]
          passed += (second - first) * beyond[1] + (third - second) * beyond[2]
          members = match(classes, word, which)
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


@part(inline='always')
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
  """Like `apply_classes` for one class, whose ranks are all within the base."""
  top_bit = 8 * base.itemsize - 1
  for n in range(ranks_W.size):
    at = ranks_W[n]
    out[at] = _moved(np.int64(base[at]), steps_W[n], is_float, top_bit)
  return 0


@functools.cache
def kernel(which, bits):
  """Compiled for one type of bits, when first asked for."""
  t = numba.from_dtype(bits)
  array = types.Array(t, 1, 'C', readonly=True)
  i64 = types.int64
  shape = types.Tuple((i64, t, t, t, t, i64))
  lists = types.Tuple((types.uint8[::1], i64[::1], i64[::1]))
  fixed, to = types.Tuple((_I64, _I64, _I64)), i64[::1]
  signature = {
    scan_classes: (array, array, shape, to, i64, lists),
    apply_classes: (array, t[::1], shape, fixed, to, to),
    apply_flat: (array, t[::1], i64, _I64, _I64),
  }
  return compiled(i64(*signature[which]))(which)


def _spans(arrays, size):
  """The arrays cut at the last whole batch, and the weights in each span.

  The rest has zeros up to a whole batch.
  """
  whole = size - size % BATCH
  spans = [([a[:whole] for a in arrays], whole)] if whole else []
  if whole < size:
    tails = [np.pad(a[whole:], (0, whole + BATCH - size)) for a in arrays]
    spans.append((tails, size - whole))
  return spans


def _shape_of(number, num_classes, base, valid):
  """What kernels know of classes; weights from `valid` on are padding."""
  t = base.dtype.type
  low = 0 if num_classes == 1 else number.low
  return (
    *(valid, t(number.shift), t(number.exponent_mask), t(low)),
    *(t(num_classes - 1), int(number.is_float)),
  )


def scan(values, base, number, num_classes):
  """Class, rank, and step of the changes by position, and the class sizes."""
  run = kernel(scan_classes, base.dtype)
  # For as many changes as there can be: what is not written takes no memory.
  room = base.size + WORD
  classes_W = np.empty(room, np.uint8)
  ranks_W, steps_W = np.empty(room, np.int64), np.empty(room, np.int64)
  sizes = np.zeros(num_classes, np.int64)
  changed = 0
  for span, valid in _spans((values, base), base.size):
    about = _shape_of(number, num_classes, base, valid)
    changed = run(*span, about, sizes, changed, (classes_W, ranks_W, steps_W))
  return *(a[:changed] for a in (classes_W, ranks_W, steps_W)), sizes


def apply(base, number, changes, out):
  """Writes the base with its changes to `out`; False if a rank is too high."""
  starts, ranks_W, steps_W = changes
  np.copyto(out, base)
  if starts.size == 2:
    run = kernel(apply_flat, base.dtype)
    return run(base, out, number.is_float, ranks_W, steps_W) == 0
  run = kernel(apply_classes, base.dtype)
  cursors = starts[:-1].copy()
  left = np.full(cursors.size, NEVER)
  some = np.flatnonzero(starts[:-1] < starts[1:])
  left[some] = ranks_W[cursors[some]]
  for span, valid in _spans((base, out), base.size):
    about = _shape_of(number, cursors.size, base, valid)
    run(*span, about, changes, cursors, left)
  if base.size % BATCH:
    # The last span was a copy.
    out[-valid:] = span[1][:valid]
  return bool((cursors == starts[1:]).all())
