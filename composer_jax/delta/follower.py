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
import logging
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from composer_jax.core import files
from composer_jax.delta import rebuild
from composer_jax.delta.format import keys
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects

# Each object that cannot be reached takes as long as the store's patience.
MAX_UNREACHED = 3

_log = logging.getLogger(__name__)


# Bytes, the weights to start from (None before a keyframe), and links of the
# bundles to apply to them in order.
_Way = tuple[int, rebuild.Held | None, tuple[manifests.Link, ...]]


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

  In memory are at most what is held, and what the way has reached. A ValueError
  says what is wrong with the ways that were tried.

  Args:
    pointer: pointer whose signature the caller has verified.
    version: version to load; None for the pointer's own.
    held: weights that may spare a part of the way.
  """
  version = pointer.version if version is None else version
  cost = cost or rebuild.UpdateCost()
  return _Walk(store, pointer, version, held, wanted, threads, cost).to_end()


class _Walk:
  """Goes from bundle to bundle and around those that fail."""

  def __init__(self, store, pointer, version, held, wanted, threads, cost):
    self._store, self._pointer, self._version = store, pointer, version
    self._held, self._wanted, self._threads = held, wanted, threads
    self._cost = cost
    # Buffers that others read.
    tensors = held.tensors.values() if held else ()
    self._kept = {id(tensor.buffer) for tensor in tensors}
    # Texts: an exception holds its frames, and they hold buffers.
    self._failures: list[str] = []
    # None for those that are of no use.
    self._bundles: dict[str, manifests.Manifest | None] = {}
    self._unreached = 0

  def to_end(self) -> rebuild.Held:
    while way := self._cheapest():
      _, reached, links = way
      for link in links:
        reached = self._step(link, reached)
        if reached is None:
          break
      if reached is not None:
        return dataclasses.replace(reached, version=self._version)
    reasons = self._failures[:4] or ['no bundle leads there']
    more = len(self._failures) - len(reasons)
    text = '; '.join(reasons) + (f'; and {more} more' if more > 0 else '')
    raise ValueError(f'version {self._version} cannot be rebuilt: {text}')

  def _cheapest(self) -> _Way | None:
    """Returns the way of fewest bytes, None if there is none.

    It is looked for from the head back to a keyframe, and further as long as
    what is held may be nearer. A receiver that holds the version before takes
    the delta.
    """
    held, target_id = self._held, self._pointer.target_id
    link, keyframe = self._pointer.head, self._pointer.keyframe
    while link is not None and link.version > self._version:
      if (passed := self._read(link, target_id)) is None:
        return None
      link, keyframe = passed.previous, passed.keyframe
      target_id = passed.base_id
    ways, cost, after = list[_Way](), 0, tuple[manifests.Link, ...]()
    while link is not None and (after or link.version == self._version):
      bundle, total, links = self._read(link, target_id), cost, (link, *after)
      if bundle is not None:
        # Equal weights under another version will do, but nobody vouches for
        # the name of what is held except the manifest of the version.
        if held and held.target_id == bundle.target_id:
          ways.append((cost, held, after))
          break
        total += link.bytes + bundle.bundle_bytes
        if held and held.target_id == bundle.base_id:
          ways.append((total, held, links))
          break
      if keyframe is not None and keyframe.version == link.version:
        frame = self._read(keyframe, target_id)
        if frame is not None:
          size = keyframe.bytes + frame.bundle_bytes
          ways.append((cost + size, None, (keyframe, *after)))
      if bundle is None or bundle.kind == manifests.KEY:
        break
      if ways and (held is None or total >= ways[0][0]):
        break
      cost, after, target_id = total, links, bundle.base_id
      link, keyframe = bundle.previous, bundle.keyframe
    return min(ways, key=lambda way: (way[0], len(way[2])), default=None)

  def _read(
    self, link: manifests.Link, target_id: str
  ) -> manifests.Manifest | None:
    """Reads a manifest once; None for one that is of no use."""
    if link.manifest not in self._bundles:
      self._bundles[link.manifest] = None
      try:
        bundle = rebuild.read_manifest(self._store, link, target_id)
        self._bundles[link.manifest] = bundle
        self._cost.bytes += link.bytes
      except (ValueError, OSError) as error:
        self._note(error)
    return self._bundles[link.manifest]

  def _step(
    self, link: manifests.Link, base: rebuild.Held | None
  ) -> rebuild.Held | None:
    """Applies one bundle; None, and it is not tried again, where it fails."""
    bundle = self._bundles[link.manifest]
    how: Any = dict(wanted=self._wanted, threads=self._threads, cost=self._cost)
    assert bundle is not None
    try:
      # What the way has reached is as large as the policy, and nobody else's.
      reached = rebuild.apply(self._store, bundle, base, kept=self._kept, **how)
    except (ValueError, OSError) as error:
      if self._held and isinstance(error, rebuild.DamagedBase):
        # The bundle may be good: what it was applied to is not.
        self._held = None
      else:
        self._bundles[link.manifest] = None
      self._note(error)
      return None
    self._cost.route += (bundle.title,)
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


# Following.


class Follower:
  """Holds the last verified weights of a run on the host.

  One thread polls; any may read `held`.

  Attributes:
    held: weights that it serves, None before the first success.
    problem: reason why the last poll was refused, None when it was not.
    stats: cost of the last update, None before the first.
  """

  def __init__(
    self,
    store: objects.Store,
    run_id: str,
    key: str | os.PathLike | keys.Hmac,
    *,
    memory: str | os.PathLike | None = None,
    wanted: rebuild.Wanted | None = None,
    threads: int = 2,
    now: Callable[[], float] = time.time,
  ):
    """Reads nothing yet.

    Args:
      store, run_id, key: those of the publisher; the key may be a file, which
        may come later.
      memory: file of this receiver alone that keeps the newest pointer seen,
        so that a restarted one refuses an older one too; None to remember only
        while it lives.
      wanted: (name, dtype, shape) -> the blocks of a tensor to hold; None for
        all of all.
    """
    self.held: rebuild.Held | None = None
    self.problem: str | None = None
    self.stats: rebuild.UpdateCost | None = None
    self._store, self._run_id, self._key = store, run_id, key
    self._memory = None if memory is None else pathlib.Path(memory)
    self._wanted, self._threads, self._now = wanted, threads, now
    self._where = f'{store.url}/refs/{run_id}/latest'
    self._seen: manifests.Pointer | None = None
    if self._memory is not None:
      files.sweep(self._memory.parent)  # of receivers that were killed

  def poll(self) -> rebuild.Held | None:
    """Returns newer weights, or None when there are none that can be trusted.

    After damage the old weights stay in `held`, `problem` says what is wrong
    and a warning says it once; the next poll tries again.
    """
    try:
      held = self._poll()
    except (ValueError, OSError) as error:
      if str(error) != self.problem:
        serving = 'has no weights to serve yet'
        if self.held is not None:
          serving = f'keeps serving version {self.held.version}'
        _log.warning('Run %r %s: %s', self._run_id, serving, error)
      self.problem = str(error)
      return None
    self.problem = None
    return held

  def _poll(self) -> rebuild.Held | None:
    begun, cost, held = time.perf_counter(), rebuild.UpdateCost(), self.held
    pointer = self._read_pointer()
    if pointer is None or (
      held is not None
      and (held.version, held.target_id) == (pointer.version, pointer.target_id)
    ):
      return None
    how: Any = dict(wanted=self._wanted, threads=self._threads, cost=cost)
    self.held = load(self._store, pointer, held=held, **how)
    cost.wall_s = time.perf_counter() - begun
    self.stats = cost
    return self.held

  def _read_pointer(self) -> manifests.Pointer | None:
    """Returns the pointer if it is signed, in order and not expired."""
    if not isinstance(self._key, keys.Hmac):
      self._key = keys.open_key(self._key)
    if self._seen is None and self._memory and self._memory.exists():
      self._seen = self._recall(self._memory, self._key)
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
      pointer = manifests.unseal(sealed, self._key, self._run_id)
    except ValueError as error:
      if isinstance(error, manifests.OtherFormat):
        raise ValueError(f'{self._where}: {error}.') from error
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
        f'{late_s:.0f} s ago: nobody publishes any more, or something keeps '
        'newer pointers from here.'
      )
    return pointer

  def _check_order(self, pointer: manifests.Pointer) -> None:
    """Refuses an older, a forked and an unexplained backward pointer."""
    seen = self._seen
    if seen is None:
      return
    # Of the same version a keyframe was added, or the expiry renewed.
    now, then = (pointer.rewinds, pointer.version), (seen.rewinds, seen.version)
    is_same = now == then and pointer.target_id == seen.target_id
    if pointer.sequence <= seen.sequence or not (now > then or is_same):
      raise ValueError(
        f'{self._where}: the pointer was rolled back or forked: it names '
        f'version {pointer.version} ({pointer.target_id[:12]}), move '
        f'{pointer.sequence}, rewinds {pointer.rewinds}, after version '
        f'{seen.version} ({seen.target_id[:12]}), move {seen.sequence}, '
        f'rewinds {seen.rewinds}.'
      )

  def _recall(self, memory: pathlib.Path, key: keys.Hmac) -> manifests.Pointer:
    try:
      return manifests.unseal(memory.read_bytes(), key, self._run_id)
    except ValueError as error:
      raise ValueError(
        f'{memory}: {error}. Delete it to trust the store anew.'
      ) from error
