"""Trees of arrays as blocks of named tensors, and back.

The bundles of `delta` know no jax: they see (name, dtype, global shape, index,
block). Each block of a sharded array is yielded once, whatever the mesh, by
the process that holds it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from composer_jax.core import trees
from composer_jax.delta import bundle


def blocks(tree: Any) -> Iterator[bundle.Block]:
  """Yields every addressable block of every array of a tree, once.

  Args:
    tree: of jax or numpy arrays, such as a policy's variables.

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
      yield bundle.Block(
        name, str(values.dtype), tuple(leaf.shape), index, values
      )


def _pieces(leaf: Any) -> Iterator[tuple[tuple, np.ndarray]]:
  if not isinstance(leaf, jax.Array):
    values = np.asarray(leaf)
    yield tuple((0, length) for length in values.shape), values
    return
  # One process of several that share a fully replicated array yields it.
  for shard in leaf.addressable_shards:
    if shard.replica_id == 0:
      index = tuple(
        part.indices(length)[:2]
        for part, length in zip(shard.index, leaf.shape, strict=True)
      )
      yield index, np.asarray(shard.data)


def to_tree(arrays: Mapping[str, np.ndarray], like: Any) -> Any:
  """Rebuilds a tree of device arrays from named arrays.

  Args:
    arrays: {name: whole array}, as a subscriber returns them.
    like: a tree of arrays or `jax.ShapeDtypeStruct`s; where a leaf has a
      sharding, the result has it too.

  Raises:
    ValueError: names the tensors that are missing or left over, or the one
      whose dtype or shape differs.
  """
  wanted = trees.flatten_names(like)
  if wanted.keys() != arrays.keys():
    raise ValueError(
      'The weights and the model have different tensors: missing '
      f'{sorted(wanted.keys() - arrays.keys())}, left over '
      f'{sorted(arrays.keys() - wanted.keys())}.'
    )

  def place(name: str, leaf: Any) -> jax.Array:
    array = arrays[name]
    if (array.shape, array.dtype) != (tuple(leaf.shape), leaf.dtype):
      raise ValueError(
        f'{name}: the weights are {array.dtype} of shape {array.shape}, the '
        f'model wants {leaf.dtype} of shape {tuple(leaf.shape)}.'
      )
    return jax.device_put(array, getattr(leaf, 'sharding', None))

  return trees.map_names(place, like)


def num_bytes(tree: Any) -> int:
  """Returns the bytes of all leaves, which need not exist."""
  return sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )
