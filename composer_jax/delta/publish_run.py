"""Where a run stands in its store: the pointer, and what it leads to.

Only `point` changes what readers see, by one comparison and swap.
"""

import logging
import time
from collections.abc import Callable, Iterable

from composer_jax.delta import manifest, publish_share, restore, signing
from composer_jax.delta import store as stores

_log = logging.getLogger(__name__)


class Run:
  """The last committed version of a run, as its publisher knows it.

  Args:
    store: where the run is.
    run_id: names it.
    signer: signs pointers.
    verifier: of pointers.
    expires_s: after which a pointer is believed no more; 0 for never.
    now: unix seconds.

  Attributes:
    run_id: names the run.
    head: the last pointer, None while there is nothing to build on.
    edges: the listed bundles.
    specs: (dtype, shape) of the head's tensors, by name.
    rewinds: how often versions became void.
    is_unsure: whether only the store knows where the run stands; `open` asks.
  """

  def __init__(
    self,
    store: stores.Store,
    run_id: str,
    signer: signing.Signer,
    verifier: signing.Verifier,
    *,
    expires_s: float,
    now: Callable[[], float],
  ):
    self._store, self.run_id = store, run_id
    self._signer, self._verifier = signer, verifier
    self._expires_s, self._now = expires_s, now
    self.open()

  def open(self) -> None:
    """Reads where the run stands; what is damaged ends its chain."""
    self.head: manifest.Pointer | None = None
    self.edges: tuple[manifest.Edge, ...] = ()
    self.specs: publish_share.Specs = {}
    self.is_unsure = False
    # Of the last pointer. Receivers refuse one that falls behind.
    self._sequence = self.rewinds = 0
    self._sealed: bytes | None = None
    self._tag: str | None = None
    found = self._store.read_pointer(self.run_id)
    if found is None:
      return
    self._sealed, self._tag = found
    try:
      head = manifest.unseal(self._sealed, self._verifier, self.run_id)
    except ValueError as error:
      # The counts are lost with it; the clock is ahead of any of them.
      self._sequence = self.rewinds = time.time_ns()
      self.start_afresh(error)
      return
    self._sequence, self.rewinds = head.sequence, head.rewinds
    try:
      index = restore.read_index(self._store, head.index, self.run_id)
      bundle = restore.read_manifest(self._store, head.manifest)
    except (ValueError, OSError) as error:
      self.start_afresh(error)
      return
    self.head, self.edges, self.specs = head, index.edges, bundle.signature()

  def start_afresh(self, reason: object) -> None:
    """Voids all versions; receivers keep theirs until the next pointer."""
    _log.warning(
      '%s: the next version starts a new chain: %s', self.run_id, reason
    )
    self.rewinds += 1
    self.head, self.edges, self.specs = None, (), {}

  def check_alone(self) -> bool:
    """Returns whether the pointer is still there and intact.

    Raises:
      ValueError: another publisher moved it.
    """
    found = self._store.read_pointer(self.run_id)
    if found is None:
      self._tag = None
      return self._sealed is None
    data, self._tag = found
    if data == self._sealed:
      return True
    try:
      other = manifest.unseal(data, self._verifier, self.run_id)
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
    whole: publish_share.Whole,
    version: int,
    base: tuple[int, str] | None,
  ) -> manifest.Edge:
    """Writes the manifest of a bundle, to which nothing points yet.

    Args:
      whole: whose packs are objects already.
      version: of the policy.
      base: version and identity it starts from; None for a keyframe.
    """
    base_version, base_id = base or (None, '')
    bundle = manifest.Manifest(
      run_id=self.run_id,
      version=version,
      kind=manifest.KEY if base is None else manifest.DELTA,
      base_version=base_version,
      base_id=base_id,
      target_id=whole.target_id(),
      packs=whole.packs,
      tensors=whole.tensors,
    )
    data = bundle.to_bytes()
    return manifest.Edge(
      version=version,
      base_version=base_version,
      kind=bundle.kind,
      bytes=bundle.bundle_bytes + len(data),
      manifest=self._store.put(data),
      target=bundle.target_id[:16],
    )

  def point(
    self,
    edges: Iterable[manifest.Edge],
    *,
    version: int,
    target_id: str,
    base_id: str,
    name: str,
  ) -> None:
    """Moves the pointer: this commits.

    Args:
      edges: what is listed from now on.
      version: of the head.
      target_id: of the head.
      base_id: what its bundle starts from.
      name: of that bundle's manifest.

    Raises:
      ValueError: another publisher moved it first.
      OSError: the store failed; the pointer stands where it stood.
    """
    index = manifest.Index(run_id=self.run_id, edges=tuple(edges))
    expires = int(self._now() + self._expires_s) if self._expires_s else 0
    pointer = manifest.Pointer(
      run_id=self.run_id,
      sequence=self._sequence + 1,
      rewinds=self.rewinds,
      version=version,
      target_id=target_id,
      base_id=base_id,
      manifest=name,
      index=self._store.put(index.to_bytes()),
      expires=expires,
    )
    data = manifest.seal(pointer, self._signer)
    try:
      self._tag = self._store.move_pointer(self.run_id, data, self._tag)
    except (ValueError, OSError):
      # The answer of a remote store may be lost after it did what was asked.
      if not self._has_landed(data):
        raise
    self._sealed, self._sequence = data, pointer.sequence
    self.head, self.edges = pointer, index.edges

  def is_aging(self) -> bool:
    """Whether half of the time is over in which the pointer is believed."""
    assert self.head is not None
    expires = self.head.expires or float('inf')
    return expires - self._now() < self._expires_s / 2

  def point_again(self, edges: Iterable[manifest.Edge]) -> None:
    """Moves the pointer to the same version, to expire later."""
    assert self.head is not None
    self.point(
      edges,
      version=self.head.version,
      target_id=self.head.target_id,
      base_id=self.head.base_id,
      name=self.head.manifest,
    )

  def heal_index(self) -> None:
    """Writes the index again if it is damaged."""
    index = manifest.Index(run_id=self.run_id, edges=self.edges)
    self._store.put(index.to_bytes())

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
