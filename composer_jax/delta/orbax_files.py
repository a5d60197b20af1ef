"""Regions of the arrays of an orbax checkpoint, read from a list of its files.

A keyframe is an orbax checkpoint whose every file is an object of the store.
Here its tensors are found among those files, so that a receiver of a part
fetches only what intersects it. Orbax writes them as zarr (version 2, no
OCDBT): a folder for each array, a `.zarray` of JSON in it and one file for each
chunk, compressed by zstd or not at all. That is little enough to read without
orbax, jax and tensorstore, whose decoders allocate whatever a file claims.

The bytes that `fetch` returns are taken for verified, and nothing is taken for
granted about them: what does not fit the declared shape and dtype is refused.
"""

import collections
import dataclasses
import io
import itertools
import json
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterable

import numpy as np
import zstandard

Index = tuple[tuple[int, int], ...]

METADATA = '.zarray'
# The length of a `.zarray` is bounded by the rank and not by the array.
MAX_METADATA_BYTES = 2**16

_CACHE_BYTES = 2**28


def folder_of(name: str) -> str:
  """Returns the folder of a '/'-joined tensor name, as orbax joins keys."""
  return name.replace('/', '.')


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
  """How a tensor lies in its files.

  Attributes:
    folder: of its files.
    dtype: of its elements.
    shape: of the tensor.
    sides: of a chunk; the last along an axis may hang over the end.
    is_compressed: whether files are zstd frames, or the elements themselves.
  """

  folder: str
  dtype: np.dtype
  shape: tuple[int, ...]
  sides: tuple[int, ...]
  is_compressed: bool

  @property
  def chunk_bytes(self) -> int:
    return math.prod(self.sides) * self.dtype.itemsize

  def chunks(self, index: Index) -> list[tuple[int, ...]]:
    """Returns the grid coordinates of the chunks that an index intersects."""
    ranges = [
      range(start // side, -(-stop // side))
      for (start, stop), side in zip(index, self.sides, strict=True)
    ]
    return list(itertools.product(*ranges))

  def path(self, chunk: tuple[int, ...]) -> str:
    return f'{self.folder}/{".".join(map(str, chunk)) or "0"}'


class Files:
  """The arrays of one checkpoint; threads may share it.

  Args:
    paths: of all files of the checkpoint, relative to its folder.
    fetch: returns the verified bytes of one of them.
    cache_bytes: of decoded chunks that are kept, since a region that is asked
      for is often a part of one; the last is kept whatever its size.
  """

  def __init__(
    self,
    paths: Iterable[str],
    fetch: Callable[[str], bytes],
    *,
    cache_bytes: int = _CACHE_BYTES,
  ):
    self._paths = frozenset(paths)
    self._fetch = fetch
    self._cache_bytes = cache_bytes
    self._layouts: dict[str, Layout] = {}
    self._chunks: collections.OrderedDict[str, np.ndarray] = (
      collections.OrderedDict()
    )
    self._held_bytes = 0
    self._lock = threading.Lock()
    # A file is decoded once even if several threads want it at a time.
    self._busy: dict[str, threading.Lock] = {}

  def needed(
    self, name: str, dtype: np.dtype, shape: tuple[int, ...], index: Index
  ) -> list[str]:
    """Returns the files that a region of a tensor needs, metadata first.

    Args:
      name: of the tensor, '/'-joined.
      dtype: that it must have.
      shape: that it must have.
      index: (start, stop) along each axis.

    Raises:
      ValueError: the checkpoint does not hold this tensor, or not so.
    """
    _check_index(name, shape, index)
    if _is_empty(index):
      return []
    layout = self._layout(name, np.dtype(dtype), tuple(shape))
    paths = [layout.path(chunk) for chunk in layout.chunks(index)]
    return [f'{layout.folder}/{METADATA}', *paths]

  def read(
    self, name: str, dtype: np.dtype, shape: tuple[int, ...], index: Index
  ) -> np.ndarray:
    """Returns the values of a region; the arguments are those of `needed`.

    Raises:
      ValueError: a file is missing, damaged or not what the tensor calls for.
    """
    dtype, shape = np.dtype(dtype), tuple(shape)
    _check_index(name, shape, index)
    out = np.empty([stop - start for start, stop in index], dtype)
    if _is_empty(index):
      return out
    layout = self._layout(name, dtype, shape)
    for chunk in layout.chunks(index):
      here, there = [], []
      for at, side, (start, stop) in zip(
        chunk, layout.sides, index, strict=True
      ):
        first, last = max(start, at * side), min(stop, (at + 1) * side)
        here.append(slice(first - start, last - start))
        there.append(slice(first - at * side, last - at * side))
      out[tuple(here)] = self._chunk(layout, chunk)[tuple(there)]
    return out

  def _layout(
    self, name: str, dtype: np.dtype, shape: tuple[int, ...]
  ) -> Layout:
    layout = self._layouts.get(name)
    if layout is None:
      path = f'{folder_of(name)}/{METADATA}'
      layout = parse(name, dtype, shape, self._bytes(path))
      self._layouts[name] = layout
    if (layout.dtype, layout.shape) != (dtype, shape):
      raise ValueError(
        f'{name} is {layout.dtype} of shape {layout.shape} in the checkpoint; '
        f'{dtype} of shape {shape} is wanted.'
      )
    return layout

  def _chunk(self, layout: Layout, chunk: tuple[int, ...]) -> np.ndarray:
    path = layout.path(chunk)
    with self._lock:
      busy = self._busy.setdefault(path, threading.Lock())
    try:
      with busy:
        with self._lock:
          if path in self._chunks:
            self._chunks.move_to_end(path)
            return self._chunks[path]
        values = _decode(layout, path, self._bytes(path))
        with self._lock:
          if path not in self._chunks:  # of a thread that came by another lock
            self._held_bytes += values.nbytes
          self._chunks[path] = values
          while self._held_bytes > self._cache_bytes and len(self._chunks) > 1:
            _, oldest = self._chunks.popitem(last=False)
            self._held_bytes -= oldest.nbytes
        return values
    finally:
      with self._lock:
        self._busy.pop(path, None)

  def _bytes(self, path: str) -> bytes:
    if path not in self._paths:
      raise ValueError(
        f'The checkpoint lacks {path}; its list of {len(self._paths)} files '
        'must name it.'
      )
    return self._fetch(path)


def open_folder(folder: str | os.PathLike) -> Files:
  """Returns the arrays of a folder, whose files are taken for verified."""
  folder = pathlib.Path(folder)
  paths = [p.relative_to(folder).as_posix() for p in folder.rglob('*')]
  return Files(paths, lambda path: (folder / path).read_bytes())


def parse(
  name: str, dtype: np.dtype, shape: tuple[int, ...], data: bytes
) -> Layout:
  """Reads a `.zarray`; ValueError unless it describes this very tensor."""
  path = f'{folder_of(name)}/{METADATA}'
  if len(data) > MAX_METADATA_BYTES:
    raise ValueError(
      f'{path} has {len(data)} bytes; metadata has at most '
      f'{MAX_METADATA_BYTES}.'
    )
  try:
    fields = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not JSON ({error}).') from error
  if not isinstance(fields, dict):
    raise ValueError(f'{path} is not a JSON object.')
  compressor = fields.get('compressor')
  if isinstance(compressor, dict):
    compressor = compressor.get('id')
  wanted = {
    'zarr_format': [2],
    'shape': [list(shape)],
    # Zarr has codes for the dtypes of numpy and borrows the others' names.
    'dtype': [dtype.str if dtype.isbuiltin == 1 else str(dtype)],
    'order': ['C'],
    'filters': [None],
    'dimension_separator': ['.', None],
  }
  for key, values in wanted.items():
    if fields.get(key) not in values:
      raise ValueError(
        f'{path}: {key} is {fields.get(key)!r:.200}; a keyframe whose {name} '
        f'is {dtype} of shape {shape} has {values[0]!r}.'
      )
  if compressor not in ('zstd', None):
    raise ValueError(
      f'{path}: compressor {compressor!r:.200} is neither zstd nor none.'
    )
  sides = fields.get('chunks')
  good = isinstance(sides, list) and len(sides) == len(shape)
  # A chunk that is no larger than its tensor bounds what is allocated for it.
  if not good or not all(
    type(side) is int and 1 <= side <= max(length, 1)
    for side, length in zip(sides or [], shape, strict=True)
  ):
    raise ValueError(
      f'{path}: chunks {sides!r:.200} must be sides between 1 and those of '
      f'the shape {shape}.'
    )
  return Layout(
    folder=folder_of(name),
    dtype=dtype,
    shape=shape,
    sides=tuple(sides),
    is_compressed=compressor is not None,
  )


def _decode(layout: Layout, path: str, data: bytes) -> np.ndarray:
  size = layout.chunk_bytes
  if layout.is_compressed:
    bits = np.empty(size, np.uint8)
    found = _decompress(path, data, bits.data)
  else:
    bits, found = np.frombuffer(data, np.uint8), len(data)
  if found != size:
    more = ' or more' if found > size else ''
    raise ValueError(
      f'{path} holds {found}{more} bytes; a chunk of {layout.sides} '
      f'{layout.dtype} has {size}.'
    )
  values = bits.view(layout.dtype).reshape(layout.sides)
  values.setflags(write=False)
  return values


def _decompress(path: str, data: bytes, into: memoryview) -> int:
  """Fills a buffer; returns the bytes found, one more than fit at most."""
  # Tensorstore reads frame after frame.
  reader = zstandard.ZstdDecompressor().stream_reader(
    io.BytesIO(data), read_across_frames=True
  )
  try:
    done = 0
    while done < len(into):
      count = reader.readinto(into[done:])
      if not count:
        return done
      done += count
    return done + len(reader.read(1))
  except zstandard.ZstdError as error:
    raise ValueError(f'{path} is not a zstd frame ({error}).') from error


def _is_empty(index: Index) -> bool:
  return any(start == stop for start, stop in index)


def _check_index(name: str, shape: tuple[int, ...], index: Index) -> None:
  inside = len(index) == len(shape) and all(
    0 <= start <= stop <= length
    for (start, stop), length in zip(index, shape, strict=True)
  )
  if not inside:
    raise ValueError(f'{name}: {index} is no region of the shape {shape}.')
