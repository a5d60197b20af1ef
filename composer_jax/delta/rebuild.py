"""Rebuilds verified weights from one bundle and the weights it starts from.

Every byte is verified before it is used: a blob before it is decoded, a chunk
after it. The Merkle root of the chunks' hashes was checked when the manifest
was read, and weights leave here only when all their chunks matched it; what was
held before stays as it is.

Requests, decoding and hashing overlap: while some threads wait for ranges of
packs, others decode those that came, straight to where the chunks stay.
"""

import collections
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import (
  Callable,
  Collection,
  Generator,
  Iterable,
  Iterator,
  Mapping,
)
from concurrent import futures
from typing import Any, NamedTuple, TypeVar

import numpy as np

from composer_jax.delta.codec import coding
from composer_jax.delta.format import identity
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects

# What one request asks for at most, more only if a single blob is larger; less
# of small bundles, so that what is on its way is small beside the weights.
RANGE_BYTES = 8 * 2**20
_SMALL_BYTES = 2**20
# Requests on their way at once: enough to fill 10 Gbit/s at a round trip of
# 200 ms, and a quarter of a GiB of memory at most.
IN_FLIGHT: int = 32
# What another way through the same store will hardly cure.
UNREACHED = (ConnectionError, TimeoutError)
# Elements that a thread takes at a time: small tensors share a turn.
_TURN_ELEMENTS = 2**19
# Items in flight for each thread: they hold ranges and blocks of weights.
_AHEAD = 4

Index = identity.Index
# Says which regions of a tensor (name, dtype, shape) a receiver needs.
Wanted = Callable[[str, str, tuple[int, ...]], Iterable[Index]]
_In = TypeVar('_In')
_Out = TypeVar('_Out')
_log = logging.getLogger(__name__)


def in_flight(
  pool: futures.Executor,
  work: Callable[[_In], _Out],
  items: Iterable[_In],
  most: int,
) -> Iterator[_Out]:
  """Yields work(item) in the order of the items, at most so many ahead.

  The first are on their way when this returns.
  """
  rest = iter(items)
  flying = collections.deque(
    pool.submit(work, item) for item in itertools.islice(rest, most)
  )

  def results() -> Iterator[_Out]:
    while flying:
      yield flying.popleft().result()
      for item in itertools.islice(rest, 1):
        flying.append(pool.submit(work, item))

  return results()


def in_order(
  work: Callable[[_In], _Out], items: Iterable[_In], threads: int
) -> Generator[_Out, None, None]:
  """Yields work(item) in the order of the items, by a pool of threads.

  The first error ends it, as closing the generator does: what did not begin is
  dropped, and no thread is left when the error reaches the caller.
  """
  if threads < 1:
    raise ValueError(f'threads must be at least 1, not {threads}.')
  pool = futures.ThreadPoolExecutor(threads, 'delta')
  try:
    yield from in_flight(pool, work, items, _AHEAD * threads)
  finally:
    pool.shutdown(cancel_futures=True)


