"""From the blocks of one process to encoded chunks in packs, and to manifests.

A block is what a process holds of an array, a chunk a cell of the array's grid,
a cut what a block holds of a chunk; a blob is a chunk encoded, a pack a stored
object of blobs.

Blocks are what a process holds of sharded arrays. Shards of the shipped layouts
are made of whole chunks, which pass through as views. A chunk that is cut
between blocks waits here until all of it is there, perhaps from another
process; only such chunks are copied, and their bytes are counted.

What is made depends on the weights, the base and the tier alone, not on the
threads: chunks are packed in one order.
"""

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from composer_jax.delta import rebuild
from composer_jax.delta.codec import coding
from composer_jax.delta.format import identity, manifest
from composer_jax.delta.store import objects

# Blobs share packs up to this size: few requests for a small policy, and
# objects that a cache can pass on early for a large one.
PACK_BYTES = 8 * 2**20
# Packs on their way; more would only hold memory.
_UPLOADS = 4
# Number of a chunk, and its row of the manifest.
_ROW = np.dtype([('number', '<u4'), *manifest.CHUNK.descr])
# In place of a codec, of a chunk that is hashed and not encoded.
_UNCODED = 255

Key = tuple[str, int]  # of a chunk: its tensor and its number
AnyBlock = identity.Block | tuple
Cut = tuple[Key, identity.Index, np.ndarray]  # what a block holds of a chunk


class Cutter:
  """Turns blocks into chunks and notices overlaps and disagreements.

  Attributes:
    specs: {name: (dtype, shape)} of the tensors seen so far.
    cut_bytes: bytes of the chunks that no block held whole.
    waiting: chunks of which something is missing: values, what is missing of
      them, and the cuts that came.
  """

  def __init__(self):
    self.specs: manifest.Specs = {}
    self.cut_bytes = 0
    self._done: dict[str, np.ndarray] = {}
    self.waiting: dict[Key, tuple[np.ndarray, np.ndarray, list[Cut]]] = {}

  def add(self, block: AnyBlock) -> Iterator[tuple[Key, np.ndarray]]:
    """Yields the chunks that a block holds whole, as views, or completes.

    A ValueError names a tensor whose blocks disagree or overlap.
    """
    name, dtype, shape, index, values = block
    shape = tuple(shape)
    index = tuple((start, stop) for start, stop in index)
    self._check(name, dtype, shape, index, values)
    if not values.size:
      return
    grid = identity.of(shape)
    for number in grid.intersecting(index):
      chunk = grid.chunk(number)
      shared = identity.shared(chunk, index)
      inside = values[identity.within(shared, index)]
      if shared == chunk:
        self._finish(name, number, index)
        yield (name, number), inside
      else:
        yield from self.add_cut(((name, number), shared, inside))

  def add_cut(self, cut: Cut) -> Iterator[tuple[Key, np.ndarray]]:
    """Yields the chunk that a cut completes, if it does."""
    key, index, inside = cut
    dtype, shape = self.specs[key[0]]
    chunk = identity.of(shape).chunk(key[1])
    if key not in self.waiting:
      sides = [stop - start for start, stop in chunk]
      empty = np.empty(sides, identity.DTYPES[dtype])
      self.waiting[key] = empty, np.ones(sides, bool), []
    values, missing, cuts = self.waiting[key]
    at = identity.within(index, chunk)
    if self._done[key[0]][key[1]] or not missing[at].all():
      raise _overlap(key[0], index)
    values[at], missing[at] = inside, False
    # A copy of its own: the block is gone before the cut is sent on.
    cuts.append((key, index, values[at]))
    if not missing.any():
      del self.waiting[key]
      self._finish(*key, index)
      self.cut_bytes += values.nbytes
      yield key, values

  def take_foreign(self) -> list[Cut]:
    """Removes and returns cuts of chunks that others will complete.

    The process that holds the first element of a chunk completes it. Every
    process can tell by itself whether that is its own.
    """
    foreign = [
      key
      for key, (_, missing, _) in self.waiting.items()
      if missing[(0,) * missing.ndim]
    ]
    return [cut for key in foreign for cut in self.waiting.pop(key)[2]]

  def _check(self, name, dtype, shape, index, values) -> None:
    if values.dtype != identity.DTYPES.get(dtype):
      raise ValueError(
        f'{name}: dtype {dtype!r} of an array with a block of dtype '
        f'{values.dtype}; bundles carry {sorted(identity.DTYPES)}.'
      )
    seen = self.specs.setdefault(name, (dtype, shape))
    if seen != (dtype, shape):
      raise ValueError(
        f'{name}: a block of a {dtype} array of shape {shape} after one of a '
        f'{seen[0]} array of shape {seen[1]}.'
      )
    if name not in self._done:
      self._done[name] = np.zeros(identity.of(shape).num_chunks, bool)
    inside = len(index) == len(shape) and all(
      0 <= start <= stop <= length
      for (start, stop), length in zip(index, shape, strict=True)
    )
    if not inside or values.shape != tuple(b - a for a, b in index):
      raise ValueError(
        f'{name}: the block at {index}, of shape {values.shape}, leaves the '
        f'array of shape {shape} or is not of the size it claims.'
      )

  def _finish(self, name, number, index) -> None:
    if self._done[name][number] or (name, number) in self.waiting:
      raise _overlap(name, index)
    self._done[name][number] = True


