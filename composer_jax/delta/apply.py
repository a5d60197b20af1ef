"""Applies one bundle: decodes its chunks beside the base and hashes each.

Requests, decoding and hashing overlap: while some threads wait for the next
pieces, others decode those that came, straight to where the chunks stay. What
a thread does between two chunks is little, and the kernels hold no lock.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping

import numpy as np

from composer_jax.delta import (
  codec,
  fetch,
  identity,
  weights_held,
)
from composer_jax.delta import manifest as manifests
from composer_jax.delta import threads as threads_lib

# Elements that a thread takes at a time: small tensors share a turn.
_TURN_ELEMENTS = 2**19


class DamagedBase(ValueError):
  """The held weights are not what they were when they were verified."""


class UnfitBase(ValueError):
  """The bundle builds on something else than these intact weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
  """A tensor on its way: its bundle's table, the base, and what becomes."""

  tensor: manifests.Tensor
  made: weights_held.HeldTensor
  base: weights_held.HeldTensor | None
  # Where the boxes of `made` stand in the base, None where they coincide.
  base_at: np.ndarray | None
  # Columns of the table, of the boxes of `made`.
  numbers: list[int]
  codecs: list[int]
  lengths: list[int]
  bounds: list[int]

  def base_bounds(self, at: int) -> tuple[int, int]:
    if self.base_at is None:
      return self.bounds[at], self.bounds[at + 1]
    assert self.base is not None
    there = self.base_at[at]
    return self.base.offsets[there], self.base.offsets[there + 1]


def apply(
  fetcher: fetch.Fetcher,
  manifest: manifests.Manifest,
  base: weights_held.Held | None,
  wanted: weights_held.Wanted | None = None,
  threads: int = 2,
) -> weights_held.Held:
  """Applies a bundle to a base, which it leaves as it is.

  Args:
    fetcher: reads the store.
    manifest: of the bundle.
    base: what a delta builds on; a keyframe needs none.
    wanted: the regions to hold; None for all.
    threads: that decode and hash.

  Raises:
    DamagedBase: the bits of the base changed since they were verified.
    UnfitBase: it is not the base of this bundle.
    ValueError: names the tensor whose base or blob is wrong.
    OSError: an object cannot be read.
  """
  if manifest.kind == manifests.KEY:
    base = None
  else:
    _check_base(manifest, base)
  try:
    slots = [
      _slot(manifest, tensor, base, wanted) for tensor in manifest.tensors
    ]
  except MemoryError as error:
    raise ValueError(
      f'version {manifest.version} ({manifest.full_bytes} bytes) does not fit '
      'in the memory that is left.'
    ) from error
  _Apply(fetcher, manifest, slots).run(threads)
  for slot in slots:
    slot.made.buffer.setflags(write=False)
  return weights_held.Held(
    version=manifest.version,
    target_id=manifest.target_id,
    tensors={slot.tensor.name: slot.made for slot in slots},
  )


def _check_base(manifest, base: weights_held.Held | None) -> None:
  if base is None:
    raise UnfitBase(f'version {manifest.version} needs a base.')
  if base.signature() != manifest.signature():
    raise UnfitBase(
      f'version {manifest.version} has other tensors than its base: '
      f'{_difference(base.signature(), manifest.signature())}.'
    )
  if base.target_id != manifest.base_id:
    raise UnfitBase(
      f'version {manifest.version} builds on the weights {manifest.base_id}, '
      f'not on the {base.target_id} that are held.'
    )


def _slot(manifest, tensor, base, wanted) -> _Slot:
  name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
  numbers = weights_held.boxes_of(wanted, name, dtype, shape)
  chunks = tensor.chunks if numbers is None else tensor.chunks[numbers]
  posts = np.ascontiguousarray(chunks['post'])
  old = base_at = None
  if base is not None:
    old = base.tensors[name]
    base_at = _base_places(manifest, name, old, numbers)
  if old is not None and base_at is None and not chunks['codec'].any():
    # Frozen: both versions hold the same memory, which is still hashed.
    made = dataclasses.replace(old, posts=posts)
  else:
    made = weights_held.HeldTensor.empty(dtype, shape, numbers, posts)
  return _Slot(
    tensor=tensor,
    made=made,
    base=old,
    base_at=base_at,
    numbers=list(range(len(chunks))) if numbers is None else numbers.tolist(),
    codecs=chunks['codec'].tolist(),
    lengths=chunks['length'].tolist(),
    bounds=made.offsets.tolist(),
  )


def _base_places(manifest, name, old, numbers) -> np.ndarray | None:
  same = (
    numbers is old.numbers
    if numbers is None or old.numbers is None
    else np.array_equal(numbers, old.numbers)
  )
  if same:
    return None
  wanted = np.arange(old.grid.num_boxes) if numbers is None else numbers
  if old.numbers is None:
    return wanted
  if not np.isin(wanted, old.numbers).all():
    raise ValueError(
      f'{name}: {len(wanted)} boxes are wanted of version '
      f'{manifest.version}, and its base holds {len(old.numbers)} others.'
    )
  return np.searchsorted(old.numbers, wanted)


