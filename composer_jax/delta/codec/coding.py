"""Lossless codecs of one chunk of weights, with or without a base.

A chunk is at most 2**20 weights. The codec is chosen per chunk, the one with
the fewest bytes, and named by a number in the manifest:

  SAME     equals the base, no bytes
  RAW      the little-endian bits
  PLANES   byte planes under zstd: keyframes and unpredictable deltas
  FLAT     gaps between changed weights, and their steps
  CLASS    the same, separately for each exponent of the base weight: a step of
           the optimizer crosses a rounding boundary in inverse proportion to
           the distance between them, and both ends know the base

Steps are differences on the number line of `model`, which describes the
blobs of FLAT and CLASS. Those of PLANES are one byte that says what the planes
are of, then each plane: its length as u32 and a zstd frame, or, if it has the
length of the plane itself, the plane. All are little-endian. The kernels are
compiled with numba; `tests/delta/codec_reference.py` is a plain decoder.
"""

import numpy as np
import zstandard

from composer_jax.delta.codec import model

SAME, RAW, PLANES, FLAT, CLASS = range(5)
_OF_STEPS = (FLAT, CLASS)
TIERS = ('fast', 'small')
MAX_ELEMENTS = 2**20
# What a blob may be longer than the raw bits, at most.
MAX_OVERHEAD = 64
# Few changes do not pay for a header with a class for each exponent.
_FEW_BYTES = 2048
# What the planes of a blob are of; of each, the bytes of its length.
_VALUES, _STEPS = 0, 1
_LENGTH_BYTES = 4
_LEVEL = 1  # of zstd


def _kernels():
  # numba takes half a second to import, which a process that only moves
  # bundles need not wait for.
  from composer_jax.delta.codec import rans, scan

  return rans, scan


def count_changed(values: np.ndarray, base: np.ndarray) -> int:
  bits, old = _both_bits(values, base)
  if bits.itemsize > 4:
    return int(np.count_nonzero(bits != old))
  return _kernels()[1].count(bits, old)


def encode(
  values: np.ndarray, base: np.ndarray | None, *, tier: str = 'small'
) -> tuple[int, bytes]:
  """Returns the number of the codec that serves best and its blob.

  The values are flat; the base is the same chunk of the base weights, None for
  a keyframe.
  """
  number = model.kind(values.dtype)
  bits, old = model.to_bits(values), None
  _check_size(bits.size)
  found: list[tuple[int, bytes]] = []
  if base is not None:
    bits, old = _both_bits(values, base)
    found = _step_blobs(values, base, tier)
  if found and found[0][0] == SAME:
    return found[0]
  if not found or 2 * min(len(blob) for _, blob in found) > bits.nbytes:
    found.append((RAW, bits.astype(number.bits.newbyteorder('<')).tobytes()))
    found.append((PLANES, _encode_planes(bits, None, number)))
    if old is not None:
      found.append((PLANES, _encode_planes(bits, old, number)))
  return min(found, key=lambda pair: (len(pair[1]), pair[0]))


def _step_blobs(values, base, tier) -> list[tuple[int, bytes]]:
  """Blobs of the codecs of steps worth a try; SAME first if nothing changed."""
  number = model.kind(values.dtype)
  if number.width > 32:
    return [] if count_changed(values, base) else [(SAME, b'')]
  by_class = tier == 'small' and number.exponent_mask
  blob = encode_as(CLASS if by_class else FLAT, values, base)
  if blob == b'':
    return [(SAME, b'')]
  found = [(CLASS if by_class else FLAT, blob)]
  if by_class and blob is not None and len(blob) < _FEW_BYTES:
    found.append((FLAT, encode_as(FLAT, values, base)))
  return [(codec_id, blob) for codec_id, blob in found if blob is not None]