def _overlap(name: str, index: identity.Index) -> ValueError:
  return ValueError(f'{name}: the block at {index} overlaps another block.')


def wanted_by(blocks: Iterable[AnyBlock]) -> rebuild.Wanted:
  """Says where in the weights these blocks are."""
  found: dict[tuple, list[identity.Index]] = {}
  for name, dtype, shape, index, _ in blocks:
    inside = identity.shared(index, tuple((0, n) for n in shape))
    found.setdefault((name, dtype, tuple(shape)), []).append(inside)
  return lambda *tensor: found.get(tensor, [])


def identify(blocks: Iterable[AnyBlock]) -> tuple[str, int, int]:
  """Returns the identity, elements and bytes of weights, in no store."""
  cutter, rows, size = Cutter(), {}, 0
  for (name, number), values in (c for b in blocks for c in cutter.add(b)):
    rows.setdefault(name, []).append(_row(number, identity.hash_chunk(values)))
    size += values.nbytes
  rows = {name: np.array(found, _ROW) for name, found in rows.items()}
  table = merge([ChunkTable(specs=cutter.specs, rows=rows)])
  return table.target_id, table.elements, size


def _row(
  number, post, codec=_UNCODED, pack=manifest.NO_PACK, length=0
) -> tuple:
  return number, codec, pack, length, np.frombuffer(post, np.uint8)


# Encoding.


@dataclasses.dataclass(slots=True)
class HostWeights:
  """Part of a version's weights that one process has on the host.

  Chunks that did not change between versions are the same array in both.

  Attributes:
    specs: {name: (dtype, shape)} of its tensors.
    target_id: identity of the whole weights; '' until it is known.
    chunks: flat values and hash of each chunk.
  """

  specs: manifest.Specs
  target_id: str = ''
  chunks: dict[Key, tuple[np.ndarray, bytes]] = dataclasses.field(
    default_factory=dict
  )


def weights_of(held: rebuild.Held) -> HostWeights:
  """Takes verified weights, whole or a part."""
  made = HostWeights(held.specs, held.target_id)
  for name, tensor in held.tensors.items():
    for at, number in enumerate(tensor.numbers.tolist()):
      made.chunks[name, number] = tensor.values(at), tensor.posts[at].tobytes()
  return made


