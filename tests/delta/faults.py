"""Runs with every kind of bundle in a store in memory, and receivers of them.

A case takes about a millisecond: a `World` is published once and followed once;
then each case gets a copy of its files to damage, and a receiver as it was at
some version. Boxes, packs and pieces are so small that tiny tensors have many.
"""

import contextlib
import copy
import dataclasses
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest

from composer_jax.delta import chain, chunking, rebuild
from composer_jax.delta import follower as followers
from composer_jax.delta.format import identity, keys
from composer_jax.delta.format import identity as grids
from composer_jax.delta.format import manifest as manifests
from tests.delta import faults_store, identities

KEY = keys.Hmac(b'the key of a run')
RUN = 'run'
LATEST = f'refs/{RUN}/latest'
EXPIRES_S = 100
VERSIONS = 7


@contextlib.contextmanager
def small_chunks():
  """Cuts arrays into chunks of 64 elements; identities differ from usual."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(grids, 'MAX_ELEMENTS', 64)
    patch.setattr(chunking, 'PACK_BYTES', 300)
    patch.setattr(rebuild, 'RANGE_BYTES', 200)
    grids.of.cache_clear()
    try:
      yield
    finally:
      grids.of.cache_clear()


def peak_mib():
  """Most memory of this process; `ru_maxrss` begins with its parent's."""
  status = pathlib.Path('/proc/self/status').read_text()
  return int(re.findall(r'VmHWM:\s+(\d+) kB', status)[0]) / 1024


# Weights.

SHAPES = {
  'one': {'kernel': ('bfloat16', (4, 20))},
  'floats': {
    'bias': ('float32', (9,)),
    'empty': ('float32', (0, 3)),
    'half': ('float16', (70,)),
    'kernel': ('bfloat16', (8, 20)),
    'scalar': ('float32', ()),
  },
  'codes': {
    'bits': ('bool', (9,)),
    'frozen': ('int8', (5, 6)),
    'int4': ('int4', (70,)),
    'scales': ('float8_e8m0fnu', (10,)),
    'wide': ('float8_e5m2', (40,)),
    'w/e4m3': ('float8_e4m3fn', (5, 30)),
  },
  'words': {
    'double': ('float64', (20,)),
    'long': ('int64', (70,)),
    'tied': ('bfloat16', (6, 20)),
    'tied_too': ('bfloat16', (6, 20)),
    'word': ('uint32', (10,)),
  },
}
# NaNs with payloads, infinities, both zeros, denormals.
SPECIAL = [0x8000, 0, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 1, 0x8001, 0x7F7F]


def weights(kind, version, seed=0):
  """Tensors of a few dtypes that move a little each version."""
  return {
    name: _array(name.removesuffix('_too'), dtype, shape, version, seed)
    for name, (dtype, shape) in SHAPES[kind].items()
  }


