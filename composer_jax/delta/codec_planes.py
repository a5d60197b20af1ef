"""Codecs without a model of steps: raw bits, and compressed byte planes.

For keyframes, for dtypes of eight bytes, and for deltas in which nothing is
predictable.
"""

import numpy as np
import zstandard

from composer_jax.delta import order

_LEVEL = 1
VALUES, STEPS = 0, 1
_HEADER_BYTES = 1
_LENGTH_BYTES = 4


def encode(
  bits: np.ndarray, base: np.ndarray | None, number: order.Kind
) -> bytes:
  """One byte that says what the planes are of, then each plane.

  A plane is its length as u32 and a zstd frame, or, if it has the length of the
  plane itself, the plane.
  """
  if base is None:
    mode, words = VALUES, _exponents_in_one_byte(bits)
  else:
    mode = STEPS
    words = _zigzag(
      order.ordered(bits, number.is_float)
      - order.ordered(base, number.is_float)
    )
  compressor = zstandard.ZstdCompressor(level=_LEVEL)
  parts = [bytes([mode])]
  planes = _little_endian(words).view(np.uint8).reshape(-1, bits.itemsize).T
  for plane in planes:
    data = plane.tobytes()
    frame = compressor.compress(data)
    kept = frame if len(frame) < len(data) else data
    parts += [len(kept).to_bytes(_LENGTH_BYTES, 'little'), kept]
  return b''.join(parts)


def decode(
  blob: bytes | memoryview,
  size: int,
  number: order.Kind,
  base: np.ndarray | None,
) -> np.ndarray:
  """Undoes `encode`; raises ValueError for bytes it does not make."""
  if not blob or blob[0] not in (VALUES, STEPS):
    raise ValueError('blob of planes does not say what they are of')
  if blob[0] == STEPS and base is None:
    raise ValueError('planes of steps need a base and there is none')
  at = _HEADER_BYTES
  planes = np.empty((size, number.bits.itemsize), np.uint8)
  for n in range(number.bits.itemsize):
    stop = at + _LENGTH_BYTES
    length = int.from_bytes(blob[at:stop], 'little')
    if len(blob) < stop + length:
      raise ValueError(f'blob of {len(blob)} bytes ends inside plane {n}')
    planes[:, n] = _plane(blob[stop : stop + length], size)
    at = stop + length
  if at != len(blob):
    raise ValueError(f'blob has {len(blob) - at} bytes after its planes')
  words = planes.view(number.bits.newbyteorder('<')).reshape(-1)
  words = words.astype(number.bits, copy=False)
  if blob[0] == VALUES or base is None:
    return _exponents_back(words)
  keys = order.ordered(base, number.is_float) + _unzigzag(words)
  return order.unordered(keys, number.is_float)


def _plane(data: bytes | memoryview, size: int) -> np.ndarray:
  if len(data) == size:
    return np.frombuffer(data, np.uint8)
  # The frame's own claim is checked first: the library allocates what a frame
  # announces, whatever limit it is given.
  try:
    claimed = zstandard.frame_content_size(data)
    if claimed != size:
      raise ValueError(f'plane of {claimed} bytes must have {size}')
    plane = zstandard.ZstdDecompressor().decompress(
      data, max_output_size=size, allow_extra_data=False
    )
  except zstandard.ZstdError as error:
    raise ValueError(f'plane is not a zstd frame ({error})') from error
  if len(plane) != size:
    raise ValueError(f'plane of {len(plane)} bytes must have {size}')
  return np.frombuffer(plane, np.uint8)


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


def _little_endian(values: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(values, values.dtype.newbyteorder('<'))
