"""Cuts the blocks of weights into the boxes of their grids, as they arrive.

Blocks are what a process holds of sharded arrays. Shards of the shipped layouts
are made of whole boxes, which pass through as views. A box that is cut between
blocks waits here until all its pieces are there, which may come from another
process; only such boxes are copied, and their bytes are counted.
"""

import dataclasses
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from composer_jax.delta import grid as grids
from composer_jax.delta import identity, weights_held

# A box of a tensor: its name and the number of the box.
Key = tuple[str, int]
Index = tuple[tuple[int, int], ...]


class Piece(NamedTuple):
  """What one block holds of a box that it holds in part.

  Attributes:
    key: of the box.
    index: of the piece in the whole tensor.
    values: of the piece.
  """

  key: Key
  index: Index
  values: np.ndarray


@dataclasses.dataclass(slots=True)
class _Cut:
  """A box of which pieces are missing."""

  values: np.ndarray
  missing: np.ndarray
  pieces: list[Piece]

  @property
  def is_whole(self) -> bool:
    return not self.missing.any()


class Cutter:
  """Turns blocks into boxes and notices overlaps and disagreements.

  Attributes:
    signature: {name: (dtype, shape)} of the tensors seen so far.
    cut_bytes: of the boxes that no block held whole.
  """

  def __init__(self):
    self.signature: dict[str, tuple[str, tuple[int, ...]]] = {}
    self.cut_bytes = 0
    self._done: dict[str, np.ndarray] = {}
    self._cut: dict[Key, _Cut] = {}

  def add(
    self, block: identity.Block | tuple
  ) -> Iterator[tuple[Key, np.ndarray]]:
    """Yields the boxes that a block holds whole, as views, or completes.

    Raises:
      ValueError: names the tensor whose blocks disagree or overlap or have a
        dtype that bundles do not carry.
    """
    name, dtype, shape, index, values = block
    shape = tuple(shape)
    index = tuple((start, stop) for start, stop in index)
    self._check(name, dtype, shape, index, values)
    if not values.size:
      return
    grid = grids.of(shape, identity.DTYPES[dtype])
    for number in grid.intersecting(index):
      box = grid.box(number)
      shared = tuple(
        (max(a, c), min(b, d))
        for (a, b), (c, d) in zip(box, index, strict=True)
      )
      part = values[_within(shared, index)]
      if shared == box:
        self._finish(name, number, index)
        yield (name, number), part
      else:
        yield from self.add_piece(Piece((name, number), shared, part))

  def add_piece(self, piece: Piece) -> Iterator[tuple[Key, np.ndarray]]:
    """Yields the box that a piece completes, if it does."""
    name, number = piece.key
    dtype, shape = self.signature[name]
    box = grids.of(shape, identity.DTYPES[dtype]).box(number)
    cut = self._cut.get(piece.key)
    if cut is None:
      sides = [stop - start for start, stop in box]
      cut = self._cut[piece.key] = _Cut(
        np.empty(sides, identity.DTYPES[dtype]), np.ones(sides, bool), []
      )
    at = _within(piece.index, box)
    if self._done[name][number] or not cut.missing[at].all():
      raise _overlap(name, piece.index)
    cut.values[at] = piece.values
    cut.missing[at] = False
    # A copy of its own: the block is gone before the piece is sent on.
    cut.pieces.append(piece._replace(values=cut.values[at]))
    if cut.is_whole:
      del self._cut[piece.key]
      self._finish(name, number, piece.index)
      self.cut_bytes += cut.values.nbytes
      yield piece.key, cut.values

  def take_foreign(self) -> list[Piece]:
    """Removes and returns pieces of boxes that others will complete.

    The process that holds the first element of a box completes it. Every
    process can tell by itself whether that is its own.
    """
    foreign = [
      key
      for key, cut in self._cut.items()
      if cut.missing[(0,) * cut.missing.ndim]
    ]
    return [p for key in foreign for p in self._cut.pop(key).pieces]

  @property
  def waiting(self) -> set[Key]:
    """Boxes of which pieces are missing."""
    return set(self._cut)

  def check_whole(self) -> None:
    """Refuses tensors of which elements were in no block."""
    for name, (dtype, shape) in self.signature.items():
      begun = {
        number: int(cut.missing.sum())
        for (other, number), cut in self._cut.items()
        if other == name
      }
      check_cover(name, dtype, shape, self._done[name], begun)

  def _check(self, name, dtype, shape, index, values) -> None:
    if dtype not in identity.DTYPES:
      raise ValueError(
        f'{name}: dtype {dtype!r} is not one of {sorted(identity.DTYPES)}.'
      )
    seen = self.signature.setdefault(name, (dtype, shape))
    if seen != (dtype, shape):
      raise ValueError(
        f'{name}: a block of a {dtype} array of shape {shape} after one of a '
        f'{seen[0]} array of shape {seen[1]}.'
      )
    if name not in self._done:
      number = grids.of(shape, identity.DTYPES[dtype]).num_boxes
      self._done[name] = np.zeros(number, bool)
    if values.dtype != identity.DTYPES[dtype]:
      raise ValueError(
        f'{name}: a block of dtype {values.dtype} of an array of {dtype}.'
      )
    inside = len(index) == len(shape) and all(
      0 <= start <= stop <= length
      for (start, stop), length in zip(index, shape, strict=True)
    )
    if not inside or values.shape != tuple(b - a for a, b in index):
      raise ValueError(
        f'{name}: the block at {index}, of shape {values.shape}, leaves the '
        f'array of shape {shape} or is not of the size it claims.'
      )

  def _finish(self, name, number, index) -> None:
    if self._done[name][number] or (name, number) in self._cut:
      raise _overlap(name, index)
    self._done[name][number] = True


