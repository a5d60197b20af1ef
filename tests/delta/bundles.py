"""A publisher by hand: any edge, any order, any pointer, and damage to them."""

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
      chunk[...] = array[grid.slices(number)]
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


class Run:
  """Bundles of one run in a store.

  Attributes:
    held: weights by version, as a receiver would hold them.
    edges: of the index; drop one and call `point` again, and it is gone.
  """

  def __init__(self, root, run_id='run', signer=SIGNER, make=weights):
    self.store = store_lib.Store(root)
    self.run_id, self.signer, self.make = run_id, signer, make
    self.held: dict[int, rebuild.Held] = {}
    self.edges: list[manifests.Edge] = []
    self.pointer: manifests.Pointer | None = None

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
      run_id=self.run_id,
      version=version,
      base_version=base,
      base_id='' if base is None else old.target_id,
      target_id=new.target_id,
      packs=tuple(packs),
      tensors=tuple(tensors),
    )
    data = manifest.to_bytes()
    edge = manifests.Edge(
      version=version,
      base_version=base,
      bytes=manifest.bundle_bytes + len(data),
      manifest=self.store.put(data),
      manifest_bytes=len(data),
      target=new.target_id[:16],
    )
    self.edges.append(edge)
    return edge

  def point(self, version, *, sequence=None, rewinds=0, expires=0):
    """Moves the pointer; the head is the single delta, or else a keyframe."""
    index = manifests.write_index(self.run_id, self.edges)
    heads = [e for e in self.edges if e.version == version]
    head = max(
      heads, key=lambda e: (e.base_version is not None, e.base_version or 0)
    )
    base = head.base_version
    self.pointer = manifests.Pointer(
      run_id=self.run_id,
      sequence=sequence or (self.pointer.sequence + 1 if self.pointer else 1),
      rewinds=rewinds,
      version=version,
      target_id=self.held[version].target_id,
      base_id='' if base is None else self.held[base].target_id,
      manifest=head.manifest,
      manifest_bytes=head.manifest_bytes,
      index=self.store.put(index),
      index_bytes=len(index),
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


def damage(path, at=-1):
  """Flips a bit of a file."""
  data = bytearray(path.read_bytes())
  data[at] ^= 1
  path.chmod(0o644)
  path.write_bytes(data)
