"""Blocks of sharded arrays, on the host.

No more than a shard is copied to the host at once. Checkpoints hash the blocks,
and `delta.device.tensors` sends them as named tensors.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

# (start, stop) of a block along each axis.
Index = tuple[tuple[int, int], ...]


def array_blocks(array: Any) -> Iterator[tuple[Index, np.ndarray]]:
  """Yields the blocks of one array for which this process is responsible."""
  if not isinstance(array, jax.Array):
    if jax.process_index() == 0:
      values = np.asarray(array)
      yield whole_index(values.shape), values
    return
  for shard in array.addressable_shards:
    # Only one of several processes yields a replicated block.
    if shard.replica_id == 0:
      index = shard_index(shard.index, array.shape)
      yield index, np.asarray(same_buffer(shard.data))


def same_buffer(shard: jax.Array) -> jax.Array:
  """Returns another array of the same buffer, to be copied to the host.

  An array keeps its host copy; that of a temporary array is freed with it. On a
  CPU the copy is a view, which outlives donation.
  """
  return jax.make_array_from_single_device_arrays(
    shard.shape, shard.sharding, [shard]
  )


def shard_index(slices: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
  """Converts jax's index of a shard."""
  pairs = [s.indices(n)[:2] for s, n in zip(slices, shape, strict=True)]
  return tuple((start, stop) for start, stop in pairs)


def whole_index(shape: tuple[int, ...]) -> Index:
  return tuple((0, length) for length in shape)
