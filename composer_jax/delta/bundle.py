"""What a bundle is: weights cut into chunks, a manifest, an identity.

The identity (`target_id`) of weights is the Merkle root of the BLAKE3 hashes of
their bits: chunks under tensors (name, dtype, shape), tensors under the root.
It says what the weights are and not how they were sent, so a keyframe and a
chain of deltas that lead to the same bits have the same one. A manifest names
the `target_id` of its base, which chains the bundles.

Nothing here touches a disk; `store` does.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import blake3
import ml_dtypes
import numpy as np

from composer_jax.delta import codec

FORMAT = 'CDB1'
KEY, DELTA = KINDS = ('key', 'delta')

# Chunks are cut from the flattened global array, never from device shards, so
# the identity does not depend on a sharding.
CHUNK_ELEMENTS = 2**20

DTYPES = {
  str(np.dtype(t)): np.dtype(t)
  for t in (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
    np.float16,
    np.float32,
    np.float64,
    np.int8,
    np.uint8,
    np.int16,
    np.uint16,
    np.int32,
    np.uint32,
    np.int64,
    np.uint64,
  )
}
_HASH = re.compile('[0-9a-f]{64}')


class Block(NamedTuple):
  """A piece of a named global array, as an iterator of weights yields it.

  Attributes:
    name: of the tensor, '/'-joined.
    dtype: name in `DTYPES`.
    shape: of the global array.
    index: (start, stop) of the piece along each axis.
    values: the piece itself.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  index: tuple[tuple[int, int], ...]
  values: np.ndarray


