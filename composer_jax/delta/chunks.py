"""Chunk tables of manifests: 57 bytes a chunk, checked and placed by numpy."""

from collections.abc import Sequence

import numpy as np

from composer_jax.delta import checks, identity

# Codec id, pack and bytes of the blob, its short hash, and the hash of the box
# that it becomes.
CHUNK = np.dtype(
  [
    ('codec', 'u1'),
    ('pack', '<u4'),
    ('length', '<u4'),
    ('blob', 'u1', identity.SHORT_HASH_BYTES),
    ('post', 'u1', identity.HASH_BYTES),
  ]
)
NO_PACK = 0xFFFFFFFF  # No blob: the box is that of the base.

# A codec never makes a blob longer than its box by more.
MAX_BLOB_OVERHEAD = 64

# The codec ids of `codec` that mean something to a manifest.
SAME, RAW, PLANES, CLASS = 0, 1, 2, 4


def joined(tables: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate(tables) if tables else np.zeros(0, CHUNK)


def check(
  table: np.ndarray,
  raw_bytes: np.ndarray,
  allowed: Sequence[int],
  packs: Sequence[int],
) -> None:
  """Refuses a table that no publisher writes.

  Args:
    table: all chunks of a manifest.
    raw_bytes: of their boxes.
    allowed: codec ids.
    packs: the bytes of each pack.
  """
  codecs, lengths = table['codec'], table['length']
  checks.require(np.isin(codecs, allowed).all(), 'codec of a chunk')
  bare = codecs == SAME
  in_pack = table['pack'] < len(packs)
  good = np.where(bare, table['pack'] == NO_PACK, in_pack).all()
  checks.require(good, 'pack of a chunk')
  most = np.where(bare, 0, raw_bytes + MAX_BLOB_OVERHEAD)
  least = np.where(codecs == RAW, raw_bytes, ~bare)
  most = np.where(codecs == RAW, raw_bytes, most)
  good = ((least <= lengths) & (lengths <= most)).all()
  checks.require(good, 'length of a blob')
  checks.require(not table['blob'][bare].any(), 'hash of a blob that is none')
  _, filled = place(table, len(packs))
  good = filled.tolist() == list(packs)
  checks.require(good, 'pack; its blobs must fill it exactly')


def place(table: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the offset of each blob in its pack, and the bytes of each pack."""
  order = np.argsort(table['pack'], kind='stable')
  packs = table['pack'][order]
  ends = np.concatenate(
    [[0], np.cumsum(table['length'][order], dtype=np.int64)]
  )
  borders = np.searchsorted(packs, np.arange(num_packs + 1))
  filled = np.diff(ends[borders])
  # Chunks without a pack come last.
  held = order[: borders[-1]]
  offsets = np.zeros(len(table), np.int64)
  begins = np.repeat(ends[borders[:-1]], np.diff(borders))
  offsets[held] = ends[: borders[-1]] - begins
  return offsets, filled
