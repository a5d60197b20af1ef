"""Follows a run's bundles and never serves anything unverified.

Consumes: the run's pointer, then the manifests and blobs it leads to.
Waits for: the store, while the held weights are served on.
Woken by: the caller, as often as it likes.
Produces: whole verified weights by one swap of a reference, or None with the
reason in `problem`.
"""

import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from composer_jax.core import files
from composer_jax.delta import fetch, restore, signing, weights_held
from composer_jax.delta import manifest as manifests
from composer_jax.delta import store as store_lib

_log = logging.getLogger(__name__)


class Update(NamedTuple):
  """Weights of a version; nobody may write to them."""

  version: int
  target_id: str
  weights: weights_held.Held


class Stats(NamedTuple):
  """What the last update took.

  Attributes:
    route: the bundles applied, such as 'key 0', 'delta 0-8', 'delta 8-9'; none
      where the weights were held under another version.
    bytes: read from the store for them, failed ways included.
    fetch_s: seconds of reading, summed over the requests.
    decode_s: seconds of decoding and hashing, summed over the threads.
    wall_s: seconds from the pointer to the swap.
  """

  route: tuple[str, ...]
  bytes: int
  fetch_s: float
  decode_s: float
  wall_s: float


class Subscriber:
  """Holds the last verified weights of a run and moves them forward.

  One thread polls; any may read `held` and call `rollback`.

  Attributes:
    held: what it serves, None before the first success.
    previous: what it served before, for `rollback`.
    problem: why the last poll was refused, None when it was not.
    stats: of the last update, None before the first.
  """

  def __init__(
    self,
    store: store_lib.Store,
    run_id: str,
    verifier: signing.Verifier,
    *,
    memory: str | os.PathLike | None = None,
    cache: str | os.PathLike | None = None,
    wanted: weights_held.Wanted | None = None,
    threads: int = 2,
    now: Callable[[], float] = time.time,
  ):
    """Follows.

    Args:
      store: where to read.
      run_id: names the run and its pointer.
      verifier: of the pointer's signature.
      memory: a file of this receiver alone that keeps the newest pointer seen,
        so that a restarted one refuses an older one too; None to remember only
        while it lives.
      cache: a folder of this receiver alone that keeps what was moved until
        the weights are held, so that a restarted one moves only the rest.
      wanted: (name, dtype, shape) -> the regions of a tensor to hold; None for
        all of all.
      threads: that decode and hash.
      now: unix seconds, for the pointer's expiry.
    """
    self.held: Update | None = None
    self.previous: Update | None = None
    self.problem: str | None = None
    self.stats: Stats | None = None
    self._store, self._run_id, self._verifier = store, run_id, verifier
    self._memory = None if memory is None else pathlib.Path(memory)
    self._cache = None if cache is None else fetch.Cache(cache)
    self._wanted, self._threads, self._now = wanted, threads, now
    self._where = f'{store.url}/refs/{run_id}/latest'
    self._polling, self._swapping = threading.Lock(), threading.Lock()
    # (version, target_id) that was rolled back from.
    self._unwanted: tuple[int, str] | None = None
    self._seen: manifests.Pointer | None = None
    if self._memory is not None:
      # Left there by receivers that were killed.
      for torn in self._memory.parent.glob(f'.{self._memory.name}.*.tmp'):
        torn.unlink(missing_ok=True)
    if self._memory is not None and self._memory.exists():
      self._seen = self._recall(self._memory)

  def poll(self) -> Update | None:
    """Returns newer weights, or None when there are none that can be trusted.

    After damage the old weights stay in `held`, `problem` says what is wrong
    and a warning says it once; the next poll tries again.
    """
    with self._polling:
      try:
        update = self._poll()
      except (ValueError, OSError) as error:
        if str(error) != self.problem:
          _log.warning('%s', self._keeping(error))
        self.problem = str(error)
        return None
      self.problem = None
      return update

  def rollback(self, version: int | None = None) -> Update:
    """Serves the previous weights again, at once.

    The version rolled back from is not taken again while this object lives;
    a newer one is.

    Args:
      version: to leave, and no other, which may have come meanwhile; None for
        whatever is held.

    Raises:
      ValueError: another version is held, or there is none before it.
    """
    with self._swapping:
      held = None if self.held is None else self.held.version
      if version is not None and held != version:
        has = 'nothing' if held is None else f'version {held}'
        raise ValueError(
          f'Version {version} cannot be left: the newest that was received is '
          f'{has}.'
        )
      if self.held is None or self.previous is None:
        raise ValueError(
          f'run {self._run_id!r}: there is nothing to roll back to; only the '
          'version before the last update is kept.'
        )
      self._unwanted = self.held.version, self.held.target_id
      self.held, self.previous = self.previous, None
      return self.held

  def _poll(self) -> Update | None:
    begun = time.perf_counter()
    pointer = self._read_pointer()
    if pointer is None:
      return None
    held, tally = self.held, fetch.Tally()
    named = pointer.version, pointer.target_id
    if held is not None and named == held[:2]:
      return None
    self._check_wanted(named)
    weights = restore.load(
      self._store,
      pointer,
      held=None if held is None else held.weights,
      wanted=self._wanted,
      threads=self._threads,
      cache=self._cache,
      tally=tally,
    )
    update = Update(*named, weights)
    with self._swapping:
      self._check_wanted(named)
      self.held, self.previous = update, self.held
    if self._cache is not None:
      self._cache.clear()
    self.stats = Stats(
      tuple(tally.steps),
      tally.bytes,
      tally.fetch_s,
      tally.decode_s,
      time.perf_counter() - begun,
    )
    return update

  def _check_wanted(self, named: tuple[int, str]) -> None:
    if named == self._unwanted:
      raise ValueError(
        f'version {named[0]} ({named[1][:12]}) was rolled back from; a newer '
        'one will be taken.'
      )

  def _read_pointer(self) -> manifests.Pointer | None:
    """Returns the pointer if it is signed, in order and not expired."""
    found = self._store.read_pointer(self._run_id)
    if found is None:
      if self._seen is not None:
        raise ValueError(
          f'{self._where}: the pointer is gone; it had reached version '
          f'{self._seen.version}.'
        )
      return None
    sealed, _ = found
    try:
      pointer = manifests.unseal(sealed, self._verifier, self._run_id)
    except ValueError as error:
      raise ValueError(
        f'{self._where}: the pointer is damaged: {error}. The next publish '
        'writes a new one; if no publisher runs, start the trainer again.'
      ) from error
    if pointer != self._seen:
      self._check_order(pointer)
      # Before its weights are fetched: who withholds them must not be able to
      # lead back to an older version, after a restart either.
      if self._memory is not None:
        files.write_atomic(self._memory, sealed)
      self._seen = pointer
    now = self._now()
    if pointer.expires and now > pointer.expires:
      raise ValueError(
        f'{self._where}: the pointer to version {pointer.version} expired '
        f'{now - pointer.expires:.0f} s ago: the publisher stopped renewing '
        'it, or something keeps newer ones from here.'
      )
    return pointer

  def _check_order(self, pointer: manifests.Pointer) -> None:
    """Refuses an older, a forked and an unexplained backward pointer."""
    seen = self._seen
    if seen is None:
      return
    forward = pointer.rewinds > seen.rewinds or (
      pointer.rewinds == seen.rewinds
      and (
        pointer.version > seen.version
        # A keyframe or a skip was added, or the expiry renewed.
        or (pointer.version, pointer.target_id)
        == (seen.version, seen.target_id)
      )
    )
    if pointer.sequence <= seen.sequence or not forward:
      raise ValueError(
        f'{self._where}: the pointer was rolled back or forked: it names '
        f'version {pointer.version} ({pointer.target_id[:12]}), move '
        f'{pointer.sequence}, rewinds {pointer.rewinds}, after version '
        f'{seen.version} ({seen.target_id[:12]}), move {seen.sequence}, '
        f'rewinds {seen.rewinds}.'
      )

  def _recall(self, memory: pathlib.Path) -> manifests.Pointer:
    try:
      with memory.open('rb') as file:
        sealed = file.read(manifests.MAX_POINTER_BYTES + 1)
      return manifests.unseal(sealed, self._verifier, self._run_id)
    except ValueError as error:
      raise ValueError(
        f'{memory}: {error}. Delete it to trust the store anew.'
      ) from error

  def _keeping(self, error: Exception) -> str:
    if self.held is None:
      return f'Run {self._run_id!r} has no weights to serve yet: {error}'
    return (
      f'Run {self._run_id!r} keeps serving version {self.held.version} '
      f'({self.held.target_id[:12]}): {error}'
    )