def chunks_of(
  wanted: Wanted | None, name: str, dtype: str, shape: tuple[int, ...]
) -> np.ndarray:
  """Returns the numbers of the chunks that a receiver needs, ascending."""
  grid = identity.of(shape)
  if wanted is None:
    return np.arange(grid.num_chunks)
  indices = wanted(name, dtype, shape)
  numbers = {n for index in indices for n in grid.intersecting(index)}
  return np.array(sorted(numbers), np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class HeldTensor:
  """The chunks of one tensor that a receiver holds; nobody writes to them.

  Attributes:
    dtype: name in `identity.DTYPES`.
    shape: shape of the whole tensor, and `grid` its grid.
    numbers: numbers of the chunks, ascending.
    offsets: where each chunk begins in `buffer`, and its end.
    buffer: flat values, chunk after chunk, each in C order.
    posts: uint8 [chunks, 32], what each chunk hashes to.
  """

  dtype: str
  shape: tuple[int, ...]
  grid: identity.Grid
  numbers: np.ndarray
  offsets: np.ndarray
  buffer: np.ndarray
  posts: np.ndarray

  @classmethod
  def empty(
    cls,
    dtype: str,
    shape: tuple[int, ...],
    numbers: np.ndarray,
    posts: np.ndarray,
  ) -> 'HeldTensor':
    """Makes room for chunks whose values will follow."""
    grid = identity.of(shape)
    offsets = np.concatenate([[0], np.cumsum(grid.sizes[numbers])])
    buffer = np.empty(int(offsets[-1]), identity.DTYPES[dtype])
    fields = dict(numbers=numbers, offsets=offsets, buffer=buffer, posts=posts)
    return cls(dtype=dtype, shape=shape, grid=grid, **fields)

  def chunk(self, number: int) -> np.ndarray:
    at = int(np.searchsorted(self.numbers, number))
    if at == self.numbers.size or self.numbers[at] != number:
      raise ValueError(
        f'chunk {number} of {self.grid.num_chunks} is not among the '
        f'{self.numbers.size} that this receiver asked for.'
      )
    values = self.buffer[self.offsets[at] : self.offsets[at + 1]]
    return values.reshape([b - a for a, b in self.grid.chunk(number)])

  def block(self, index: Index) -> np.ndarray:
    """Returns a region: a view where memory allows, else a copy."""
    numbers = self.grid.intersecting(index)
    if self.numbers.size == self.grid.num_chunks and self.grid.is_flat:
      array = self.buffer.reshape(self.shape)
      return array[tuple(slice(*ends) for ends in index)]
    if len(numbers) == 1 and self.grid.chunk(numbers[0]) == tuple(index):
      return self.chunk(numbers[0])
    region = np.empty([b - a for a, b in index], self.buffer.dtype)
    for number in numbers:
      chunk = self.grid.chunk(number)
      shared = identity.shared(chunk, index)
      source = self.chunk(number)[identity.within(shared, chunk)]
      region[identity.within(shared, index)] = source
    region.setflags(write=False)
    return region


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Held:
  """Weights of a version, whole or the chunks that a receiver asked for.

  Attributes:
    version: policy version.
    target_id: identity of the whole weights, also where a part is held.
    tensors: tensors by name.
  """

  version: int
  target_id: str
  tensors: Mapping[str, HeldTensor]

  def signature(self) -> manifests.Specs:
    """Returns {name: (dtype, shape)}."""
    return {name: (t.dtype, t.shape) for name, t in self.tensors.items()}

  def block(self, name: str, index: Index) -> np.ndarray:
    """Returns a region of a tensor, read-only.

    Raises:
      ValueError: names the tensor of which a needed chunk is not held.
    """
    if name not in self.tensors:
      raise ValueError(
        f'{name} is not among the {len(self.tensors)} tensors of version '
        f'{self.version}, such as {list(self.tensors)[:5]}.'
      )
    try:
      return self.tensors[name].block(index)
    except ValueError as error:
      raise ValueError(f'{name}: {error}') from error

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns whole tensors, read-only."""
    return {
      name: self.block(name, tuple((0, n) for n in tensor.shape))
      for name, tensor in self.tensors.items()
    }


class Blob(NamedTuple):
  """One encoded chunk, where it lies in its pack, and who waits for it."""

  pack: str
  start: int
  stop: int
  short_hash: bytes
  slot: Any
  at: int


def ranges(blobs: list[Blob]) -> list[list[Blob]]:
  """Joins neighbours to one request each; other bytes are never asked for."""
  found: list[list[Blob]] = []
  total = sum(blob.stop - blob.start for blob in blobs)
  most = min(RANGE_BYTES, max(_SMALL_BYTES, total // (8 * IN_FLIGHT)))
  for blob in blobs:
    last = found[-1] if found else None
    if (
      last is None
      or (last[-1].pack, last[-1].stop) != (blob.pack, blob.start)
      or blob.stop - last[0].start > most
    ):
      found.append([blob])
    else:
      last.append(blob)
  return found


@dataclasses.dataclass
class UpdateCost:
  """What an update took; its threads count together.

  Attributes:
    route: bundles applied, such as 'key 0', 'delta 0-8', 'delta 8-9'; none
      where the weights were held under another version.
    bytes: bytes read from the store for them, failed ways included.
    fetch_s: seconds of reading, summed over the requests.
    decode_s: seconds of decoding and hashing, summed over the threads.
    wall_s: seconds from the pointer to the swap.
  """

  route: tuple[str, ...] = ()
  bytes: int = 0
  fetch_s: float = 0.0
  decode_s: float = 0.0
  wall_s: float = 0.0

  def __post_init__(self):
    self._lock = threading.Lock()

  def add(self, *, moved: int = 0, fetch_s: float = 0, decode_s: float = 0):
    with self._lock:
      self.bytes += moved
      self.fetch_s += fetch_s
      self.decode_s += decode_s


class Fetcher:
  """Reads verified bytes of a store, with threads of its own, in `pool`.

  Use it as a context; leaving it drops requests that did not start.
  """

  def __init__(self, store: objects.Store, cost: UpdateCost | None = None):
    self.cost = cost or UpdateCost()
    self._store = store
    self.pool = futures.ThreadPoolExecutor(IN_FLIGHT, 'fetch')

  def __enter__(self) -> 'Fetcher':
    return self

  def __exit__(self, *_):
    self.pool.shutdown(cancel_futures=True)

  def get(self, name: str, length: int | None) -> bytes:
    """Returns an object whose sha256 is its name, of a stated length."""
    return self._twice(
      lambda store: self._moved(lambda: store.get(name, length))
    )

  def range(self, blobs: list[Blob]) -> memoryview:
    """Returns the bytes of neighbouring blobs; errors name a tensor."""
    try:
      return memoryview(self._twice(lambda store: self._part(blobs, store)))
    except _DamagedBlob:
      raise
    except (ValueError, OSError) as error:
      raise _named(blobs[0].slot.where(blobs[0].at), error) from error

  def _twice(self, read: Callable[[objects.Store], bytes]) -> bytes:
    """Reads; what comes damaged or cut once more, past caches on the way."""
    try:
      return read(self._store)
    except (ValueError, objects.CutShort) as error:
      # What a link or a cache damaged may arrive whole. Not after any failure:
      # past a cache that is slow, all its followers would ask the store.
      _log.warning('Asked for again: %s', error)
      return read(self._store.past_caches)

  def _part(self, blobs: list[Blob], store: objects.Store) -> bytes:
    first, stop = blobs[0], blobs[-1].stop
    data = self._moved(lambda: store.get_range(first.pack, first.start, stop))
    view = memoryview(data)
    for blob in blobs:
      held = view[blob.start - first.start : blob.stop - first.start]
      if identity.short_hash(held) != blob.short_hash:
        raise _DamagedBlob(
          f'{blob.slot.where(blob.at)}: its blob is damaged, the hash is wrong '
          f'(object {blob.pack[:12]}).'
        )
    return data

  def _moved(self, read: Callable[[], bytes]) -> bytes:
    begun = time.perf_counter()
    data = read()
    self.cost.add(moved=len(data), fetch_s=time.perf_counter() - begun)
    return data


def read_manifest(
  source: Fetcher | objects.Store, named: manifests.Edge | manifests.Pointer
) -> manifests.Manifest:
  """Reads the manifest that an edge or pointer names; errors name it, too."""
  data = source.get(named.manifest, named.manifest_bytes)
  try:
    return manifests.Manifest.from_bytes(data)
  except ValueError as error:
    raise ValueError(f'manifest {named.manifest}: {error}') from error


def read_index(
  source: Fetcher | objects.Store, pointer: manifests.Pointer
) -> manifests.Index:
  """Reads the list of a run's bundles; errors as of `read_manifest`."""
  data = source.get(pointer.index, pointer.index_bytes)
  try:
    index = manifests.Index.from_bytes(data)
  except ValueError as error:
    raise ValueError(f'index {pointer.index}: {error}') from error
  if index.run_id != pointer.run_id:
    raise ValueError(
      f'index {pointer.index}: it belongs to run {index.run_id!r}, not '
      f'{pointer.run_id!r}.'
    )
  return index


class _DamagedBlob(ValueError):
  pass


class DamagedBase(ValueError):
  """The held weights are not what they were when they were verified."""


class UnfitBase(ValueError):
  """The bundle builds on something else than these intact weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
  """A tensor on its way: its rows of the manifest, the base, what becomes.

  Attributes:
    made: the tensor of the new version.
    base: the tensor that it is built on, None for a keyframe.
    base_at: where the chunks of `made` stand in the base.
    rows: rows of the manifest, of the chunks of `made`.
    places: where the blobs of the rows begin in their packs.
  """

  bundle: manifests.Manifest
  name: str
  made: HeldTensor
  base: HeldTensor | None
  base_at: np.ndarray
  rows: np.ndarray
  places: np.ndarray

  def where(self, at: int) -> str:
    number, version = self.made.numbers[at], self.bundle.version
    return f'{self.name} (chunk {number}, version {version})'

  def size(self, at: int) -> int:
    return int(self.made.offsets[at + 1] - self.made.offsets[at])

  def blobs(self) -> Iterator[Blob]:
    found = np.flatnonzero(self.rows['length']).tolist()
    rows = self.rows[found]
    short = np.ascontiguousarray(rows['blob']).tobytes()
    columns = rows['pack'], self.places[found], rows['length']
    for n, (pack, start, length) in enumerate(
      zip(*(column.tolist() for column in columns), strict=True)
    ):
      name, digest = self.bundle.packs[pack][0], short[16 * n : 16 * n + 16]
      yield Blob(name, start, start + length, digest, self, found[n])

  def decode(self, at: int, blob: memoryview) -> None:
    """Decodes a chunk to where it stays, and hashes it."""
    low, high = self.made.offsets[at], self.made.offsets[at + 1]
    kept = made = self.made.buffer[low:high]
    base, there = None, self.base_at[at]
    if self.base is not None:
      base = self.base.buffer[slice(*self.base.offsets[there : there + 2])]
    kind = int(self.rows['codec'][at])
    is_shared = self.base is not None and self.made.buffer is self.base.buffer
    if is_shared and kind != coding.SAME:
      made = np.empty_like(kept)  # The base is read while this is written.
    try:
      if kind != coding.SAME:
        coding.decode(kind, blob, made.size, made.dtype, base, out=made)
      elif base is not None and not is_shared:
        made[...] = base
    except (ValueError, OSError) as error:
      self._check_rot(at, there, base)
      raise _named(self.where(at), error) from error
    if identity.hash_chunk(made) != self.made.posts[at].tobytes():
      self._check_rot(at, there, base)
      raise ValueError(
        f'{self.where(at)}: does not decode to the weights that were '
        'published; blob and base do not belong together.'
      )
    if made is not kept:
      kept[...] = made

  def _check_rot(self, at: int, there: int, base: np.ndarray | None) -> None:
    if base is None or self.base is None:
      return
    if identity.hash_chunk(base) != self.base.posts[there].tobytes():
      raise DamagedBase(
        f'{self.where(at)}: the weights that are held changed in memory since '
        'they were verified.'
      )


def apply(
  fetcher: Fetcher,
  bundle: manifests.Manifest,
  base: Held | None,
  wanted: Wanted | None = None,
  threads: int = 2,
  *,
  kept: Collection[int] | None = None,
) -> Held:
  """Applies a bundle to a base; a keyframe needs none.

  Args:
    fetcher: reads the bundle's blobs.
    bundle: manifest of the bundle.
    base: weights that it builds on; None for a keyframe.
    wanted: regions to hold; None for all.
    threads: number of threads that decode.
    kept: None leaves the base as it is. Else it is lost, whether this succeeds
      or not: its memory is written to, but for buffers of these ids.

  Raises:
    ValueError: names the tensor whose base or blob is wrong.
    OSError: an object cannot be read.
  """
  if bundle.kind == manifests.KEY:
    base = None
  else:
    _check_base(bundle, base)
  try:
    slots = [
      _slot(bundle, tensor, places, base, wanted, kept)
      for tensor, places in zip(bundle.tensors, bundle.offsets(), strict=True)
    ]
  except MemoryError as error:
    raise ValueError(
      f'version {bundle.version} ({bundle.full_bytes} bytes) does not fit in '
      'the memory that is left.'
    ) from error

  def decode(turn: list[tuple[_Slot, int, memoryview]]) -> None:
    begun = time.perf_counter()
    for slot, at, blob in turn:
      slot.decode(at, blob)
    fetcher.cost.add(decode_s=time.perf_counter() - begun)

  for _ in in_order(decode, _turns(fetcher, slots), threads):
    pass
  for slot in slots:
    slot.made.buffer.setflags(write=False)
  tensors = {slot.name: slot.made for slot in slots}
  names = {'version': bundle.version, 'target_id': bundle.target_id}
  return Held(tensors=tensors, **names)


def _check_base(bundle: manifests.Manifest, base: Held | None) -> None:
  if base is None:
    raise UnfitBase(f'version {bundle.version} needs a base.')
  ours, theirs = base.signature(), bundle.signature()
  if ours != theirs:
    both = sorted({*ours, *theirs})
    names = [n for n in both if ours.get(n) != theirs.get(n)]
    raise UnfitBase(
      f'version {bundle.version} has other tensors than its base: '
      + ', '.join(f'{n}: {ours.get(n)} and {theirs.get(n)}' for n in names[:5])
    )
  if base.target_id != bundle.base_id:
    raise UnfitBase(
      f'version {bundle.version} builds on the weights {bundle.base_id}, '
      f'not on the {base.target_id} that are held.'
    )


def _slot(bundle, tensor, places, base, wanted, kept) -> _Slot:
  name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
  numbers = chunks_of(wanted, name, dtype, shape)
  rows = tensor.chunks[numbers]
  posts = np.ascontiguousarray(rows['post'])
  old, base_at, is_shared = None, numbers, False
  is_frozen = not rows['codec'].any()
  if base is not None:
    old = base.tensors[name]
    if not np.isin(numbers, old.numbers).all():
      raise ValueError(
        f'{name}: {len(numbers)} chunks are wanted of version '
        f'{bundle.version}, and its base holds {len(old.numbers)} others.'
      )
    base_at = np.searchsorted(old.numbers, numbers)
    is_lost = kept is not None and id(old.buffer) not in kept
    is_shared = (is_frozen or is_lost) and len(numbers) == len(old.numbers)
  if old is not None and is_shared:
    # Both versions hold the same memory, which is still hashed.
    made = dataclasses.replace(old, posts=posts)
    if not is_frozen:
      made.buffer.setflags(write=True)
  else:
    made = HeldTensor.empty(dtype, shape, numbers, posts)
  return _Slot(bundle, name, made, old, base_at, rows, places[numbers])


def _turns(fetcher: Fetcher, slots: list[_Slot]) -> Iterator[list]:
  """Yields (slot, chunk, blob) for a thread at a time."""
  blobs = [blob for slot in slots for blob in slot.blobs()]
  blobs.sort(key=lambda blob: blob[:2])
  arriving = in_flight(
    fetcher.pool, lambda r: (r, fetcher.range(r)), ranges(blobs), IN_FLIGHT
  )
  bare = (
    (slot, at, memoryview(b''))
    for slot in slots
    for at in np.flatnonzero(slot.rows['length'] == 0).tolist()
  )
  yield from _split(bare)
  for group, data in arriving:
    first = group[0].start
    yield from _split(
      (b.slot, b.at, data[b.start - first : b.stop - first]) for b in group
    )


def _split(chunks: Iterable[tuple]) -> Iterator[list]:
  turn, elements = [], 0
  for chunk in chunks:
    turn.append(chunk)
    elements += chunk[0].size(chunk[1])
    if elements >= _TURN_ELEMENTS:
      yield turn
      turn, elements = [], 0
  if turn:
    yield turn


def _named(where: str, error: Exception) -> Exception:
  """Returns an error that says where; a store that is away stays one."""
  kind = type(error) if isinstance(error, UNREACHED) else ValueError
  return kind(f'{where}: {error}')
