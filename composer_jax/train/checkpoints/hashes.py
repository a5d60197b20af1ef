"""Hashes of blocks of sharded arrays, verified on any mesh.

A block is named by its bounds in the whole array, '0:4,8:16'; '' for a scalar.
"""

import json
from collections.abc import Callable, Collection
from typing import Any

import blake3
import jax
import numpy as np
from jax.experimental import multihost_utils

from composer_jax.core import trees
from composer_jax.train import weights


def index_of(name: str) -> weights.Index:
  """Returns the (start, stop) along each axis of a named block."""
  pairs = [bounds.split(':') for bounds in name.split(',') if bounds]
  return tuple((int(start), int(stop)) for start, stop in pairs)


def _hash(block: np.ndarray) -> str:
  # As bytes: scalars and bfloat16 have no plain buffer.
  flat = np.atleast_1d(np.ascontiguousarray(block)).view(np.uint8)
  return blake3.blake3(flat.data.cast('B')).hexdigest()


def record(array: jax.Array) -> dict[str, Any]:
  """Returns an array's shape, dtype, and hashes of this process's shards."""
  return {
    'shape': list(array.shape),
    'dtype': str(array.dtype),
    'shards': {
      ','.join(f'{start}:{stop}' for start, stop in index): _hash(values)
      for index, values in weights.array_blocks(array)
    },
  }


def joined(records: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
  """Returns arrays' records with the shards of all processes.

  Every process calls it alike; one process alone exchanges nothing.
  """
  if jax.process_count() == 1:
    return records
  shards = {name: record['shards'] for name, record in records.items()}
  own_N = np.frombuffer(json.dumps(shards).encode(), np.uint8)
  sizes_P = multihost_utils.process_allgather(np.int32(own_N.size))
  padded_N = np.pad(own_N, (0, int(sizes_P.max()) - own_N.size))
  texts_PN = multihost_utils.process_allgather(padded_N)
  for text_N, size in zip(texts_PN, sizes_P, strict=True):
    for name, found in json.loads(text_N[:size].tobytes()).items():
      shards[name] = shards[name] | found
  return {n: record | {'shards': shards[n]} for n, record in records.items()}


def _gathered(array: jax.Array, block: weights.Index) -> np.ndarray:
  """Returns a block of several shards, in every process that has some."""
  starts, stops = zip(*block, strict=True)
  sizes = [stop - start for start, stop in block]
  cut = jax.lax.dynamic_slice(array, starts, sizes)
  if array.is_fully_addressable:
    return np.asarray(cut)
  return multihost_utils.process_allgather(cut, tiled=True)


def matches(
  array: jax.Array,
  shards: dict[str, str],
  gather: Callable[..., np.ndarray] = _gathered,
) -> bool:
  """Verifies every recorded block; all processes call this alike.

  On another mesh a block is cut out of a shard, by the processes that hold it.
  One that lies in no single shard is brought together by all of them.
  """
  # One of several equal replicas.
  held = {
    weights.shard_index(s.index, array.shape): s.data
    for s in array.addressable_shards
  }
  everywhere = {
    weights.shard_index(place, array.shape)
    for place in array.sharding.devices_indices_map(array.shape).values()
  }
  is_right = True  # No early end: others would wait for this process.
  for name, expected in shards.items():
    block = index_of(name)
    if own := _around(block, held):
      found = _cut(held[own[0]], _within(block, own[0]))
    elif _around(block, everywhere):
      continue  # Others hold it.
    else:
      found = gather(array, block)
    is_right &= _hash(found) == expected
  return is_right


def _around(
  block: weights.Index, places: Collection[weights.Index]
) -> list[weights.Index]:
  """Returns the places, of shards, that contain a block whole."""
  if block in places:
    return [block]
  return [
    place
    for place in places
    if all(c <= a and b <= d for (a, b), (c, d) in zip(block, place))
  ]


def _within(part: weights.Index, of: weights.Index) -> tuple[slice, ...]:
  return tuple(
    slice(start - origin, stop - origin)
    for (start, stop), (origin, _) in zip(part, of, strict=True)
  )


def _cut(shard: jax.Array, part: tuple[slice, ...]) -> np.ndarray:
  """Brings a part of a shard to the host."""
  if next(iter(shard.devices())).platform == 'cpu' or trees.is_on_host(shard):
    return np.asarray(shard)[part]  # A view.
  # A slice of everything would be the array itself, which keeps the copy.
  return np.asarray(weights.same_buffer(shard)[part])
