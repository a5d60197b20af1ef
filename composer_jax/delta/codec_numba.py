"""The compiled kernels of the codec; imported on first use.

They release the GIL and are cached on disk.
"""

import numpy as np

from composer_jax.delta import codec_coder as coder
from composer_jax.delta import codec_decoder as decoder
from composer_jax.delta import codec_model as model
from composer_jax.delta import codec_scan as scanner

# Most deltas change fewer than one in so many weights.
_FEW = 16


def _padded(array, at):
  """The rest of the array from `at`, with zeros up to a whole block."""
  tail = np.zeros(scanner.BLOCK, array.dtype)
  tail[: array.size - at] = array[at:]
  return tail


def _pieces(arrays, size):
  """The arrays cut at the last whole block, and the weights in each piece."""
  whole = size - size % scanner.BLOCK
  pieces = [([a[:whole] for a in arrays], whole)] if whole else []
  if whole < size:
    tails = [_padded(a, whole) for a in arrays]
    pieces.append((tails, size - whole))
  return pieces


def count(values, base):
  kernel = scanner.kernel(scanner.count, base.dtype)
  return sum(kernel(*piece) for piece, _ in _pieces((values, base), base.size))


def _arguments(shape, base):
  """What kernels want to know of the classes."""
  number, t = shape.number, base.dtype.type
  return (
    *(t(number.shift), t(number.exponent_mask), t(shape.low)),
    *(t(shape.num_classes - 1), number.is_float),
  )


def scan(values, base, shape):
  """Class, rank, and step of the changes by position, and the class sizes."""
  is_flat = shape.num_classes == 1
  which = scanner.scan_flat if is_flat else scanner.scan
  kernel = scanner.kernel(which, base.dtype)
  pieces = _pieces((values, base), base.size)
  changed = base.size // _FEW
  while True:
    room = changed + scanner.WORD
    classes_W = (np.zeros if is_flat else np.empty)(room, np.uint8)
    ranks_W, steps_W = np.empty(room, np.int64), np.empty(room, np.int64)
    sizes = np.zeros(shape.num_classes, np.int64)
    changed = 0
    for piece, valid in pieces:
      if is_flat:
        to = (int(sizes[0]), shape.number.is_float, changed, ranks_W, steps_W)
        changed = kernel(*piece, *to)
        sizes += valid
      else:
        about = (valid, *_arguments(shape, base))
        to = (sizes, changed, classes_W, ranks_W, steps_W)
        changed = kernel(*piece, *about, *to)
    if changed + scanner.WORD <= room:
      return *(a[:changed] for a in (classes_W, ranks_W, steps_W)), sizes


def arrange(classes_W, ranks_W, steps_W, starts):
  """Ranks and steps by class."""
  if starts.size == 2:
    return ranks_W, steps_W
  arranged = np.empty_like(ranks_W), np.empty_like(steps_W)
  coder.arrange(classes_W, ranks_W, steps_W, starts, *arranged)
  return arranged


def apply(base, shape, starts, ranks_W, steps_W, out):
  """Writes the base with its changes to `out`; False if a rank is too high."""
  if starts.size == 2:
    kernel = scanner.kernel(scanner.apply_flat, base.dtype)
    return kernel(base, out, shape.number.is_float, ranks_W, steps_W) == 0
  kernel = scanner.kernel(scanner.apply, base.dtype)
  cursors = starts[:-1].copy()
  left = np.full(cursors.size, scanner.NEVER)
  some = np.flatnonzero(starts[:-1] < starts[1:])
  left[some] = ranks_W[cursors[some]]
  for piece, valid in _pieces((base, out), base.size):
    kernel(
      *(*piece, valid, *_arguments(shape, base)),
      *(starts, ranks_W, steps_W, cursors, left),
    )
  if base.size % scanner.BLOCK:
    # The last piece was a copy.
    out[-valid:] = piece[1][:valid]
  return bool((cursors == starts[1:]).all())


def code(starts, ranks_W, steps_W, levels, shape, limit):
  """The coded changes, or None if they take more than `limit` bytes."""
  some = starts[1:] > starts[:-1]
  plain = (levels[some] - model.EVEN) // model.OCTAVE - 2
  plain = np.clip(plain, 0, model.RAW_BITS)
  last = ranks_W[starts[1:][some] - 1]
  escapes = int((last >> plain).sum()) // model.GAP_ESCAPE
  changed = ranks_W.size
  symbols = np.empty(changed + escapes, np.uint8)
  ops = np.empty(5 * changed + escapes, np.uint32)
  bits = np.empty(model.plain_bytes(starts, levels), np.uint8)
  num_ops = coder.operations(
    *(starts, ranks_W, steps_W, levels),
    *(*model.guesses(shape.number.width), ops, symbols, bits),
  )
  assert num_ops >= 0, 'more coding operations than there can be'
  lanes = model.num_lanes(changed)
  states = np.full(lanes, model.STATE_LOW, np.uint32)
  room = limit - 4 * lanes - bits.size
  if room < 0:
    return None
  # One word more than may be kept, where words are tried out.
  words = np.empty(room // 2 + 1, np.uint16)
  at = coder.code(ops, num_ops, states, words)
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
  bad = decoder.decode(
    bits,
    words,
    np.frombuffer(blob[middle:begin], '<u4').astype(np.uint32),
    size,
    starts,
    levels,
    *model.guesses(shape.number.width),
    ranks_W,
    steps_W,
    np.empty(changed, np.uint8),
  )
  return None if bad else (ranks_W, steps_W)
