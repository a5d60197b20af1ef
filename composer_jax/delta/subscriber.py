"""Follows a run's bundles and places its weights on devices.

A receiver asks for the blocks of its devices, and no more than a shard is
copied to one at once. `follower` says what is verified, and how.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.core import trees
from composer_jax.delta import follower, rebuild
from composer_jax.delta.format import keys
from composer_jax.delta.store import objects
from composer_jax.train import weights


class Subscriber:
  """Follows a run and places its weights; see the README for ten lines of use.

  Attributes:
    version: version of the tree that was returned last, None before the first.
    target_id: identity of its weights; '' before the first.
    follower: holds the weights on the host; see its `problem` and `stats`.
  """

  def __init__(
    self,
    store: str | os.PathLike | objects.Store,
    key: str | os.PathLike | keys.Hmac,
    like: Any = None,
    *,
    run_id: str = 'policy',
    memory: str | os.PathLike | None = None,
    threads: int = 2,
  ):
    """Reads nothing yet: the run may not have begun, nor made its key.

    Args:
      key: file of the publisher's key, or the key.
      like: tree of arrays or `jax.ShapeDtypeStruct`s with shardings, of which
        only this process's part is fetched; None for arrays of numpy by name.
      memory: file that keeps the newest pointer seen; see `follower.Follower`.
    """
    self.version: int | None = None
    self.target_id = ''
    self.follower = follower.Follower(
      store if isinstance(store, objects.Store) else objects.Store(store),
      run_id,
      key,
      memory=memory,
      wanted=None if like is None else wanted_by(like),
      threads=threads,
    )
    self._like = like
    self._placed: rebuild.Held | None = None

  def __enter__(self) -> 'Subscriber':
    return self

  def __exit__(self, *_) -> None:
    self.follower.held = self._placed = None

  @property
  def problem(self) -> str | None:
    """Reason why the last look found nothing to use; None if it did not."""
    return self.follower.problem

  def poll(self) -> Any:
    """Returns the newest tree if it is newer than the last one, else None.

    A ValueError says, at every look, that the weights are not like the tree.
    """
    self.follower.poll()
    held = self.follower.held
    if held is None or held is self._placed:
      return None
    tree = held.arrays() if self._like is None else place(held, self._like)
    self._placed = held
    self.version, self.target_id = held.version, held.target_id
    return tree


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


def wanted_by(like: Any) -> rebuild.Wanted:
  """Returns a function from a tensor to this process's blocks of it.

  Without a sharding that is the whole; of a tensor that `place` refuses, none.
  """
  leaves = trees.flatten_names(like)

  def indices(name: str, _: str, shape: tuple[int, ...]) -> list[weights.Index]:
    leaf = leaves.get(name)
    if leaf is None or tuple(leaf.shape) != tuple(shape):
      return []
    return list(_shards(leaf) or [weights.whole_index(shape)])

  return indices


def place(held: rebuild.Held, like: Any) -> Any:
  """Rebuilds a tree like `like` on its devices, block by block."""
  leaves, specs = trees.flatten_names(like), held.specs
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
