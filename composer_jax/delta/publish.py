"""Publishes each version of a policy as a bundle; survives a kill anywhere.

The order of writes is blobs, manifest, pointer. Until the pointer is replaced,
which is atomic, readers see the version before; afterwards the new one. What a
killed publisher leaves behind is unreachable and `gc` removes it. Publishing
the same weights under the same version again changes nothing, unless the last
version was damaged: then it is written anew, as a keyframe.

One publisher at a time writes to a store; a second one is noticed at its next
publish, when the pointer is not where it left it.
"""

import dataclasses
import logging
import operator
import time
from collections.abc import Iterable, Mapping

import numpy as np

from composer_jax.delta import bundle, codec, restore
from composer_jax.delta import store as store_lib

# Blobs share objects up to about this size: few files for a small policy,
# bounded memory for a large one.
PACK_BYTES = 64 * 2**20

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BundleInfo:
  """What one version cost.

  Attributes:
    version: of the policy.
    kind: bundle.KEY or bundle.DELTA.
    target_id: identity of the weights.
    base_id: identity of the version before, '' for the first.
    bytes: of the bundle: manifest and blobs.
    full_bytes: of the weights, uncompressed.
  """

  version: int
  kind: str
  target_id: str
  base_id: str
  bytes: int
  full_bytes: int


class Publisher:
  """Publishes one run; goes on from the last version the store committed.

  A trainer that resumes from a checkpoint of version v calls `rewind(v)` and
  publishes v: if the weights of later published versions differ from what it
  will train now, they are void; if it trains bit for bit the same, the same
  identities appear again. A damaged pointer, manifest or blob ends the chain,
  and a keyframe starts another.

  Args:
    store: where to write.
    run_id: names the run and its pointer.
    keyframe_every: every so many versions one stands alone, which bounds what
      a late joiner reads.
    base_blocks: weights of the last committed version, if the caller has them;
      others are ignored. Without, they are read from the store.
  """

  def __init__(
    self,
    store: store_lib.Store,
    run_id: str,
    *,
    keyframe_every: int = 20,
    base_blocks: Iterable[bundle.Block | tuple] | None = None,
  ):
    if keyframe_every < 1:
      raise ValueError(f'keyframe_every must be >= 1, not {keyframe_every}.')
    self._store = store
    self._run_id = run_id
    self._keyframe_every = keyframe_every
    store.pointer_path(run_id)  # Refuses a bad name before anything is read.
    self._depth = 0
    self._base: Mapping[str, np.ndarray] | None = None
    # Of the last pointer. Receivers refuse one that falls behind.
    self._sequence = self._rewinds = 0
    self._pointer: store_lib.Pointer | None = None
    try:
      self._pointer = store.pointer(run_id)
    except ValueError as error:
      # The counts are lost with it; the clock is ahead of any of them.
      self._sequence = self._rewinds = time.time_ns()
      self._start_afresh(error)
    if self._pointer is not None:
      self._sequence = self._pointer.sequence
      self._rewinds = self._pointer.rewinds
    # Where the chain goes on; None while there is nothing to build on.
    self._head: store_lib.Pointer | None = self._pointer
    if self._head is not None:
      held = None
      if base_blocks is not None:
        tensors = bundle.assemble(base_blocks)
        held = bundle.target_id(tensors), tensors
      try:
        self._depth = store.manifest(self._head.manifest).depth
        self._base = self._read_base(self._head, held)
      except (ValueError, OSError) as error:
        self._start_afresh(error)

  @property
  def version(self) -> int | None:
    """The last committed version that counts, None before the first."""
    return None if self._head is None else self._head.version

  def publish(
    self, blocks: Iterable[bundle.Block | tuple], version: int
  ) -> BundleInfo:
    """Commits the weights of a version, or finds that they already are.

    Args:
      blocks: all pieces of all tensors; copied.
      version: above the last one, or one published before.

    Raises:
      ValueError: other weights stand under this version, or another publisher
        moved the pointer.
      OSError: the disk is full or refuses; what was committed stays, and
        publishing this version again is the cure once there is room.
    """
    version = operator.index(version)  # a numpy integer will do
    tensors = bundle.assemble(blocks)
    head = self._head
    if head is not None and version == head.version:
      self._check_intact(head, tensors)
    if self._head is not None and version <= self._head.version:
      return self._published(self._head, version, tensors)
    self._check_alone()
    manifest = self._write_bundle(tensors, version)
    name = self._store.put(manifest.to_bytes())
    self._move(manifest, name)
    for array in tensors.values():
      array.setflags(write=False)
    self._base = tensors
    return _info(manifest)

  def rewind(self, version: int) -> None:
    """Makes published versions after `version` void; receivers follow.

    The newest kept version up to `version` becomes the last one and receivers
    go back to it. Does nothing if no later version was published. If all kept
    versions are later, the next publish starts a chain afresh with a keyframe,
    and until then receivers keep what they have.
    """
    if self._head is None or self._head.version <= version:
      return
    self._check_alone()
    try:
      kept = next(
        (name, manifest)
        for name, manifest in restore.history(self._store, self._head.manifest)
        if manifest.version <= version
      )
    except (StopIteration, ValueError, OSError) as error:
      self._start_afresh(f'no version up to {version} is kept. {error}')
      return
    self._rewinds += 1
    self._move(kept[1], kept[0])
    self._base = self._read_base(self._pointer, None)

  def gc(self, keep: int) -> int:
    """Deletes what neither the last `keep` versions nor their bases need.

    Covers all runs of the store. A resumed trainer can rewind only to a
    version that is kept, so `keep` should span its checkpoints.

    Returns:
      Bytes freed.

    Raises:
      ValueError, OSError: a manifest that would have to be followed is
        damaged or missing; nothing is deleted.
    """
    if keep < 1:
      raise ValueError(f'keep must be at least 1, not {keep}.')
    names = set()
    for run_id in self._store.run_ids():
      pointer = self._store.pointer(run_id)
      last = '' if pointer is None else pointer.manifest
      for count, (name, manifest) in enumerate(
        restore.history(self._store, last), start=1
      ):
        names |= {name, *(digest for digest, _ in manifest.objects)}
        if count >= keep and manifest.kind == bundle.KEY:
          break
    return self._store.delete_except(names)

  def _check_intact(self, head, tensors) -> None:
    """Starts afresh when the last version is damaged; `tensors` replace it."""
    if bundle.target_id(tensors) != head.target_id:
      return
    try:
      restore.weights(self._store, head.manifest)
    except (ValueError, OSError) as error:
      self._start_afresh(error)

  def _published(self, head, version: int, tensors) -> BundleInfo:
    target_id = bundle.target_id(tensors)
    oldest = None
    for _, manifest in restore.history(self._store, head.manifest):
      oldest = manifest.version
      if manifest.version == version:
        if manifest.target_id != target_id:
          raise ValueError(
            f'run {self._run_id!r} has published version {version} with '
            f'other weights ({manifest.target_id}, now {target_id}). A '
            f'trainer resumed from checkpoint v calls rewind(v) first.'
          )
        return _info(manifest)
    raise ValueError(
      f'version {version} of run {self._run_id!r} is neither new (the last '
      f'is {head.version}) nor kept (the oldest is {oldest}). A '
      'trainer resumed from checkpoint v calls rewind(v) first.'
    )

  def _write_bundle(self, tensors, version) -> bundle.Manifest:
    base, head = self._base, self._head
    if (
      base is None
      or self._depth + 1 >= self._keyframe_every
      or bundle.signature_of(base) != bundle.signature_of(tensors)
    ):
      base = None
    packer = _Packer(self._store)
    entries = tuple(
      _encode_tensor(name, array, None if base is None else base[name], packer)
      for name, array in tensors.items()
    )
    return bundle.Manifest(
      run_id=self._run_id,
      version=version,
      kind=bundle.KEY if base is None else bundle.DELTA,
      depth=0 if base is None else self._depth + 1,
      base_id=head.target_id if head else '',
      previous=head.manifest if head else '',
      target_id=bundle.identity(
        bundle.signature_of(tensors),
        {t.name: [c.post_hash for c in t.chunks] for t in entries},
      ),
      objects=packer.finish(),
      tensors=entries,
    )

  def _move(self, manifest: bundle.Manifest, name: str) -> None:
    pointer = store_lib.Pointer(
      run_id=self._run_id,
      sequence=self._sequence + 1,
      rewinds=self._rewinds,
      version=manifest.version,
      target_id=manifest.target_id,
      manifest=name,
    )
    self._store.move_pointer(pointer)
    self._pointer = self._head = pointer
    self._sequence = pointer.sequence
    self._depth = manifest.depth

  def _start_afresh(self, reason: object) -> None:
    _log.warning(
      '%s: the next version starts a new chain: %s', self._run_id, reason
    )
    self._rewinds += 1
    self._head, self._base = None, None

  def _check_alone(self) -> None:
    try:
      found = self._store.pointer(self._run_id)
    except ValueError as error:
      # What is in memory is about to replace the damaged one.
      _log.warning('%s The pointer is written anew.', error)
      return
    if found is not None and found != self._pointer:
      raise ValueError(
        f'run {self._run_id!r}: another publisher moved the pointer to '
        f'version {found.version}; end one of the two.'
      )

  def _read_base(self, head, held) -> Mapping[str, np.ndarray] | None:
    try:
      return restore.weights(self._store, head.manifest, held)
    except (ValueError, OSError) as error:
      _log.warning(
        '%s: version %d cannot be rebuilt, so the next one is a keyframe: %s',
        self._run_id,
        head.version,
        error,
      )
      return None


