"""Follows a run on the host by the cheapest way that works.

Consumes: the run's pointer, then the manifests and blobs it leads to.
Waits for: the store, while the held weights are served on.
Woken by: the caller, as often as it likes.
Produces: whole verified weights by one swap of a reference, or None with the
reason in `problem`.

A bundle that fails is left aside and the next best way is tried; what was held
before stays as it is, and nothing unverified is ever served.
"""

import dataclasses
import itertools
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from composer_jax.core import files
from composer_jax.delta import rebuild
from composer_jax.delta.format import keys
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects

# A store in which so many bundles fail is not worth more of a poll's time, and
# each that cannot be reached takes as long as the store's patience.
MAX_FAILURES = 32
MAX_UNREACHED = 3

_log = logging.getLogger(__name__)


class Way(NamedTuple):
  """The bundles to rebuild.apply, in order.

  Attributes:
    bytes: what they cost together, manifests included.
    start: which of the starts the first one needs, None for a keyframe.
    edges: the bundles; none where a start has the weights already.
  """

  bytes: int
  start: int | None
  edges: tuple[manifests.Edge, ...]


def cheapest(
  edges: Iterable[manifests.Edge],
  version: int,
  starts: Sequence[rebuild.Held] = (),
  banned: Collection[str] = (),
) -> Way | None:
  """Returns the way of fewest bytes to a version; of equal ones the shortest.

  Args:
    edges: bundles of the run.
    version: version to reach.
    starts: what is held; what a rewind made void is not started from.
    banned: manifests that turned out to be unusable.

  Returns:
    None if there is no way.
  """
  edges = [edge for edge in edges if edge.manifest not in banned]
  targets = {edge.version: edge.target for edge in edges}
  best: dict[int, Way] = {}
  for number, start in enumerate(starts):
    short = start.target_id[:16]
    known = {v for v, target in targets.items() if target == short}
    if start.version not in targets:
      known.add(start.version)
    for other in known:
      best.setdefault(other, Way(0, number, ()))
  # Bases are earlier versions, so that one pass over the versions finds all.
  for edge in sorted(edges, key=lambda edge: edge.version):
    if edge.base_version is None:
      before = Way(0, None, ())
    elif (before := best.get(edge.base_version)) is None:
      continue
    way = Way(before.bytes + edge.bytes, before.start, (*before.edges, edge))
    known = best.get(edge.version)
    cost = way.bytes, len(way.edges)
    if known is None or cost < (known.bytes, len(known.edges)):
      best[edge.version] = way
  return best.get(version)


def load(
  store: objects.Store,
  pointer: manifests.Pointer,
  *,
  version: int | None = None,
  held: rebuild.Held | None = None,
  wanted: rebuild.Wanted | None = None,
  threads: int = 2,
  cost: rebuild.UpdateCost | None = None,
) -> rebuild.Held:
  """Returns the weights of a pointer, or of an older version it leads to.

  In memory are at most what is held, and what the way has reached.

  Args:
    store: where to read.
    pointer: pointer whose signature the caller has verified.
    version: version to load; None for the pointer's own.
    held: weights that may spare a part of the way.
    wanted: regions to hold; None for all.
    threads: number of threads that decode.
    cost: counts what moves, and by which bundles.

  Raises:
    ValueError: no way leads there; says what is wrong with those tried.
    OSError: the store cannot be reached or what it must have is missing.
  """
  with rebuild.Fetcher(store, cost) as fetcher:
    walk = _Walk(fetcher, pointer, held, wanted, threads)
    if version is None or version == pointer.version:
      return walk.to_head()
    return walk.to(version)


