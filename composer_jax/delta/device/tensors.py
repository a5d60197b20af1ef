"""Converts trees of arrays to blocks of named tensors, and back.

A `WeightTransport` handles TensorBlocks only, not jax arrays. Each block of a
sharded array is yielded once, by a process that has it; a receiver asks for the
blocks of its devices. No more than a shard is copied to the host at once.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import trees
from composer_jax.delta import weights_held
from composer_jax.train import weights


class TensorBlock(NamedTuple):
  """Block of a global array on the host."""

  name: str
  dtype: str  # its name, such as 'bfloat16'
  shape: tuple[int, ...]  # of the global array
  index: weights.Index
  values: np.ndarray


def blocks(tree: Any) -> Iterator[TensorBlock]:
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
      yield TensorBlock(name, dtype, shape, index, values)


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


def wanted(
  like: Any,
) -> Callable[[str, str, tuple[int, ...]], list[weights.Index]]:
  """Returns a function that tells a receiver the blocks of this process.

  For (name, dtype, shape) it returns indices of blocks, or of the whole array
  without a sharding; [] for a tensor that `to_tree` would refuse.
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


def to_tree(held: weights_held.Held, like: Any) -> Any:
  """Rebuilds a tree of device arrays from named arrays.

  Leaves of `like`, arrays or `jax.ShapeDtypeStruct`s, with a sharding are put
  on their devices block by block.

  Raises:
    ValueError: tensors are missing or left over, or a dtype or shape differs.
  """
  leaves, signature = trees.flatten_names(like), held.signature()
  if leaves.keys() != signature.keys():
    raise ValueError(
      'The weights and the model have different tensors: missing '
      f'{sorted(leaves.keys() - signature.keys())}, left over '
      f'{sorted(signature.keys() - leaves.keys())}.'
    )

  def place(name: str, leaf: Any) -> jax.Array:
    dtype, shape = signature[name]
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

  return trees.map_names(place, like)
