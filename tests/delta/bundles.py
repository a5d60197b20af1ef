"""A publisher by hand: any bundle, any pointer, and damage to them."""

import contextlib
from typing import NamedTuple

import ml_dtypes
import numpy as np

from composer_jax.delta import rebuild
from composer_jax.delta.codec import coding
from composer_jax.delta.format import identity, keys
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects as store_lib
from tests.delta import identities

SIGNER = keys.Hmac(b'subscribers-test')


def weights(version, seed=0, shape=(40, 50)):
  """Weights that move a little each version, special values among them."""
  rng = np.random.default_rng(seed)
  masters = rng.normal(0, 0.02, shape).astype(np.float32)
  masters += 1e-4 * version * np.sign(rng.normal(size=masters.shape))
  kernel = masters.astype(ml_dtypes.bfloat16)
  kernel.reshape(-1).view(np.uint16)[:6] = [
      0x8000, 0, 0x7F80, 0xFF80, 0x7FC1 + version, 0xFFFF - version
  ]  # fmt: skip
  bias = (rng.normal(size=8) + 1e-3 * version).astype(np.float32)
  return {
    'bias': bias,
    'empty': np.zeros((0, 3), np.float32),
    'frozen': np.arange(30, dtype=np.int8).reshape(5, 6),
    'kernel': kernel,
    'scalar': np.array(version, np.float32),
  }


def blocks(arrays):
  for name, array in arrays.items():
    ends = tuple((0, length) for length in array.shape)
    yield identity.Block(name, str(array.dtype), array.shape, ends, array)


def from_arrays(arrays, version=0):
  """Weights as a receiver would hold them, of whole arrays."""
  tensors = {}
  for name, array in sorted(arrays.items()):
    grid = identity.of(array.shape)
    numbers = np.arange(grid.num_chunks)
    posts = np.empty((grid.num_chunks, identity.HASH_BYTES), np.uint8)
    tensor = rebuild.HeldTensor.empty(
      str(array.dtype), array.shape, numbers, posts
    )
    for number in numbers:
      chunk = tensor.chunk(number)
      chunk[...] = array[tuple(slice(*ends) for ends in grid.chunk(number))]
      posts[number] = np.frombuffer(identity.hash_chunk(chunk), np.uint8)
    tensor.buffer.setflags(write=False)
    tensors[name] = tensor
  target_id = identities.target_id(arrays)
  return rebuild.Held(version=version, target_id=target_id, tensors=tensors)


def assert_same_bits(held, wanted):
  found = held.arrays()
  assert found.keys() == wanted.keys()
  for name, array in wanted.items():
    assert found[name].dtype == array.dtype, name
    assert found[name].shape == array.shape, name
    assert found[name].tobytes() == array.tobytes(), name


class Edge(NamedTuple):
  """A bundle that was written: its link, and all its bytes."""

  version: int
  base_version: int | None
  link: manifests.Link
  bytes: int

  @property
  def manifest(self):
    return self.link.manifest


class Run:
  """Bundles of one run in a store.

  Attributes:
    held: weights by version, as a receiver would hold them.
    edges: bundles in the order in which they were written; later ones link to
      those that are there.
  """

  def __init__(self, root, run_id='run', signer=SIGNER, make=weights):
    self.store = store_lib.Store(root)
    self.run_id, self.signer, self.make = run_id, signer, make
    self.held: dict[int, rebuild.Held] = {}
    self.edges: list[Edge] = []
    self.pointer: manifests.Pointer | None = None

  def newest(self, version, *, is_key=False):
    """The newest bundle up to a version: its delta, or its keyframe."""
    found = [
      edge
      for edge in self.edges
      if edge.version <= version and is_key <= (edge.base_version is None)
    ]
    order = lambda edge: (edge.version, edge.base_version is not None)
    return max(found, key=order).link if found else None

  def add(self, version, base=None, pack_bytes=1000):
    """Writes a keyframe, or a delta from `base`; returns its edge."""
    self._hold(version)
    packs, pack, tensors = [], b'', []
    new, old = self.held[version], self.held.get(base)
    for name, tensor in new.tensors.items():
      chunks = np.zeros(tensor.grid.num_chunks, manifests.CHUNK)
      for number, (start, stop) in enumerate(
        zip(tensor.offsets, tensor.offsets[1:])
      ):
        kind, blob = coding.encode(
          tensor.buffer[start:stop],
          None if base is None else old.tensors[name].buffer[start:stop],
        )
        if pack and len(pack) + len(blob) > pack_bytes:
          packs.append((self.store.put(pack), len(pack)))
          pack = b''
        pack += blob
        chunks[number] = (
          kind,
          len(packs) if blob else manifests.NO_PACK,
          len(blob),
          tensor.posts[number],
        )
      tensors.append(manifests.Tensor(name, tensor.dtype, tensor.shape, chunks))
    if pack:
      packs.append((self.store.put(pack), len(pack)))
    manifest = manifests.Manifest(
      version=version,
      base_id='' if base is None else old.target_id,
      target_id=new.target_id,
      previous=self.newest(version - 1),
      keyframe=self.newest(version - 1, is_key=True),
      packs=tuple(packs),
      tensors=tuple(tensors),
    )
    data = manifest.to_bytes()
    link = manifests.Link(version, self.store.put(data), len(data))
    edge = Edge(version, base, link, manifest.bundle_bytes + len(data))
    self.edges.append(edge)
    return edge

  def point(self, version, *, sequence=None, rewinds=0, expires=0):
    """Moves the pointer; the head is the single delta, or else a keyframe."""
    self.pointer = manifests.Pointer(
      run_id=self.run_id,
      sequence=sequence or (self.pointer.sequence + 1 if self.pointer else 1),
      rewinds=rewinds,
      target_id=self.held[version].target_id,
      head=self.newest(version),
      keyframe=self.newest(version, is_key=True),
      expires=expires,
    )
    found = self.store.read_pointer(self.run_id)
    self.store.move_pointer(
      self.run_id,
      manifests.seal(self.pointer, self.signer),
      found[1] if found else None,
    )

  def path(self, name):
    return self.store.root / 'objects' / name

  def packs(self, edge):
    data = self.store.get(edge.manifest)
    return [name for name, _ in manifests.Manifest.from_bytes(data).packs]

  def _hold(self, version):
    if version not in self.held:
      self.held[version] = from_arrays(self.make(version), version)


def history(store, pointer):
  """All bundles that a pointer leads to and that are there, oldest first."""
  link, links, found = pointer.head, {pointer.head, pointer.keyframe}, {}
  while link is not None:
    for one in links - found.keys():
      with contextlib.suppress(FileNotFoundError):
        found[one] = rebuild.read_manifest(store, one)
    if link not in found:
      break
    link, keyframe = found[link].previous, found[link].keyframe
    links |= {link, keyframe} - {None}
  edges = [
    Edge(
      one.version,
      bundle.previous.version if bundle.base_id else None,
      one,
      one.bytes + bundle.bundle_bytes,
    )
    for one, bundle in found.items()
  ]
  return sorted(edges, key=lambda e: (e.version, e.base_version is not None))


def damage(path, at=-1):
  """Flips a bit of a file."""
  data = bytearray(path.read_bytes())
  data[at] ^= 1
  path.chmod(0o644)
  path.write_bytes(data)
