"""Verified weights of one version, as chunks lie in them.

A tensor is one flat buffer of its boxes in the order of their numbers, so a
chunk is decoded straight to where it stays and hashed there. A receiver of
some boxes only holds those. Nobody writes to weights that are held: the next
version is built beside them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from composer_jax.delta import grid as grids
from composer_jax.delta import identity

Index = tuple[tuple[int, int], ...]
# Says which regions of a tensor (name, dtype, shape) a receiver needs.
Wanted = Callable[[str, str, tuple[int, ...]], Iterable[Index]]


def boxes_of(
  wanted: Wanted | None, name: str, dtype: str, shape: tuple[int, ...]
) -> np.ndarray | None:
  """Returns the numbers of the boxes that a receiver needs, None for all."""
  if wanted is None:
    return None
  grid = grids.of(shape, identity.DTYPES[dtype])
  numbers: set[int] = set()
  for index in wanted(name, dtype, shape):
    numbers.update(grid.intersecting(index))
  if len(numbers) == grid.num_boxes:
    return None
  return np.array(sorted(numbers), np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class HeldTensor:
  """The boxes of one tensor that a receiver holds.

  Attributes:
    dtype: its name in `identity.DTYPES`.
    shape: of the whole tensor.
    grid: of the whole tensor.
    numbers: of the boxes, ascending; None for all.
    offsets: of the boxes in `buffer`, and its end.
    buffer: flat; box after box, each in C order.
    posts: uint8 [boxes, 32], what each box hashes to.
  """

  dtype: str
  shape: tuple[int, ...]
  grid: grids.Grid
  numbers: np.ndarray | None
  offsets: np.ndarray
  buffer: np.ndarray
  posts: np.ndarray

  @classmethod
  def empty(
    cls,
    dtype: str,
    shape: tuple[int, ...],
    numbers: np.ndarray | None,
    posts: np.ndarray,
  ) -> 'HeldTensor':
    """Makes room for boxes whose values will follow.

    Args:
      dtype: of the tensor.
      shape: of the tensor.
      numbers: of the boxes, None for all.
      posts: of these boxes.
    """
    grid = grids.of(shape, identity.DTYPES[dtype])
    sizes = grid.sizes if numbers is None else grid.sizes[numbers]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    buffer = np.empty(int(offsets[-1]), identity.DTYPES[dtype])
    return cls(
      dtype=dtype,
      shape=shape,
      grid=grid,
      numbers=numbers,
      offsets=offsets,
      buffer=buffer,
      posts=posts,
    )

  def position(self, number: int) -> int:
    """Returns where a box stands in `offsets` and `posts`."""
    if self.numbers is None:
      return number
    at = int(np.searchsorted(self.numbers, number))
    if at == self.numbers.size or self.numbers[at] != number:
      raise ValueError(
        f'box {number} of {self.grid.num_boxes} is not among the '
        f'{self.numbers.size} that this receiver asked for.'
      )
    return at

  def box(self, number: int) -> np.ndarray:
    at = self.position(number)
    values = self.buffer[self.offsets[at] : self.offsets[at + 1]]
    sides = [stop - start for start, stop in self.grid.box(number)]
    return values.reshape(sides)

  def whole(self) -> np.ndarray:
    """Returns the tensor, a view where memory has its order."""
    if self.numbers is None and self.grid.is_flat:
      return self.buffer.reshape(self.shape)
    return self.block(tuple((0, length) for length in self.shape))

  def block(self, index: Index) -> np.ndarray:
    """Returns a region: a view where memory allows, else a copy."""
    numbers = self.grid.intersecting(index)
    whole = all(
      ends == (0, length)
      for ends, length in zip(index, self.shape, strict=True)
    )
    if self.numbers is None and self.grid.is_flat:
      array = self.buffer.reshape(self.shape)
      return array if whole else array[tuple(slice(*ends) for ends in index)]
    if len(numbers) == 1 and self.grid.box(numbers[0]) == tuple(index):
      return self.box(numbers[0])
    region = np.empty(
      [stop - start for start, stop in index], self.buffer.dtype
    )
    for number in numbers:
      source, target = [], []
      for (start, stop), (low, high) in zip(
        self.grid.box(number), index, strict=True
      ):
        first, last = max(start, low), min(stop, high)
        source.append(slice(first - start, last - start))
        target.append(slice(first - low, last - low))
      region[tuple(target)] = self.box(number)[tuple(source)]
    region.setflags(write=False)
    return region


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Held:
  """Weights of a version, whole or the boxes that a receiver asked for.

  Attributes:
    version: of the policy.
    target_id: identity of the whole weights, also where a part is held.
    tensors: by name.
  """

  version: int
  target_id: str
  tensors: Mapping[str, HeldTensor]

  @property
  def names(self) -> tuple[str, ...]:
    return tuple(self.tensors)

  def signature(self) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (t.dtype, t.shape) for name, t in self.tensors.items()}

  def buffer(self, name: str) -> np.ndarray:
    """Returns all held boxes of a tensor, flat and read-only."""
    return self.tensors[name].buffer

  def box(self, name: str, number: int) -> np.ndarray:
    return self._ask(name, lambda tensor: tensor.box(number))

  def block(self, name: str, index: Index) -> np.ndarray:
    """Returns a region of a tensor, read-only.

    Raises:
      ValueError: names the tensor of which a needed box is not held.
    """
    return self._ask(name, lambda tensor: tensor.block(index))

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns whole tensors, read-only."""
    return {name: self._ask(name, HeldTensor.whole) for name in self.tensors}

  def _ask(self, name, ask) -> np.ndarray:
    if name not in self.tensors:
      raise ValueError(
        f'{name} is not among the {len(self.tensors)} tensors of version '
        f'{self.version}, such as {list(self.tensors)[:5]}.'
      )
    try:
      return ask(self.tensors[name])
    except ValueError as error:
      raise ValueError(f'{name}: {error}') from error


def from_arrays(arrays: Mapping[str, np.ndarray], version: int = 0) -> Held:
  """Copies whole arrays and finds out what they hash to."""
  tensors, nodes = {}, {}
  for name, array in sorted(arrays.items()):
    dtype, shape = str(array.dtype), array.shape
    grid = grids.of(shape, array.dtype)
    posts = np.empty((grid.num_boxes, 32), np.uint8)
    tensor = HeldTensor.empty(dtype, shape, None, posts)
    for number in range(grid.num_boxes):
      box = tensor.box(number)
      box[...] = array[tuple(slice(*ends) for ends in grid.box(number))]
      posts[number] = np.frombuffer(identity.hash_box(box), np.uint8)
    tensor.buffer.setflags(write=False)
    tensors[name] = tensor
    nodes[name] = identity.tensor_node(name, dtype, shape, posts.tobytes())
  return Held(version=version, target_id=identity.root(nodes), tensors=tensors)
