"""What is written down about a bundle, and about the latest one of a run.

  Manifest   one bundle: its chunks, where their blobs lie, what they become
  Pointer    signed: names the manifests of the head and of a keyframe
  Link       how both name a manifest: by version, sha256 and length

A manifest links to the one of the version before and to the newest keyframe up
to that version, so the pointer leads to all of a run. Each says how long what
it names is, and nothing is read further than someone verified. Parsing one that
is damaged or hostile is a ValueError that costs no more memory than a multiple
of its bytes.

A manifest is its magic, the lengths of its header and of a zstd frame, that
frame, and the hashes of all chunks. The frame has the header in JSON and the
rest of the rows, the first byte of each, then the second of each, and so on.
"""

import dataclasses
import math
import re
import reprlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from composer_jax.delta.codec import coding
from composer_jax.delta.format import identity, keys
from composer_jax.delta.store import folder

FORMAT = identity.FORMAT
KEY, DELTA = 'key', 'delta'
Specs = dict[str, tuple[str, tuple[int, ...]]]  # {name: (dtype, shape)}

MAX_MANIFEST_BYTES = 2**28
MAX_HEADER_BYTES = 2**24
MAX_TENSORS = 2**17
MAX_POINTER_BYTES = folder.MAX_POINTER_BYTES
_MAX_NAME = 1024
# A header of bytes that zstd shortens by more is no list of tensors.
_MAX_RATIO = 256

# Of a chunk: codec id, pack and bytes of its blob.
_COLUMNS = np.dtype([('codec', 'u1'), ('pack', '<u4'), ('length', '<u4')])
# And the hash of what it becomes.
CHUNK = np.dtype([*_COLUMNS.descr, ('post', 'u1', identity.HASH_BYTES)])
NO_PACK = 0xFFFFFFFF  # No blob: the chunk is that of the base.

_MAGIC = FORMAT.encode() + b'\n'
_LENGTHS = struct.Struct('<II')
_SEAL = FORMAT.encode() + b'P'
_RUN_ID = re.compile('[A-Za-z0-9][A-Za-z0-9._-]{0,127}')


