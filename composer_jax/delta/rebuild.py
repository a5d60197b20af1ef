"""Rebuilds verified weights from one bundle and the weights it starts from.

A pack that is wanted whole is verified by its name before its blobs are
decoded, each decoded chunk by its hash in the manifest, whose Merkle root was
checked when it was read. Weights leave here only when all their chunks matched;
what was held before stays as it is.

Requests, decoding and hashing overlap: while some threads wait for packs,
others decode those that came, straight to where the chunks stay.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple, TypeVar

import numpy as np

from composer_jax.delta.codec import coding
from composer_jax.delta.format import identity
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects

# What one request for a part of a pack asks for at most, more only if a single
# blob is larger.
RANGE_BYTES = 8 * 2**20
# Requests on their way at once: enough to fill 10 Gbit/s at a round trip of
# 200 ms, and few of a small bundle, so that they are small beside the weights.
IN_FLIGHT: int = 32
_FEWEST = 4
# What another way through the same store will hardly cure.
UNREACHED = (ConnectionError, TimeoutError)
# Elements that a thread takes at a time: small tensors share a turn.
_TURN_ELEMENTS = 2**19

Index = identity.Index
# Says which blocks of a tensor (name, dtype, shape) a receiver needs.
Wanted = Callable[[str, str, tuple[int, ...]], Iterable[Index]]
_In = TypeVar('_In')
_Out = TypeVar('_Out')


def in_order(
  work: Callable[[_In], _Out],
  items: Iterable[_In],
  threads: int,
  ahead: int = 4,
) -> Generator[_Out, None, None]:
  """Yields work(item) in the order of the items, by a pool of threads.

  At most `ahead` items for each thread are in flight: they hold packs and
  blocks of weights. The first error ends it, as closing the generator does, and
  no thread is left when the error reaches the caller.
  """
  flying: collections.deque[futures.Future] = collections.deque()
  pool = futures.ThreadPoolExecutor(threads, 'delta')
  try:
    for item in items:
      flying.append(pool.submit(work, item))
      if len(flying) >= ahead * threads:
        yield flying.popleft().result()
    while flying:
      yield flying.popleft().result()
  finally:
    pool.shutdown(cancel_futures=True)


def chunks_of(
  wanted: Wanted | None, name: str, dtype: str, shape: tuple[int, ...]
) -> np.ndarray:
  """Returns the numbers of the chunks that a receiver needs, ascending."""
  grid = identity.of(shape)
  if wanted is None:
    return np.arange(grid.num_chunks)
  indices = map(grid.intersecting, wanted(name, dtype, shape))
  return np.array(sorted(set(itertools.chain(*indices))), np.int64)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class HeldTensor:
  """The chunks of one tensor that a receiver holds; nobody writes to them.

  Attributes:
    shape: shape of the whole tensor.
    numbers: numbers of the chunks, ascending.
    offsets: where each chunk begins in `buffer`, and its end.
    buffer: flat values, chunk after chunk, each in C order.
    posts: uint8 [chunks, HASH_BYTES], what each chunk hashes to.
  """

  dtype: str
  shape: tuple[int, ...]
  numbers: np.ndarray
  offsets: np.ndarray
  buffer: np.ndarray
  posts: np.ndarray

  @classmethod
  def empty(cls, dtype, shape, numbers, posts) -> 'HeldTensor':
    """Makes room for chunks whose values will follow."""
    sizes = identity.of(shape).sizes[numbers]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    buffer = np.empty(int(offsets[-1]), identity.DTYPES[dtype])
    return cls(dtype, shape, numbers, offsets, buffer, posts)

  @property
  def grid(self) -> identity.Grid:
    return identity.of(self.shape)

  def values(self, at: int) -> np.ndarray:
    """Returns the flat values of the chunk that is held at a place."""
    return self.buffer[self.offsets[at] : self.offsets[at + 1]]

  def chunk(self, number: int) -> np.ndarray:
    at = int(np.searchsorted(self.numbers, number))
    if at == self.numbers.size or self.numbers[at] != number:
      raise ValueError(
        f'chunk {number} of {self.grid.num_chunks} is not among the '
        f'{self.numbers.size} that this receiver asked for.'
      )
    return self.values(at).reshape([b - a for a, b in self.grid.chunk(number)])

  def block(self, index: Index) -> np.ndarray:
    """Returns a block: a view where memory allows, else a copy."""
    numbers = self.grid.intersecting(index)
    if self.numbers.size == self.grid.num_chunks and self.grid.is_flat:
      array = self.buffer.reshape(self.shape)
      return array[tuple(slice(*ends) for ends in index)]
    if len(numbers) == 1 and self.grid.chunk(numbers[0]) == tuple(index):
      return self.chunk(numbers[0])
    block = np.empty([b - a for a, b in index], self.buffer.dtype)
    for number in numbers:
      chunk = self.grid.chunk(number)
      shared = identity.shared(chunk, index)
      source = self.chunk(number)[identity.within(shared, chunk)]
      block[identity.within(shared, index)] = source
    block.setflags(write=False)
    return block


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Held:
  """Verified weights of a version, whole or the chunks that were asked for.

  `target_id` is the identity of the whole weights, also where a part is held.
  """

  version: int
  target_id: str
  tensors: dict[str, HeldTensor]

  @property
  def specs(self) -> manifests.Specs:
    return {name: (t.dtype, t.shape) for name, t in self.tensors.items()}

  def block(self, name: str, index: Index) -> np.ndarray:
    """Returns a block, read-only; an error names the tensor that lacks it."""
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


# Reading.


@dataclasses.dataclass
class UpdateCost:
  """What an update took.

  Attributes:
    route: bundles applied, such as 'key 0', 'delta 0-1', 'delta 1-2'; none
      where the weights were held under another version.
    bytes: bytes read from the store for them, failed ways included.
    wall_s: seconds from the pointer to the swap.
  """

  route: tuple[str, ...] = ()
  bytes: int = 0
  wall_s: float = 0.0


def read_manifest(
  store: objects.Store, link: manifests.Link, target_id: str = ''
) -> manifests.Manifest:
  """Reads what a link leads to, and refuses one that belies it.

  Args:
    target_id: identity that it must lead to; '' for any.
  """
  data = store.get(link.manifest, link.bytes)
  with _naming(f'manifest {link.manifest}'):
    bundle = manifests.Manifest.from_bytes(data)
    for name, claim in ('version', link.version), ('target_id', target_id):
      found = getattr(bundle, name)
      if found != claim and claim != '':
        raise ValueError(
          f'its {name} is {found!r}, and what leads to it says {claim!r}.'
        )
  return bundle


# Applying.


class DamagedBase(ValueError):
  """The held weights are not what they were when they were verified."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
  """A tensor on its way: `made` is built on `base`, None for a keyframe.

  Attributes:
    base_at: where the chunks of `made` are in the base.
    rows: rows of the manifest, of the chunks of `made`.
    places: where the blobs of the rows begin in their packs.
  """

  name: str
  version: int
  made: HeldTensor
  base: HeldTensor | None
  base_at: np.ndarray
  rows: np.ndarray
  places: np.ndarray

  def where(self, at: int) -> str:
    number = self.made.numbers[at]
    return f'{self.name} (chunk {number}, version {self.version})'

  def blobs(self, packs: tuple[tuple[str, int], ...]) -> Iterator['Blob']:
    for at in np.flatnonzero(self.rows['length']).tolist():
      start, length = int(self.places[at]), int(self.rows['length'][at])
      pack = packs[self.rows['pack'][at]]
      yield Blob(pack, start, start + length, self, at)

  def decode(self, at: int, blob: bytes | memoryview) -> None:
    """Decodes a chunk to where it stays, and hashes it."""
    kept = made = self.made.values(at)
    base = None
    if self.base is not None:
      base = self.base.values(self.base_at[at])
    kind = int(self.rows['codec'][at])
    is_shared = self.base is not None and self.made.buffer is self.base.buffer
    if is_shared and kind != coding.SAME:
      made = np.empty_like(kept)  # The base is read while this is written.
    try:
      with _naming(self.where(at)):
        if kind != coding.SAME:
          coding.decode(kind, blob, made.size, made.dtype, base, out=made)
        elif base is not None and not is_shared:
          made[...] = base
        if identity.hash_chunk(made) != self.made.posts[at].tobytes():
          raise ValueError(
            'does not decode to the weights that were published; the blob is '
            'damaged, or not of this base.'
          )
    except ValueError as error:
      if self.base is not None and base is not None:
        post = self.base.posts[self.base_at[at]].tobytes()
        if identity.hash_chunk(base) != post:
          raise DamagedBase(
            f'{self.where(at)}: the weights that are held changed in memory '
            'since they were verified.'
          ) from error
      raise
    if made is not kept:
      kept[...] = made


