"""Trees of arrays as blocks of named tensors, and back.

The bundles of `delta` know no jax: they see (name, dtype, global shape, index,
block). Each block of a sharded array is yielded once, whatever the mesh, by
the process that holds it; a receiver asks for the blocks of its own devices.
Nothing larger than a shard ever comes to the host.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from composer_jax.core import trees
from composer_jax.delta import identity, weights_held

# (start, stop) of a block along each axis.
Index = tuple[tuple[int, int], ...]


def blocks(tree: Any) -> Iterator[identity.Block]:
  """Yields every addressable block of every array of a tree, once.

  A shard comes to the host when its block is asked for, and the array keeps no
  copy of it.

  Args:
    tree: of jax or numpy arrays, such as a policy's variables. Numpy arrays are
      taken to be the same in every process; the first one yields them.

  Raises:
    ValueError: two leaves have the same '/'-joined name.
  """
  named = trees.flatten_names(tree)
  if len(named) != len(jax.tree.leaves(tree)):
    raise ValueError(
      "Two leaves of the tree have the same '/'-joined name; keys must not "
      "contain '/'."
    )
  for name, leaf in named.items():
    for index, values in _pieces(leaf):
      yield identity.Block(
        name, str(values.dtype), tuple(np.shape(leaf)), index, values
      )


def _pieces(leaf: Any) -> Iterator[tuple[Index, np.ndarray]]:
  if not isinstance(leaf, jax.Array):
    if jax.process_index() == 0:
      values = np.asarray(leaf)
      yield tuple((0, length) for length in values.shape), values
    return
  for shard in leaf.addressable_shards:
    # One process of several that share a replicated array yields it.
    if shard.replica_id == 0:
      yield _bounds(shard.index, leaf.shape), _to_host(shard.data)


def _to_host(shard: jax.Array) -> np.ndarray:
  """Copies from a device; on a CPU it is a view, which outlives donation."""
  # An array keeps the host copy that is made of it. Another one of the same
  # buffer is asked, which dies here.
  same = jax.make_array_from_single_device_arrays(
    shard.shape, shard.sharding, [shard]
  )
  return np.asarray(same)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
  pairs = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
  return tuple((start, stop) for start, stop in pairs)


def _shards(leaf: Any) -> dict[Index, list[jax.Device]] | None:
  """Returns the blocks of this process and their devices; None: no sharding."""
  sharding = getattr(leaf, 'sharding', None)
  if sharding is None:
    return None
  shape, found = tuple(leaf.shape), {}
  indices = sharding.addressable_devices_indices_map(shape)
  for device, index in indices.items():
    found.setdefault(_bounds(index, shape), []).append(device)
  return found


def wanted(like: Any) -> Callable[[str, str, tuple[int, ...]], list[Index]]:
  """Returns what tells a `Subscriber` which parts this process needs.

  Args:
    like: a tree as for `to_tree`.

  Returns:
    A function of (name, dtype, shape) to the indices of the blocks: those of
    this process's devices, the whole of an array without sharding, nothing of a
    tensor that the tree lacks or whose shape differs, which `to_tree` refuses
    by name.
  """
  leaves = trees.flatten_names(like)

  def indices(name: str, dtype: str, shape: tuple[int, ...]) -> list[Index]:
    del dtype
    leaf = leaves.get(name)
    if leaf is None or tuple(leaf.shape) != tuple(shape):
      return []
    shards = _shards(leaf)
    return list(shards or [tuple((0, length) for length in shape)])

  return indices


def to_tree(
  held: weights_held.Held | Mapping[str, np.ndarray], like: Any
) -> Any:
  """Rebuilds a tree of device arrays from named arrays.

  Leaves with a sharding are put on their devices block by block: where `held`
  has only the blocks that this process needs, no more than those exist.

  Args:
    held: what a subscriber returns, or {name: whole array}.
    like: a tree of arrays or `jax.ShapeDtypeStruct`s; where a leaf has a
      sharding, the result has it too.

  Raises:
    ValueError: names the tensors that are missing or left over, or the one
      whose dtype or shape differs.
  """
  leaves = trees.flatten_names(like)
  specs = _specs(held)
  if leaves.keys() != specs.keys():
    raise ValueError(
      'The weights and the model have different tensors: missing '
      f'{sorted(leaves.keys() - specs.keys())}, left over '
      f'{sorted(specs.keys() - leaves.keys())}.'
    )

  def place(name: str, leaf: Any) -> jax.Array:
    dtype, shape = specs[name]
    if (shape, dtype) != (tuple(leaf.shape), leaf.dtype):
      raise ValueError(
        f'{name}: the weights are {dtype} of shape {shape}, the model wants '
        f'{leaf.dtype} of shape {tuple(leaf.shape)}.'
      )
    shards = _shards(leaf)
    if shards is None:
      whole = tuple((0, length) for length in shape)
      return jax.device_put(_block(held, name, whole))
    # Not make_array_from_callback, which asks once for each device: replicas
    # share a block, and it goes before the next one is made.
    pieces = [
      array
      for index, devices in shards.items()
      for array in _put(_block(held, name, index), devices)
    ]
    return jax.make_array_from_single_device_arrays(
      shape, leaf.sharding, pieces, dtype=leaf.dtype
    )

  return trees.map_names(place, like)


def _put(values: np.ndarray, devices: list[jax.Device]) -> list[jax.Array]:
  return [jax.device_put(values, device) for device in devices]


def _specs(
  held: weights_held.Held | Mapping[str, np.ndarray],
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
  if isinstance(held, weights_held.Held):
    return {
      name: (identity.DTYPES[dtype], tuple(shape))
      for name, (dtype, shape) in held.signature().items()
    }
  return {name: (array.dtype, array.shape) for name, array in held.items()}


def _block(
  held: weights_held.Held | Mapping[str, np.ndarray], name: str, index: Index
) -> np.ndarray:
  if isinstance(held, weights_held.Held):
    return held.block(name, index)
  return held[name][tuple(slice(*ends) for ends in index)]