def encode_as(
  codec_id: int, values: np.ndarray, base: np.ndarray
) -> bytes | None:
  """The blob of FLAT or CLASS; empty if nothing changed.

  None if it would outgrow the weights.
  """
  number = model.kind(values.dtype)
  bits, old = _both_bits(values, base)
  _check_size(bits.size)
  if codec_id not in _OF_STEPS or number.width > 32:
    raise ValueError(f'codec {codec_id} does not code {values.dtype} by steps')
  low = 0 if codec_id == FLAT else model.window(old, number)
  shape = model.Classes(number, low, _num_classes(codec_id, number))
  rans, scan = _kernels()
  classes_W, ranks_W, steps_W, sizes = scan.scan(bits, old, shape)
  if not classes_W.size:
    return b''
  counts = np.array([classes_W.size])
  if sizes.size > 1:
    counts = np.bincount(classes_W, minlength=sizes.size)
  starts = np.concatenate([[0], np.cumsum(counts)])
  levels = np.zeros(sizes.size, np.int64)
  for c in np.flatnonzero(counts):
    levels[c] = model.level(int(counts[c]), int(sizes[c]))
  head = b'' if codec_id == FLAT else bytes([low])
  head += model.pack_counts(counts, levels)
  arranged = rans.arrange(classes_W, ranks_W, steps_W, starts)
  limit = bits.nbytes + MAX_OVERHEAD - len(head)
  body = rans.code((starts, *arranged), levels, shape, limit)
  return None if body is None else head + body


def _num_classes(codec_id, number):
  return min(
    1 if codec_id == FLAT else model.EXPONENTS, number.exponent_mask + 1
  )


def decode(
  codec_id: int,
  blob: bytes | memoryview,
  size: int,
  dtype: np.dtype,
  base: np.ndarray | None,
  *,
  out: np.ndarray | None = None,
) -> np.ndarray:
  """Undoes `encode`, to a flat array `out` or a new one of the size.

  The base is never modified; RAW and keyframes need none.

  Raises:
    ValueError: the blob is not one that `encode` makes for such a chunk.
  """
  number = model.kind(dtype)
  _check_size(size)
  if out is None:
    out = np.empty(size, dtype)
  new = _flat_bits('out', out, size, dtype)
  old = None if base is None else _flat_bits('base', base, size, dtype)
  if codec_id not in range(CLASS + 1):
    raise ValueError(f'codec {codec_id} is not one of 0 to {CLASS}')
  if codec_id == RAW:
    _check_length(blob, number.bits.itemsize * size)
    new[:] = np.frombuffer(blob, number.bits.newbyteorder('<'))
  elif codec_id == PLANES:
    new[:] = _decode_planes(blob, size, number, old)
  elif old is None:
    raise ValueError(f'codec {codec_id} needs a base and there is none')
  elif codec_id == SAME:
    _check_length(blob, 0)
    new[:] = old
  else:
    _decode_classes(codec_id, blob, number, old, new)
  return out


def _decode_classes(codec_id, blob, number, old, new):
  if number.width > 32 or not old.size:
    raise ValueError(f'codec {codec_id} does not code such a chunk')
  low, at, num_classes = 0, 0, _num_classes(codec_id, number)
  if codec_id != FLAT:
    if not blob:
      raise ValueError('blob ends before its window')
    low, at = blob[0], 1
    if low + num_classes > number.exponent_mask + 1:
      raise ValueError(f'window of exponents at {low} leaves the dtype')
  shape = model.Classes(number, low, num_classes)
  counts, levels, at = model.unpack_counts(blob, at, shape.num_classes)
  if not 0 < counts.sum() <= old.size:
    raise ValueError(f'{counts.sum()} changes in a chunk of {old.size}')
  starts = np.concatenate([[0], np.cumsum(counts)])
  if model.plain_bytes(starts, levels) > old.size // 8 + 1:
    # Classes so sparse do not have so many changes.
    raise ValueError(f'gaps of {counts.sum()} changes leave {old.size} weights')
  rans, scan = _kernels()
  changes = rans.decode(blob, at, old.size, starts, levels, shape)
  if changes is None or not scan.apply(old, shape, changes, new):
    raise ValueError(f'blob of {len(blob)} bytes is not a coded delta')


def _both_bits(values, base):
  bits, old = model.to_bits(values), model.to_bits(base)
  if base.dtype != values.dtype or old.size != bits.size:
    # Kernels check no bounds.
    raise ValueError(
      f'base is {base.dtype}[{old.size}] and must be '
      f'{values.dtype}[{bits.size}]'
    )
  return bits, old


def _flat_bits(what, array, size, dtype):
  if array.dtype != dtype or array.shape != (size,):
    raise ValueError(
      f'{what} is {array.dtype}{list(array.shape)} and must be {dtype}[{size}]'
    )
  if not array.flags.c_contiguous or not array.flags.aligned:
    raise ValueError(f'{what} must be contiguous and aligned')
  return array.view(model.kind(np.dtype(dtype)).bits)


