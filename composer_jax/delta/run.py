"""Where a run stands in its store: the pointer, what it leads to, and upkeep.

Only `Run.point` changes what readers see, by one comparison and swap. A store
holds one run: what its pointer does not lead to is garbage.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from composer_jax.delta import chunking, rebuild
from composer_jax.delta.format import keys, manifest
from composer_jax.delta.store import objects

_log = logging.getLogger(__name__)


class Run:
  """The last committed version of a run, as its publisher knows it.

  Attributes:
    run_id: name of the run.
    head: last pointer, None while there is nothing to build on.
    specs: {name: (dtype, shape)} of the head's tensors.
    is_unsure: whether only the store knows where the run stands; see `open`.
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
    self._store, self.run_id, self._key = store, run_id, key
    self._expires_s, self._now = expires_s, now
    # Links and packs of the manifests that are known here, by name.
    self._known: dict[str, tuple] = {}
    self.open()

  def open(self) -> None:
    """Reads where the run stands; what is damaged ends its chain."""
    self.head: manifest.Pointer | None = None
    self.specs: manifest.Specs = {}
    self.is_unsure = False
    # Of the last pointer. Receivers refuse one that falls behind.
    self._sequence = self._rewinds = 0
    self._sealed: bytes | None = None
    self._tag: str | None = None
    found = self._store.read_pointer(self.run_id)
    if found is None:
      self._check_only()
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
      self.specs = rebuild.read_manifest(self._store, head.head).specs
    except (ValueError, OSError) as error:
      self.start_afresh(error)
      return
    self.head = head

  def start_afresh(self, reason: object) -> None:
    """Voids all versions; receivers keep theirs until the next pointer."""
    _log.warning(
      '%s: the next version starts a new chain: %s', self.run_id, reason
    )
    self._rewinds += 1
    self.head, self.specs = None, {}

  def check_alone(self) -> bool:
    """Returns whether the pointer is intact; refuses one that is not ours."""
    found = self._store.read_pointer(self.run_id)
    if found is None:
      self._check_only()
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
    how, cure = 'another publisher moved the pointer', 'end one of the two'
    if other.sequence <= self._sequence:
      how, cure = 'the pointer was put back', 'start the publisher again'
    raise ValueError(
      f'run {self.run_id!r}: {how} to version {other.version}; {cure}.'
    )

  def _check_only(self) -> None:
    """Refuses a store of another run, whose objects `collect` would delete."""
    if others := [r for r in self._store.run_ids() if r != self.run_id]:
      raise ValueError(
        f'{self._store.url} has the run {others[0]!r}; publish '
        f'{self.run_id!r} to another store.'
      )

  def write(
    self, table: chunking.ChunkTable, version: int, base_id: str
  ) -> tuple[manifest.Link, manifest.Manifest]:
    """Writes the manifest of a bundle, to which nothing points yet.

    Its packs are objects already; `base_id` is '' for a keyframe, which may be
    a second bundle of the head.
    """
    previous = keyframe = None
    if self.head is not None:
      previous, keyframe = self.head.head, self.head.keyframe
      if version == self.head.version:
        previous, keyframe, _ = self._read(previous)
    bundle = manifest.Manifest(
      version=version,
      base_id=base_id,
      target_id=table.target_id,
      previous=previous,
      keyframe=keyframe,
      packs=table.packs,
      tensors=table.tensors,
    )
    data = bundle.to_bytes()
    link = manifest.Link(version, self._store.put(data), len(data))
    self._known[link.manifest] = previous, keyframe, bundle.packs
    return link, bundle

  def point(
    self,
    keyframe: manifest.Link,
    head: manifest.Link | None = None,
    bundle: manifest.Manifest | None = None,
  ) -> None:
    """Moves the pointer, unless another publisher did first: this commits.

    It names the newest keyframe and the head, whose manifest is the bundle;
    without them the head is that of before.
    """
    last: Any = self.head
    pointer = manifest.Pointer(
      run_id=self.run_id,
      sequence=self._sequence + 1,
      rewinds=self._rewinds,
      target_id=(bundle or last).target_id,
      head=head or last.head,
      keyframe=keyframe,
      expires=int(self._now() + self._expires_s) if self._expires_s else 0,
    )
    data = manifest.seal(pointer, self._key)
    try:
      self._tag = self._store.move_pointer(self.run_id, data, self._tag)
    except (ValueError, OSError):
      # The answer of a remote store may be lost after it did what was asked.
      if not self._has_landed(data):
        raise
    self._sealed, self._sequence, self.head = data, pointer.sequence, pointer
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
    """Writes the pointer again if it is damaged, or soon too old."""
    assert self.head is not None
    expires = self.head.expires or float('inf')
    is_aging = expires - self._now() < self._expires_s / 2
    if not self.check_alone() or is_aging:
      self.point(self.head.keyframe)

  def _find(
    self, version: int
  ) -> tuple[manifest.Link, manifest.Link, manifest.Manifest]:
    """Returns the newest keyframe and the newest bundle up to a version."""
    assert self.head is not None
    keyframe, link = self.head.keyframe, self.head.head
    while True:
      bundle = rebuild.read_manifest(self._store, link)
      if link.version <= version:
        return keyframe, link, bundle
      if bundle.previous is None or bundle.keyframe is None:
        raise ValueError(f'no version up to {version} was published.')
      keyframe, link = bundle.keyframe, bundle.previous

  def found(
    self, version: int, target_id: str
  ) -> tuple[manifest.Link, manifest.Manifest]:
    """Returns the bundle of a version; refuses one of other weights."""
    assert self.head is not None
    problem = f'version {version} of run {self.run_id!r} is neither new (the '
    problem += f'last is {self.head.version}) nor kept'
    with contextlib.suppress(ValueError, FileNotFoundError):
      _, link, bundle = self._find(version)
      if (link.version, bundle.target_id) == (version, target_id):
        return link, bundle
      if link.version == version:
        problem = (
          f'run {self.run_id!r} has published version {version} with other '
          f'weights ({bundle.target_id[:16]}, now {target_id[:16]})'
        )
    raise ValueError(
      f'{problem}. A trainer resumed from checkpoint v calls rewind(v) first.'
    )

  def rewind(self, version: int) -> None:
    """Points to the newest version up to `version`.

    If that is deleted or damaged, the next version starts a chain afresh.
    """
    try:
      found = self._find(version)
    except (ValueError, OSError) as error:
      self.start_afresh(error)
      return
    self._rewinds += 1
    self.point(*found)

  def has_lost(self) -> bool:
    """Whether the store forgot an object that a joiner needs."""
    sizes, lost = self._store.sizes(), True
    with contextlib.suppress(ValueError, FileNotFoundError):
      needed = self._needed(1)
      lost = any(sizes.get(name) != length for name, length in needed.items())
    if lost:
      _log.warning(
        '%s: what joiners need is gone from %s; a keyframe is written.',
        *(self.run_id, self._store.url),
      )
    return lost

  def collect(self, keep: int, grace_s: float) -> int:
    """Deletes what neither the last versions nor joiners need.

    Younger objects stay, as they may be about to be pointed to. Nothing is
    deleted if the pointer or a manifest is damaged. Returns the bytes freed.
    """
    if self.head is None:
      return 0
    if not self.check_alone():
      raise ValueError(f'the pointer of {self._store.url} is damaged.')
    self._check_only()
    needed, sizes = self._needed(keep), self._store.sizes()
    self._known = {n: known for n, known in self._known.items() if n in needed}
    gone = self._store.delete(sizes.keys() - needed, grace_s=grace_s)
    freed = sum(sizes.get(name, 0) for name in gone)
    _log.info('%s: freed %d bytes', self._store.url, freed)
    return freed

  def _needed(self, keep: int) -> dict[str, int]:
    """Returns the objects of the last versions, and their lengths.

    From the newest keyframe before the last `keep` on, or as far back as there
    are versions.
    """
    assert self.head is not None
    link, keyframe, needed = self.head.head, self.head.keyframe, {}
    while link is not None:
      is_start = keyframe is not None and keyframe.version == link.version
      try:
        for one in {link, keyframe} if is_start else {link}:
          before = self._read(one)
          needed |= {one.manifest: one.bytes, **dict(before[2])}
      except FileNotFoundError:
        if link.version >= self.head.keyframe.version:
          raise
        break  # It was collected as older than what was kept before.
      keep -= 1
      if keep <= 0 and is_start:
        break
      link, keyframe, _ = self._read(link)
    return needed

  def _read(self, link: manifest.Link) -> tuple:
    """Returns the links and packs of a manifest."""
    if link.manifest not in self._known:
      bundle = rebuild.read_manifest(self._store, link)
      known = bundle.previous, bundle.keyframe, bundle.packs
      self._known[link.manifest] = known
    return self._known[link.manifest]