class Blob(NamedTuple):
  """One encoded chunk, where it lies in its pack, and who waits for it."""

  pack: tuple[str, int]
  start: int
  stop: int
  slot: Any
  at: int


def requests(blobs: Iterable[Blob]) -> list[list[Blob]]:
  """Joins neighbours to one request each; other bytes are never asked for."""
  found: list[list[Blob]] = []
  for blob in sorted(blobs, key=lambda blob: blob[:2]):
    last = found[-1] if found else None
    if (
      last is None
      or (last[-1].pack, last[-1].stop) != (blob.pack, blob.start)
      or blob.stop - last[0].start > RANGE_BYTES
    ):
      found.append([blob])
    else:
      last.append(blob)
  return found


def read_blobs(
  store: objects.Store, blobs: list[Blob], *, fresh: bool = False
) -> memoryview:
  """Returns the bytes of neighbours; verified if they are a whole pack."""
  first, stop = blobs[0], blobs[-1].stop
  name, length = first.pack
  with _naming(first.slot.where(first.at)):
    if not fresh and (first.start, stop) == (0, length):
      return memoryview(store.get(name, length))
    return memoryview(store.get_range(name, first.start, stop, fresh=fresh))


def apply(
  store: objects.Store,
  bundle: manifests.Manifest,
  base: Held | None,
  wanted: Wanted | None = None,
  threads: int = 2,
  *,
  kept: Collection[int] | None = None,
  cost: UpdateCost | None = None,
) -> Held:
  """Applies a bundle to a base, which a keyframe does not need.

  Args:
    wanted: blocks to hold; None for all.
    kept: None leaves the base as it is. Else it is lost, whether this succeeds
      or not: its memory is written to, but for buffers of these ids.
    cost: gets the bytes added that are read.
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

  def decode(turn: list[tuple[Blob, memoryview]]) -> None:
    for blob, data in turn:
      try:
        blob.slot.decode(blob.at, data)
      except DamagedBase:
        raise
      except ValueError:
        if not data:
          raise
        # What a link or a cache damaged may arrive whole.
        blob.slot.decode(blob.at, read_blobs(store, [blob], fresh=True))

  with contextlib.closing(_turns(store, bundle, slots, cost)) as turns:
    collections.deque(in_order(decode, turns, threads), maxlen=0)
  tensors = {}
  for tensor, slot in zip(bundle.tensors, slots, strict=True):
    slot.made.buffer.setflags(write=False)
    tensors[tensor.name] = slot.made
  return Held(
    version=bundle.version, target_id=bundle.target_id, tensors=tensors
  )


def _check_base(bundle: manifests.Manifest, base: Held | None) -> None:
  if base is None or base.target_id != bundle.base_id:
    held = 'none' if base is None else base.target_id
    raise ValueError(
      f'version {bundle.version} builds on the weights {bundle.base_id}, '
      f'not on those that are held: {held}.'
    )
  others = sorted(base.specs.items() ^ bundle.specs.items())
  if others:
    raise ValueError(
      f'version {bundle.version} has other tensors than its base: {others[:5]}.'
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
  to = name, bundle.version, made
  return _Slot(*to, old, base_at, rows, places[numbers])


def _turns(
  store, bundle: manifests.Manifest, slots: list[_Slot], cost
) -> Generator[list[tuple[Blob, memoryview]], None, None]:
  """Yields blobs and their bytes, as many as a thread takes at a time."""
  asked = requests(blob for slot in slots for blob in slot.blobs(bundle.packs))
  bare = (
    (Blob(('', 0), 0, 0, slot, at), memoryview(b''))
    for slot in slots
    for at in np.flatnonzero(slot.rows['length'] == 0).tolist()
  )
  most = bundle.bundle_bytes // (8 * RANGE_BYTES)
  threads = min(max(most, _FEWEST), IN_FLIGHT)
  with contextlib.closing(
    in_order(lambda blobs: read_blobs(store, blobs), asked, threads, 1)
  ) as arriving:
    came = (
      (blob, data[blob.start - blobs[0].start : blob.stop - blobs[0].start])
      for blobs, data in zip(asked, arriving, strict=True)
      for blob in blobs
    )
    turn, elements = [], 0
    for blob, data in itertools.chain(bare, came):
      turn.append((blob, data))
      if cost is not None:
        cost.bytes += len(data)
      elements += blob.slot.made.values(blob.at).size
      if elements >= _TURN_ELEMENTS:
        yield turn
        turn, elements = [], 0
    if turn:
      yield turn


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
  """Makes errors say where; that of a store that is away stays one."""
  try:
    yield
  except (ValueError, OSError) as error:
    kind = type(error) if isinstance(error, UNREACHED) else ValueError
    raise kind(f'{where}: {error}') from error
