"""Follows a run's bundles and never serves anything unverified.

Consumes: the run's pointer, then the manifests and blobs it leads to.
Waits for: the store, while the held weights are served on.
Woken by: the caller, as often as it likes, or the clock of a `Poller`.
Produces: whole verified weights by one swap of a reference, or None with the
reason in `problem`.
"""

import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from composer_jax.core import files
from composer_jax.delta import rebuild
from composer_jax.delta.format import keys
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects

_log = logging.getLogger(__name__)


class Update(NamedTuple):
  """Weights of a version; nobody may write to them."""

  version: int
  target_id: str
  weights: rebuild.Held


class Transfer(NamedTuple):
  """What the last update took.

  Attributes:
    route: bundles applied, such as 'key 0', 'delta 0-8', 'delta 8-9'; none
      where the weights were held under another version.
    bytes: bytes read from the store for them, failed ways included.
    fetch_s: seconds of reading, summed over the requests.
    decode_s: seconds of decoding and hashing, summed over the threads.
    wall_s: seconds from the pointer to the swap.
  """

  route: tuple[str, ...]
  bytes: int
  fetch_s: float
  decode_s: float
  wall_s: float


class Follower:
  """Holds the last verified weights of a run on the host.

  One thread polls; any may read `held` and call `rollback`.

  Attributes:
    held: weights that it serves, None before the first success.
    previous: weights that it served before, for `rollback`.
    problem: why the last poll was refused, None when it was not.
    stats: what the last update took, None before the first.
  """

  def __init__(
    self,
    store: objects.Store,
    run_id: str,
    verifier: keys.Verifier,
    *,
    memory: str | os.PathLike | None = None,
    wanted: rebuild.Wanted | None = None,
    threads: int = 2,
    now: Callable[[], float] = time.time,
  ):
    """Follows.

    Args:
      store: where to read.
      run_id: name of the run and of its pointer.
      verifier: checks the pointer's signature.
      memory: file of this receiver alone that keeps the newest pointer seen,
        so that a restarted one refuses an older one too; None to remember only
        while it lives.
      wanted: (name, dtype, shape) -> the regions of a tensor to hold; None for
        all of all.
      threads: number of threads that decode and hash.
      now: unix seconds, for the pointer's expiry.
    """
    self.held: Update | None = None
    self.previous: Update | None = None
    self.problem: str | None = None
    self.stats: Transfer | None = None
    self._store, self._run_id, self._verifier = store, run_id, verifier
    self._memory = None if memory is None else pathlib.Path(memory)
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
      if self._memory.exists():
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
          _log.warning('%s: %s', self._serving(), error)
        self.problem = str(error)
        return None
      self.problem = None
      return update

  def rollback(self, version: int | None = None) -> Update:
    """Serves the previous weights again, at once.

    The version rolled back from is not taken again while this object lives;
    a newer one is.

    Args:
      version: version to leave, and no other, which may have come meanwhile;
        None for whatever is held.

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
      self._unwanted = self.held[:2]
      self.held, self.previous = self.previous, None
      return self.held

  def _poll(self) -> Update | None:
    begun = time.perf_counter()
    pointer = self._read_pointer()
    if pointer is None:
      return None
    held, tally = self.held, rebuild.Tally()
    named = pointer.version, pointer.target_id
    if held is not None and named == held[:2]:
      return None
    self._check_wanted(named)
    weights = rebuild.load(
      self._store,
      pointer,
      held=None if held is None else held.weights,
      wanted=self._wanted,
      threads=self._threads,
      tally=tally,
    )
    update = Update(*named, weights)
    with self._swapping:
      self._check_wanted(named)
      self.held, self.previous = update, self.held
    wall_s = time.perf_counter() - begun
    moved = tally.bytes, tally.fetch_s, tally.decode_s, wall_s
    self.stats = Transfer(tuple(tally.steps), *moved)
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
    except manifests.OtherFormat as error:
      raise ValueError(f'{self._where}: {error}.') from error
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
    late_s = self._now() - pointer.expires
    if pointer.expires and late_s > 0:
      raise ValueError(
        f'{self._where}: the pointer to version {pointer.version} expired '
        f'{late_s:.0f} s ago: the publisher stopped renewing it, or something '
        'keeps newer ones from here.'
      )
    return pointer

  def _check_order(self, pointer: manifests.Pointer) -> None:
    """Refuses an older, a forked and an unexplained backward pointer."""
    seen = self._seen
    if seen is None:
      return
    # Of the same version a keyframe or skip was added, or the expiry renewed.
    is_same = (pointer.version, pointer.target_id) == (
      *(seen.version, seen.target_id),
    )
    forward = pointer.rewinds > seen.rewinds or (
      pointer.rewinds == seen.rewinds
      and (pointer.version > seen.version or is_same)
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

  def _serving(self) -> str:
    if self.held is None:
      return f'Run {self._run_id!r} has no weights to serve yet'
    version, target_id, _ = self.held
    return (
      f'Run {self._run_id!r} keeps serving version {version} ({target_id[:12]})'
    )


class Subscriber:
  """Follows a run and places its weights; see the README for ten lines of use.

  Attributes:
    version: version of the tree that was returned last, None before the first.
    target_id: identity of its weights; '' before the first.
    follower: what holds the weights on the host, with `problem` and `stats`.
  """

  def __init__(
    self,
    store: str | os.PathLike | objects.Store,
    key: str | os.PathLike | keys.Verifier,
    like: Any = None,
    *,
    run_id: str = 'policy',
    memory: str | os.PathLike | None = None,
    threads: int = 2,
  ):
    """Follows; nothing is read yet, so the run may not have begun.

    Args:
      store: folder or URL of the store.
      key: file of a key that can verify, or the key.
      like: tree of arrays or `jax.ShapeDtypeStruct`s with shardings, of which
        only this process's part is fetched; None for arrays of numpy by name.
      run_id: name of the run.
      memory: file that keeps the newest pointer seen; see `Follower`.
      threads: number of threads that decode.
    """
    if not isinstance(store, objects.Store):
      store = objects.Store(store)
    if isinstance(key, str | os.PathLike):
      key = keys.open_key(key)
    wanted = None
    if like is not None:
      from composer_jax.delta import trees  # jax is slow to import

      wanted = trees.wanted(like)
    self.version: int | None = None
    self.target_id = ''
    self.follower = Follower(
      store, run_id, key, memory=memory, wanted=wanted, threads=threads
    )
    self._like = like
    self._pending: Update | None = None

  def __enter__(self) -> 'Subscriber':
    return self

  def __exit__(self, *_) -> None:
    self.follower.held = self.follower.previous = self._pending = None

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
    self._pending = self.follower.poll() or self._pending
    if self._pending is None or self._pending is not self.follower.held:
      return None
    tree = self._place(self._pending)
    self._pending = None
    return tree

  def rollback(self, version: int | None = None) -> Any:
    """Returns the tree before the last one; see `Follower.rollback`."""
    return self._place(self.follower.rollback(version))

  def _place(self, update: Update) -> Any:
    if self._like is None:
      tree = update.weights.arrays()
    else:
      from composer_jax.delta import trees

      tree = trees.place(update.weights, self._like)
    self.version, self.target_id = update.version, update.target_id
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
      notify: called after something new was found; `take` it.
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
