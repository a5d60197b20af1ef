"""What is written down about a bundle, a run's bundles, and its latest one.

  Manifest   one bundle: its chunks, where their blobs lie, what they become
  Index      the live bundles of a run: edges between versions
  Pointer    signed: the head of a run; names its manifest and the index

Each has exactly one spelling. Parsing one that is damaged or hostile is a
ValueError that costs no more memory than a small multiple of its bytes.
"""

import dataclasses
import struct
from typing import Any

import numpy as np

from composer_jax.delta import checks, chunks, identity, signing
from composer_jax.delta import grid as grids

FORMAT = identity.FORMAT
KEY, DELTA = KINDS = ('key', 'delta')
CHUNK, NO_PACK = chunks.CHUNK, chunks.NO_PACK

MAX_MANIFEST_BYTES = 2**28
MAX_HEADER_BYTES = 2**24
MAX_TENSORS = 2**17
MAX_INDEX_BYTES = 2**24
MAX_POINTER_BYTES = 4096

_MAGIC = FORMAT.encode() + b'\n'
_LENGTH = struct.Struct('<I')
_SEAL = FORMAT.encode() + b'P'
# Of codecs and of keyframes, orbax checkpoints, that older versions had.
_IDLE: dict[str, Any] = {'history': None}
_IDLE_BUNDLE = _IDLE | {'files': []}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tensor:
  """A tensor of a manifest.

  Attributes:
    name: of the tensor.
    dtype: name in `identity.DTYPES`.
    shape: of the global array.
    chunks: of dtype CHUNK, one for each box of its grid, by number.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  chunks: np.ndarray

  def __post_init__(self):
    checks.tensor(self.name, self.dtype, self.shape)
    good = isinstance(self.chunks, np.ndarray) and self.chunks.dtype == CHUNK
    good = good and self.chunks.shape == (self.grid.num_boxes,)
    checks.require(good, f'number of chunks of {self.name!r}')
    self.chunks.setflags(write=False)

  @property
  def grid(self) -> grids.Grid:
    return grids.of(self.shape, identity.DTYPES[self.dtype])

  @property
  def raw_bytes(self) -> np.ndarray:
    """Bytes of each box."""
    return self.grid.sizes * identity.DTYPES[self.dtype].itemsize

  @property
  def node(self) -> bytes:
    """Its Merkle node."""
    posts = self.chunks['post'].tobytes()
    return identity.tensor_node(self.name, self.dtype, self.shape, posts)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Manifest:
  """Everything about one bundle except the blobs themselves.

  Attributes:
    run_id: the run that published it.
    version: of the policy.
    kind: KEY stands alone, DELTA needs the weights `base_id`.
    base_version: what a DELTA starts from; several versions back for a skip.
    base_id: identity of those weights; '' for a KEY.
    target_id: identity of the resulting weights.
    packs: (sha256, bytes) of the objects that hold the blobs. Blobs lie in
      each in ascending (tensor, box) order, without gaps, and fill it.
    tensors: sorted by name.
  """

  run_id: str
  version: int
  kind: str
  base_version: int | None
  base_id: str
  target_id: str
  packs: tuple[tuple[str, int], ...]
  tensors: tuple[Tensor, ...]

  def __post_init__(self):
    _check_header(self)
    names = [t.name for t in self.tensors]
    checks.require(names == sorted(set(names)), 'order of the tensors')
    if self.kind == KEY:
      allowed = [chunks.RAW, chunks.PLANES]
    else:
      allowed = list(range(chunks.CLASS + 1))
    raw_bytes = [np.zeros(0, np.int64), *(t.raw_bytes for t in self.tensors)]
    packs = [length for _, length in self.packs]
    chunks.check(self._table, np.concatenate(raw_bytes), allowed, packs)
    found = identity.root({t.name: t.node for t in self.tensors})
    if found != self.target_id:
      raise ValueError(
        f'the tensors of version {self.version} have the Merkle root '
        f'{found}, and the manifest claims {self.target_id}.'
      )

  @property
  def _table(self) -> np.ndarray:
    return chunks.joined([t.chunks for t in self.tensors])

  @property
  def full_bytes(self) -> int:
    """Bytes of the weights."""
    return sum(int(t.raw_bytes.sum()) for t in self.tensors)

  @property
  def bundle_bytes(self) -> int:
    """Bytes of its packs, without the manifest itself."""
    return sum(length for _, length in self.packs)

  def signature(self) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns {name: (dtype, shape)}."""
    return {t.name: (t.dtype, t.shape) for t in self.tensors}

  def offsets(self) -> tuple[np.ndarray, ...]:
    """Returns where each blob begins in its pack: for each tensor, by box."""
    if not self.tensors:
      return ()
    places, _ = chunks.place(self._table, len(self.packs))
    ends = np.cumsum([len(t.chunks) for t in self.tensors])
    return tuple(np.split(places, ends[:-1]))

  def to_bytes(self) -> bytes:
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    fields['tensors'] = [[t.name, t.dtype, t.shape] for t in self.tensors]
    header = identity.canonical_json(fields | _IDLE_BUNDLE)
    tables = (t.chunks.tobytes() for t in self.tensors)
    return b''.join([_MAGIC, _LENGTH.pack(len(header)), header, *tables])

  @classmethod
  def from_bytes(cls, data: bytes) -> 'Manifest':
    """Parses and checks; ValueError says what is wrong."""
    if len(data) > MAX_MANIFEST_BYTES:
      raise ValueError(
        f'a manifest of {len(data)} bytes exceeds {MAX_MANIFEST_BYTES}.'
      )
    start = len(_MAGIC) + _LENGTH.size
    good = len(data) >= start and data.startswith(_MAGIC)
    checks.require(good, f'format, which is not {FORMAT}')
    (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
    good = length <= min(MAX_HEADER_BYTES, len(data) - start)
    checks.require(good, 'length of its header')
    fields = checks.parse(data[start : start + length], cls, _IDLE_BUNDLE)
    fields['tensors'] = _read_tensors(fields['tensors'], data, start + length)
    rows = checks.items(fields['packs'], 'packs')
    fields['packs'] = tuple(tuple(checks.items(row, 'packs')) for row in rows)
    return cls(**fields)


def _read_tensors(rows: Any, data: bytes, start: int) -> tuple[Tensor, ...]:
  tensors = []
  rows = checks.items(rows, 'tensors')
  checks.require(len(rows) <= MAX_TENSORS, f'number of tensors, {len(rows)}')
  for row in rows:
    good = isinstance(row, list) and len(row) == 3
    checks.require(good, 'list of tensors')
    name, dtype, shape = row
    checks.tensor(name, dtype, shape)
    # Before the grid is made: no more boxes than there are rows for them.
    left = (len(data) - start) // CHUNK.itemsize
    fits = checks.num_elements(shape) <= left * grids.MAX_ELEMENTS
    checks.require(fits, f'length; {name!r} has no room')
    count = grids.of(tuple(shape), identity.DTYPES[dtype]).num_boxes
    checks.require(count <= left, f'length; {name!r} has no room')
    table = np.frombuffer(data, CHUNK, count, start)
    start += table.nbytes
    tensors.append(
      Tensor(name=name, dtype=dtype, shape=tuple(shape), chunks=table)
    )
  checks.require(start == len(data), 'length; something follows its chunks')
  return tuple(tensors)


def _check_header(manifest: Manifest) -> None:
  checks.run_id(manifest.run_id)
  checks.require(manifest.kind in KINDS, f'kind {manifest.kind!r:.200}')
  checks.start(
    manifest.kind == KEY,
    manifest.version,
    manifest.base_version,
    'a manifest',
  )
  if manifest.kind == KEY:
    checks.require(manifest.base_id == '', 'base_id of a keyframe')
  else:
    checks.require(identity.is_hash(manifest.base_id), 'base_id')
  checks.require(identity.is_hash(manifest.target_id), 'target_id')
  for pack in manifest.packs:
    good = len(pack) == 2 and identity.is_hash(pack[0])
    good = good and identity.is_count(pack[1]) and pack[1] > 0
    checks.require(good, 'pack')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
  """A live bundle, as a way from one version to another.

  Attributes:
    version: where it leads.
    base_version: where it starts; None for a keyframe.
    kind: KEY or DELTA.
    bytes: of its packs and manifest.
    manifest: sha256 of it.
    target: the first 16 digits of the identity it leads to.
  """

  version: int
  base_version: int | None
  kind: str
  bytes: int
  manifest: str
  target: str

  def __post_init__(self):
    checks.require(self.kind in KINDS, 'kind of an edge')
    is_key = self.kind == KEY
    checks.start(is_key, self.version, self.base_version, 'an edge')
    checks.require(identity.is_count(self.bytes), 'bytes of an edge')
    checks.require(identity.is_hash(self.manifest), 'manifest of an edge')
    good = isinstance(self.target, str) and identity.is_hash(self.target * 4)
    checks.require(good and len(self.target) == 16, 'target of an edge')

  @property
  def order(self) -> tuple[int, int, str]:
    base = -1 if self.base_version is None else self.base_version
    return self.version, base, self.manifest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Index:
  """The live bundles of a run; edges of any order become sorted."""

  run_id: str
  edges: tuple[Edge, ...]

  def __post_init__(self):
    checks.run_id(self.run_id)
    edges = sorted(self.edges, key=lambda edge: edge.order)
    object.__setattr__(self, 'edges', tuple(edges))
    names = {edge.manifest for edge in edges}
    checks.require(len(names) == len(edges), 'index that repeats a manifest')
    targets = {(edge.version, edge.target) for edge in edges}
    good = len(targets) == len(dict(targets))
    checks.require(good, 'index: a version with two targets')

  def to_bytes(self) -> bytes:
    edges = [dataclasses.asdict(edge) | _IDLE for edge in self.edges]
    return identity.canonical_json({'run_id': self.run_id, 'edges': edges})

  @classmethod
  def from_bytes(cls, data: bytes) -> 'Index':
    """Parses and checks; ValueError says what is wrong."""
    checks.require(len(data) <= MAX_INDEX_BYTES, 'length of an index')
    fields = checks.parse(data, cls)
    rows = checks.items(fields['edges'], 'edges')
    edges = tuple(Edge(**checks.fields_of(row, Edge, _IDLE)) for row in rows)
    index = cls(run_id=fields['run_id'], edges=edges)
    checks.require(index.edges == edges, 'order of the edges')
    return index


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
  """Names the latest version of a run.

  Attributes:
    run_id: of the run it belongs to.
    sequence: grows by one whenever the pointer moves, also backwards.
    rewinds: how often the run was rewound; the version falls only with it.
    version: of the policy.
    target_id: identity of its weights.
    base_id: identity of what `manifest` starts from; '' for a keyframe.
    manifest: sha256 of the head's single delta; of its keyframe if there is
      none.
    index: sha256 of the index.
    expires: unix seconds after which it is too old to be believed.
  """

  run_id: str
  sequence: int
  rewinds: int
  version: int
  target_id: str
  base_id: str
  manifest: str
  index: str
  expires: int

  def __post_init__(self):
    checks.run_id(self.run_id)
    for name in ('sequence', 'rewinds', 'version', 'expires'):
      value = getattr(self, name)
      good = identity.is_count(value)
      checks.require(good, f'{name} {value!r:.99} of a pointer')
    for name in ('target_id', 'manifest', 'index'):
      value = getattr(self, name)
      good = identity.is_hash(value)
      checks.require(good, f'{name} {value!r:.99} of a pointer')
    good = self.base_id == '' or identity.is_hash(self.base_id)
    checks.require(good, 'base_id of a pointer')


def seal(pointer: Pointer, signer: signing.Signer) -> bytes:
  """Returns the pointer in canonical JSON after a line with its signature."""
  body = identity.canonical_json(dataclasses.asdict(pointer))
  signature = signer.sign(_signed(signer.algorithm, body))
  line = f' {signer.algorithm} {signature.hex()}\n'
  return _SEAL + line.encode() + body


def unseal(data: bytes, verifier: signing.Verifier, run_id: str) -> Pointer:
  """Undoes `seal`; the signature is verified before the JSON is parsed.

  Raises:
    ValueError: changed, cut, of another key, or of another run.
  """
  if len(data) > MAX_POINTER_BYTES:
    raise ValueError(
      f'a pointer of {len(data)} bytes exceeds {MAX_POINTER_BYTES}.'
    )
  line, newline, body = data.partition(b'\n')
  parts = line.split(b' ')
  if not newline or len(parts) != 3 or parts[0] != _SEAL:
    raise ValueError('a pointer does not begin with its signature')
  algorithm = verifier.algorithm
  if parts[1] != algorithm.encode():
    raise ValueError(
      f'a pointer is signed by {parts[1]!r:.99}, and the key is of {algorithm}'
    )
  signature = bytes.fromhex(parts[2].decode('ascii'))
  if signature.hex().encode() != parts[2]:
    raise ValueError('a signature must be in lower-case hexadecimal')
  verifier.verify(_signed(algorithm, body), signature)
  pointer = Pointer(**checks.parse(body, Pointer))
  if pointer.run_id != run_id:
    raise ValueError(
      f'a pointer belongs to run {pointer.run_id!r}, not {run_id!r}'
    )
  return pointer


def _signed(algorithm: str, body: bytes) -> bytes:
  return algorithm.encode() + b'\n' + body
