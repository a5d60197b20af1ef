"""Where a run stands in its store: the pointer, what it leads to, and upkeep.

Only `Run.point` changes what readers see, by one comparison and swap.
"""

import logging
import time
from collections.abc import Callable, Iterable

from composer_jax.delta import chunking, rebuild
from composer_jax.delta.format import keys, manifest
from composer_jax.delta.store import objects

Edges = tuple[manifest.Edge, ...]
_log = logging.getLogger(__name__)


class Run:
  """The last committed version of a run, as its publisher knows it.

  Attributes:
    run_id: name of the run.
    head: last pointer, None while there is nothing to build on.
    edges: listed bundles.
    specs: {name: (dtype, shape)} of the head's tensors.
    is_unsure: whether only the store knows where the run stands; `open` asks.
  """

  def __init__(
    self,
    store: objects.Store,
    run_id: str,
    key: keys.Hmac,
    *,
    expires_s: float,
    now: Callable[[], float],
  ):
    manifest.check_run_id(run_id)
    self._store, self.run_id, self._key = store, run_id, key
    self._expires_s, self._now = expires_s, now
    # Packs of the manifests that are known here.
    self._packs: dict[str, tuple[tuple[str, int], ...]] = {}
    self.open()

  def open(self) -> None:
    """Reads where the run stands; what is damaged ends its chain."""
    self.head: manifest.Pointer | None = None
    self.edges: Edges = ()
    self.specs: manifest.Specs = {}
    self.is_unsure = False
    # Of the last pointer. Receivers refuse one that falls behind.
    self._sequence = self._rewinds = 0
    self._sealed: bytes | None = None
    self._tag: str | None = None
    found = self._store.read_pointer(self.run_id)
    if found is None:
      return
    self._sealed, self._tag = found
    try:
      head = manifest.unseal(self._sealed, self._key, self.run_id)
    except manifest.OtherFormat as error:
      raise ValueError(f'{self._store.url}: {error}.') from error
    except ValueError as error:
      # The counts are lost with it; the clock is ahead of any of them.
      self._sequence = self._rewinds = time.time_ns()
      self.start_afresh(error)
      return
    self._sequence, self._rewinds = head.sequence, head.rewinds
    try:
      edges = rebuild.read_index(self._store, head)
      bundle = rebuild.read_manifest(self._store, head)
    except (ValueError, OSError) as error:
      self.start_afresh(error)
      return
    self.head, self.edges, self.specs = head, edges, bundle.specs

  def make_sure(self) -> None:
    """Asks the store where the run stands, if a failure left that open."""
    if self.is_unsure:
      self.open()

  def start_afresh(self, reason: object) -> None:
    """Voids all versions; receivers keep theirs until the next pointer."""
    _log.warning(
      '%s: the next version starts a new chain: %s', self.run_id, reason
    )
    self._rewinds += 1
    self.head, self.edges, self.specs = None, (), {}

  def check_alone(self) -> bool:
    """Returns whether the pointer is intact; refuses one that is not ours."""
    found = self._store.read_pointer(self.run_id)
    if found is None:
      self._tag = None
      return self._sealed is None
    data, self._tag = found
    if data == self._sealed:
      return True
    try:
      other = manifest.unseal(data, self._key, self.run_id)
    except ValueError as error:
      # What is in memory is about to replace the damaged one.
      _log.warning('%s: %s. The pointer is written anew.', self.run_id, error)
      return False
    raise ValueError(
      f'run {self.run_id!r}: another publisher moved the pointer to version '
      f'{other.version}; end one of the two.'
    )

  def write(
    self,
    table: chunking.ChunkTable,
    version: int,
    base: manifest.Pointer | None,
  ) -> tuple[manifest.Edge, manifest.Manifest]:
    """Writes the manifest of a bundle, to which nothing points yet.

    Its packs are objects already; `base` is None for a keyframe.
    """
    bundle = manifest.Manifest(
      run_id=self.run_id,
      version=version,
      base_version=None if base is None else base.version,
      base_id='' if base is None else base.target_id,
      target_id=table.target_id,
      packs=table.packs,
      tensors=table.tensors,
    )
    data = bundle.to_bytes()
    name = self._store.put(data)
    self._packs[name] = bundle.packs
    edge = manifest.Edge(
      version=version,
      base_version=bundle.base_version,
      bytes=bundle.bundle_bytes + len(data),
      manifest=name,
      manifest_bytes=len(data),
      target=bundle.target,
    )
    return edge, bundle

  def point(
    self,
    edges: Edges,
    edge: manifest.Edge | None = None,
    bundle: manifest.Manifest | None = None,
  ) -> None:
    """Moves the pointer, unless another publisher did first: this commits.

    Args:
      edges: bundles listed from now on.
      edge: bundle of the head; None for the same head, to expire later.
      bundle: manifest of that bundle.
    """
    head, weights = edge or self.head, bundle or self.head
    assert head is not None and weights is not None
    listed = manifest.write_index(self.run_id, edges)
    pointer = manifest.Pointer(
      run_id=self.run_id,
      sequence=self._sequence + 1,
      rewinds=self._rewinds,
      version=head.version,
      target_id=weights.target_id,
      base_id=weights.base_id,
      manifest=head.manifest,
      manifest_bytes=head.manifest_bytes,
      index=self._store.put(listed),
      index_bytes=len(listed),
      expires=int(self._now() + self._expires_s) if self._expires_s else 0,
    )
    data = manifest.seal(pointer, self._key)
    try:
      self._tag = self._store.move_pointer(self.run_id, data, self._tag)
    except (ValueError, OSError):
      # The answer of a remote store may be lost after it did what was asked.
      if not self._has_landed(data):
        raise
    self._sealed, self._sequence = data, pointer.sequence
    self.head, self.edges = pointer, edges
    self.specs = bundle.specs if bundle else self.specs

  def _has_landed(self, data: bytes) -> bool:
    try:
      found = self._store.read_pointer(self.run_id)
    except (ValueError, OSError) as error:
      _log.warning(
        '%s: nobody knows whether the pointer moved: %s', self.run_id, error
      )
      self.is_unsure = True
      return False
    if found is None or found[0] != data:
      return False
    self._tag = found[1]
    return True

  def heal(self) -> None:
    """Writes pointer and index again if they are damaged.

    So it does if half of the time is over in which the pointer is believed.
    """
    assert self.head is not None
    expires = self.head.expires or float('inf')
    is_aging = expires - self._now() < self._expires_s / 2
    if not self.check_alone() or is_aging:
      self.point(self.edges)
    self._store.put(manifest.write_index(self.run_id, self.edges))

  def rewind(self, version: int) -> None:
    """Points to the newest listed version up to `version`.

    If none is listed or it is damaged, the next version starts a chain afresh.
    """
    edges = tuple(e for e in self.edges if e.version <= version)
    edge = head_of(edges, max((e.version for e in edges), default=-1))
    try:
      if edge is None:
        raise ValueError(f'no version up to {version} is listed.')
      bundle = rebuild.read_manifest(self._store, edge)
    except (ValueError, OSError) as error:
      self.start_afresh(error)
      return
    self._rewinds += 1
    self.point(edges, edge, bundle)

  def lost(self) -> Edges:
    """Returns the listed bundles of which the store forgot an object."""
    sizes = self._store.sizes()
    return tuple(e for e in self.edges if not self._is_there(e, sizes))

  def _is_there(self, edge: manifest.Edge, sizes: dict[str, int]) -> bool:
    if sizes.get(edge.manifest) != edge.manifest_bytes:
      return False
    if edge.manifest not in self._packs:
      try:
        bundle = rebuild.read_manifest(self._store, edge)
      except (ValueError, FileNotFoundError):
        return False
      self._packs[edge.manifest] = bundle.packs
    packs = self._packs[edge.manifest]
    return all(sizes.get(name) == length for name, length in packs)

  def collect(self, grace_s: float) -> int:
    """Deletes what the pointer of no run leads to; returns bytes freed.

    Younger objects stay, as another publisher may be about to point to them. If
    a pointer, index or manifest cannot be followed, nothing is deleted.
    """
    needed, runs, url = set(), self._store.run_ids(), self._store.url
    # Some file systems list a folder that they cannot read as if it were empty.
    if self.head is not None and self.run_id not in runs:
      raise ValueError(
        f'{url} lists the runs {runs} and not {self.run_id!r}, which has a '
        'pointer there, so nothing is deleted; look whether refs/ can be read.'
      )
    for run_id in runs:
      needed |= self._needed(run_id)
    sizes = self._store.sizes()
    gone = self._store.delete(sizes.keys() - needed, grace_s=grace_s)
    freed = sum(sizes.get(name, 0) for name in gone)
    _log.info('%s: freed %d bytes in %d objects', url, freed, len(gone))
    return freed

  def _needed(self, run_id: str) -> set[str]:
    """Returns the objects that the bundles of a run consist of."""
    found = self._store.read_pointer(run_id)
    if found is None:
      return set()
    try:
      pointer = manifest.unseal(found[0], self._key, run_id)
    except ValueError as error:
      raise ValueError(
        f'the pointer of run {run_id!r} cannot be read, so nothing is deleted: '
        f'{error}'
      ) from error
    needed = {pointer.index}
    for named in (pointer, *rebuild.read_index(self._store, pointer)):
      bundle = rebuild.read_manifest(self._store, named)
      needed |= {named.manifest, *(pack for pack, _ in bundle.packs)}
    return needed


def pruned(edges: Iterable[manifest.Edge], keep: int) -> Edges:
  """Returns the edges that the last `keep` versions and joiners need.

  They are the newest keyframe before the last `keep` versions, and all that
  follows it. What is not listed any more, `Run.collect` deletes.
  """
  edges = tuple(edges)
  versions = sorted({edge.version for edge in edges})
  frames = [e.version for e in edges if e.kind == manifest.KEY]
  if not frames:
    return edges
  first = versions[-keep:][0]
  start = max((v for v in frames if v <= first), default=min(frames))
  return tuple(
    e
    for e in edges
    if e.version >= min(first, start + 1)
    or (e.version == start and e.kind == manifest.KEY)
  )


def head_of(
  edges: Iterable[manifest.Edge], version: int
) -> manifest.Edge | None:
  """Returns the bundle of a version that a follower would take: its delta."""
  found = [e for e in edges if e.version == version]
  return max(found, key=lambda e: e.order[1], default=None)
