"""Rebuilds verified weights of a run by the cheapest way that works.

Every byte is verified before it is used: a blob before it is decoded, a chunk
after it. The Merkle root of the chunks' hashes was checked when the manifest
was read, and weights leave here only when all their chunks matched it. A
bundle that fails is left aside and the next best way is tried; what was held
before stays as it is.
"""

import dataclasses
import logging
from concurrent import futures

from composer_jax.delta import apply as applying
from composer_jax.delta import fetch, route, weights_held
from composer_jax.delta import manifest as manifests
from composer_jax.delta import store as store_lib

# A store in which so many bundles fail is not worth more of a poll's time, and
# each that cannot be reached takes as long as the store's patience.
MAX_FAILURES = 32
MAX_UNREACHED = 3

_log = logging.getLogger(__name__)
_Held = weights_held.Held


def read_manifest(
  source: fetch.Fetcher | store_lib.Store, name: str
) -> manifests.Manifest:
  """Reads a manifest, verified before it is parsed.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is damaged; the message names it.
  """
  data = _whole(source, name, manifests.MAX_MANIFEST_BYTES)
  try:
    return manifests.Manifest.from_bytes(data)
  except ValueError as error:
    raise ValueError(f'manifest {name}: {error}') from error


def read_index(
  source: fetch.Fetcher | store_lib.Store, name: str, run_id: str
) -> manifests.Index:
  """Reads the list of a run's bundles; errors as of `read_manifest`."""
  data = _whole(source, name, manifests.MAX_INDEX_BYTES)
  try:
    index = manifests.Index.from_bytes(data)
  except ValueError as error:
    raise ValueError(f'index {name}: {error}') from error
  if index.run_id != run_id:
    raise ValueError(
      f'index {name}: it belongs to run {index.run_id!r}, not {run_id!r}.'
    )
  return index


def _whole(source, name: str, limit: int) -> bytes:
  if isinstance(source, fetch.Fetcher):
    return source.whole(name, limit)
  return source.get(name, limit=limit)


def apply(
  store: store_lib.Store,
  manifest: manifests.Manifest,
  base: _Held | None,
  *,
  wanted: weights_held.Wanted | None = None,
  threads: int = 2,
  cache: fetch.Cache | None = None,
) -> _Held:
  """Applies one bundle to a base, which it leaves as it is.

  Raises:
    ValueError: names the tensor whose base or blob is wrong.
    OSError: an object cannot be read.
  """
  with fetch.Fetcher(store, cache) as fetcher:
    return applying.apply(fetcher, manifest, base, wanted, threads)


def load(
  store: store_lib.Store,
  pointer: manifests.Pointer,
  *,
  version: int | None = None,
  held: _Held | None = None,
  wanted: weights_held.Wanted | None = None,
  threads: int = 2,
  cache: fetch.Cache | None = None,
  tally: fetch.Tally | None = None,
) -> _Held:
  """Returns the weights of a pointer, or of an older version it leads to.

  In memory are at most what is held, what the way has reached, and the next.

  Args:
    store: where to read.
    pointer: whose signature the caller has verified.
    version: None for the pointer's own.
    held: weights that may spare a part of the way.
    wanted: the regions to hold; None for all.
    threads: that decode.
    cache: keeps what was moved until it is held.
    tally: counts what moves, and by which bundles.

  Raises:
    ValueError: no way leads there; says what is wrong with those tried.
    OSError: the store cannot be reached or what it must have is missing.
  """
  with fetch.Fetcher(store, cache, tally) as fetcher:
    walk = _Walk(fetcher, pointer, held, wanted, threads)
    if version is None or version == pointer.version:
      return walk.to_head()
    return walk.to(version)


