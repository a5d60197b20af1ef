"""Vectors of weights: what LLVM knows and numba does not expose.

Each function loads 64 neighbours of an array; most answer with one bit for
each. The compiler makes the vector instructions of the machine of them. Nothing
here checks an index; the kernels call it on whole blocks only.
"""

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

# The decorator takes the first argument away, which no type checker sees.
intrinsic: Any = extending.intrinsic

WORD = 64  # weights that an integer has a bit for
BLOCK = 256
_i1, _i8, _i32, _i64 = (ir.IntType(width) for width in (1, 8, 32, 64))


def _pointer(context, builder, array_type, array, index, size):
  data = context.make_array(array_type)(context, builder, array).data
  element = context.get_data_type(array_type.dtype)
  vector = ir.VectorType(element, size)
  return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _load(context, builder, array_type, array, index):
  pointer = _pointer(context, builder, array_type, array, index, WORD)
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
def classify(typingctx, bits, start, shift, mask, low, top, classes, to):
  """classes[to:] = clip((bits[start:] >> shift) & mask, low, low+top) - low.

  Of 64 weights.
  """
  scalar = bits.dtype

  def code(context, builder, signature, args):
    x = _load(context, builder, signature.args[0], args[0], args[1])
    shift, mask, low, top = (_everywhere(builder, a) for a in args[2:6])
    x = builder.and_(builder.lshr(x, shift), mask)
    x = builder.select(builder.icmp_unsigned('>', x, low), x, low)
    x = builder.sub(x, low)
    x = builder.select(builder.icmp_unsigned('<', x, top), x, top)
    if scalar.bitwidth > 8:
      x = builder.trunc(x, ir.VectorType(_i8, WORD))
    pointer = _pointer(
      context, builder, signature.args[6], args[6], args[7], WORD
    )
    builder.store(x, pointer, align=1)
    return context.get_dummy_value()

  return types.void(
    *(bits, types.intp, scalar, scalar, scalar, scalar, classes, types.intp)
  ), code


@intrinsic
def copy(typingctx, to, source, start, stop):
  """to[start:stop] = source[start:stop] of arrays that do not overlap."""

  def code(context, builder, signature, args):
    size = context.get_abi_sizeof(
      context.get_data_type(signature.args[0].dtype)
    )
    first, last = args[2:]
    target, origin = (
      context.make_array(signature.args[n])(context, builder, args[n]).data
      for n in (0, 1)
    )
    cgutils.raw_memcpy(
      builder,
      builder.gep(target, [first]),
      builder.gep(origin, [first]),
      builder.sub(last, first),
      size,
    )
    return context.get_dummy_value()

  return types.void(to, source, types.intp, types.intp), code


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