class Chunk(NamedTuple):
  """How a chunk was sent and what it must decode to.

  Attributes:
    codec: of the blob.
    length: bytes of the blob.
    blob_hash: checked before decoding.
    post_hash: of the decoded bits; a leaf of the Merkle tree.
  """

  codec: str
  length: int
  blob_hash: str
  post_hash: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
  """A tensor of a manifest and its chunks, in the order of the elements."""

  name: str
  dtype: str
  shape: tuple[int, ...]
  chunks: tuple[Chunk, ...]

  def __post_init__(self):
    _require(isinstance(self.name, str), f'tensor name {self.name!r}')
    _require(self.dtype in DTYPES, f'dtype {self.dtype!r} of {self.name!r}')
    _require(all(map(_is_count, self.shape)), f'shape of {self.name!r}')
    for chunk in self.chunks:
      good = chunk.codec in codec.CODECS and _is_count(chunk.length)
      _require(good and _is_hash(chunk.blob_hash), f'chunk of {self.name!r}')
      _require(_is_hash(chunk.post_hash), f'chunk of {self.name!r}')
    wanted = num_chunks(math.prod(self.shape))
    if len(self.chunks) != wanted:
      raise ValueError(
        f'tensor {self.name!r} of shape {self.shape} must have {wanted} '
        f'chunks, not {len(self.chunks)}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
  """Everything about one version except the blobs themselves.

  Attributes:
    run_id: the run that published it.
    version: of the policy.
    kind: KEY stands alone, DELTA needs the weights `base_id`.
    depth: deltas between it and the keyframe it rests on; 0 for a keyframe.
    base_id: identity of the previous version; '' for the first of a chain.
    previous: hash of the previous version's manifest, '' likewise.
    target_id: identity of the resulting weights.
    objects: (hash, bytes) of the objects that hold the blobs. Blobs lie in
      them in the order of the chunks, each whole within one object, no gaps.
    tensors: sorted by name.
  """

  run_id: str
  version: int
  kind: str
  depth: int
  base_id: str
  previous: str
  target_id: str
  objects: tuple[tuple[str, int], ...]
  tensors: tuple[Tensor, ...]

  def __post_init__(self):
    _require(isinstance(self.run_id, str), f'run_id {self.run_id!r}')
    _require(_is_count(self.version), f'version {self.version!r}')
    _require(self.kind in KINDS, f'kind {self.kind!r}')
    _require(_is_count(self.depth), f'depth {self.depth!r}')
    _require((self.depth == 0) == (self.kind == KEY), f'depth {self.depth!r}')
    first = self.kind == KEY and self.base_id == self.previous == ''
    chained = _is_hash(self.base_id) and _is_hash(self.previous)
    _require(first or chained, f'base {self.base_id!r}, {self.previous!r}')
    _require(_is_hash(self.target_id), f'target_id {self.target_id!r}')
    names = [t.name for t in self.tensors]
    _require(names == sorted(set(names)), 'order of the tensors')
    for digest, length in self.objects:
      _require(_is_hash(digest) and _is_count(length), f'object {digest!r}')
    found = identity(
      {t.name: (t.dtype, t.shape) for t in self.tensors},
      {t.name: [c.post_hash for c in t.chunks] for t in self.tensors},
    )
    if found != self.target_id:
      raise ValueError(
        f'the tensors of version {self.version} have the Merkle root '
        f'{found}, and the manifest claims {self.target_id}.'
      )

  @property
  def full_bytes(self) -> int:
    return sum(
      math.prod(t.shape) * DTYPES[t.dtype].itemsize for t in self.tensors
    )

  def signature(self) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {t.name: (t.dtype, t.shape) for t in self.tensors}

  def to_bytes(self) -> bytes:
    return canonical_json({'format': FORMAT, **dataclasses.asdict(self)})

  @classmethod
  def from_bytes(cls, data: bytes) -> 'Manifest':
    """Parses and checks; ValueError says which field is wrong."""
    fields = parse_canonical(data)
    names = {f.name for f in dataclasses.fields(cls)} | {'format'}
    _require(isinstance(fields, dict) and fields.keys() == names, 'fields')
    _require(fields.pop('format') == FORMAT, f'format, which is not {FORMAT}')
    try:
      tensors = tuple(
        Tensor(
          name=t['name'],
          dtype=t['dtype'],
          shape=tuple(t['shape']),
          chunks=tuple(Chunk(*c) for c in t['chunks']),
        )
        for t in fields.pop('tensors')
      )
      objects = tuple((digest, size) for digest, size in fields.pop('objects'))
      return cls(tensors=tensors, objects=objects, **fields)
    except (TypeError, KeyError) as error:
      raise ValueError(f'a manifest has malformed fields ({error}).') from error


def identity(
  signature: Mapping[str, tuple[str, tuple[int, ...]]],
  post_hashes: Mapping[str, Iterable[str]],
) -> str:
  """Returns the Merkle root of weights.

  Args:
    signature: {name: (dtype, shape)}.
    post_hashes: {name: hashes of its chunks, in order}.
  """
  leaves = [
    digest(canonical_json(['tensor', name, *spec, list(post_hashes[name])]))
    for name, spec in sorted(signature.items())
  ]
  return digest(canonical_json(['weights', FORMAT, CHUNK_ELEMENTS, leaves]))


def hash_chunks(array: np.ndarray) -> list[str]:
  bits = flat_bits(array)
  return [hash_bits(bits[part]) for part in chunk_slices(bits.size)]


def target_id(tensors: Mapping[str, np.ndarray]) -> str:
  """Returns the identity of whole arrays: what a publisher would call them."""
  hashes = {name: hash_chunks(array) for name, array in tensors.items()}
  return identity(signature_of(tensors), hashes)


def signature_of(
  tensors: Mapping[str, np.ndarray],
) -> dict[str, tuple[str, tuple[int, ...]]]:
  return {name: (str(a.dtype), a.shape) for name, a in tensors.items()}


def assemble(blocks: Iterable[Block | tuple]) -> dict[str, np.ndarray]:
  """Copies blocks into whole arrays of this process, sorted by name.

  Raises:
    ValueError: names the tensor whose blocks disagree, overlap, leave a hole
      or have a dtype that bundles do not carry.
  """
  tensors: dict[str, np.ndarray] = {}
  missing: dict[str, np.ndarray] = {}
  for name, dtype, shape, index, values in blocks:
    if dtype not in DTYPES:
      raise ValueError(
        f'{name}: dtype {dtype!r} is not one of {sorted(DTYPES)}.'
      )
    if name not in tensors:
      tensors[name] = np.empty(shape, DTYPES[dtype])
      missing[name] = np.ones(shape, bool)
    array, box = tensors[name], tuple(slice(*ends) for ends in index)
    if (array.shape, array.dtype) != (tuple(shape), values.dtype):
      raise ValueError(
        f'{name}: a block of a {values.dtype} array of shape {tuple(shape)} '
        f'after one of a {array.dtype} array of shape {array.shape}.'
      )
    if values.shape != array[box].shape or not missing[name][box].all():
      raise ValueError(
        f'{name}: the block at {index}, of shape {values.shape}, leaves the '
        f'array of shape {array.shape} or overlaps another block.'
      )
    array[box] = values
    missing[name][box] = False
  for name, holes in missing.items():
    if holes.any():
      raise ValueError(f'{name}: {holes.sum()} elements are in no block.')
  return dict(sorted(tensors.items()))


def flat_bits(array: np.ndarray) -> np.ndarray:
  """Views an array as flat unsigned integers of the same width."""
  flat = np.ascontiguousarray(array).reshape(-1)
  return flat.view(bits_dtype(array.dtype))


def bits_dtype(dtype: np.dtype) -> np.dtype:
  return np.dtype(f'u{dtype.itemsize}')


def num_chunks(elements: int) -> int:
  return -(-elements // CHUNK_ELEMENTS)


def chunk_slices(elements: int) -> list[slice]:
  starts = range(0, elements, CHUNK_ELEMENTS)
  return [slice(s, min(s + CHUNK_ELEMENTS, elements)) for s in starts]


def hash_bits(bits: np.ndarray) -> str:
  return digest(bits.view(np.uint8).data)


def digest(data: bytes | memoryview) -> str:
  return blake3.blake3(data).hexdigest()


def canonical_json(value: Any) -> bytes:
  return json.dumps(value, sort_keys=True, separators=(',', ':')).encode()


def parse_canonical(data: bytes) -> Any:
  """Parses JSON that has exactly one spelling; any other is a ValueError."""
  try:
    value = json.loads(data)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not valid JSON ({error})') from error
  if canonical_json(value) != data:
    raise ValueError('JSON that is not in the canonical spelling')
  return value


def _is_hash(value: Any) -> bool:
  return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _is_count(value: Any) -> bool:
  return type(value) is int and value >= 0


def _require(condition: bool, what: str) -> None:
  if not condition:
    raise ValueError(f'a manifest has an invalid {what}.')