class _Apply:
  """One run over all chunks of a bundle."""

  def __init__(self, fetcher, manifest, slots: list[_Slot]):
    self._fetcher, self._manifest, self._slots = fetcher, manifest, slots

  def run(self, threads: int) -> None:
    for _ in threads_lib.in_order(self._decode, self._work(), threads):
      pass

  def _work(self) -> Iterator[tuple[list, memoryview | None, int]]:
    """Yields chunks, their bytes, and where those begin in their object."""
    blobs, places = self._plan()
    jobs = fetch.pieces(blobs)
    arriving = self._fetcher.stream(jobs, self._fetcher.piece)
    for turn in self._turns(self._bare()):
      yield turn, None, 0
    place = iter(places)
    for piece, data in arriving:
      boxes = ((*next(place), blob) for blob in piece.blobs)
      for turn in self._turns(boxes):
        yield turn, data, piece.start

  def _plan(self):
    """Returns the (object, blob) to fetch by place, and their (slot, box)."""
    names = [name for name, _ in self._manifest.packs]
    offsets = self._manifest.offsets()
    found = []
    for slot, places in zip(self._slots, offsets, strict=True):
      table = slot.tensor.chunks
      at = np.flatnonzero(table['length'][slot.numbers])
      rows = np.asarray(slot.numbers, np.int64)[at]
      starts = places[rows].tolist()
      packs = table['pack'][rows].tolist()
      short = np.ascontiguousarray(table['blob'][rows]).tobytes()
      for k, (box, pack, start) in enumerate(
        zip(at.tolist(), packs, starts, strict=True)
      ):
        blob = fetch.Blob(
          slot.tensor.name,
          slot.numbers[box],
          start,
          start + slot.lengths[box],
          short[16 * k : 16 * k + 16],
        )
        found.append((pack, start, slot, box, blob))
    found.sort(key=lambda row: row[:2])
    blobs = [(names[row[0]], row[4]) for row in found]
    return blobs, [(row[2], row[3]) for row in found]

  def _bare(self) -> Iterator[tuple]:
    """Yields chunks without a blob, which are those of the base."""
    for slot in self._slots:
      for at, length in enumerate(slot.lengths):
        if not length:
          yield slot, at, None

  def _turns(self, boxes) -> Iterator[list]:
    turn, elements = [], 0
    for box in boxes:
      slot, at, _ = box
      turn.append(box)
      elements += slot.bounds[at + 1] - slot.bounds[at]
      if elements >= _TURN_ELEMENTS:
        yield turn
        turn, elements = [], 0
    if turn:
      yield turn

  def _decode(self, work: tuple[list, memoryview | None, int]) -> None:
    turn, data, start = work
    begun = time.perf_counter()
    for slot, at, blob in turn:
      encoded = memoryview(b'')
      if data is not None:
        encoded = data[blob.start - start : blob.stop - start]
      self._decode_box(slot, at, encoded)
    self._fetcher.tally.add(decode_s=time.perf_counter() - begun)

  def _decode_box(self, slot: _Slot, at: int, blob: memoryview) -> None:
    low, high = slot.bounds[at], slot.bounds[at + 1]
    made = slot.made.buffer[low:high]
    base = None
    if slot.base is not None:
      first, last = slot.base_bounds(at)
      base = slot.base.buffer[first:last]
    kind = slot.codecs[at]
    try:
      if kind != codec.SAME:
        codec.decode(kind, blob, made.size, made.dtype, base, out=made)
      elif slot.base is not None and slot.made.buffer is not slot.base.buffer:
        made[...] = base
    except (ValueError, OSError) as error:
      self._check_rot(slot, at, base)
      raise fetch.named(self._where(slot, at), error) from error
    if identity.hash_box(made) != slot.made.posts[at].tobytes():
      self._check_rot(slot, at, base)
      raise ValueError(
        f'{self._where(slot, at)}: does not decode to the weights that were '
        'published; blob and base do not belong together.'
      )

  def _check_rot(self, slot: _Slot, at: int, base: np.ndarray | None) -> None:
    if base is None or slot.base is None:
      return
    there = at if slot.base_at is None else slot.base_at[at]
    if identity.hash_box(base) != slot.base.posts[there].tobytes():
      raise DamagedBase(
        f'{slot.tensor.name} (box {slot.numbers[at]}): the weights that are '
        'held changed in memory since they were verified.'
      )

  def _where(self, slot: _Slot, at: int) -> str:
    return (
      f'{slot.tensor.name} (box {slot.numbers[at]}, version '
      f'{self._manifest.version})'
    )


def _difference(left: Mapping, right: Mapping) -> str:
  names = sorted(n for n in {*left, *right} if left.get(n) != right.get(n))
  return ', '.join(f'{n}: {left.get(n)} and {right.get(n)}' for n in names[:5])
