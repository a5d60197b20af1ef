"""Trees of arrays as blocks of named tensors, and back onto devices.

Each block of a sharded array is yielded once, by a process that has it; a
receiver asks for the blocks of its devices. No more than a shard is copied to
the host at once.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from composer_jax.core import trees
from composer_jax.delta import rebuild
from composer_jax.delta.format import identity
from composer_jax.train import weights


def copy(tree: Any) -> Any:
  """Returns the tree in memory of its own, on the devices where it is."""
  return jax.tree.map(
    lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else np.array(leaf),
    tree,
  )


def blocks(tree: Any) -> Iterator[identity.Block]:
  """Yields every addressable block of every array of a tree, once.

  A shard is copied to the host when its block is requested, and the array does
  not keep the copy. The first process yields numpy arrays, which must be equal
  in all processes.

  Raises:
    ValueError: two leaves have the same '/'-joined name.
  """
  for name, leaf in trees.flatten_names(tree).items():
    for index, values in weights.array_blocks(leaf):
      dtype, shape = str(values.dtype), tuple(np.shape(leaf))
      yield identity.Block(name, dtype, shape, index, values)


def agreed(number: int) -> int:
  """Returns the number of process 0, of 62 bits; collective."""
  words = np.array([number >> 31 & 0x7FFFFFFF, number & 0x7FFFFFFF], np.int32)
  high, low = multihost_utils.broadcast_one_to_all(words)
  return int(high) << 31 | int(low)


def _shards(leaf: Any) -> dict[weights.Index, list[jax.Device]] | None:
  """Returns this process's blocks and devices; None without a sharding."""
  sharding = getattr(leaf, 'sharding', None)
  if sharding is None:
    return None
  shape, shards = tuple(leaf.shape), {}
  slices_of = sharding.addressable_devices_indices_map(shape)
  for device, slices in slices_of.items():
    shards.setdefault(weights.shard_index(slices, shape), []).append(device)
  return shards


def wanted(like: Any) -> rebuild.Wanted:
  """Returns a function that tells a receiver the blocks of this process.

  For (name, dtype, shape) it returns indices of blocks, or of the whole array
  without a sharding; [] for a tensor that `place` would refuse.
  """
  leaves = trees.flatten_names(like)

  def indices(
    name: str, dtype: str, shape: tuple[int, ...]
  ) -> list[weights.Index]:
    del dtype
    leaf = leaves.get(name)
    if leaf is None or tuple(leaf.shape) != tuple(shape):
      return []
    return list(_shards(leaf) or [weights.whole_index(shape)])

  return indices


def place(held: rebuild.Held, like: Any) -> Any:
  """Rebuilds a tree of device arrays from what is held.

  Leaves of `like`, arrays or `jax.ShapeDtypeStruct`s, with a sharding are put
  on their devices block by block.

  Raises:
    ValueError: tensors are missing or left over, or a dtype or shape differs.
  """
  leaves, specs = trees.flatten_names(like), held.signature()
  if leaves.keys() != specs.keys():
    raise ValueError(
      'The weights and the model have different tensors: missing '
      f'{sorted(leaves.keys() - specs.keys())}, left over '
      f'{sorted(specs.keys() - leaves.keys())}.'
    )

  def put(name: str, leaf: Any) -> jax.Array:
    dtype, shape = specs[name]
    if (tuple(shape), jnp.dtype(dtype)) != (tuple(leaf.shape), leaf.dtype):
      raise ValueError(
        f'{name}: the weights are {dtype} of shape {shape}, the model wants '
        f'{leaf.dtype} of shape {tuple(leaf.shape)}.'
      )
    shards = _shards(leaf)
    if shards is None:
      return jax.device_put(held.block(name, weights.whole_index(leaf.shape)))
    # Not make_array_from_callback, which asks for each replica's block anew and
    # keeps all of them.
    arrays = []
    for index, devices in shards.items():
      values = held.block(name, index)
      arrays += [jax.device_put(values, device) for device in devices]
    return jax.make_array_from_single_device_arrays(
      leaf.shape, leaf.sharding, arrays, dtype=leaf.dtype
    )

  return trees.map_names(put, like)
