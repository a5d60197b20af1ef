"""Encodes boxes, and packs their blobs in the order of the boxes.

What is made here depends on the weights, the base and the tier alone: boxes are
encoded in any order by any number of threads, and packed in one.
"""

import contextlib
from collections.abc import Iterable
from concurrent import futures
from typing import NamedTuple

import numpy as np

from composer_jax.delta import codec, identity, manifest, publish_boxes
from composer_jax.delta import store as stores

# Blobs share objects up to this size: few requests for a small policy, and
# pieces that a cache can pass on early for a large one.
PACK_BYTES = 8 * 2**20
# Packs on their way; more would only hold memory.
_UPLOADS = 4
NO_BLOB = bytes(identity.SHORT_HASH_BYTES)
# In place of a codec, of a box that is hashed and not encoded.
UNCODED = 255


class Coded(NamedTuple):
  """A box, encoded.

  Attributes:
    key: of the box.
    codec: of the blob.
    blob: what is sent.
    post: hash of the values.
    values: flat, owned by nobody else; the next base.
    changed: elements that differ from the base.
  """

  key: publish_boxes.Key
  codec: int
  blob: bytes
  post: bytes
  values: np.ndarray
  changed: int


class Coder(NamedTuple):
  """How boxes are encoded.

  Attributes:
    tier: of the codec.
    verify: decode each blob again and compare.
  """

  tier: str
  verify: bool

  def encode(
    self,
    key: publish_boxes.Key,
    values: np.ndarray,
    base: np.ndarray | None,
    post: bytes | None = None,
  ) -> Coded:
    """Encodes a box.

    Args:
      key: of the box.
      values: of the box, in any memory order.
      base: flat values of the base, None for a keyframe.
      post: hash of the values, None if it has to be found.

    Raises:
      ValueError: what was encoded does not decode to the values.
    """
    values = publish_boxes.flat(values)
    kind, blob = codec.encode(values, base, tier=self.tier)
    if kind == codec.SAME and base is not None:
      kept = base
    elif self.verify:
      kept = codec.decode(kind, blob, values.size, values.dtype, base)
    else:
      kept = values.copy()
    if self.verify and not same_bits(kept, values):
      raise ValueError(
        f'{key[0]} (box {key[1]}): codec {kind} does not decode to what it '
        "encoded; nothing was published. This machine's memory may be at "
        'fault.'
      )
    if base is None:
      changed = values.size
    elif kind == codec.SAME:
      changed = 0
    else:
      changed = codec.count_changed(values, base)
    post = identity.hash_box(values) if post is None else post
    return Coded(key, kind, blob, post, kept, changed)

  def keep(self, key: publish_boxes.Key, values: np.ndarray) -> Coded:
    """Copies and hashes a box that is to be encoded later, if at all."""
    kept = publish_boxes.flat(values)
    if np.may_share_memory(kept, values):
      kept = kept.copy()
    post = identity.hash_box(kept)
    return Coded(key, UNCODED, b'', post, kept, kept.size)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
  bits = identity.bits_dtype(left.dtype)
  return np.array_equal(left.view(bits), right.view(bits))


class Made(NamedTuple):
  """What a chunk table says of a box, but for the pack its blob lies in."""

  codec: int
  length: int
  blob: bytes
  post: bytes

  @classmethod
  def of(cls, coded: Coded) -> 'Made':
    blob = coded.blob
    short = identity.short_hash(blob) if blob else NO_BLOB
    return cls(coded.codec, len(blob), short, coded.post)


class Packer(contextlib.AbstractContextManager):
  """Gathers blobs into objects of bounded size and uploads them.

  Args:
    store: where to put them.
    order: keys of the blobs to come, if they are known: packs are then
      uploaded while later boxes are encoded.
  """

  def __init__(
    self, store: stores.Store, order: Iterable[publish_boxes.Key] = ()
  ):
    self._store = store
    self._order = iter(order)
    self._next = next(self._order, None)
    self._waiting: dict[publish_boxes.Key, bytes] = {}
    self._buffer = bytearray()
    self._uploads: list[futures.Future[str]] = []
    self._lengths: list[int] = []
    self._places: dict[publish_boxes.Key, int] = {}
    self._pool = futures.ThreadPoolExecutor(_UPLOADS, 'delta-upload')

  def __exit__(self, *_) -> None:
    self._pool.shutdown(cancel_futures=True)

  def add(self, key: publish_boxes.Key, blob: bytes) -> None:
    self._waiting[key] = blob
    while self._next is not None and self._next in self._waiting:
      self._pack(self._next)
      self._next = next(self._order, None)

  def finish(
    self,
  ) -> tuple[tuple[tuple[str, int], ...], dict[publish_boxes.Key, int]]:
    """Waits for the uploads; returns packs and the pack of each blob."""
    for key in sorted(self._waiting):
      self._pack(key)
    self._flush()
    names = [upload.result() for upload in self._uploads]
    return tuple(zip(names, self._lengths, strict=True)), self._places

  def _pack(self, key: publish_boxes.Key) -> None:
    blob = self._waiting.pop(key)
    if not blob:
      return
    if self._buffer and len(self._buffer) + len(blob) > PACK_BYTES:
      self._flush()
    self._places[key] = len(self._lengths)
    self._buffer += blob

  def _flush(self) -> None:
    if not self._buffer:
      return
    if len(self._uploads) >= _UPLOADS:
      self._uploads[-_UPLOADS].result()
    data = bytes(self._buffer)
    self._uploads.append(self._pool.submit(self._store.put, data))
    self._lengths.append(len(data))
    self._buffer.clear()


def tables(
  made: dict[publish_boxes.Key, Made], places: dict[publish_boxes.Key, int]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Returns {name: (numbers of boxes, ascending, and their chunks)}."""
  found: dict[str, list[int]] = {}
  for name, number in sorted(made):
    found.setdefault(name, []).append(number)
  result = {}
  for name, numbers in found.items():
    rows = [made[name, number] for number in numbers]
    chunks = np.zeros(len(rows), manifest.CHUNK)
    chunks['codec'] = [row.codec for row in rows]
    chunks['pack'] = [
      places.get((name, number), manifest.NO_PACK) for number in numbers
    ]
    chunks['length'] = [row.length for row in rows]
    for field in ('blob', 'post'):
      joined = b''.join(getattr(row, field) for row in rows)
      chunks[field] = np.frombuffer(joined, 'u1').reshape(len(rows), -1)
    result[name] = np.array(numbers, np.uint32), chunks
  return result
