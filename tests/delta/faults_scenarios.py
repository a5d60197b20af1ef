"""What is going on when a process dies: one class for each kind of process.

prepare(root)   what stood before
begin(root)     the process, up to where things may befall it
act(actor)      what it does; doing it twice is allowed
look(root)      a reader right after: old or new, never torn
recover(root)   another process goes on; returns how it ends
collect(root)   cleans up
"""

import hashlib

from composer_jax.delta import follower as followers
from composer_jax.delta import rebuild
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects as stores
from tests.delta import bundles, faults

KIND = 'floats'


def _open(root):
  return stores.Store(root / 'store')


def _publisher(root, **options):
  return faults.publisher_of(_open(root), keyframe_every=2, **options)


def _publish(publisher, version, seed=0):
  arrays = faults.weights(KIND, version, seed)
  return publisher.publish(faults.blocks(arrays), version)


def _joiner(root):
  return followers.Follower(
    _open(root), faults.RUN, faults.KEY, threads=1, now=lambda: 0.0
  )


def _served(root, versions, seed=0):
  """Polls as a joiner; what it gets is exact and one of these versions."""
  reader = _joiner(root)
  update = reader.poll()
  assert reader.problem is None, reader.problem
  assert (update and update.version) in versions, (update, versions)
  if update is not None:
    assert_exact(update, faults.weights(KIND, update.version, seed))
  return update


def assert_exact(update, wanted):
  found = update.arrays()
  assert found.keys() == wanted.keys()
  for name, array in wanted.items():
    assert found[name].dtype == array.dtype, name
    assert found[name].tobytes() == array.tobytes(), name


def _standing(root):
  """All that readers can see, but for how often the pointer moved."""
  store = _open(root)
  pointer = manifests.unseal(
    store.read_pointer(faults.RUN)[0], faults.KEY, faults.RUN
  )
  edges = bundles.history(store, pointer)
  ends = [[e.base_version, e.version] for e in edges]
  return [pointer.version, pointer.target_id, ends]


def _assert_intact(root):
  """Nothing is torn under its name."""
  store = _open(root)
  for name in store.sizes():
    store.get(name)


class Publish:
  """A publisher dies while it publishes a version."""

  def __init__(self, version):
    self.version = version

  def prepare(self, root):
    publisher = _publisher(root)
    for version in range(self.version):
      _publish(publisher, version)
    (root / 'store').mkdir(parents=True, exist_ok=True)

  def begin(self, root):
    publisher = _publisher(root)
    if self.version:
      # It has its base, as one that runs for long.
      _publish(publisher, self.version - 1)
    return publisher

  def act(self, publisher):
    _publish(publisher, self.version)

  def look(self, root):
    before = self.version - 1 if self.version else None
    _assert_intact(root)
    _served(root, {before, self.version})

  def recover(self, root):
    publisher = _publisher(root)
    # A keyframe that was lost is made up for by the next.
    for version in range(self.version, self.version + 3):
      _publish(publisher, version)
    publisher.gc(2)
    _served(root, {self.version + 2})
    pointer, target, edges = _standing(root)
    kinds = [e for e in edges if e[0] is not None and e[1] - e[0] == 1]
    return [pointer, target, kinds[-2:]]

  def collect(self, root):
    _publisher(root).gc(2)
    assert_no_garbage(root)


class Collect(Publish):
  """A publisher dies while it deletes what nobody needs."""

  def __init__(self):
    super().__init__(17)

  def begin(self, root):
    return _publisher(root)

  def act(self, publisher):
    publisher.gc(1)

  def look(self, root):
    _assert_intact(root)
    _served(root, {16})


class Rewind(Publish):
  """A trainer goes back to its checkpoint and trains on otherwise."""

  def __init__(self):
    super().__init__(4)

  def begin(self, root):
    return _publisher(root)

  def act(self, publisher):
    publisher.rewind(1)
    _publish(publisher, 2, seed=8)

  def look(self, root):
    _assert_intact(root)
    version = _standing(root)[0]
    assert version in (1, 2, 3)
    update = _joiner(root).poll()
    seeds = [
      seed
      for seed in (0, 8)
      if update.arrays()['bias'].tobytes()
      == faults.weights(KIND, version, seed)['bias'].tobytes()
    ]
    assert seeds and (version == 2 or seeds == [0])
    assert_exact(update, faults.weights(KIND, version, seeds[0]))

  def recover(self, root):
    publisher = _publisher(root)
    publisher.rewind(1)
    _publish(publisher, 2, seed=8)
    _publish(publisher, 3, seed=8)
    _served(root, {3}, seed=8)
    return _standing(root)[:2]


