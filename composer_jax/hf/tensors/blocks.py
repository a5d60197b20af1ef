"""Cuts arrays into pieces, each read from one range of a stored tensor.

A part of a tensor fills a block of an array (`hf.tensors.names.TensorPart`).
Blocks are cut along the axis that leads in the tensor, so that a piece is one
range of elements and nothing larger than a piece is ever held. The pieces of an
array are a regular grid: the chunks of its checkpoint.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import numpy as np

from composer_jax.hf.tensors import names

# Most bytes of a piece. From 32 MiB on malloc asks the kernel for fresh pages
# every time, which would cost more than the transposition.
PIECE_BYTES = 31 * 2**20

Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayPiece:
  """A box of an array and the elements of a tensor that fill it.

  Attributes:
    box: (start, stop) of each axis of the array.
    start: first element of the tensor that is read.
    stop: one past the last element that is read.
    view: shape of those elements, as axes of the part's view.
    select: slices of the view that belong to the box.
    order: axes of the view in the order that the block has them.
  """

  array: str
  box: Box
  start: int
  stop: int
  view: tuple[int, ...]
  select: tuple[slice, ...]
  order: tuple[int, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in self.box)

  @property
  def is_whole(self) -> bool:
    """True if all elements of the range belong to the box."""
    return math.prod(self.shape) == self.stop - self.start

  def of(self, values: np.ndarray) -> np.ndarray:
    """Returns the values of the box, a view of elements `start:stop`."""
    block = values.reshape(self.view)[self.select].transpose(self.order)
    return block.reshape(self.shape)

  def put(self, block: np.ndarray, values: np.ndarray) -> None:
    """Writes the values of the box into elements `start:stop`."""
    view = values.reshape(self.view)[self.select]
    sizes = [view.shape[axis] for axis in self.order]
    as_stored = block.reshape(sizes).transpose(np.argsort(self.order))
    view[...] = contiguous(as_stored)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedArray:
  shape: tuple[int, ...]
  dtype: np.dtype
  chunk: tuple[int, ...]


def shapes(table: names.Table) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every array that the tensors of a table fill."""
  ends_of: dict[str, list[int]] = {}
  for tensor in table.values():
    for part in tensor.parts:
      sizes = iter(part.block_shape)
      ends = [i + 1 if isinstance(i, int) else next(sizes) for i in part.index]
      known = ends_of.setdefault(part.array, ends)
      ends_of[part.array] = [
        max(a, b) for a, b in zip(known, ends, strict=True)
      ]
  return {name: tuple(ends) for name, ends in ends_of.items()}


def _leading_axis(part: names.TensorPart) -> int:
  """Returns the axis of the view along which ranges are cut."""
  sizes = [s.stop - s.start for s in part.select]
  long = [axis for axis, size in enumerate(sizes) if size > 1]
  return long[0] if long else len(sizes) - 1


def chunk_shape(part: names.TensorPart, item_bytes: int) -> tuple[int, ...]:
  """Returns the shape of the chunks of a part's array.

  A divisor of the block is preferred, since chunks that stick out are padded.
  """
  axis = part.order.index(_leading_axis(part))
  block = list(part.block_shape)
  length = block[axis]
  # A range may hold more than its block: keys beside values of each head.
  row_bytes = math.prod(part.view) // part.view[_leading_axis(part)]
  most = max(1, PIECE_BYTES // (row_bytes * item_bytes))
  if most < length:
    divisor = next(n for n in range(most, 0, -1) if length % n == 0)
    block[axis] = divisor if 4 * divisor >= most else most
  sizes = iter(block)
  return tuple(1 if isinstance(i, int) else next(sizes) for i in part.index)


def pieces(
  part: names.TensorPart, chunk: tuple[int, ...]
) -> Iterator[ArrayPiece]:
  """Yields the pieces of a part, given the shape of the array's chunks."""
  axes = [i for i, index in enumerate(part.index) if not isinstance(index, int)]
  split = axes[part.order.index(_leading_axis(part))]
  sizes = iter(part.block_shape)
  whole = [
    (i, i + 1) if isinstance(i, int) else (0, next(sizes)) for i in part.index
  ]
  for start in range(0, whole[split][1], chunk[split]):
    box = list(whole)
    box[split] = (start, min(start + chunk[split], whole[split][1]))
    yield _piece(part, tuple(box), axes)


def _piece(part: names.TensorPart, box: Box, axes: list[int]) -> ArrayPiece:
  bounds = [(0, 0)] * len(part.view)
  for axis, ours in zip(part.order, axes, strict=True):
    first = part.select[axis].start
    bounds[axis] = (first + box[ours][0], first + box[ours][1])
  # The range is exact up to the first axis with several entries; the axes after
  # it are read whole and cut in memory.
  long = [axis for axis, (a, b) in enumerate(bounds) if b - a > 1]
  lead = long[0] if long else len(bounds) - 1
  strides = [math.prod(part.view[i + 1 :]) for i in range(len(bounds))]
  base = sum(bounds[i][0] * strides[i] for i in range(lead))
  a, b = bounds[lead]
  inner = tuple(slice(*bound) for bound in bounds[lead + 1 :])
  return ArrayPiece(
    array=part.array,
    box=box,
    start=base + a * strides[lead],
    stop=base + b * strides[lead],
    view=(1,) * lead + (b - a,) + part.view[lead + 1 :],
    select=(slice(None),) * (lead + 1) + inner,
    order=part.order,
  )


@functools.cache
def _cpu() -> jax.Device | None:
  try:
    return jax.local_devices(backend='cpu')[0]
  except RuntimeError:  # JAX_PLATFORMS excludes the CPU.
    return None


def first_not_finite(values: np.ndarray) -> int | None:
  """Returns the index of the first NaN or infinity; None without one."""
  bits = values.view(f'u{values.itemsize}')
  exponent = np.array(np.inf, values.dtype).view(bits.dtype)
  bad = (bits & exponent) == exponent
  return int(bad.argmax()) if bad.any() else None


def contiguous(values: np.ndarray) -> np.ndarray:
  """Returns the values in C order, transposed by XLA's blocked kernels.

  These are several times faster than numpy's strided copy. The values go there
  as integers of the same width, which keep every bit.
  """
  if values.flags.c_contiguous:
    return values
  if _cpu() is None:
    return np.ascontiguousarray(values)
  bits = values.view(f'u{values.itemsize}')
  return np.asarray(jax.device_put(bits, _cpu())).view(values.dtype)
