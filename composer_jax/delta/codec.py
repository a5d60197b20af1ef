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

Numbers 5 and 6 were written by older versions and are refused. Steps are
differences on the number line of `order`. `codec_model` describes the blobs of
FLAT and CLASS, `codec_planes` those of PLANES. All are little-endian; machines
that are not have never been tried. The kernels are compiled with numba;
`tests/delta/codec_reference.py` is a plain decoder of the same format.
"""

import types

import numpy as np

from composer_jax.delta import codec_model as model
from composer_jax.delta import codec_planes, order

SAME, RAW, PLANES, FLAT, CLASS = range(5)
_OF_STEPS = (FLAT, CLASS)
TIERS = ('fast', 'small')
MAX_ELEMENTS = 2**20
# What a blob may be longer than the raw bits, at most.
MAX_OVERHEAD = 64
# Few changes do not pay for a header with a class for each exponent.
_FEW_BYTES = 2048


def _kernels() -> types.ModuleType:
  # numba takes half a second to import, which a process that only moves
  # bundles need not wait for.
  from composer_jax.delta import codec_numba

  return codec_numba


def count_changed(values: np.ndarray, base: np.ndarray) -> int:
  bits, old = _both_bits(values, base)
  if bits.itemsize > 4:
    return int(np.count_nonzero(bits != old))
  return _kernels().count(bits, old)


def encode(
  values: np.ndarray,
  base: np.ndarray | None,
  *,
  tier: str = 'small',
) -> tuple[int, bytes]:
  """Returns the number of the codec that serves best and its blob.

  Args:
    values: flat, of any dtype of `order.kind`.
    base: the same chunk of the base weights; None for a keyframe.
    tier: 'fast' or 'small'.
  """
  if tier not in TIERS:
    raise ValueError(f'tier {tier!r} is not one of {TIERS}')
  number = order.kind(values.dtype)
  bits = order.to_bits(values)
  _check_size(bits.size)
  found: list[tuple[int, bytes]] = []
  old = None
  if base is not None:
    bits, old = _both_bits(values, base)
    found = _step_blobs(values, base, tier)
  if found and found[0][0] == SAME:
    return found[0]
  if not found or 2 * min(len(blob) for _, blob in found) > bits.nbytes:
    found.append((RAW, bits.astype(number.bits.newbyteorder('<')).tobytes()))
    found.append((PLANES, codec_planes.encode(bits, None, number)))
    if old is not None:
      found.append((PLANES, codec_planes.encode(bits, old, number)))
  return min(found, key=lambda pair: (len(pair[1]), pair[0]))


def _step_blobs(values, base, tier) -> list[tuple[int, bytes]]:
  """Blobs of the codecs of steps worth a try; SAME first if nothing changed."""
  number = order.kind(values.dtype)
  if number.width > 32:
    return [] if count_changed(values, base) else [(SAME, b'')]
  by_class = tier == 'small' and number.exponent_mask
  codec_id = CLASS if by_class else FLAT
  blob = encode_as(codec_id, values, base)
  if blob == b'':
    return [(SAME, b'')]
  found = [(codec_id, blob)]
  if codec_id == CLASS and blob is not None and len(blob) < _FEW_BYTES:
    found.append((FLAT, encode_as(FLAT, values, base)))
  return [(codec_id, blob) for codec_id, blob in found if blob is not None]


def encode_as(
  codec_id: int, values: np.ndarray, base: np.ndarray
) -> bytes | None:
  """The blob of FLAT or CLASS; empty if nothing changed.

  None if it would outgrow the weights.
  """
  number = order.kind(values.dtype)
  bits, old = _both_bits(values, base)
  _check_size(bits.size)
  if codec_id not in _OF_STEPS or number.width > 32:
    raise ValueError(f'codec {codec_id} does not code {values.dtype} by steps')
  low = 0 if codec_id == FLAT else order.window(old, number)
  shape = _shape(codec_id, low, number)
  kernels = _kernels()
  classes_W, ranks_W, steps_W, sizes = kernels.scan(bits, old, shape)
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
  changes = kernels.arrange(classes_W, ranks_W, steps_W, starts)
  limit = bits.nbytes + MAX_OVERHEAD - len(head)
  body = kernels.code(starts, *changes, levels, shape, limit)
  return None if body is None else head + body


def _shape(codec_id, low, number):
  """How the codec sorts weights into classes."""
  if codec_id == FLAT:
    return order.Classes(number, 0, 1)
  return order.Classes(number, low, _num_exponents(number))


def _num_exponents(number):
  return min(order.EXPONENTS, number.exponent_mask + 1)


def decode(
  codec_id: int,
  blob: bytes | memoryview,
  size: int,
  dtype: np.dtype,
  base: np.ndarray | None,
  *,
  out: np.ndarray | None = None,
) -> np.ndarray:
  """Undoes `encode`; the base is never modified.

  Args:
    codec_id: what `encode` returned.
    blob: what `encode` returned, from whoever sent it.
    size: weights in the chunk.
    dtype: of the weights.
    base: the same chunk of the base; needed by all but RAW and keyframes.
    out: a flat array of the dtype to write to, in place of a new one.

  Raises:
    ValueError: the blob is not one that `encode` makes for such a chunk.
  """
  number = order.kind(dtype)
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
    new[:] = codec_planes.decode(blob, size, number, old)
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
  low, at = 0, 0
  if codec_id != FLAT:
    if not blob:
      raise ValueError('blob ends before its window')
    low, at = blob[0], 1
    if low + _num_exponents(number) > number.exponent_mask + 1:
      raise ValueError(f'window of exponents at {low} leaves the dtype')
  shape = _shape(codec_id, low, number)
  counts, levels, at = model.unpack_counts(blob, at, shape.num_classes)
  if not 0 < counts.sum() <= old.size:
    raise ValueError(f'{counts.sum()} changes in a chunk of {old.size}')
  starts = np.concatenate([[0], np.cumsum(counts)])
  if model.plain_bytes(starts, levels) > old.size // 8 + 1:
    # Classes so sparse do not have so many changes.
    raise ValueError(f'gaps of {counts.sum()} changes leave {old.size} weights')
  kernels = _kernels()
  found = kernels.decode(blob, at, old.size, starts, levels, shape)
  if found is None or not kernels.apply(old, shape, starts, *found, new):
    raise ValueError(f'blob of {len(blob)} bytes is not a coded delta')


def _both_bits(values, base):
  bits, old = order.to_bits(values), order.to_bits(base)
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
  return array.view(order.kind(np.dtype(dtype)).bits)


def _check_size(size):
  if not 0 <= size <= MAX_ELEMENTS:
    raise ValueError(f'chunk of {size} weights; at most {MAX_ELEMENTS}')


def _check_length(blob, wanted):
  if len(blob) != wanted:
    raise ValueError(f'blob has {len(blob)} bytes and must have {wanted}')