class Heal(Publish):
  """The last version is damaged and published again."""

  def __init__(self):
    super().__init__(3)

  def prepare(self, root):
    super().prepare(root)
    _damage_head(root)

  def begin(self, root):
    return _publisher(root)

  def act(self, publisher):
    _publish(publisher, 2)

  def look(self, root):
    reader = _joiner(root)
    update = reader.poll()
    if update is None:
      assert reader.problem
    else:
      assert_exact(update, faults.weights(KIND, 2))

  def recover(self, root):
    publisher = _publisher(root)
    _publish(publisher, 2)
    _publish(publisher, 3)
    _served(root, {3})
    return _standing(root)[:2]


def _damage_head(root):
  """Damages every pack."""
  for path in (root / 'store' / 'objects').iterdir():
    data = path.read_bytes()
    if not data.startswith(b'CDB5'):
      path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


class Follow:
  """A receiver dies, with its memory, between two versions."""

  def prepare(self, root):
    publisher = _publisher(root)
    for version in range(2):
      _publish(publisher, version)
    self.follow(root).poll()
    _publish(publisher, 2)
    _publish(publisher, 3)

  def follow(self, root):
    return followers.Follower(
      _open(root),
      faults.RUN,
      faults.KEY,
      memory=root / 'receiver' / 'memory',
      threads=1,
      now=lambda: 0.0,
    )

  def begin(self, root):
    return root

  def act(self, root):
    receiver = self.follow(root)
    update = receiver.poll()
    if update is None:
      # It said why; the next poll is a new chance.
      assert receiver.held is None
      assert 'injected' in receiver.problem, receiver.problem
    else:
      assert_exact(update, faults.weights(KIND, 3))

  def look(self, root):
    _assert_intact(root)

  def recover(self, root):
    receiver = self.follow(root)
    update = receiver.poll()
    assert update is not None, receiver.problem
    assert_exact(update, faults.weights(KIND, 3))
    # What it remembers is whole, and no older pointer leads it back.
    sealed = (root / 'receiver' / 'memory').read_bytes()
    assert sealed == _open(root).read_pointer(faults.RUN)[0]
    return [update.version, update.target_id]

  def collect(self, root):
    pass


class StoreItself:
  """Each operation of a store, one after another."""

  def prepare(self, root):
    store = _open(root)
    store.put(b'old')
    store.move_pointer(faults.RUN, b'first', None)

  def begin(self, root):
    return root

  def act(self, root):
    store = _open(root)
    _, tag = store.read_pointer(faults.RUN)
    data = store.put(b'data' * 999)
    name = store.put(b'manifest')
    store.move_pointer(faults.RUN, f'to {data}'.encode(), tag)
    store.get(data, 3996)
    old = hashlib.sha256(b'old').hexdigest()
    store.delete([old, name], grace_s=0)

  def look(self, root):
    _assert_intact(root)
    store = _open(root)
    found, _ = store.read_pointer(faults.RUN)
    data = hashlib.sha256(b'data' * 999).hexdigest()
    assert found == b'first' or (
      found == f'to {data}'.encode() and data in store.sizes()
    )

  def recover(self, root):
    self.act(root)
    store = _open(root)
    return [store.read_pointer(faults.RUN)[0].decode(), store.sizes()]

  def collect(self, root):
    _open(root).delete([], grace_s=0)


def assert_no_garbage(root):
  """Everything in the store is of use to somebody."""
  store = _open(root)
  pointer = manifests.unseal(
    store.read_pointer(faults.RUN)[0], faults.KEY, faults.RUN
  )
  needed = set()
  for edge in bundles.history(store, pointer):
    bundle = rebuild.read_manifest(store, edge.link)
    needed |= {edge.manifest, *(name for name, _ in bundle.packs)}
  assert store.sizes().keys() == needed
  assert not (root / 'store' / 'messages').exists()


SCENARIOS = {
  'first': Publish(0),
  'delta': Publish(1),
  'packed': Publish(2),
  'collect': Collect(),
  'rewind': Rewind(),
  'heal': Heal(),
  'follow': Follow(),
  'store': StoreItself(),
}
