"""Other ways to send a step of a policy, written from their descriptions.

Each encodes one array given its base and counts the bytes; the two that are
timed decode as well. Hashes and file headers count for ours, not for these.

  xor      XOR with the base under zstd-1, an array at a time (slime, miles,
           SkyRL, Stitch)
  index    int32 index and the new value of what changed (TRL, verl, vime)
  gaps     PULSE's and grail's lists: gaps of rows as u8 or i32, gaps of
           columns as u16 or i32, the new values, zstd-1
  planes   XOR with the base, its low and its high bytes apart, under zstd-1
  steps    gaps as u8 and changes in units in the last place as i8, escapes for
           larger ones, under zstd-3: the earlier format of our bundles, which
           did not use the exponents of the base
"""

from collections.abc import Callable, Mapping

import numpy as np
import zstandard

from benchmarks import delta_bounds

Peer = Callable[[np.ndarray, np.ndarray], bytes]

_LEVEL = 1
_ONE = zstandard.ZstdCompressor(level=_LEVEL)
_THREE = zstandard.ZstdCompressor(level=3)
_READER = zstandard.ZstdDecompressor()


def xor(base: np.ndarray, array: np.ndarray) -> bytes:
  mixed = delta_bounds.bits_of(base) ^ delta_bounds.bits_of(array)
  return _ONE.compress(mixed.data)


def undo_xor(blob: bytes, base: np.ndarray) -> np.ndarray:
  old = delta_bounds.bits_of(base)
  difference = np.frombuffer(_READER.decompress(blob), old.dtype)
  return difference ^ old


def index(base: np.ndarray, array: np.ndarray) -> bytes:
  where, values = _changed(base, array)
  return where.astype('<i4').tobytes() + values.tobytes()


def planes(base: np.ndarray, array: np.ndarray) -> bytes:
  mixed = delta_bounds.bits_of(base) ^ delta_bounds.bits_of(array)
  width = mixed.dtype.itemsize
  apart = mixed.view(np.uint8).reshape(-1, width).T
  return _ONE.compress(np.ascontiguousarray(apart).data)


def gaps(base: np.ndarray, array: np.ndarray) -> bytes:
  where, values = _changed(base, array)
  columns = array.shape[-1] if array.ndim > 1 else max(array.size, 1)
  row, column = np.divmod(where, columns)
  row_gap = np.diff(row, prepend=0)
  # Within a row the gap to the element before; at its start, the column.
  column_gap = np.where(row_gap > 0, column, np.diff(column, prepend=0))
  row_type = 'u1' if row_gap.max(initial=0) < 2**8 else '<i4'
  column_type = '<u2' if column_gap.max(initial=0) < 2**16 else '<i4'
  return _ONE.compress(
    row_gap.astype(row_type).tobytes()
    + column_gap.astype(column_type).tobytes()
    + values.tobytes()
  )


def undo_gaps(blob: bytes, base: np.ndarray, count: int) -> np.ndarray:
  """Undoes `gaps` where gaps of rows fit a byte and those of columns two.

  Args:
    blob: result of `gaps`.
    base: array of one or two dimensions to which the changes apply.
    count: number of changed elements, which a file's header would hold.
  """
  data = _READER.decompress(blob)
  columns = base.shape[-1] if base.ndim > 1 else max(base.size, 1)
  row_gap = np.frombuffer(data, 'u1', count)
  column = np.frombuffer(data, '<u2', count, count).astype(np.int64)
  array = delta_bounds.bits_of(base).copy()
  values = np.frombuffer(data, array.dtype, count, 3 * count)
  starts = np.flatnonzero(row_gap)
  row = np.cumsum(row_gap, dtype=np.int64)
  total = np.cumsum(column)
  before = np.zeros(count, np.int64)
  before[starts] = total[starts] - column[starts]
  np.maximum.accumulate(before, out=before)
  array[row * columns + total - before] = values
  return array


def steps(base: np.ndarray, array: np.ndarray) -> bytes:
  old, new = delta_bounds.bits_of(base), delta_bounds.bits_of(array)
  where = np.flatnonzero(old != new)
  gap = np.diff(where, prepend=-1) - 1
  step = delta_bounds.ordered(new[where]) - delta_bounds.ordered(old[where])
  far, large = gap > 254, np.abs(step) > 127
  return _THREE.compress(
    np.where(far, 255, gap).astype('u1').tobytes()
    + np.where(large, -128, step).astype('i1').tobytes()
    + gap[far].astype('<u4').tobytes()
    + step[large].astype('<i8').tobytes()
  )


def _changed(
  base: np.ndarray, array: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  old, new = delta_bounds.bits_of(base), delta_bounds.bits_of(array)
  where = np.flatnonzero(old != new)
  return where, new[where]


SIZED: dict[str, Peer] = {
  'XOR+zstd-1': xor,
  'XOR+planes+zstd-1': planes,
  'index+value': index,
  'gap lists': gaps,
  'gaps+steps+zstd-3': steps,
}


def policy_bytes(
  peer: Peer,
  base: Mapping[str, np.ndarray],
  policy: Mapping[str, np.ndarray],
) -> int:
  return sum(len(peer(base[name], policy[name])) for name in policy)
