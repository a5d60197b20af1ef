"""Lossless codecs of one chunk of weights, with or without a base.

A chunk is at most 2**20 weights. The codec is chosen per chunk, the one with
the fewest bytes, and named by a number in the manifest:

  SAME     equals the base, no bytes
  PLANES   byte planes under zstd: keyframes, and weights unlike their base
  FLAT     gaps between changed weights, and their steps
  CLASS    the same, separately for each exponent of the base weight: a step of
           the optimizer crosses a rounding boundary in inverse proportion to
           the distance between them, and both ends know the base

Steps are differences on the number line of `model`, which describes the
blobs of FLAT and CLASS. Those of PLANES are the lowest bytes of all weights,
the next of all, and so on, after the sign was turned to the low end so that one
plane holds a whole exponent: of each the length as u32 and a zstd frame, or, if
it has the length of the plane itself, the plane. All are little-endian. The
kernels are compiled with numba; `tests/delta/codec_reference.py` is a plain
decoder.
"""

from typing import Any

import numpy as np
import zstandard

from composer_jax.delta.codec import model

SAME, PLANES, FLAT, CLASS = range(4)
TIERS = ('fast', 'small')
MAX_ELEMENTS = 2**20
# What a blob may be longer than the bits, at most: as zstd keeps noise.
MAX_OVERHEAD = 512
# Few changes do not pay for a header with a class for each exponent.
_FEW_BYTES = 2048
_LEVEL = 1  # of zstd


def _kernels():
  # numba takes half a second to import, which a process that only moves
  # bundles need not wait for.
  from composer_jax.delta.codec import rans, scan

  return rans, scan


def count_changed(values: np.ndarray, base: np.ndarray) -> int:
  bits, old = _both_bits(values, base)
  return int(np.count_nonzero(bits != old))


def encode(
  values: np.ndarray, base: np.ndarray | None, *, tier: str = 'small'
) -> tuple[int, bytes]:
  """Returns the number of the codec that serves best and its blob.

  The values are flat; the base is the same chunk of the base weights, None for
  a keyframe.
  """
  bits, found = _bits('values', values, values.size, values.dtype), []
  if base is not None:
    found = _step_blobs(values, base, tier)
    if found[0][1] == b'':
      return SAME, b''
  found = [(codec_id, blob) for codec_id, blob in found if blob is not None]
  if not found or 2 * min(len(blob) for _, blob in found) > bits.nbytes:
    found.append((PLANES, _encode_planes(bits)))
  return min(found, key=lambda pair: (len(pair[1]), pair[0]))


def _step_blobs(values, base, tier) -> list[tuple[int, bytes | None]]:
  """Blobs of the codecs of steps worth a try; empty if nothing changed."""
  number = model.kind(values.dtype)
  if number.bits.itemsize > 4:
    return [(FLAT, None if count_changed(values, base) else b'')]
  by_class = tier == 'small' and number.exponent_mask
  codec_id = CLASS if by_class else FLAT
  found = [(codec_id, encode_as(codec_id, values, base))]
  if by_class and 0 < len(found[0][1] or b'') < _FEW_BYTES:
    found.append((FLAT, encode_as(FLAT, values, base)))
  return found