def _check_size(size):
  if not 0 <= size <= MAX_ELEMENTS:
    raise ValueError(f'chunk of {size} weights; at most {MAX_ELEMENTS}')


def _check_length(blob, wanted):
  if len(blob) != wanted:
    raise ValueError(f'blob has {len(blob)} bytes and must have {wanted}')


def _encode_planes(
  bits: np.ndarray, base: np.ndarray | None, number: model.Kind
) -> bytes:
  if base is None:
    mode, words = _VALUES, _exponents_in_one_byte(bits)
  else:
    mode = _STEPS
    new, old = (model.ordered(b, number.is_float) for b in (bits, base))
    words = _zigzag(new - old)
  compressor = zstandard.ZstdCompressor(level=_LEVEL)
  parts = [bytes([mode])]
  words = np.ascontiguousarray(words, words.dtype.newbyteorder('<'))
  for plane in words.view(np.uint8).reshape(-1, bits.itemsize).T:
    data = plane.tobytes()
    frame = compressor.compress(data)
    kept = frame if len(frame) < len(data) else data
    parts += [len(kept).to_bytes(_LENGTH_BYTES, 'little'), kept]
  return b''.join(parts)


def _decode_planes(
  blob: bytes | memoryview,
  size: int,
  number: model.Kind,
  base: np.ndarray | None,
) -> np.ndarray:
  if not blob or blob[0] not in (_VALUES, _STEPS):
    raise ValueError('blob of planes does not say what they are of')
  if blob[0] == _STEPS and base is None:
    raise ValueError('planes of steps need a base and there is none')
  at = 1
  planes = np.empty((size, number.bits.itemsize), np.uint8)
  for n in range(number.bits.itemsize):
    stop = at + _LENGTH_BYTES
    length = int.from_bytes(blob[at:stop], 'little')
    if len(blob) < stop + length:
      raise ValueError(f'blob of {len(blob)} bytes ends inside plane {n}')
    plane = blob[stop : stop + length]
    plane = plane if length == size else unzip(plane, size)
    planes[:, n] = np.frombuffer(plane, np.uint8)
    at = stop + length
  if at != len(blob):
    raise ValueError(f'blob has {len(blob) - at} bytes after its planes')
  words = planes.view(number.bits.newbyteorder('<')).reshape(-1)
  words = words.astype(number.bits, copy=False)
  if blob[0] == _VALUES or base is None:
    return _exponents_back(words)
  keys = model.ordered(base, number.is_float) + _unzigzag(words)
  return model.unordered(keys, number.is_float)


def unzip(data: bytes | memoryview, size: int) -> bytes:
  """Returns what a zstd frame holds, if it is of this size; else ValueError."""
  # The frame's own claim is checked first: the library allocates what a frame
  # announces, whatever limit it is given.
  try:
    claimed = zstandard.frame_content_size(data)
    if claimed != size:
      raise ValueError(f'a frame claims {claimed} bytes and must have {size}')
    content = zstandard.ZstdDecompressor().decompress(
      data, max_output_size=size, allow_extra_data=False
    )
  except zstandard.ZstdError as error:
    raise ValueError(f'not a zstd frame ({error})') from error
  if len(content) != size:
    raise ValueError(f'a frame of {len(content)} bytes must have {size}')
  return content


def _exponents_in_one_byte(bits: np.ndarray) -> np.ndarray:
  """Turns the sign to the low end: a plane then holds a whole exponent."""
  last = bits.dtype.type(8 * bits.itemsize - 1)
  return bits << bits.dtype.type(1) | bits >> last


def _exponents_back(words: np.ndarray) -> np.ndarray:
  last = words.dtype.type(8 * words.itemsize - 1)
  return words >> words.dtype.type(1) | words << last


def _zigzag(steps: np.ndarray) -> np.ndarray:
  """Maps 0, -1, 1, -2, ... (two's complement) to 0, 1, 2, 3, ..."""
  one, last = (steps.dtype.type(n) for n in (1, 8 * steps.itemsize - 1))
  return (steps << one) ^ -(steps >> last)


def _unzigzag(codes: np.ndarray) -> np.ndarray:
  one = codes.dtype.type(1)
  return (codes >> one) ^ -(codes & one)
