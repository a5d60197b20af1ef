"""Follows a run's bundles and places its weights on devices.

A receiver asks for the blocks of its devices, and no more than a shard is
copied to one at once. `follower` says what is verified, and how.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.core import trees
from composer_jax.delta import follower, rebuild
from composer_jax.delta.format import keys
from composer_jax.delta.store import objects
from composer_jax.train import weights

_log = logging.getLogger(__name__)


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
    """Follows; nothing is read yet, so the run may not have begun.

    Args:
      store: folder or URL of the store.
      key: file of the publisher's key, or the key.
      like: tree of arrays or `jax.ShapeDtypeStruct`s with shardings, of which
        only this process's part is fetched; None for arrays of numpy by name.
      run_id: name of the run.
      memory: file that keeps the newest pointer seen; see `follower.Follower`.
      threads: number of threads that decode.
    """
    if not isinstance(store, objects.Store):
      store = objects.Store(store)
    if isinstance(key, str | os.PathLike):
      key = keys.open_key(key)
    self.version: int | None = None
    self.target_id = ''
    self.follower = follower.Follower(
      store,
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
    """Why the last look found nothing that can be used; None if it did not."""
    return self.follower.problem

  def poll(self) -> Any:
    """Returns the newest tree if it is newer than the last one, else None.

    Raises:
      ValueError: the weights are not like the tree; at every look, as long as
        nothing newer comes.
    """
    self.follower.poll()
    held = self.follower.held
    if held is None or held is self._placed:
      return None
    tree = held.arrays() if self._like is None else place(held, self._like)
    self._placed = held
    self.version, self.target_id = held.version, held.target_id
    return tree


class Poller:
  """A thread that looks for newer weights, so that no step waits.

  Consumes: what `poll` finds, such as bundles of a store.
  Waits for: the next look.
  Woken by: the clock, `stop`.
  Produces: the newest weights, once; older ones that nobody took are dropped.

  Attributes:
    problem: why the last look found nothing that can be used; '' if it did not
      fail.
    thread: the thread; not started by the constructor.
  """

  def __init__(
    self,
    poll: Callable[[], Any],
    interval_s: float,
    notify: Callable[[], None] = lambda: None,
  ):
    """Makes the thread.

    Args:
      poll: returns what is newer, None for nothing; a ValueError or an OSError
        says what cannot be used.
      interval_s: seconds between two looks.
      notify: called after something new was found.
    """
    self.problem = ''
    # A read that hangs must not keep the process from ending.
    self.thread = threading.Thread(target=self._run, name='poller', daemon=True)
    self._poll, self._interval_s, self._notify = poll, interval_s, notify
    self._stopping = threading.Event()
    self._lock = threading.Lock()
    self._newest: Any = None

  def take(self) -> Any:
    """Returns what is newest if nobody took it; from any thread."""
    with self._lock:
      newest, self._newest = self._newest, None
    return newest

  def stop(self) -> None:
    """Ends the thread after its look, which the caller may wait for."""
    self._stopping.set()

  def _run(self) -> None:
    try:
      while not self._stopping.wait(self._interval_s):
        self._look()
    except BaseException as error:
      # Passed on to the log; but it is also why nothing newer will be served.
      self.problem = f'nothing is followed any more: {error!r}'
      raise

  def _look(self) -> None:
    try:
      update = self._poll()
    except (ValueError, OSError) as error:
      if str(error) != self.problem:
        _log.warning('Nothing newer can be served: %s', error)
      self.problem = str(error)
      return
    self.problem = ''
    if update is not None:
      with self._lock:
        self._newest = update
      self._notify()


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
  """Returns a function that tells a receiver the blocks of this process.

  For (name, dtype, shape) it returns indices of blocks, or of the whole array
  without a sharding; [] for a tensor that `place` would refuse.
  """
  leaves = trees.flatten_names(like)

  def indices(name: str, _: str, shape: tuple[int, ...]) -> list[weights.Index]:
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
