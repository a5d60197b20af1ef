"""What one process of a publisher contributes to a bundle, and the whole of it.

A process knows its own boxes. The tables of all of them make the manifest, in
which nothing shows who held what, but for the packs the blobs lie in.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Sequence

import numpy as np

from composer_jax.delta import grid as grids
from composer_jax.delta import identity, manifest, publish_boxes

Specs = dict[str, tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
  """Boxes of one process.

  Attributes:
    specs: {name: (dtype, shape)} of the tensors of which it has blocks.
    base_id: identity of what every box was encoded against; '' if they were
      not, and the chunks hold hashes alone or stand alone.
    changed: elements that differ from the base.
    elements: of all its boxes.
    cut_bytes: of boxes that no block held whole.
    packs: (sha256, bytes) of the objects that hold its blobs.
    chunks: {name: (numbers of boxes, ascending, and their chunks)}.
  """

  specs: Specs
  base_id: str = ''
  changed: int = 0
  elements: int = 0
  cut_bytes: int = 0
  packs: tuple[tuple[str, int], ...] = ()
  chunks: dict[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(
    default_factory=dict
  )

  def to_bytes(self) -> bytes:
    fields = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name != 'chunks'
    }
    fields['tables'] = [
      (name, len(chunks)) for name, (_, chunks) in self.chunks.items()
    ]
    head = json.dumps(fields).encode()
    arrays = [part for pair in self.chunks.values() for part in pair]
    return b''.join(
      [struct.pack('<I', len(head)), head, *(a.tobytes() for a in arrays)]
    )

  @classmethod
  def from_bytes(cls, data: bytes) -> 'Share':
    """Undoes `to_bytes`; the other processes of a publisher are trusted."""
    (length,) = struct.unpack_from('<I', data)
    at = 4 + length
    fields = json.loads(data[4:at])
    chunks = {}
    for name, count in fields.pop('tables'):
      numbers = np.frombuffer(data, np.uint32, count, at)
      rows = np.frombuffer(data, manifest.CHUNK, count, at + numbers.nbytes)
      at += numbers.nbytes + rows.nbytes
      chunks[name] = numbers, rows
    fields['specs'] = {
      name: (dtype, tuple(shape))
      for name, (dtype, shape) in fields['specs'].items()
    }
    fields['packs'] = tuple(tuple(row) for row in fields['packs'])
    return cls(chunks=chunks, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
  """A whole bundle, of the shares of all processes.

  Attributes:
    base_id: what all of it was encoded against, '' if there is no such thing.
    changed: elements that differ from the base.
    elements: of all tensors.
    cut_bytes: of boxes that no block held whole.
    packs: as in the manifest.
    tensors: as in the manifest.
  """

  base_id: str
  changed: int
  elements: int
  cut_bytes: int
  packs: tuple[tuple[str, int], ...]
  tensors: tuple[manifest.Tensor, ...]

  @property
  def specs(self) -> Specs:
    return {t.name: (t.dtype, t.shape) for t in self.tensors}

  @property
  def full_bytes(self) -> int:
    return sum(
      math.prod(t.shape) * identity.DTYPES[t.dtype].itemsize
      for t in self.tensors
    )

  def target_id(self) -> str:
    return identity.root(
      {
        t.name: identity.tensor_node(
          t.name, t.dtype, t.shape, t.chunks['post'].tobytes()
        )
        for t in self.tensors
      }
    )


def merge(shares: Sequence[Share]) -> Whole:
  """Puts the shares of all processes together.

  Raises:
    ValueError: names the tensor of which boxes are missing or there twice, or
      about which processes disagree.
  """
  specs: Specs = {}
  for share in shares:
    for name, spec in share.specs.items():
      if specs.setdefault(name, spec) != spec:
        raise ValueError(
          f'{name}: one process has blocks of {spec} and another of '
          f'{specs[name]}.'
        )
  tables, covered = {}, {}
  for name, (dtype, shape) in specs.items():
    number = grids.of(shape, identity.DTYPES[dtype]).num_boxes
    tables[name] = np.zeros(number, manifest.CHUNK)
    covered[name] = np.zeros(number, bool)
  packs: list[tuple[str, int]] = []
  for share in shares:
    for name, (numbers, chunks) in share.chunks.items():
      if covered[name][numbers].any():
        raise ValueError(
          f'{name}: the blocks of one process overlap those of another.'
        )
      moved = chunks.copy()
      moved['pack'][moved['pack'] != manifest.NO_PACK] += len(packs)
      tables[name][numbers] = moved
      covered[name][numbers] = True
    packs += share.packs
  tensors = []
  for name, (dtype, shape) in sorted(specs.items()):
    publish_boxes.check_cover(name, dtype, shape, covered[name])
    tables[name].setflags(write=False)
    tensors.append(
      manifest.Tensor(name=name, dtype=dtype, shape=shape, chunks=tables[name])
    )
  # A process that had to ask the store where the run stands may have no base.
  starts = {share.base_id for share in shares}
  return Whole(
    base_id=starts.pop() if len(starts) == 1 else '',
    changed=sum(share.changed for share in shares),
    elements=sum(share.elements for share in shares),
    cut_bytes=sum(share.cut_bytes for share in shares),
    packs=tuple(packs),
    tensors=tuple(tensors),
  )