class _Walk:
  """Goes from bundle to bundle and around those that fail."""

  def __init__(self, fetcher, pointer, held, wanted, threads):
    self._fetcher, self._pointer = fetcher, pointer
    self._wanted, self._threads = wanted, threads
    # What is held, and how far the last way led before it broke off.
    self._from: list[_Held] = [] if held is None else [held]
    self._starts = self._from
    self._failures: list[Exception] = []
    self._banned: set[str] = set()
    self._unreached = 0

  def to_head(self) -> _Held:
    pointer = self._pointer
    held = self._starts[0] if self._starts else None
    if held is not None and held.target_id == pointer.target_id:
      return _relabelled(held, pointer.version)
    if pointer.base_id in ('', held.target_id if held else ''):
      # The usual case: the next delta, and no need of the index.
      reached = self._step(pointer.manifest, None, held)
      if reached is not None:
        return reached
    return self.to(pointer.version)

  def to(self, version: int) -> _Held:
    pointer = self._pointer
    try:
      index = read_index(self._fetcher, pointer.index, pointer.run_id)
    except (ValueError, OSError) as error:
      self._note(error)
      raise self._no_way(version) from error
    while len(self._failures) < MAX_FAILURES:
      starts = [
        route.Start(held.version, held.target_id) for held in self._starts
      ]
      way = route.cheapest(index.edges, version, starts, self._banned)
      if way is None:
        break
      # Half of a way that a killed process began, and a new one.
      self._fetcher.trim(2 * way.bytes)
      reached = self._walk(way)
      if reached is not None:
        return _relabelled(reached, version)
    raise self._no_way(version)

  def _walk(self, way: route.Way) -> _Held | None:
    held = None if way.start is None else self._starts[way.start]
    coming = None
    for place, edge in enumerate(way.edges):
      manifest = coming
      if place + 1 < len(way.edges):
        coming = self._fetcher.submit(
          read_manifest, self._fetcher, way.edges[place + 1].manifest
        )
      reached = self._step(edge.manifest, edge, held, manifest)
      if reached is None:
        return None
      # Others between them are let go: each is as large as the policy.
      self._starts = [*self._from, reached]
      held = reached
    return held

  def _step(
    self,
    name: str,
    edge: manifests.Edge | None,
    base: _Held | None,
    coming: futures.Future[manifests.Manifest] | None = None,
  ) -> _Held | None:
    """Applies one bundle; None, and it is not tried again, where it fails."""
    try:
      if coming is None:
        manifest = read_manifest(self._fetcher, name)
      else:
        manifest = coming.result()
      self._check(name, manifest, edge)
      if edge is None:
        self._fetcher.trim(2 * manifest.bundle_bytes)
      reached = applying.apply(
        self._fetcher, manifest, base, self._wanted, self._threads
      )
    except applying.DamagedBase as error:
      # The bundle may be good: what it was applied to is not.
      self._from = [held for held in self._from if held is not base]
      self._starts = [held for held in self._starts if held is not base]
      self._note(error)
      return None
    except (ValueError, OSError) as error:
      if edge is None and isinstance(error, applying.UnfitBase):
        return None  # A way through the index may end with it.
      self._banned.add(name)
      self._note(error)
      return None
    self._fetcher.tally.steps.append(_name_of(manifest))
    return reached

  def _check(self, name, manifest, edge) -> None:
    pointer = self._pointer
    pairs = [('run', manifest.run_id, pointer.run_id)]
    if manifest.version == pointer.version or edge is None:
      pairs += [
        ('version', manifest.version, pointer.version),
        ('target_id', manifest.target_id, pointer.target_id),
      ]
    if edge is None:
      pairs += [('base_id', manifest.base_id, pointer.base_id)]
    else:
      pairs += [
        ('version', manifest.version, edge.version),
        ('base version', manifest.base_version, edge.base_version),
        ('kind', manifest.kind, edge.kind),
        ('target_id', manifest.target_id[:16], edge.target),
      ]
    for what, found, named in pairs:
      if found != named:
        raise ValueError(
          f'manifest {name}: its {what} is {found!r}, and what leads to it '
          f'says {named!r}.'
        )

  def _note(self, error: Exception) -> None:
    self._unreached += isinstance(error, fetch.UNREACHED)
    if self._unreached == MAX_UNREACHED:
      raise error
    _log.warning(
      'Run %r, version %d: another way is tried: %s',
      self._pointer.run_id,
      self._pointer.version,
      error,
    )
    self._failures.append(error)

  def _no_way(self, version: int) -> ValueError:
    reasons = [str(error) for error in self._failures[:4]]
    more = len(self._failures) - len(reasons)
    if more:
      reasons.append(f'and {more} more')
    if not reasons:
      reasons.append('no bundle of the index leads there')
    return ValueError(
      f'version {version} cannot be rebuilt: {"; ".join(reasons)}'
    )


def _relabelled(held: _Held, version: int) -> _Held:
  """The same weights under another version."""
  if held.version == version:
    return held
  return dataclasses.replace(held, version=version)


def _name_of(manifest: manifests.Manifest) -> str:
  if manifest.base_version is None:
    return f'{manifest.kind} {manifest.version}'
  return f'{manifest.kind} {manifest.base_version}-{manifest.version}'