class OtherFormat(ValueError):
  """A store that another version of this library wrote."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tensor:
  """A tensor of a manifest; `chunks` are rows CHUNK of its grid, by number."""

  name: str
  dtype: str
  shape: tuple[int, ...]
  chunks: np.ndarray

  def __post_init__(self):
    _check_tensor(self.name, self.dtype, self.shape)
    good = isinstance(self.chunks, np.ndarray) and self.chunks.dtype == CHUNK
    good = good and self.chunks.shape == (self.grid.num_chunks,)
    _require(good, f'number of chunks of {self.name!r}')
    self.chunks.setflags(write=False)

  @property
  def grid(self) -> identity.Grid:
    return identity.of(self.shape)

  @property
  def raw_bytes(self) -> np.ndarray:
    """Bytes of each chunk."""
    return self.grid.sizes * identity.DTYPES[self.dtype].itemsize

  @property
  def node(self) -> bytes:
    """Its Merkle node."""
    posts = self.chunks['post'].tobytes()
    return identity.tensor_node(self.name, self.dtype, self.shape, posts)


class Link(NamedTuple):
  """Leads to a manifest: its version, its sha256 and its length."""

  version: int
  manifest: str
  bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Manifest:
  """Everything about one bundle except the blobs themselves.

  Attributes:
    base_id: identity of the weights of the version before, from which a delta
      starts; '' for a keyframe.
    target_id: identity of the resulting weights.
    previous: bundle of the version before; None for the first of a chain.
    keyframe: newest keyframe up to that version; None where that is None.
    packs: (sha256, bytes) of the objects that hold the blobs. Blobs lie in
      each in ascending (tensor, chunk) order, without gaps, and fill it.
    tensors: tensors, sorted by name.
  """

  version: int
  base_id: str
  target_id: str
  previous: Link | None
  keyframe: Link | None
  packs: tuple[tuple[str, int], ...]
  tensors: tuple[Tensor, ...]

  def __post_init__(self):
    _check_fields(self, 'a manifest')
    is_key, links = self.kind == KEY, (self.previous, self.keyframe)
    good = links.count(None) in (0, 2 * is_key)
    versions = [self.version, *(link.version for link in links if link)]
    good = good and versions == sorted(versions, reverse=True)
    _require(good and versions.count(self.version) == 1, 'order of its links')
    for pack in self.packs:
      good = len(pack) == 2 and identity.is_hash(pack[0])
      good = good and identity.is_count(pack[1]) and pack[1] > 0
      _require(good, 'pack')
    names = [t.name for t in self.tensors]
    _require(names == sorted(set(names)), 'order of the tensors')
    allowed = [coding.PLANES] if is_key else range(coding.CLASS + 1)
    self._check_table(allowed)
    found = identity.root({t.name: t.node for t in self.tensors})
    if found != self.target_id:
      raise ValueError(
        f'the tensors of version {self.version} have the Merkle root '
        f'{found}, and the manifest claims {self.target_id}.'
      )

  def _check_table(self, allowed: Sequence[int]) -> None:
    """Refuses a table that no publisher writes."""
    table, packs = self._table, [length for _, length in self.packs]
    raw_bytes = [np.zeros(0, np.int64), *(t.raw_bytes for t in self.tensors)]
    raw_bytes = np.concatenate(raw_bytes)
    codecs, lengths = table['codec'], table['length']
    _require(np.isin(codecs, allowed).all(), 'codec of a chunk')
    bare = codecs == coding.SAME
    in_pack = table['pack'] < len(packs)
    good = np.where(bare, table['pack'] == NO_PACK, in_pack).all()
    _require(good, 'pack of a chunk')
    most = np.where(bare, 0, raw_bytes + coding.MAX_OVERHEAD)
    good = ((~bare <= lengths) & (lengths <= most)).all()
    _require(good, 'length of a blob')
    _, filled = place(table, len(packs))
    good = filled.tolist() == packs
    _require(good, 'pack; its blobs must fill it exactly')

  @property
  def _table(self) -> np.ndarray:
    return np.concatenate(
      [np.zeros(0, CHUNK), *(t.chunks for t in self.tensors)]
    )

  @property
  def kind(self) -> str:
    return DELTA if self.base_id else KEY

  @property
  def title(self) -> str:
    """Says what it is, such as 'key 0' or 'delta 0-1'."""
    base = f'{self.previous.version}-' if self.base_id and self.previous else ''
    return f'{self.kind} {base}{self.version}'

  @property
  def full_bytes(self) -> int:
    """Bytes of the weights."""
    return sum(int(t.raw_bytes.sum()) for t in self.tensors)

  @property
  def bundle_bytes(self) -> int:
    """Bytes of its packs, without the manifest itself."""
    return sum(length for _, length in self.packs)

  @property
  def specs(self) -> Specs:
    return {t.name: (t.dtype, t.shape) for t in self.tensors}

  def offsets(self) -> tuple[np.ndarray, ...]:
    """Returns where each blob begins in its pack: for each tensor, by chunk."""
    places, _ = place(self._table, len(self.packs))
    ends = np.cumsum([len(t.chunks) for t in self.tensors], dtype=int)
    return tuple(np.split(places, ends)[:-1])

  def to_bytes(self) -> bytes:
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    fields['tensors'] = [[t.name, t.dtype, t.shape] for t in self.tensors]
    header, table = identity.canonical_json(fields), self._table
    rows = np.empty(len(table), _COLUMNS)
    for name in _COLUMNS.names or ():
      rows[name] = table[name]
    planes = rows.view(np.uint8).reshape(-1, _COLUMNS.itemsize).T.tobytes()
    frame = zstandard.ZstdCompressor(level=9).compress(header + planes)
    lengths = _LENGTHS.pack(len(header), len(frame))
    return b''.join([_MAGIC, lengths, frame, table['post'].tobytes()])

  @classmethod
  def from_bytes(cls, data: bytes) -> 'Manifest':
    """Parses and checks; ValueError says what is wrong."""
    _require(len(data) <= MAX_MANIFEST_BYTES, 'length of a manifest')
    start = len(_MAGIC) + _LENGTHS.size
    good = len(data) >= start and data.startswith(_MAGIC)
    _require(good, f'format, which is {data[:4]!r} and must be {FORMAT}')
    length, stop = _LENGTHS.unpack_from(data, len(_MAGIC))
    good = length <= min(MAX_HEADER_BYTES, _MAX_RATIO * stop)
    stop += start
    count, odd = divmod(len(data) - stop, identity.HASH_BYTES)
    _require(good and count >= 0 and not odd, 'length of its header')
    size = length + count * _COLUMNS.itemsize
    text = coding.unzip(data[start:stop], size)
    planes = np.frombuffer(text, np.uint8, offset=length)
    rows = np.ascontiguousarray(
      planes.reshape(-1, count).T if count else planes
    )
    rows, table = rows.view(_COLUMNS).reshape(-1), np.empty(count, CHUNK)
    for name in _COLUMNS.names or ():
      table[name] = rows[name]
    posts = np.frombuffer(data, np.uint8, offset=stop)
    table['post'] = posts.reshape(-1, identity.HASH_BYTES)
    header = identity.parse_canonical(text[:length])
    fields = dict(_fields_of(header, cls))
    fields['tensors'] = _read_tensors(fields['tensors'], table)
    packs = _items(fields['packs'], 'packs')
    fields['packs'] = tuple(tuple(_items(row, 'packs')) for row in packs)
    return cls(**fields)


def _read_tensors(rows: Any, table: np.ndarray) -> tuple[Tensor, ...]:
  tensors, start = [], 0
  rows = _items(rows, 'tensors')
  _require(len(rows) <= MAX_TENSORS, f'number of tensors, {len(rows)}')
  for row in rows:
    good = isinstance(row, list) and len(row) == 3
    _require(good, 'list of tensors')
    name, dtype, shape = row
    _check_tensor(name, dtype, shape)
    # Before the grid is made: no more chunks than there are rows for them.
    left = len(table) - start
    fits = math.prod(shape) <= left * identity.MAX_ELEMENTS
    _require(fits, f'length; {name!r} has no room')
    count = identity.of(tuple(shape)).num_chunks
    _require(count <= left, f'length; {name!r} has no room')
    chunks, start = table[start : start + count], start + count
    tensors.append(Tensor(name, dtype, tuple(shape), chunks))
  _require(start == len(table), 'length; something follows its chunks')
  return tuple(tensors)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
  """Names the latest version of a run.

  Attributes:
    sequence: number that grows by one whenever the pointer moves.
    rewinds: number of times the run was rewound; the version falls only then.
    target_id: identity of the weights.
    head: the version's delta; its keyframe if there is none.
    keyframe: newest keyframe.
    expires: unix seconds after which it is too old to be believed.
  """

  run_id: str
  sequence: int
  rewinds: int
  target_id: str
  head: Link
  keyframe: Link
  expires: int

  def __post_init__(self):
    _check_fields(self, 'a pointer')

  @property
  def version(self) -> int:
    return self.head.version


def seal(pointer: Pointer, key: keys.Hmac) -> bytes:
  """Returns the pointer in canonical JSON after a line with its signature."""
  body = identity.canonical_json(dataclasses.asdict(pointer))
  return _SEAL + f' {key.sign(_SEAL + body).hex()}\n'.encode() + body


def unseal(data: bytes, key: keys.Hmac, run_id: str) -> Pointer:
  """Undoes `seal`; the signature is verified before the JSON is parsed.

  A ValueError says that it was changed, or is of another key or run.
  """
  _require(len(data) <= MAX_POINTER_BYTES, 'length of a pointer')
  line, newline, body = data.partition(b'\n')
  parts = line.split(b' ')
  if re.fullmatch(rb'CDB\d+P', parts[0]) and parts[0] != _SEAL:
    raise OtherFormat(
      f'a pointer of the format {parts[0][:-1].decode()}, and this version '
      f'reads {FORMAT} alone: publish the weights again, into another store'
    )
  if not newline or len(parts) != 2 or parts[0] != _SEAL:
    raise ValueError('a pointer does not begin with its signature')
  signature = bytes.fromhex(parts[1].decode('ascii'))
  if signature.hex().encode() != parts[1]:
    raise ValueError('a signature must be in lower-case hexadecimal')
  key.verify(_SEAL + body, signature)
  pointer = Pointer(**_fields_of(identity.parse_canonical(body), Pointer))
  if pointer.run_id != run_id:
    raise ValueError(
      f'a pointer belongs to run {pointer.run_id!r}, not {run_id!r}'
    )
  return pointer


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


def _require(condition: bool | np.bool, what: str) -> None:
  if not condition:
    raise ValueError(f'a bundle has an invalid {what}.')


def _check_fields(record: Any, what: str) -> None:
  """Refuses fields of the wrong type; links may come as lists, as JSON does."""
  for field in dataclasses.fields(record):
    name: str = field.name
    value: Any = getattr(record, name)
    good = True
    if name == 'run_id':
      check_run_id(value)
    elif name == 'target_id':
      good = identity.is_hash(value)
    elif name == 'base_id':
      good = value == '' or identity.is_hash(value)
    elif field.type is int:
      good = identity.is_count(value)
    elif field.type in (Link, Link | None):
      if isinstance(value, list | tuple) and len(value) == len(Link._fields):
        value = Link(*value)
        good = identity.is_count(value.version)
        good = good and identity.is_hash(value.manifest)
        good = good and identity.is_count(value.bytes)
        good = good and value.bytes <= MAX_MANIFEST_BYTES
        object.__setattr__(record, name, value)
      else:
        good = value is None and field.type is not Link
    if not good:
      # Not repr, which makes a long text of a long value.
      _require(False, f'{name} {reprlib.repr(value)} of {what}')


def check_run_id(value: Any) -> None:
  if not (isinstance(value, str) and _RUN_ID.fullmatch(value)):
    raise ValueError(
      f'run_id {value!r:.200} must be 1 to 128 letters, digits, ".", "_" or '
      '"-", and begin with a letter or digit.'
    )


def _fields_of(value: Any, record: type) -> dict[str, Any]:
  """Returns it, if a record is made of it; the record checks the types."""
  names = {f.name for f in dataclasses.fields(record)}
  good = isinstance(value, dict) and value.keys() == names
  _require(good, f'{record.__name__}: its fields must be {sorted(names)}')
  return value


def _items(value: Any, what: str) -> list:
  _require(isinstance(value, list), f'list of {what}')
  return value


def _check_tensor(name: Any, dtype: Any, shape: Any) -> None:
  good = isinstance(name, str) and 0 < len(name) <= _MAX_NAME
  _require(good and name.isprintable(), f'tensor name {name!r:.200}')
  good = isinstance(dtype, str) and dtype in identity.DTYPES
  _require(good, f'dtype {dtype!r:.200} of {name!r}')
  good = isinstance(shape, list | tuple) and len(shape) <= identity.MAX_RANK
  _require(good and all(map(identity.is_count, shape)), f'shape of {name!r}')
  # A zero makes an array empty but must not hide a product beyond int64.
  _require(math.prod(n or 1 for n in shape) < 2**63, f'shape of {name!r}')
