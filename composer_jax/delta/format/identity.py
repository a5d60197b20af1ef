"""What weights are: the Merkle root of the BLAKE3 hashes of their bits.

Chunks under tensors (name, dtype, shape), tensors under the root. The identity
says what the weights are and not how they were sent or lie on devices, so a
keyframe, a chain of deltas and a skip that lead to the same bits have the same
one. sha256 would cap the rate of a verified update at a fifth of a memcpy.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import blake3
import ml_dtypes
import numpy as np

from composer_jax.delta.format import grid as grids

FORMAT = 'CDB3'
HASH_BYTES = 32
SHORT_HASH_BYTES = 16

DTYPES = {
  str(np.dtype(t)): np.dtype(t)
  for t in (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
    ml_dtypes.int4,
    ml_dtypes.uint4,
    np.float16,
    np.float32,
    np.float64,
    np.bool_,
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
_HEX = re.compile('[0-9a-f]{64}')


class Block(NamedTuple):
  """What one process holds of a named global array, whole or a region.

  Attributes:
    name: of the tensor, '/'-joined.
    dtype: name in `DTYPES`.
    shape: of the global array.
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
  return blake3.blake3(little.view(np.uint8).data).digest()


def short_hash(blob: bytes | memoryview) -> bytes:
  """Returns what a manifest says of a blob; found wrong before decoding."""
  return blake3.blake3(blob).digest(SHORT_HASH_BYTES)


def tensor_node(
  name: str, dtype: str, shape: Iterable[int], posts: bytes
) -> bytes:
  """Returns the Merkle node of a tensor.

  Args:
    name: of the tensor.
    dtype: name in `DTYPES`.
    shape: of the global array.
    posts: the hashes of its chunks by number, one after another.
  """
  head = canonical_json(['tensor', FORMAT, name, dtype, list(shape)])
  return blake3.blake3(head + b'\n' + posts).digest()


def root(nodes: Mapping[str, bytes]) -> str:
  """Returns the identity of weights from the nodes of their tensors."""
  head = canonical_json(['weights', FORMAT, len(nodes)])
  leaves = b''.join(nodes[name] for name in sorted(nodes))
  return blake3.blake3(head + b'\n' + leaves).hexdigest()


def target_id(tensors: Mapping[str, np.ndarray]) -> str:
  """Returns the identity of whole arrays: what a publisher would call them."""
  nodes = {}
  for name, array in tensors.items():
    check_dtype(name, str(array.dtype))
    grid = grids.of(array.shape)
    chunks = (array[grid.slices(number)] for number in range(grid.num_chunks))
    posts = b''.join(map(hash_chunk, chunks))
    nodes[name] = tensor_node(name, str(array.dtype), array.shape, posts)
  return root(nodes)


def check_dtype(name: str, dtype: str) -> None:
  if dtype not in DTYPES:
    raise ValueError(f'{name}: dtype {dtype!r} is not one of {sorted(DTYPES)}.')


def flat_bits(array: np.ndarray) -> np.ndarray:
  """Views an array as flat unsigned integers of the same width."""
  flat = np.ascontiguousarray(array).reshape(-1)
  return flat.view(bits_dtype(array.dtype))


def bits_dtype(dtype: np.dtype) -> np.dtype:
  return np.dtype(f'u{dtype.itemsize}')


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
  """Whether it is 32 bytes in lower-case hexadecimal."""
  return isinstance(value, str) and _HEX.fullmatch(value) is not None


def is_count(value: Any) -> bool:
  """Whether it is an integer, not a bool, of 0 to 2**63 - 1."""
  return type(value) is int and 0 <= value < 2**63
