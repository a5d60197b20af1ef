"""What weights are: the Merkle root of the BLAKE3 hashes of their bits.

Chunks under tensors (name, dtype, shape), tensors under the root. The identity
says what the weights are and not how they were sent or lie on devices, so a
keyframe and a chain of deltas that lead to the same bits have the same one.
sha256 would cap the rate of a verified update at a fifth of a memcpy.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import blake3
import ml_dtypes
import numpy as np

FORMAT = 'CDB5'
# Of a chunk: nobody finds other bits for a given hash of 16 bytes. Who chooses
# both is the publisher. The identity of weights has 32.
HASH_BYTES = 16

_NAMES = (
  'bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu int4 uint4 float16 '
  'float32 float64 bool int8 uint8 int16 uint16 int32 uint32 int64 uint64'
)
DTYPES = {n: np.dtype(getattr(ml_dtypes, n, n)) for n in _NAMES.split()}
_HEX = re.compile('[0-9a-f]{64}')


class Block(NamedTuple):
  """What one process holds of a named global array, whole or a region.

  Attributes:
    name: '/'-joined name of the tensor.
    shape: shape of the global array.
    index: (start, stop) of the region along each axis.
    values: values of the region.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  index: tuple[tuple[int, int], ...]
  values: np.ndarray


def hash_chunk(values: np.ndarray) -> bytes:
  """Returns the hash of a chunk: of its little-endian bits in C order."""
  bits = flat_bits(values)
  little = bits.astype(bits.dtype.newbyteorder('<'), copy=False)
  return blake3.blake3(little.view(np.uint8).data).digest(HASH_BYTES)


def tensor_node(
  name: str, dtype: str, shape: Iterable[int], posts: bytes
) -> bytes:
  """Returns the Merkle node of a tensor from its chunks' hashes in order."""
  head = canonical_json(['tensor', FORMAT, name, dtype, list(shape)])
  return blake3.blake3(head + b'\n' + posts).digest()


def root(nodes: Mapping[str, bytes]) -> str:
  """Returns the identity of weights from the nodes of their tensors."""
  head = canonical_json(['weights', FORMAT, len(nodes)])
  leaves = b''.join(nodes[name] for name in sorted(nodes))
  return blake3.blake3(head + b'\n' + leaves).hexdigest()


def flat_bits(array: np.ndarray) -> np.ndarray:
  """Returns an array as flat unsigned integers, a view if it lies as they do.

  As integers first: numpy copies the types of ml_dtypes element by element and
  under the interpreter's lock.
  """
  bits = array.view(np.dtype(f'u{array.itemsize}'))
  return np.require(bits, requirements=['C', 'A']).reshape(-1)


def canonical_json(value: Any) -> bytes:
  return json.dumps(value, sort_keys=True, separators=(',', ':')).encode()


def parse_canonical(data: bytes) -> Any:
  """Parses JSON that has exactly one spelling; any other is a ValueError."""
  try:
    value = json.loads(data)
    # Writing recurses a little deeper than reading.
    spelled = canonical_json(value)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'not valid JSON ({error})') from error
  if spelled != data:
    raise ValueError('JSON that is not in the canonical spelling')
  return value


def is_hash(value: Any) -> bool:
  """Whether it is 64 digits of lower-case hexadecimal."""
  return isinstance(value, str) and _HEX.fullmatch(value) is not None


def is_count(value: Any) -> bool:
  """Whether it is an integer, not a bool, of 0 to 2**63 - 1."""
  return type(value) is int and 0 <= value < 2**63


# How a global array is cut into chunks: regions that shards do not cut.
#
# The grid depends on the shape alone, so the identity of weights depends on no
# sharding, while a host encodes what it holds and a receiver fetches what it
# wants. A shard that holds a part of a chunk needs the rest from its neighbour,
# so chunks are as large as the shards of `parallel.layouts` and 2**20 elements
# allow, where `_roles` guesses what each dimension counts.
#
# For every file of configs/models, on meshes whose axes are powers of two, no
# chunk is cut by REPLICATED; by TRAIN, with dense weights over up to 64 devices
# and experts over up to 512; by DECODE over up to 8, and up to 32 where a model
# is 4096 wide. Models under 2048 wide are made for 8, and small arrays of them
# are cut all the same, as many small chunks would outweigh the changes in them.
# Anything else is right too, only slower: `BundleInfo.cut_bytes` counts it.

MAX_ELEMENTS = 2**20
MAX_RANK = 16

Index = tuple[tuple[int, int], ...]

# Widths of models, and of those whose engines need more devices.
_WIDE, _WIDER = 2048, 4096
# Largest arrays of narrower models with one chunk, and with few.
_ONE_CHUNK, _FEW_CHUNKS = 2**18, 2**21
# No head dimension, and no number of heads, is longer.
_SHORT = 256
# No embedding is longer; hidden units of dense layers are.
_WIDEST = 8192


