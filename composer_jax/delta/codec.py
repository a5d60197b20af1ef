"""Lossless codecs of one chunk of a tensor, with or without a base.

A chunk is a flat array of unsigned integers, the bits of the weights: NaN
payloads, -0 and infinities are numbers like any other. A codec is named in the
manifest, so a better one is a new name here and an old bundle stays readable.

  same   equals the base, no bytes
  raw    the little-endian bits
  zstd   byte planes, compressed: for keyframes
  steps  the changed elements as gaps and signed steps on the ordered number
         line of the floats, compressed: an optimizer step moves most of the
         changed bf16 weights by one unit in the last place, in either
         direction, which an XOR smears over several bits
"""

import struct

import numpy as np
import zstandard

SAME, RAW, ZSTD, STEPS = CODECS = ('same', 'raw', 'zstd', 'steps')

# Level 3 measured slower and, on planes of steps, no smaller.
_LEVEL = 1
_STEPS_HEADER = struct.Struct('<II')


def encode(bits: np.ndarray, base: np.ndarray | None) -> tuple[str, bytes]:
  """Returns the codec that serves best and its blob.

  Args:
    bits: flat unsigned integers of 1, 2, 4 or 8 bytes, fewer than 2**32.
    base: the same chunk of the base weights; None for a keyframe.
  """
  blobs = {RAW: b''}
  if base is not None:
    changed = np.flatnonzero(bits != base)
    if not changed.size:
      return SAME, b''
    blobs[STEPS] = _encode_steps(bits, base, changed)
  if STEPS not in blobs or 2 * len(blobs[STEPS]) > bits.nbytes:
    blobs[ZSTD] = _compress(_planes(bits))
    blobs[RAW] = _little_endian(bits).tobytes()
  else:
    del blobs[RAW]
  codec = min(blobs, key=lambda name: len(blobs[name]))
  return codec, blobs[codec]


def decode(
  codec: str,
  blob: bytes,
  size: int,
  dtype: np.dtype,
  base: np.ndarray | None,
) -> np.ndarray:
  """Undoes `encode`; allocates no more than the chunk and its blob explain.

  Args:
    codec: one of `CODECS`.
    blob: what `encode` returned.
    size: elements of the chunk.
    dtype: the unsigned integer type of its bits.
    base: the same chunk of the base; needed by `same` and `steps`.

  Raises:
    ValueError: the blob is not one that `encode` makes for such a chunk.
  """
  if codec not in CODECS:
    raise ValueError(f'codec {codec!r} is not one of {CODECS}')
  if codec in (SAME, STEPS):
    if base is None:
      raise ValueError(f'codec {codec!r} needs a base and there is none')
    if codec == STEPS:
      return _decode_steps(blob, size, dtype, base)
    _check_length('blob', len(blob), 0)
    return base
  if codec == ZSTD:
    return _from_planes(_decompress(blob, size * dtype.itemsize), dtype)
  _check_length('blob', len(blob), size * dtype.itemsize)
  return np.frombuffer(blob, dtype.newbyteorder('<')).astype(dtype)


def _encode_steps(bits, base, changed) -> bytes:
  steps = _ordered(bits[changed]) - _ordered(base[changed])
  gaps = np.diff(changed, prepend=-1) - 1
  gap_blob = _compress(_planes(gaps.astype(np.uint32)))
  step_blob = _compress(_planes(_zigzag(steps)))
  header = _STEPS_HEADER.pack(len(changed), len(gap_blob))
  return header + gap_blob + step_blob


def _decode_steps(blob, size, dtype, base) -> np.ndarray:
  if len(blob) < _STEPS_HEADER.size:
    raise ValueError(f'blob of {len(blob)} bytes ends inside its header')
  count, gap_length = _STEPS_HEADER.unpack_from(blob)
  split = _STEPS_HEADER.size + gap_length
  if not 0 < count <= size:
    raise ValueError(f'{count} changed elements in a chunk of {size}')
  gaps = _from_planes(
    _decompress(blob[_STEPS_HEADER.size : split], 4 * count),
    np.dtype(np.uint32),
  )
  changed = np.cumsum(gaps.astype(np.int64) + 1) - 1
  if changed[-1] >= size:
    raise ValueError(f'changed element {changed[-1]} in a chunk of {size}')
  steps = _unzigzag(
    _from_planes(_decompress(blob[split:], dtype.itemsize * count), dtype)
  )
  bits = base.copy()
  bits[changed] = _unordered(_ordered(base[changed]) + steps)
  return bits


def _ordered(bits: np.ndarray) -> np.ndarray:
  """Maps sign-magnitude bits to integers in the order of the floats.

  The map is a bijection, so -0 and +0 stay apart and NaNs keep their payloads;
  differences wrap around and are exact for every pair. It only has to be good
  for floats: integers pass through it exactly all the same.
  """
  top = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
  return bits ^ (_sign(bits) | top)


def _unordered(keys: np.ndarray) -> np.ndarray:
  top = keys.dtype.type(1 << (8 * keys.dtype.itemsize - 1))
  return keys ^ (_sign(~keys) | top)


def _sign(bits: np.ndarray) -> np.ndarray:
  """All bits set where the top one is, else none."""
  return -(bits >> bits.dtype.type(8 * bits.dtype.itemsize - 1))


def _zigzag(steps: np.ndarray) -> np.ndarray:
  """Maps 0, -1, 1, -2, ... (two's complement) to 0, 1, 2, 3, ..."""
  one = steps.dtype.type(1)
  return (steps << one) ^ _sign(steps)


def _unzigzag(codes: np.ndarray) -> np.ndarray:
  one = codes.dtype.type(1)
  return (codes >> one) ^ -(codes & one)


def _planes(values: np.ndarray) -> bytes:
  """All lowest bytes, then all second bytes, and so on."""
  little = _little_endian(values)
  return little.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(data: bytes, dtype: np.dtype) -> np.ndarray:
  planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
  little = np.ascontiguousarray(planes.T).view(dtype.newbyteorder('<'))
  return little.reshape(-1).astype(dtype, copy=False)


def _little_endian(values: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(values, values.dtype.newbyteorder('<'))


def _compress(data: bytes) -> bytes:
  return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _decompress(blob: bytes, length: int) -> bytes:
  # The frame's own claim is checked first: the library allocates what a frame
  # announces, whatever limit it is given.
  try:
    claimed = zstandard.frame_content_size(blob)
    _check_length('decompressed blob', claimed, length)
    data = zstandard.ZstdDecompressor().decompress(
      blob, max_output_size=length, allow_extra_data=False
    )
  except zstandard.ZstdError as error:
    raise ValueError(f'blob is not a zstd frame ({error})') from error
  _check_length('decompressed blob', len(data), length)
  return data


def _check_length(what: str, found: int, wanted: int) -> None:
  if found != wanted:
    raise ValueError(f'{what} has {found} bytes and must have {wanted}')