class _Coded(NamedTuple):
  """A chunk, encoded; `values` are flat and owned by nobody else."""

  key: Key
  codec: int
  blob: bytes
  post: bytes
  values: np.ndarray
  changed: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
  """Encodes chunks with threads, decodes them again and uploads their packs."""

  store: objects.Store
  tier: str
  threads: int

  def stage(
    self,
    items: Iterable[tuple[Key, np.ndarray]],
    specs: manifest.Specs,
    base: HostWeights | None,
  ) -> tuple[HostWeights, 'ChunkTable']:
    """Copies and hashes the chunks of a version; encodes them against a base.

    The specs may grow with the items.
    """
    made = HostWeights(specs)

    def work(item: tuple[Key, np.ndarray]) -> _Coded:
      key, values = item
      spec = specs[key[0]]
      if base and key in base.chunks and base.specs.get(key[0]) == spec:
        return self._encode(key, values, base.chunks[key][0])
      return _keep(key, values)

    with contextlib.closing(
      rebuild.in_order(work, items, self.threads)
    ) as coded:
      # Blobs are few bytes beside weights, unlike those of a keyframe.
      found = sorted(coded, key=lambda one: one.key)
    made.chunks |= {one.key: (one.values, one.post) for one in found}
    table = self._table(found)
    if base and all(one.codec != _UNCODED for one in found):
      table = dataclasses.replace(table, base_id=base.target_id)
    return made, table

  def encode_key(self, weights: HostWeights) -> 'ChunkTable':
    """Encodes weights to stand alone."""

    def work(key: Key) -> _Coded:
      values, post = weights.chunks[key]
      return self._encode(key, values, None, post)

    # Closed here where a pack fails, its threads with it: whoever drops the
    # error later may be one of them, or hold what they wait for.
    with contextlib.closing(
      rebuild.in_order(work, sorted(weights.chunks), self.threads)
    ) as coded:
      return dataclasses.replace(self._table(coded), specs=weights.specs)

  def _encode(self, key: Key, values, base, post=None) -> _Coded:
    values, kept = _flat(values), base
    kind, blob = coding.encode(values, base, tier=self.tier)
    if kind != coding.SAME or kept is None:
      kept = coding.decode(kind, blob, values.size, values.dtype, base)
    if not np.array_equal(identity.flat_bits(kept), identity.flat_bits(values)):
      raise ValueError(
        f'{key[0]} (chunk {key[1]}): codec {kind} does not decode to what it '
        "encoded; nothing was published. This machine's memory may be at "
        'fault.'
      )
    if base is None:
      changed = values.size
    else:
      changed = coding.count_changed(values, base) if blob else 0
    post = identity.hash_chunk(values) if post is None else post
    return _Coded(key, kind, blob, post, kept, changed)

  def _table(self, coded: Iterable[_Coded]) -> 'ChunkTable':
    """Uploads packs of the blobs, which come in the order of their keys."""
    rows: dict[str, list[tuple]] = {}
    lengths: list[int] = []
    changed = 0

    def packs() -> Iterator[bytes]:
      nonlocal changed
      pack = bytearray()
      for (name, number), codec, blob, post, _, count in coded:
        if pack and len(pack) + len(blob) > PACK_BYTES:
          lengths.append(len(pack))
          yield bytes(pack)
          pack.clear()
        place = len(lengths) if blob else manifest.NO_PACK
        row = _row(number, post, codec, place, len(blob))
        rows.setdefault(name, []).append(row)
        pack += blob
        changed += count
      if pack:
        lengths.append(len(pack))
        yield bytes(pack)

    names = list(rebuild.in_order(self.store.put, packs(), _UPLOADS, 1))
    return ChunkTable(
      changed=changed,
      packs=tuple(zip(names, lengths, strict=True)),
      rows={name: np.array(found, _ROW) for name, found in rows.items()},
    )


def _keep(key: Key, values: np.ndarray) -> _Coded:
  """Copies and hashes a chunk that is to be encoded later, if at all."""
  kept = _flat(values)
  if np.may_share_memory(kept, values):
    kept = kept.copy()
  post = identity.hash_chunk(kept)
  return _Coded(key, _UNCODED, b'', post, kept, kept.size)


def _flat(chunk: np.ndarray) -> np.ndarray:
  """Returns the values of a chunk in C order, a view where they lie so."""
  return identity.flat_bits(chunk).view(chunk.dtype)


# Tables of several processes.


def to_bytes(fields: Any, arrays: Iterable[np.ndarray]) -> bytes:
  """Writes JSON and arrays, which are trusted between processes of a run."""
  file = io.BytesIO()
  head = np.frombuffer(json.dumps(fields).encode(), np.uint8)
  np.savez(file, head, *arrays)
  return file.getvalue()