class _Packer:
  """Gathers blobs into objects of bounded size."""

  def __init__(self, store: store_lib.Store):
    self._store = store
    self._buffer = bytearray()
    self._objects: list[tuple[str, int]] = []

  def add(self, blob: bytes) -> None:
    if self._buffer and len(self._buffer) + len(blob) > PACK_BYTES:
      self._flush()
    self._buffer += blob

  def finish(self) -> tuple[tuple[str, int], ...]:
    if self._buffer:
      self._flush()
    return tuple(self._objects)

  def _flush(self) -> None:
    data = bytes(self._buffer)
    self._objects.append((self._store.put(data), len(data)))
    self._buffer.clear()


def _encode_tensor(name, array, base, packer: _Packer) -> bundle.Tensor:
  bits = bundle.flat_bits(array)
  old = None if base is None else bundle.flat_bits(base)
  chunks = []
  for part in bundle.chunk_slices(bits.size):
    kind, blob = codec.encode(bits[part], None if old is None else old[part])
    packer.add(blob)
    chunks.append(
      bundle.Chunk(
        codec=kind,
        length=len(blob),
        blob_hash=bundle.digest(blob),
        post_hash=bundle.hash_bits(bits[part]),
      )
    )
  return bundle.Tensor(
    name=name,
    dtype=str(array.dtype),
    shape=array.shape,
    chunks=tuple(chunks),
  )


def _info(manifest: bundle.Manifest) -> BundleInfo:
  blobs = sum(length for _, length in manifest.objects)
  return BundleInfo(
    version=manifest.version,
    kind=manifest.kind,
    target_id=manifest.target_id,
    base_id=manifest.base_id,
    bytes=blobs + len(manifest.to_bytes()),
    full_bytes=manifest.full_bytes,
  )