def _array(name, dtype, shape, version, seed):
  rng = np.random.default_rng([seed, *name.encode()])
  dtype, size = identity.DTYPES[dtype], int(np.prod(shape))
  if dtype.kind == 'f' or dtype == ml_dtypes.bfloat16:
    values = rng.normal(0, 0.02, size)
    values = (values + 1e-4 * version * rng.normal(size=size)).astype(dtype)
    if dtype == ml_dtypes.bfloat16:
      special = np.roll(SPECIAL, version).astype(np.uint16)
      values.view(np.uint16)[: len(SPECIAL)] = special
    return values.reshape(shape)
  raw = rng.integers(0, 256, size * dtype.itemsize, np.uint8)
  if name != 'frozen':
    # Another few bytes each version, by any distance.
    for step in range(version):
      at = rng.integers(0, raw.size, 1 + raw.size // 20)
      raw[at] += np.uint8(1 + step * 37 % 255)
  if dtype == np.bool_:
    raw &= 1
  return raw.view(dtype).reshape(shape)


def blocks(arrays):
  for name, array in arrays.items():
    ends = tuple((0, length) for length in array.shape)
    yield identity.Block(name, str(array.dtype), array.shape, ends, array)


# Worlds.


def half(name, dtype, shape):
  """A receiver of the first half of the rows."""
  if not shape:
    return [()]
  return [((0, (shape[0] + 1) // 2), *((0, n) for n in shape[1:]))]


@dataclasses.dataclass(kw_only=True)
class World:
  """A published run, what was published beside it, and its followers.

  Attributes:
    kind: of the weights.
    store: that all receivers read.
    files: what it holds when nothing is wrong.
    others: objects and pointers of a fork, of another run and another key.
    moves: all pointers of the run, oldest first.
    bits: {identity: {tensor: bytes of its boxes one after another}}.
    parts: the same of partial receivers.
    published: (version, identity) of what the key ever signed for the run.
    receivers: {(whole or part, version or None): Subscriber}.
    needs: keys that each of them reads when nothing is wrong.
    now: what receivers take for the time.
  """

  kind: str
  store: faults_store.Store
  files: dict[str, bytes] = dataclasses.field(default_factory=dict)
  others: dict[str, bytes] = dataclasses.field(default_factory=dict)
  moves: list[bytes] = dataclasses.field(default_factory=list)
  bits: dict = dataclasses.field(default_factory=dict)
  parts: dict = dataclasses.field(default_factory=dict)
  published: set = dataclasses.field(default_factory=set)
  receivers: dict = dataclasses.field(default_factory=dict)
  needs: dict = dataclasses.field(default_factory=dict)
  now: float = 0.0

  def follow(self, wanted=None, **options):
    return followers.Follower(
      self.store,
      RUN,
      KEY,
      wanted=wanted,
      threads=1,
      now=lambda: self.now,
      **options,
    )

  def receiver(self, name, version):
    """Returns a receiver as it was at a version."""
    return copy.copy(self.receivers[name, version])

  @property
  def head(self):
    return manifests.unseal(self.files[LATEST], KEY, RUN)


def publisher_of(store, run_id=RUN, key=KEY, **options):
  options = {
    'keyframe_every': 3,
    'grace_s': 0.0,
    **options,
  }
  peers = options.pop('peers', None)
  options = chain.BundleOptions(threads=1, expires_s=EXPIRES_S, **options)
  return chain.BundleWriter(
    store, run_id, key, options=options, peers=peers, now=lambda: 0.0
  )


def _publish(publisher, kind, version, seed=0):
  return publisher.publish(blocks(weights(kind, version, seed)), version)


def build(kind, *, versions=VERSIONS, **options):
  """Publishes versions from 0, followed by receivers of all sorts.

  Beside it the run is forked, under the same key.

  Args:
    kind: of the weights, in SHAPES.
    versions: how many.
    **options: of the publisher.
  """
  world = World(kind=kind, store=faults_store.Store())
  store = world.store
  publisher = publisher_of(store, **options)
  followers = {'whole': world.follow(), 'part': world.follow(half)}
  start = min(3, versions - 1)
  for name, follower in followers.items():
    world.receivers[name, None] = copy.copy(follower)
  for version in range(versions):
    info = _publish(publisher, kind, version)
    _learn(world, info, weights(kind, version))
    for name, follower in followers.items():
      check(world, follower, follower.held, follower.poll())
      world.receivers[name, version] = copy.copy(follower)
    if version == start - 1:
      fork = faults_store.Store(store.files)
  world.files, world.moves = store.files, store.moves
  for name in world.receivers:
    world.needs[name] = _needs(world, name)
  forker = publisher_of(fork, **options)
  for version in range(start, start + 2):
    info = _publish(forker, kind, version, seed=9)
    _learn(world, info, weights(kind, version, seed=9))
  other, stranger = faults_store.Store(), faults_store.Store()
  _publish(publisher_of(other, 'other', **options), kind, 0, seed=3)
  enemy = keys.Hmac(b'the key of others')
  _publish(publisher_of(stranger, key=enemy), kind, 0, seed=4)
  for store, label in (fork, 'fork'), (other, 'other'), (stranger, 'enemy'):
    for key, data in store.files.items():
      if key not in world.files or key == LATEST:
        world.others[f'{label}:{key}'] = data
  return world


def _needs(world, name):
  world.store.asked = set()
  receiver = world.receiver(*name)
  check(world, receiver, receiver.held, receiver.poll())
  return sorted(world.store.asked)


def _learn(world, info, arrays):
  """Notes a version's true bits, found by slicing and not by a receiver."""
  assert info.target_id == identities.target_id(arrays)
  world.published.add((info.version, info.target_id))
  for truth, wanted in (world.bits, None), (world.parts, half):
    truth[info.target_id] = found = {}
    for name, array in arrays.items():
      numbers = rebuild.chunks_of(wanted, name, str(array.dtype), array.shape)
      grid = grids.of(array.shape)
      slices = (tuple(slice(*ends) for ends in grid.chunk(n)) for n in numbers)
      found[name] = b''.join(array[at].tobytes() for at in slices)


# The law.

NAMED = re.compile(r'latest|[0-9a-f]{12}|\(chunk \d+')


def check(world, receiver, before, update):
  """What a receiver may do whatever befell: serve the truth, or say why not.

  Returns:
    'served', 'refused', or 'nothing' where the pointer names what is held.
  """
  if update is None:
    assert receiver.held is before, 'refused, and yet holds something else'
    if receiver.problem is None:
      assert _is_news_free(world, receiver), 'neither served nor refused'
      return 'nothing'
    assert NAMED.search(receiver.problem), receiver.problem
    return 'refused'
  assert receiver.held is update and receiver.problem is None
  assert (update.version, update.target_id) in world.published
  tensors = update.tensors
  is_part = any(t.numbers.size < t.grid.num_chunks for t in tensors.values())
  truth = (world.parts if is_part else world.bits)[update.target_id]
  assert tensors.keys() == truth.keys()
  for name, tensor in tensors.items():
    shape = SHAPES[world.kind][name]
    assert (tensor.dtype, tensor.shape) == shape, f'wrong accept: {name}'
    assert tensor.buffer.tobytes() == truth[name], f'wrong accept: {name}'
    assert not tensor.buffer.flags.writeable
  return 'served'


def _is_news_free(world, receiver):
  sealed = world.store.files.get(LATEST)
  if sealed is None:
    return receiver._seen is None
  pointer = manifests.unseal(sealed, KEY, RUN)
  return receiver.held is not None and named(receiver.held) == named(pointer)


def named(weights):
  return weights.version, weights.target_id


def check_recovers(world, receiver):
  """Repairs everything: a receiver gets to the head by itself."""
  world.store.files, world.store.noise, world.now = dict(world.files), None, 0.0
  head, before = world.head, receiver.held
  seen = receiver._seen
  update = receiver.poll()
  if seen is not None and seen.sequence >= head.sequence and seen != head:
    # It followed a fork further than the run goes.
    assert update is None and 'rolled back or forked' in receiver.problem
    return
  check(world, receiver, before, update)
  assert receiver.problem is None, receiver.problem
  assert named(receiver.held) == named(head)