def from_bytes(data: bytes) -> tuple[Any, list[np.ndarray]]:
  """Undoes `to_bytes`."""
  with np.load(io.BytesIO(data), allow_pickle=False) as found:
    head, *arrays = (found[f'arr_{n}'] for n in range(len(found.files)))
  return json.loads(head.tobytes()), arrays


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChunkTable:
  """Part of a bundle that one process, or all of them, made.

  Attributes:
    specs: {name: (dtype, shape)} of the tensors of which it has blocks.
    base_id: identity of the weights that every chunk was encoded against; ''
      if the rows stand alone, or hold hashes alone.
    changed: number of elements that differ from the base.
    cut_bytes: bytes of chunks that no block held whole.
    packs: (sha256, bytes) of the objects that hold its blobs.
    rows: {name: numbers of chunks, ascending, and their rows}.
  """

  specs: manifest.Specs = dataclasses.field(default_factory=dict)
  base_id: str = ''
  changed: int = 0
  cut_bytes: int = 0
  packs: tuple[tuple[str, int], ...] = ()
  rows: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def to_bytes(self) -> bytes:
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    fields['rows'] = list(self.rows)
    return to_bytes(fields, self.rows.values())

  @classmethod
  def from_bytes(cls, data: bytes) -> 'ChunkTable':
    fields, arrays = from_bytes(data)
    fields['rows'] = dict(zip(fields['rows'], arrays, strict=True))
    fields['packs'] = tuple(tuple(pack) for pack in fields['packs'])
    fields['specs'] = {
      name: (dtype, tuple(shape))
      for name, (dtype, shape) in fields['specs'].items()
    }
    return cls(**fields)

  @property
  def tensors(self) -> tuple[manifest.Tensor, ...]:
    """Tensors of the manifest, of a table of all processes."""
    columns = list(manifest.CHUNK.names or ())
    return tuple(
      manifest.Tensor(
        name, *spec, self.rows[name][columns].astype(manifest.CHUNK)
      )
      for name, spec in sorted(self.specs.items())
    )

  @property
  def elements(self) -> int:
    return sum(math.prod(shape) for _, shape in self.specs.values())

  @property
  def target_id(self) -> str:
    return identity.root({t.name: t.node for t in self.tensors})


def merge(tables: Sequence[ChunkTable]) -> ChunkTable:
  """Puts the tables of all processes together.

  A ValueError names a tensor of which chunks are missing or there twice.
  """
  specs: manifest.Specs = {}
  rows: dict[str, list[np.ndarray]] = {}
  packs: list[tuple[str, int]] = []
  for table in tables:
    for name, spec in table.specs.items():
      rows.setdefault(name, [np.empty(0, _ROW)])
      if specs.setdefault(name, spec) != spec:
        raise ValueError(
          f'{name}: one process has blocks of {spec} and another of '
          f'{specs[name]}.'
        )
    for name, found in table.rows.items():
      moved = found.copy()
      moved['pack'][moved['pack'] != manifest.NO_PACK] += len(packs)
      rows[name].append(moved)
    packs += table.packs
  merged = {}
  for name, (_, shape) in specs.items():
    found = np.concatenate(rows[name])
    _check_whole(name, shape, found['number'])
    merged[name] = found[np.argsort(found['number'])]
  # A process that had to ask the store where the run stands may have no base.
  bases = {table.base_id for table in tables}
  return ChunkTable(
    specs=specs,
    base_id=bases.pop() if len(bases) == 1 else '',
    changed=sum(table.changed for table in tables),
    cut_bytes=sum(table.cut_bytes for table in tables),
    packs=tuple(packs),
    rows=merged,
  )


def _check_whole(name: str, shape: tuple[int, ...], numbers: Any) -> None:
  """Refuses a tensor that does not have each of its chunks once."""
  numbers, sizes = np.asarray(numbers, int), identity.of(shape).sizes
  if len(np.unique(numbers)) < len(numbers):
    raise ValueError(
      f'{name}: the blocks of one process overlap those of another.'
    )
  lost = np.setdiff1d(np.arange(len(sizes)), numbers)
  if lost.size:
    raise ValueError(
      f'{name}: {sizes[lost].sum()} elements are in chunks that no blocks make '
      'whole.'
    )