@dataclasses.dataclass(frozen=True)
class Grid:
  """Chunks of one array; the last one along a dimension may be shorter.

  `sides` are those of a chunk, at least 1 each.
  """

  shape: tuple[int, ...]
  sides: tuple[int, ...]

  @functools.cached_property
  def counts(self) -> tuple[int, ...]:
    """Chunks along each dimension."""
    return tuple(
      -(-n // side) for n, side in zip(self.shape, self.sides, strict=True)
    )

  @functools.cached_property
  def num_chunks(self) -> int:
    return math.prod(self.counts)

  @functools.cached_property
  def sizes(self) -> np.ndarray:
    """Elements of each chunk, int64, by number."""
    sizes = np.ones(1, np.int64)
    for n, side in zip(self.shape, self.sides, strict=True):
      starts = np.arange(0, n, side, dtype=np.int64)
      lengths = np.minimum(n - starts, side)
      sizes = np.multiply.outer(sizes, lengths).reshape(-1)
    return sizes

  @property
  def is_flat(self) -> bool:
    """Whether the chunks one after another are the array in C order."""
    return not self.num_chunks or all(
      math.prod(self.sides[:dim]) == 1
      for dim, count in enumerate(self.counts)
      if count > 1
    )

  def chunk(self, number: int) -> Index:
    """Returns (start, stop) along each dimension; numbers are in C order."""
    if not 0 <= number < self.num_chunks:
      raise IndexError(f'chunk {number} of {self.num_chunks}')
    places = map(int, np.unravel_index(number, self.counts))
    return tuple(
      (place * side, min((place + 1) * side, n))
      for place, side, n in zip(places, self.sides, self.shape, strict=True)
    )

  def intersecting(self, index: Index) -> list[int]:
    """Returns the numbers, ascending, of chunks that `index` has a part of.

    Raises:
      ValueError: it leaves the array.
    """
    for (start, stop), n in zip(index, self.shape, strict=True):
      if start < 0 or stop > n:
        raise ValueError(
          f'the region {index} leaves an array of shape {self.shape}.'
        )
    if any(start >= stop for start, stop in index):
      return []
    numbers = [0]
    dims = zip(index, self.sides, self.counts, strict=True)
    for (start, stop), side, count in dims:
      places = range(start // side, -(-stop // side))
      numbers = [number * count + at for number in numbers for at in places]
    return numbers


def shared(left: Index, right: Index) -> Index:
  """Returns the region that two regions share."""
  pairs = zip(left, right, strict=True)
  return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)


def within(index: Index, outer: Index) -> tuple[slice, ...]:
  """Returns where a region lies in a region around it."""
  pairs = zip(index, outer, strict=True)
  return tuple(slice(a - first, b - first) for (a, b), (first, _) in pairs)


# The identity of weights rests on all that follows: a change of it is another
# `identity.FORMAT`.
@functools.lru_cache(maxsize=4096)
def of(shape: tuple[int, ...]) -> Grid:
  """Returns the grid of an array; the same whoever asks, for any dtype."""
  if len(shape) > MAX_RANK:
    raise ValueError(f'an array of rank {len(shape)} exceeds {MAX_RANK}.')
  if 0 in shape:
    return Grid(shape, tuple(max(n, 1) for n in shape))
  parts = _parts(shape)
  sides, room = [], MAX_ELEMENTS
  # From the last: the elements of a chunk lie in long runs.
  for n, count in zip(reversed(shape), reversed(parts), strict=True):
    sides.append(_side(n, count, room))
    room //= sides[-1]
  return Grid(shape, tuple(reversed(sides)))


def _side(n: int, parts: int, room: int) -> int:
  """Returns about the longest side within `room` that divides each part."""
  if parts > 1:
    fewest = -(-(n // parts) // room)
    for count in range(fewest, 4 * fewest):
      if n // parts % count == 0:
        return n // parts // count
  # Nobody cuts this dimension, or its length has no good divisor.
  return -(-n // -(-n // room))


def _parts(shape: tuple[int, ...]) -> list[int]:
  """Returns how many equal parts of each dimension chunks must not straddle."""
  roles, elements = _roles(shape), math.prod(shape)
  named = dict(zip(roles, shape, strict=True))
  # A guess at how wide the model is.
  width = named.get('embed', named.get('rest', 0))
  if 'low_rank' in named or 'norm' in named:
    width = named['heads'] * named.get('whole', named.get('norm', 1))
  if width >= _WIDE:
    decode = 32 if width >= _WIDER else 8
    # An expert lies on one device, or where those outnumber the experts, its
    # own dimension is divided too.
    train = {'embed': 64, 'low_rank': 64, 'rest': 16}
    train['expert'] = named.get('expert', 1)
  else:
    decode = 8 if elements > _FEW_CHUNKS else 1
    train = {} if elements <= _ONE_CHUNK else {'embed': 8, 'expert': 8}
  parts = {'heads': decode, 'ffw': decode, 'vocab': decode, **train}
  pairs = zip(roles, shape, strict=True)
  return [math.gcd(n, parts.get(role, 1)) for role, n in pairs]


def _roles(shape: tuple[int, ...]) -> tuple[str, ...]:
  """Guesses what each dimension counts, as `models` order them."""
  match shape:
    case (first, _) if first <= _SHORT:
      return 'layer', 'whole'
    case (first, second):
      return ('vocab', 'embed') if first >= second else ('embed', 'vocab')
    case (_, heads, dim) if 4 * heads <= dim <= _SHORT and heads * dim >= _WIDE:
      return 'layer', 'heads', 'norm'
    case (_, embed, to) if 3 * to <= embed <= _WIDEST and (
      to <= 512 or to % 512 == 0
    ):
      # A router, or down to a low rank.
      return 'layer', 'embed', 'whole'
    case (_, _, _):
      return 'layer', 'ffw', 'embed'
    case (_, embed, heads, dim) if dim <= _SHORT and embed > dim:
      is_rank = embed % 512 == 0 and 4 * embed <= heads * dim
      return 'layer', 'low_rank' if is_rank else 'embed', 'heads', 'whole'
    case (_, _, 2, _):
      return 'layer', 'embed', 'gate_up', 'ffw'
    case (_, heads, dim, embed) if heads * dim < 4 * embed:
      return 'layer', 'heads', 'whole', 'embed'
    case (_, _, _, _):
      return 'layer', 'expert', 'whole', 'rest'
    case (_, _, _, 2, _):
      return 'layer', 'expert', 'rest', 'gate_up', 'whole'
  return ('whole',) * len(shape)