def flat(box: np.ndarray) -> np.ndarray:
  """Returns the values of a box in C order, a view where they lie so."""
  # As integers: numpy copies the types of ml_dtypes element by element and
  # under the interpreter's lock.
  bits = box.view(identity.bits_dtype(box.dtype))
  return np.ascontiguousarray(bits).reshape(-1).view(box.dtype)


def check_cover(
  name: str,
  dtype: str,
  shape: tuple[int, ...],
  covered: np.ndarray,
  begun: Mapping[int, int] = types.MappingProxyType({}),
) -> None:
  """Refuses a tensor some of whose boxes nobody has.

  Args:
    name: of the tensor.
    dtype: of the tensor.
    shape: of the tensor.
    covered: bool of each box.
    begun: {number: elements missing} of boxes that are there in part.
  """
  if covered.all():
    return
  grid = grids.of(shape, identity.DTYPES[dtype])
  lost = 0
  for number in map(int, np.flatnonzero(~covered)):
    whole = math.prod(stop - start for start, stop in grid.box(number))
    lost += begun.get(number, whole)
  raise ValueError(f'{name}: {lost} elements are in no block.')


def regions(blocks: Iterable[identity.Block | tuple]) -> weights_held.Wanted:
  """Says which part of weights these blocks are."""
  found: dict[tuple, list[Index]] = {}
  for name, dtype, shape, index, _ in blocks:
    inside = tuple(
      (max(start, 0), min(stop, length))
      for (start, stop), length in zip(index, shape, strict=True)
    )
    found.setdefault((name, dtype, tuple(shape)), []).append(inside)
  return lambda *tensor: found.get(tensor, [])


def _within(index: Index, outer: Index) -> tuple[slice, ...]:
  return tuple(
    slice(start - first, stop - first)
    for (start, stop), (first, _) in zip(index, outer, strict=True)
  )


def _overlap(name: str, index: Index) -> ValueError:
  return ValueError(f'{name}: the block at {index} overlaps another block.')
