"""Hashes of blocks of sharded arrays, verified on any mesh.

A block is named by its bounds in the whole array, '0:4,8:16'; '' for a scalar.
"""

import json
import math
from typing import Any

import blake3
import jax
import numpy as np
from jax.experimental import multihost_utils

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


def matches(array: jax.Array, shards: dict[str, str]) -> bool:
  """Verifies every recorded block that the shards of this process cover.

  On another mesh a block is cut out of a shard or assembled from several. No
  process verifies a block that only shards of several processes cover.
  """
  # One of several equal replicas.
  held = {
    weights.shard_index(s.index, array.shape): s.data
    for s in array.addressable_shards
  }
  blocks = ((_block(index_of(name), held), shards[name]) for name in shards)
  return all(
    block is None or _hash(block) == expected for block, expected in blocks
  )


def _block(
  block: weights.Index, held: dict[weights.Index, jax.Array]
) -> np.ndarray | None:
  """Returns a block of an array, None if the shards do not cover it."""
  parts = []
  for index, shard in held.items():
    shared = tuple(
      (max(a, c), min(b, d))
      for (a, b), (c, d) in zip(block, index, strict=True)
    )
    if all(start < stop for start, stop in shared):
      parts.append((shared, _within(shared, index), shard))
  # Shards of one array do not overlap.
  if not parts or sum(_size(part) for part, _, _ in parts) < _size(block):
    return None
  if len(parts) == 1:
    return _cut(parts[0][2], parts[0][1])
  whole = np.empty([stop - start for start, stop in block], parts[0][2].dtype)
  for shared, there, shard in parts:
    whole[_within(shared, block)] = _cut(shard, there)
  return whole


def _size(index: weights.Index) -> int:
  return math.prod(stop - start for start, stop in index)


def _within(part: weights.Index, of: weights.Index) -> tuple[slice, ...]:
  return tuple(
    slice(start - origin, stop - origin)
    for (start, stop), (origin, _) in zip(part, of, strict=True)
  )


def _cut(shard: jax.Array, part: tuple[slice, ...]) -> np.ndarray:
  """Brings a part of a shard to the host."""
  if next(iter(shard.devices())).platform == 'cpu':
    return np.asarray(shard)[part]  # A view.
  # A slice of everything would be the array itself, which keeps the copy.
  return np.asarray(weights.same_buffer(shard)[part])
