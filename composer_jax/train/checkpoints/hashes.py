"""Hashes of the blocks of sharded arrays, for whatever mesh reads them."""

import math
from typing import Any

import blake3
import jax
import numpy as np


def _slices_name(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
  """Names a shard by its global bounds: '0:4,8:16'; '' for a scalar."""
  bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
  return ','.join(f'{start}:{stop}' for start, stop in bounds)


def _hash(block: np.ndarray) -> str:
  return blake3.blake3(np.ascontiguousarray(block).data.cast('B')).hexdigest()


def record(array: jax.Array) -> dict[str, Any]:
  """Describes an array: shape, dtype, and a hash of each shard held here."""
  return {
    'shape': list(array.shape),
    'dtype': str(array.dtype),
    'shards': {
      _slices_name(shard.index, array.shape): _hash(_bytes(shard.data))
      for shard in array.addressable_shards
      if shard.replica_id == 0
    },
  }


def _bytes(array: Any) -> np.ndarray:
  """Views as bytes what has no plain buffer: scalars and bfloat16."""
  return np.atleast_1d(np.ascontiguousarray(np.asarray(array))).view(np.uint8)


def bounds(name: str) -> tuple[slice, ...]:
  """The inverse of `_slices_name`."""
  pairs = [b.split(':') for b in name.split(',') if b]
  return tuple(slice(int(a), int(b)) for a, b in pairs)


def matches(array: jax.Array, shards: dict[str, str]) -> bool:
  """Verifies every recorded block that the shards of this process cover.

  The mesh may differ from the one that wrote: a block is cut out of a shard, or
  put together from several. The host holds one at a time. A block that only
  shards of several processes cover is verified by none of them.
  """
  # Replicas hold the same; one will do.
  held = {
    _slices_name(s.index, array.shape): s.data for s in array.addressable_shards
  }
  for name, expected in shards.items():
    block = _block(bounds(name), held)
    if block is not None and _hash(_bytes(block)) != expected:
      return False
  return True


def _block(
  block: tuple[slice, ...], held: dict[str, jax.Array]
) -> np.ndarray | None:
  """Returns a block of an array, None if the shards do not cover it."""
  size = math.prod(b.stop - b.start for b in block)
  pieces = []
  for name, shard in held.items():
    pairs = list(zip(block, bounds(name), strict=True))
    starts = [max(b.start, s.start) for b, s in pairs]
    stops = [min(b.stop, s.stop) for b, s in pairs]
    if all(a < b for a, b in zip(starts, stops, strict=True)):
      ends = list(zip(starts, stops, pairs, strict=True))
      there = tuple(slice(a - s.start, z - s.start) for a, z, (_, s) in ends)
      here = tuple(slice(a - b.start, z - b.start) for a, z, (b, _) in ends)
      pieces.append((here, there, shard))
  # Shards of one array do not overlap.
  sizes = [math.prod(s.stop - s.start for s in here) for here, _, _ in pieces]
  if not pieces or sum(sizes) < size:
    return None
  if len(pieces) == 1:
    return _cut(pieces[0][2], pieces[0][1])
  whole = np.empty([b.stop - b.start for b in block], pieces[0][2].dtype)
  for here, there, shard in pieces:
    whole[here] = _cut(shard, there)
  return whole


def _cut(shard: jax.Array, part: tuple[slice, ...]) -> np.ndarray:
  """Brings a part of a shard to the host."""
  if next(iter(shard.devices())).platform == 'cpu':
    return np.asarray(shard)[part]  # It lies there: no copy.
  # An array keeps the host copy that is made of it. Another one of the same
  # buffer is asked, since a slice that is the whole is the array itself.
  same = jax.make_array_from_single_device_arrays(
    shard.shape, shard.sharding, [shard]
  )
  return np.asarray(same[part])
