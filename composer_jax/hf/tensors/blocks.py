"""Pieces of our arrays, each cut from one range of a Hugging Face tensor.

A part of a tensor is a block of an array (`hf.tensors.names.Part`). Blocks are
cut along the axis that leads in the tensor, so that a piece is read as one
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

# Of a piece. Below the size from which malloc asks the kernel for fresh pages
# every time (32 MiB), which would cost more than the transposition.
PIECE_BYTES = 31 * 2**20

# Of the buffers that XLA can use as they are.
_ALIGNMENT = 64

Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayPiece:
  """A box of an array and the elements of a tensor that it holds.

  Attributes:
    box: (start, stop) of each axis of the array.
    start: first element that is read.
    stop: one past the last.
    view: shape of those elements, as axes of the part's view.
    select: of them, what belongs to the box.
    order: of the axes of the view in the block.
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
    """Whether all the elements of the range belong to the box."""
    return math.prod(self.shape) == self.stop - self.start

  def of(self, values: np.ndarray) -> np.ndarray:
    """Returns the box, a view of `values`, elements `start:stop`."""
    block = values.reshape(self.view)[self.select].transpose(self.order)
    return block.reshape(self.shape)

  def put(self, block: np.ndarray, values: np.ndarray) -> None:
    """The inverse of `of`."""
    view = values.reshape(self.view)[self.select]
    sizes = [view.shape[axis] for axis in self.order]
    theirs = block.reshape(sizes).transpose(np.argsort(self.order))
    view[...] = contiguous(theirs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedArray:
  """An array and the shape of its chunks."""

  shape: tuple[int, ...]
  dtype: np.dtype
  chunk: tuple[int, ...]


def shapes(table: names.Table) -> dict[str, tuple[int, ...]]:
  """Returns the shape of every array that the tensors of a table make up."""
  found: dict[str, list[int]] = {}
  for tensor in table.values():
    for part in tensor.parts:
      sizes = iter(part.block_shape)
      ends = [i + 1 if isinstance(i, int) else next(sizes) for i in part.index]
      known = found.setdefault(part.array, ends)
      found[part.array] = [max(a, b) for a, b in zip(known, ends, strict=True)]
  return {name: tuple(shape) for name, shape in found.items()}


def _leading_axis(part: names.TensorPart) -> int:
  """Returns the axis of the view along which ranges are cut."""
  sizes = [s.stop - s.start for s in part.select]
  long = [axis for axis, size in enumerate(sizes) if size > 1]
  return long[0] if long else len(sizes) - 1


def chunk_shape(part: names.TensorPart, item_bytes: int) -> tuple[int, ...]:
  """Returns the shape of the chunks of the part's array.

  A divisor of the block is preferred: chunks that stick out are padded.
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
  part: names.TensorPart, chunk: tuple[int, ...], within: Box | None = None
) -> Iterator[ArrayPiece]:
  """Yields the chunks of a part, each cut to the box `within`."""
  lead = _leading_axis(part)
  axes = [i for i, index in enumerate(part.index) if not isinstance(index, int)]
  split = axes[part.order.index(lead)]
  sizes = iter(part.block_shape)
  whole = [
    (i, i + 1) if isinstance(i, int) else (0, next(sizes)) for i in part.index
  ]
  for start in range(0, whole[split][1], chunk[split]):
    box = list(whole)
    box[split] = (start, min(start + chunk[split], whole[split][1]))
    if within is not None:
      pairs = zip(box, within, strict=True)
      box = [(max(a, c), min(b, d)) for (a, b), (c, d) in pairs]
    if all(a < b for a, b in box):
      yield _piece(part, tuple(box), axes)


def _piece(part: names.TensorPart, box: Box, axes: list[int]) -> ArrayPiece:
  bounds = [(0, 0)] * len(part.view)
  for axis, ours in zip(part.order, axes, strict=True):
    first = part.select[axis].start
    bounds[axis] = (first + box[ours][0], first + box[ours][1])
  # Up to the first axis of several entries the range is exact; further axes
  # are read whole and cut in memory.
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


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Returns an array that XLA's CPU backend takes over without a copy."""
  num_bytes = math.prod(shape) * dtype.itemsize
  buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
  start = -buffer.ctypes.data % _ALIGNMENT
  return buffer[start : start + num_bytes].view(dtype).reshape(shape)


@functools.cache
def _cpu() -> jax.Device | None:
  try:
    return jax.local_devices(backend='cpu')[0]
  except RuntimeError:  # JAX_PLATFORMS leaves it out.
    return None


def contiguous(values: np.ndarray) -> np.ndarray:
  """Returns the values in C order, transposed by XLA's blocked kernels.

  They are several times faster than numpy's strided copy; integers of the same
  width keep every bit.
  """
  if values.flags.c_contiguous:
    return values
  if _cpu() is None:
    return np.ascontiguousarray(values)
  bits = values.view(f'u{values.itemsize}')
  return np.asarray(jax.device_put(bits, _cpu())).view(values.dtype)