def encode_as(
  codec_id: int, values: np.ndarray, base: np.ndarray
) -> bytes | None:
  """The blob of FLAT or CLASS; empty if nothing changed.

  None if it would outgrow the weights.
  """
  number = model.kind(values.dtype)
  bits, old = _both_bits(values, base)
  if codec_id not in (FLAT, CLASS) or number.bits.itemsize > 4:
    raise ValueError(f'codec {codec_id} does not code {values.dtype} by steps')
  num_classes, (rans, scan) = _num_classes(codec_id, number), _kernels()
  classes_W, *changes, sizes = scan.scan(bits, old, number, num_classes)
  if not classes_W.size:
    return b''
  counts = np.bincount(classes_W, minlength=num_classes)
  levels = np.zeros(num_classes, np.int64)
  for c in np.flatnonzero(counts):
    levels[c] = model.level(int(counts[c]), int(sizes[c]))
  if num_classes > 1:
    order = np.argsort(classes_W, kind='stable')
    changes = [change[order] for change in changes]
  starts = np.concatenate([[0], np.cumsum(counts)])
  head = model.pack_counts(counts, levels)
  limit = bits.nbytes + MAX_OVERHEAD - len(head)
  body = rans.code((starts, *changes), levels, limit)
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

  The base is never modified; PLANES needs none. A blob that `encode` does not
  make for such a chunk is a ValueError.
  """
  number = model.kind(dtype)
  if out is None:
    out = np.empty(min(size, MAX_ELEMENTS), dtype)
  new = _bits('out', out, size, dtype)
  old = None if base is None else _bits('base', base, size, dtype)
  if codec_id == PLANES:
    new[:] = _decode_planes(blob, size, number)
  elif old is None:
    raise ValueError(f'codec {codec_id} needs a base and there is none')
  elif codec_id == SAME:
    if blob:
      raise ValueError(f'blob has {len(blob)} bytes and must have none')
    new[:] = old
  else:
    _decode_classes(codec_id, blob, number, old, new)
  return out


def _decode_classes(codec_id, blob, number, old, new):
  good = codec_id in (FLAT, CLASS) and number.bits.itemsize <= 4
  if not good or not old.size:
    raise ValueError(f'codec {codec_id} does not code such a chunk')
  num_classes = _num_classes(codec_id, number)
  counts, levels, at = model.unpack_counts(blob, num_classes)
  if not 0 < counts.sum() <= old.size:
    raise ValueError(f'{counts.sum()} changes in a chunk of {old.size}')
  starts = np.concatenate([[0], np.cumsum(counts)])
  rans, scan = _kernels()
  changes = rans.decode(blob, at, old.size, starts, levels)
  if changes is None or not scan.apply(old, number, changes, new):
    raise ValueError(f'blob of {len(blob)} bytes is not a coded delta')


def _bits(what: str, array: np.ndarray, size: int, dtype: Any) -> np.ndarray:
  """Returns the bits of a chunk, in place; kernels check no bounds."""
  if array.dtype != dtype or array.shape != (size,) or size > MAX_ELEMENTS:
    raise ValueError(
      f'{what} is {array.dtype}{list(array.shape)} and must be '
      f'{dtype}[{size}], of at most {MAX_ELEMENTS} weights'
    )
  if not array.flags.c_contiguous or not array.flags.aligned:
    raise ValueError(f'{what} must be contiguous and aligned')
  return array.view(model.kind(array.dtype).bits)


def _both_bits(values, base):
  spec = values.size, values.dtype
  return _bits('values', values, *spec), _bits('base', base, *spec)


def _encode_planes(bits: np.ndarray) -> bytes:
  last = bits.dtype.type(8 * bits.itemsize - 1)
  words = bits << bits.dtype.type(1) | bits >> last
  words = words.astype(bits.dtype.newbyteorder('<'), copy=False)
  parts = []
  for plane in words.view(np.uint8).reshape(-1, bits.itemsize).T:
    data = plane.tobytes()
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    kept = min(data, frame, key=len)
    parts += [len(kept).to_bytes(4, 'little'), kept]
  return b''.join(parts)


def _decode_planes(
  blob: bytes | memoryview, size: int, number: model.Kind
) -> np.ndarray:
  planes = np.empty((size, number.bits.itemsize), np.uint8)
  for n in range(number.bits.itemsize):
    stop = 4 + int.from_bytes(blob[:4], 'little')
    plane = blob[4:stop] if stop == 4 + size else unzip(blob[4:stop], size)
    planes[:, n] = np.frombuffer(plane, np.uint8)
    blob = blob[stop:]
  if blob:
    raise ValueError(f'blob has {len(blob)} bytes after its planes')
  words = planes.view(number.bits.newbyteorder('<')).reshape(-1)
  words = words.astype(number.bits, copy=False)
  last = words.dtype.type(8 * words.itemsize - 1)
  return words >> words.dtype.type(1) | words << last


def unzip(data: bytes | memoryview, size: int) -> bytes:
  """Returns what a zstd frame holds, if it is of this size; else ValueError."""
  # The frame's own claim is checked first: the library allocates what a frame
  # announces, whatever limit it is given.
  try:
    claimed = zstandard.frame_content_size(data)
    if claimed != size:
      raise ValueError(f'a frame claims {claimed} bytes and must have {size}')
    return zstandard.ZstdDecompressor().decompress(
      data, max_output_size=size, allow_extra_data=False
    )
  except zstandard.ZstdError as error:
    raise ValueError(f'not a zstd frame ({error})') from error