class _Walk:
  """Goes from bundle to bundle and around those that fail."""

  def __init__(self, fetcher, pointer, held, wanted, threads):
    self._fetcher, self._pointer = fetcher, pointer
    self._wanted, self._threads = wanted, threads
    self._starts: list[rebuild.Held] = [] if held is None else [held]
    # Buffers that others read.
    self._kept = {
      id(tensor.buffer)
      for start in self._starts
      for tensor in start.tensors.values()
    }
    # Texts: an exception holds its frames, and they hold buffers.
    self._failures: list[str] = []
    self._banned: set[str] = set()
    self._unreached = 0

  def to_head(self) -> rebuild.Held:
    pointer = self._pointer
    bundle = self._read(pointer)
    held = self._starts[0] if self._starts else None
    if bundle is not None:
      if held is not None and held.target_id == pointer.target_id:
        return dataclasses.replace(held, version=pointer.version)
      if pointer.base_id in ('', held.target_id if held else ''):
        # The usual case: the next delta, and no need of the index.
        reached = self._step(pointer, bundle, held)
        if reached is not None:
          return reached
    # Nobody vouches for the name of what is held but the manifest.
    self._starts = [
      held for held in self._starts if held.target_id != pointer.target_id
    ]
    return self.to(pointer.version)

  def to(self, version: int) -> rebuild.Held:
    try:
      index = rebuild.read_index(self._fetcher, self._pointer)
    except (ValueError, OSError) as error:
      self._note(error)
      raise self._no_way(version) from error
    while len(self._failures) < MAX_FAILURES:
      way = cheapest(index.edges, version, self._starts, self._banned)
      if way is None:
        break
      reached = self._walk(way)
      if reached is not None:
        return dataclasses.replace(reached, version=version)
    raise self._no_way(version)

  def _walk(self, way: Way) -> rebuild.Held | None:
    held = None if way.start is None else self._starts[way.start]
    coming = None
    for edge, following in itertools.zip_longest(way.edges, way.edges[1:]):
      bundle = self._read(edge) if coming is None else coming.result()
      coming = None
      if following is not None:
        coming = self._fetcher.pool.submit(self._read, following)
      if bundle is None:
        return None
      held = self._step(edge, bundle, held)
      if held is None:
        return None
    return held

  def _read(self, named) -> manifests.Manifest | None:
    try:
      bundle = rebuild.read_manifest(self._fetcher, named)
      for what, found, said in mismatches(bundle, named, self._pointer):
        raise ValueError(
          f'manifest {named.manifest}: its {what} is {found!r}, and what leads '
          f'to it says {said!r}.'
        )
      return bundle
    except (ValueError, OSError) as error:
      self._banned.add(named.manifest)
      self._note(error)
    return None

  def _step(
    self, named, bundle, base: rebuild.Held | None
  ) -> rebuild.Held | None:
    """Applies one bundle; None, and it is not tried again, where it fails."""
    try:
      # What the way has reached is as large as the policy, and nobody else's.
      reached = rebuild.apply(
        self._fetcher,
        bundle,
        base,
        self._wanted,
        self._threads,
        kept=self._kept,
      )
    except rebuild.DamagedBase as error:
      # The bundle may be good: what it was applied to is not.
      self._starts = [held for held in self._starts if held is not base]
      self._note(error)
      return None
    except (ValueError, OSError) as error:
      if named is self._pointer and isinstance(error, rebuild.UnfitBase):
        return None  # A way through the index may end with it.
      self._banned.add(named.manifest)
      self._note(error)
      return None
    self._fetcher.cost.route += (name_of(bundle),)
    return reached

  def _note(self, error: Exception) -> None:
    self._unreached += isinstance(error, rebuild.UNREACHED)
    if self._unreached == MAX_UNREACHED:
      raise error
    _log.warning(
      'Run %r, version %d: another way is tried: %s',
      *(self._pointer.run_id, self._pointer.version, error),
    )
    self._failures.append(str(error))

  def _no_way(self, version: int) -> ValueError:
    reasons = self._failures[:4]
    more = len(self._failures) - len(reasons)
    reasons += [f'and {more} more'] if more else []
    text = '; '.join(reasons or ['no bundle of the index leads there'])
    return ValueError(f'version {version} cannot be rebuilt: {text}')


def mismatches(
  bundle: manifests.Manifest,
  named: manifests.Edge | manifests.Pointer,
  pointer: manifests.Pointer,
) -> Iterator[tuple[str, Any, Any]]:
  """Yields (what, found, said) where a manifest belies what leads to it."""
  pairs = [
    ('run', bundle.run_id, pointer.run_id),
    ('version', bundle.version, named.version),
  ]
  if bundle.version == pointer.version:
    pairs.append(('target', bundle.target_id, pointer.target_id))
  if isinstance(named, manifests.Pointer):
    pairs.append(('base_id', bundle.base_id, pointer.base_id))
  else:
    pairs += [
      ('base version', bundle.base_version, named.base_version),
      ('kind', bundle.kind, named.kind),
      ('target', bundle.target_id[:16], named.target),
    ]
  yield from (pair for pair in pairs if pair[1] != pair[2])


def name_of(bundle: manifests.Manifest | manifests.Edge) -> str:
  if bundle.base_version is None:
    return f'{bundle.kind} {bundle.version}'
  return f'{bundle.kind} {bundle.base_version}-{bundle.version}'


# Following.


class Update(NamedTuple):
  """Weights of a version; nobody may write to them."""

  version: int
  target_id: str
  weights: rebuild.Held


class Follower:
  """Holds the last verified weights of a run on the host.

  One thread polls; any may read `held` and call `rollback`.

  Attributes:
    held: weights that it serves, None before the first success.
    previous: weights that it served before, for `rollback`; let go when newer
      ones are fetched, so that never more than two are in memory.
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
    self.stats: rebuild.UpdateCost | None = None
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
    held, cost = self.held, rebuild.UpdateCost()
    named = pointer.version, pointer.target_id
    if held is not None and named == held[:2]:
      return None
    self._check_wanted(named)
    with self._swapping:
      self.previous = None
      held = self.held
    weights = load(
      self._store,
      pointer,
      held=None if held is None else held.weights,
      wanted=self._wanted,
      threads=self._threads,
      cost=cost,
    )
    update = Update(*named, weights)
    with self._swapping:
      self._check_wanted(named)
      self.held, self.previous = update, self.held
    cost.wall_s = time.perf_counter() - begun
    self.stats = cost
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
