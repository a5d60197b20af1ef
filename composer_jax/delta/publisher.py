"""Publishes the policies of a trainer as bundles, while it trains on.

Consumes: trees of arrays, one at a time.
Waits for: the store; a tree that comes while one is in flight waits for it.
Woken by: `publish` and `gc`.
Produces: a `BundleInfo` for each version; an error at the next call.
"""

import collections
import logging
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from composer_jax.core import trees
from composer_jax.delta import chain, team
from composer_jax.delta.format import identity, keys
from composer_jax.delta.store import objects
from composer_jax.train import weights

# How long processes wait for each other's messages, and for the key.
_TIMEOUT_S = 600.0
_log = logging.getLogger(__name__)


class Publisher:
  """Publishes one run from a thread of its own, at most one tree at a time.

  Arrays are brought to the host in the thread, shard by shard, each process its
  own. Under `jax.distributed` every process has one and calls it alike.

  Args:
    store: folder or URL of the store.
    key: file of the key that signs; made when missing.
    peers: how several processes share the work; None asks jax for them.
  """

  def __init__(
    self,
    store: str | os.PathLike | objects.Store,
    key: str | os.PathLike,
    run_id: str = 'policy',
    options: chain.BundleOptions | None = None,
    *,
    peers: team.Peers | None = None,
  ):
    if not isinstance(store, objects.Store):
      store = objects.Store(store)
    store.check_writable()
    peers = peers or _peers()
    opened = _open_or_make_key(pathlib.Path(key), peers, store, run_id)
    self._chain = chain.BundleWriter(
      store, run_id, opened, options=options, peers=peers
    )
    self._done: list[chain.BundleInfo] = []
    self._tasks: collections.deque[futures.Future] = collections.deque()
    self._thread = futures.ThreadPoolExecutor(1, 'bundles')
    self._is_closed = False

  def __enter__(self) -> 'Publisher':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  @property
  def version(self) -> int | None:
    """The last committed version, None before the first."""
    return self._chain.version

  def publish(self, tree: Any, version: int, *, owned: bool = False) -> None:
    """Copies a tree and starts publishing; waits for what was started before.

    An error of that is raised here, and this tree is not published.

    Args:
      tree: arrays of jax or numpy, which may be donated or written to then.
      version: above the last one, or one published before.
      owned: whether nobody else has the tree's arrays, which spares the copy.
    """
    self.wait()
    if not owned:
      tree = copy(tree)
    self._start(
      lambda: self._done.append(self._chain.publish(blocks(tree), version))
    )

  def results(self) -> list[chain.BundleInfo]:
    """Returns what was finished since, in order; an error is raised once."""
    while self._tasks and self._tasks[0].done():
      self._tasks.popleft().result()
    return [self._done.pop(0) for _ in range(len(self._done))]

  def wait(self) -> None:
    """Waits until nothing is in flight; raises what `results` would."""
    futures.wait(self._tasks)
    while self._tasks:
      self._tasks.popleft().result()

  def rewind(self, version: int) -> None:
    """Makes published versions after `version` void; receivers follow."""
    self._start(lambda: self._chain.rewind(version))
    self.wait()

  def gc(self, keep: int, say: Callable[[str], None] = _log.warning) -> None:
    """Frees, after what is in flight, what no receiver needs any more.

    Damaged old bundles cost room and end no run; `say` is told of them.
    """

    def collect() -> None:
      try:
        self._chain.gc(keep)
      except (ValueError, OSError) as error:
        say(f'old bundles are not deleted, the run goes on: {error}')

    self._start(collect)

  def close(self) -> None:
    """Waits for what is in flight and ends the thread.

    Raises what could not be published, unless an error is on its way already.
    """
    self._is_closed = True
    self._thread.shutdown()
    if sys.exc_info()[0] is None:
      self.wait()
    while self._tasks:
      if (error := self._tasks.popleft().exception()) is not None:
        _log.error('Not published: %s', error)

  def _start(self, task: Callable[[], None]) -> None:
    if self._is_closed:
      raise RuntimeError('This publisher is closed; make another.')
    self._tasks.append(self._thread.submit(task))


def _peers() -> team.Peers | None:
  """Returns the share of this process; collective, None if it is alone."""
  if jax.process_count() == 1:
    return None
  # Messages of an earlier launch must not be taken for those of this one.
  launch = np.frombuffer(secrets.token_bytes(8), np.uint8).astype(np.int32)
  launch = multihost_utils.broadcast_one_to_all(launch)
  return team.Peers(
    process=jax.process_index(),
    count=jax.process_count(),
    attempt=np.asarray(launch).astype(np.uint8).tobytes().hex(),
    timeout_s=_TIMEOUT_S,
  )


def _open_or_make_key(path: pathlib.Path, peers, store, run_id) -> keys.Hmac:
  """Opens the key; the first process makes it if there is none."""
  deadline = time.monotonic() + _TIMEOUT_S
  while not path.exists():
    if peers is not None and peers.process:
      if time.monotonic() > deadline:
        raise ValueError(
          f'{path}: no key within {_TIMEOUT_S:.0f} s; the processes of a run '
          'must see the same file, which the first one makes.'
        )
      time.sleep(0.05)
      continue
    # To a publisher a pointer of another key is a damaged one, to be replaced:
    # two jobs at one store would do that to each other without end.
    if store.read_pointer(run_id) is not None:
      raise ValueError(
        f'{store.url} has a run {run_id!r} already, and there is no {path}. '
        'Bring the key of that run, or choose another store.'
      )
    break
  return keys.make_key(path)


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
  in all processes. Two leaves of one '/'-joined name are a ValueError.
  """
  for name, leaf in trees.flatten_names(tree).items():
    for index, values in weights.array_blocks(leaf):
      dtype, shape = str(values.dtype), tuple(np.shape(leaf))
      yield identity.Block(name, dtype, shape, index, values)
