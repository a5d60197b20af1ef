"""Sharded policies pass through a store, whatever holds them at either end."""

import concurrent.futures
import contextlib
import gc
import math
import os
import pathlib
import socket
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.delta import chain, subscriber
from composer_jax.delta import follower as followers
from composer_jax.delta import publisher as bundles
from composer_jax.delta.format import identity as grids
from composer_jax.delta.format import keys
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects as stores
from composer_jax.models import config as model_config
from composer_jax.models import decoder, placement
from composer_jax.parallel import layouts, topology
from configs.models import tiny
from tests.delta import identities

P = jax.sharding.PartitionSpec
AUTO = jax.sharding.AxisType.Auto
REPOSITORY = pathlib.Path(__file__).parents[2]
RUN = 'run'
FAST = chain.BundleOptions(tier='fast')


def make_policy(step=0):
  random = np.random.default_rng(0)
  embed = random.normal(size=(96, 64)).astype(np.float32)
  embed[0, :4] = [np.nan, -0.0, np.inf, 1e-40]
  experts = random.normal(size=(2, 24, 2, 8, 12))
  touched = random.random(experts.shape) < 0.05
  return {
    'params': {
      'embed': jnp.asarray(embed, jnp.bfloat16),
      'experts': jnp.asarray(experts + step * touched, jnp.bfloat16),
      'norm': jnp.full(8, step, jnp.bfloat16),
      # Large enough to be several boxes.
      'table': jnp.arange(512 * 1024).reshape(512, 1024).astype(jnp.bfloat16),
      'empty': jnp.zeros((0, 3), jnp.bfloat16),
    },
    'selection_bias': jnp.asarray(random.normal(size=(2, 3)), jnp.float32),
  }


POLICIES = [make_policy(step) for step in range(3)]

# Meshes and the specs of what they shard. The last but one is uneven: two
# thirds of the devices, whose shards are multiples of three.
LAYOUTS = {
  'eight': ((8,), dict(experts=P(None, 'a'), table=P('a'))),
  'hybrid': (
    (2, 4),
    dict(experts=P(None, ('b', 'a')), embed=P('b', 'a'), table=P('b', 'a')),
  ),
  'cube': ((2, 2, 2), dict(experts=P('c', 'b'), norm=P(('a', 'b', 'c')))),
  'six': ((3, 2), dict(experts=P('b', 'a'), embed=P('a'))),
  'four': ((2, 2), dict(experts=P(None, None, None, 'a', 'b'), embed=P('b'))),
}


def place(tree, layout):
  sizes, specs = LAYOUTS[layout]
  names = ('a', 'b', 'c')[: len(sizes)]
  mesh = jax.make_mesh(
    sizes,
    names,
    axis_types=(AUTO,) * len(sizes),
    devices=jax.devices()[: math.prod(sizes)],
  )

  def put(name, leaf):
    spec = specs.get(name.rsplit('/')[-1], P())
    sharding = jax.sharding.NamedSharding(mesh, spec)
    values = np.asarray(leaf)
    # Not device_put, which compares the values of several processes: nan.
    return jax.make_array_from_callback(
      leaf.shape, sharding, lambda index: values[index], dtype=leaf.dtype
    )

  return trees.map_names(put, tree)


def target_of(tree):
  named = trees.flatten_names(tree)
  return identities.target_id({n: np.asarray(a) for n, a in named.items()})


def cut_bytes_of(tree):
  """Bytes of the boxes that no shard holds whole."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    grid = grids.of(leaf.shape)
    shards = [
      [part.indices(n)[:2] for part, n in zip(shard.index, leaf.shape)]
      for shard in leaf.addressable_shards
    ]
    for number in range(grid.num_chunks):
      box = grid.chunk(number)
      whole = any(
        all(a <= b and y <= z for (a, z), (b, y) in zip(shard, box))
        for shard in shards
      )
      total += (not whole) * int(grid.sizes[number]) * leaf.dtype.itemsize
  return total


def bits(tree):
  return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


@contextlib.contextmanager
def sending(root, options=FAST):
  with contextlib.closing(
    bundles.Publisher(root / 'store', root / 'key', RUN, options)
  ) as sender:
    yield sender


def follower(root, **options):
  key = keys.open_key(root / 'key')
  return followers.Follower(stores.Store(root / 'store'), RUN, key, **options)


@pytest.fixture
def no_transfers_between_devices():
  name = 'jax_transfer_guard_device_to_device'
  before = getattr(jax.config, name)
  jax.config.update(name, 'disallow_explicit')
  yield
  jax.config.update(name, before)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_shards_are_published_without_gathering(layout, tmp_path, request):
  trees_ = [place(policy, layout) for policy in POLICIES[:2]]
  request.getfixturevalue('no_transfers_between_devices')
  with sending(tmp_path) as sender:
    for version, tree in enumerate(trees_):
      sender.publish(tree, version)
    sender.wait()
    infos = sender.results()
  # The identity is that of one device, whatever the mesh.
  assert [i.target_id for i in infos] == [target_of(p) for p in POLICIES[:2]]
  assert [i.kind for i in infos] == [manifests.KEY, manifests.DELTA]
  assert infos[1].bytes < infos[0].bytes / 3
  assert infos[1].cut_bytes == cut_bytes_of(trees_[1])
  update = follower(tmp_path).poll()
  assert (update.version, update.target_id) == (1, infos[1].target_id)


def test_receivers_on_fewer_devices_and_in_another_layout(tmp_path):
  with sending(tmp_path) as sender:
    like = place(POLICIES[0], 'four')
    following = follower(tmp_path, wanted=subscriber.wanted_by(like))
    for version, policy in enumerate(POLICIES):
      sender.publish(place(policy, 'hybrid'), version)
      sender.wait()
      update = following.poll()
      assert following.problem is None
      assert update.target_id == target_of(policy)
      tree = subscriber.place(update, like)
      assert bits(tree) == bits(policy)
      assert jax.tree.map(lambda a: a.sharding, tree) == jax.tree.map(
        lambda a: a.sharding, like
      )


@pytest.fixture(scope='module')
def model_policies():
  """Two policies of the tiny model, a few weights apart."""
  config = model_config.ModelConfig.from_dict(tiny.get_config().to_dict())
  shapes = jax.eval_shape(decoder.policy, decoder.abstract(config)[0])
  random = np.random.default_rng(0)
  first = jax.tree.map(
    lambda a: random.normal(scale=0.02, size=a.shape).astype(a.dtype), shapes
  )
  second = jax.tree.map(
    lambda a: np.where(
      random.random(a.shape) < 0.02, a * a.dtype.type(1.01), a
    ),
    first,
  )
  return config, (first, second)


def put(tree, shardings):
  return jax.tree.map(
    lambda a, sharding: jax.make_array_from_callback(
      a.shape, sharding, lambda index: a[index], dtype=a.dtype
    ),
    tree,
    shardings,
  )


@pytest.mark.parametrize('sizes', [(2, 2, 2), (1, 8, 1), (1, 4, 2)])
def test_a_model_goes_from_training_on_8_to_decoding_on_4(
  model_policies, tmp_path, sizes
):
  config, policies = model_policies
  trained = placement.variable_shardings(
    config, layout=layouts.TRAIN, mesh=topology.make_mesh(*sizes)
  )
  decoding = placement.variable_shardings(
    config,
    layout=layouts.DECODE,
    mesh=topology.make_mesh(1, 4, 1, devices=jax.devices()[4:]),
  )
  like = put(policies[0], decoding)
  with sending(tmp_path) as sender:
    for version, policy in enumerate(policies):
      sender.publish(put(policy, trained), version)
    sender.wait()
    infos = sender.results()
  # Arrays this small are single boxes, which TRAIN cuts.
  assert infos[1].cut_bytes == cut_bytes_of(put(policies[1], trained)) > 0
  update = follower(tmp_path, wanted=subscriber.wanted_by(like)).poll()
  assert update.target_id == infos[1].target_id == target_of(policies[1])
  tree = subscriber.place(update, like)
  assert bits(tree) == bits(policies[1])
  assert jax.tree.map(lambda a: a.sharding, tree) == decoding


# The sender.


class Gate:
  """An array that cannot be read before somebody opens it."""

  def __init__(self, values, error=None):
    self.opened, self._values, self._error = threading.Event(), values, error
    self.shape, self.dtype, self.size = values.shape, values.dtype, values.size

  def __array__(self, dtype=None, copy=None):
    assert self.opened.wait()
    if self._error is not None:
      raise self._error
    return self._values


def test_one_tree_is_in_flight_and_the_next_waits(tmp_path):
  gate = Gate(np.arange(8, dtype=np.float32))
  with sending(tmp_path) as sender:
    sender.publish({'x': gate}, 0, owned=True)
    assert sender.results() == [] and sender.version is None
    waiter = threading.Thread(
      target=sender.publish, args=({'x': np.ones(8, np.float32)}, 1)
    )
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    gate.opened.set()
    waiter.join()
    sender.wait()
    assert [i.version for i in sender.results()] == [0, 1]
    assert sender.results() == []
    assert sender.version == 1


@pytest.mark.parametrize('call', ['publish', 'results', 'wait', 'close'])
def test_an_error_surfaces_once_at_the_next_call(tmp_path, call):
  sender = bundles.Publisher(tmp_path / 'store', tmp_path / 'key', RUN, FAST)
  gate = Gate(np.ones(3), error=OSError(28, 'No space left on device'))
  sender.publish({'x': gate}, 0, owned=True)
  gate.opened.set()
  arguments = ({'x': np.ones(3)}, 0) if call == 'publish' else ()
  if call == 'results':
    concurrent.futures.wait(sender._tasks)
  with pytest.raises(OSError, match='No space left'):
    getattr(sender, call)(*arguments)
  if call != 'close':
    assert sender.results() == []
    sender.publish({'x': np.ones(3)}, 0)
    sender.close()
    assert sender.version == 0


def test_an_error_on_its_way_is_not_replaced(tmp_path):
  with pytest.raises(KeyError, match='the real one'), sending(tmp_path) as s:
    s.publish({'x': np.zeros(1, np.complex64)}, 0)
    raise KeyError('the real one')


def test_an_error_that_another_hides_is_logged(tmp_path, caplog):
  with pytest.raises(KeyError), sending(tmp_path) as s:
    s.publish({'x': np.zeros(1, np.complex64)}, 0)
    raise KeyError
  assert 'Not published: ' in caplog.text and 'complex64' in caplog.text


def test_no_error_takes_the_place_of_another(tmp_path):
  with sending(tmp_path) as sender:
    sender._start(lambda: 1 / 0)
    sender._start(lambda: [][0])
    with pytest.raises(ZeroDivisionError):
      sender.wait()
    with pytest.raises(IndexError):
      sender.results()
    assert sender.results() == []


def test_a_closed_sender_refuses_and_does_not_hang(tmp_path):
  with sending(tmp_path) as sender:
    pass
  with pytest.raises(RuntimeError, match='closed'):
    sender.publish({'x': np.ones(3)}, 0)
  sender.wait()


def test_a_run_is_not_taken_over_with_a_new_key(tmp_path):
  with sending(tmp_path) as sender:
    sender.publish({'x': np.ones(3)}, 0)
  other = tmp_path / 'other'
  with pytest.raises(ValueError, match="has a run 'run' already, and .*other"):
    bundles.Publisher(tmp_path / 'store', other, RUN, FAST)
  assert not other.exists()


def test_donated_arrays_are_an_error_and_no_other_values(tmp_path):
  gate = Gate(np.ones(3, np.float32))
  tree = {'a': gate, 'b': jnp.ones(3)}
  with sending(tmp_path) as sender:
    sender.publish(tree, 0, owned=True)
    tree['b'].delete()
    gate.opened.set()
    with pytest.raises(RuntimeError, match='deleted'):
      sender.wait()
    assert sender.version is None


def test_a_tree_may_be_donated_or_written_to_once_publish_returned(tmp_path):
  """The version is what the tree was, however late its bytes are read."""
  tree = {'a': jnp.arange(5000.0), 'b': np.arange(300.0)}
  wanted = target_of({k: np.array(v) for k, v in tree.items()})
  double = jax.jit(lambda a: 2 * a, donate_argnums=0)
  with bundles.Publisher(tmp_path / 'store', tmp_path / 'key', RUN) as sender:
    started, go_on = threading.Event(), threading.Event()
    sender._start(lambda: (started.set(), go_on.wait()))
    sender.wait = lambda: None  # It does not wait for what holds it up.
    assert started.wait()
    sender.publish(tree, 0)
    del sender.wait
    tree['b'][:] = -1
    double(tree['a']).block_until_ready()
    assert tree['a'].is_deleted()
    go_on.set()
    sender.wait()
    (info,) = sender.results()
  assert info.target_id == wanted


@pytest.mark.parametrize('options', [FAST, chain.BundleOptions()])
def test_a_published_tree_is_let_go(tmp_path, options):
  """Else a policy would stay on the devices until the next one."""
  tree = {'x': jnp.arange(4096.0)}
  leaf = weakref.ref(tree['x'])
  with sending(tmp_path, options) as sender:
    sender.publish(tree, 0, owned=True)
    del tree
    sender.wait()
    gc.collect()
    assert leaf() is None


def test_rewind_makes_later_versions_void(tmp_path):
  with sending(tmp_path) as sender:
    for version in range(3):
      sender.publish(POLICIES[version], version)
    sender.rewind(1)
    assert sender.version == 1
    sender.publish(POLICIES[0], 2)
    sender.wait()
  update = follower(tmp_path).poll()
  assert (update.version, update.target_id) == (2, target_of(POLICIES[0]))


def test_gc_is_queued_and_its_failure_ends_no_run(tmp_path):
  said = []
  with sending(tmp_path) as sender:
    for version in range(3):
      sender.publish(POLICIES[version], version)
      sender.gc(1, said.append)
    sender.wait()
    assert said == []
    (tmp_path / 'store' / 'refs' / RUN / 'latest').write_bytes(b'rot')
    sender.gc(1, said.append)
    sender.wait()
  assert len(said) == 1
  assert said[0].startswith('old bundles are not deleted, the run goes on: ')


def test_all_that_moves_the_pointer_happens_in_one_thread(
  tmp_path, monkeypatch
):
  names = []
  with sending(tmp_path) as sender:
    for name in ('publish', 'rewind', 'gc'):
      monkeypatch.setattr(
        sender._chain,
        name,
        lambda *_, **__: names.append(threading.current_thread().name),
      )
    sender.publish({}, 0)
    sender.rewind(0)
    sender.gc(1)
  assert names == ['bundles_0'] * 3


def test_a_sender_goes_on_where_another_ended(tmp_path):
  for version, policy in enumerate(POLICIES):
    with sending(tmp_path) as sender:
      assert sender.version == (version - 1 if version else None)
      sender.publish(policy, version)
  assert follower(tmp_path).poll().target_id == target_of(POLICIES[-1])


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(tier='best'), "tier is 'best'; it must be one of fast, small"),
    (dict(keyframe_every=0), r'keyframe_every must be at least 1; got 0'),
    (dict(threads=0), r'threads must be at least 1; got 0'),
    (dict(expires_s=-1), 'expires_s must be at least 0; got -1'),
  ],
)
def test_options_are_checked(fields, message):
  with pytest.raises(ValueError, match=message):
    chain.BundleOptions(**fields)


# Several processes.


def test_a_sender_that_is_closed_twice_waits_for_nothing(tmp_path):
  sender = bundles.Publisher(tmp_path / 'store', tmp_path / 'key', RUN, FAST)
  sender.close()
  sender.close()
  waiting = threading.Thread(target=sender.wait, daemon=True)
  waiting.start()
  waiting.join()
  with pytest.raises(RuntimeError, match='closed'):
    sender.publish(POLICIES[0], 0)


PROCESS = """
import sys
import jax
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
process, address, root = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(address, num_processes=2, process_id=process)
import pathlib
from composer_jax.delta import chain
from composer_jax.delta import publisher, subscriber
from tests.delta import publisher_test as t
root = pathlib.Path(root)
like = t.place(t.POLICIES[0], 'eight')
options = chain.BundleOptions(tier='fast')
with t.sending(root, options) as sender:
  for version in range(2):
    tree = t.place(t.POLICIES[version], 'hybrid')
    # Both have it, one sends it.
    tree['selection_bias'] = t.np.asarray(tree['selection_bias'])
    sender.publish(tree, version)
  sender.wait()
  infos = sender.results()
assert [i.version for i in infos] == [0, 1], infos
# Each receives what its own devices need, in another layout.
update = t.follower(root, wanted=subscriber.wanted_by(like)).poll()
tree = subscriber.place(update, like)
for name, leaf in t.trees.flatten_names(tree).items():
  want = t.np.asarray(t.trees.flatten_names(t.POLICIES[1])[name])
  for shard in leaf.addressable_shards:
    assert t.np.asarray(shard.data).tobytes() == want[shard.index].tobytes()
table = update.tensors['params/table']
# Of larger weights, the bytes that each process fetches are counted.
lines = t.fetched_of(root / 'larger')
held = table.buffer.size
print('OK', update.target_id, infos[1].cut_bytes, held, *lines)
"""


def fetched_of(root):
  """Returns lines: blobs of a bundle, and those that this process fetches.

  In bytes; of a keyframe, and of a delta that changes a twentieth.
  """
  mesh = jax.make_mesh((8,), ('x',), axis_types=(AUTO,))
  # As wide as models whose chunks are cut for shards (`identity`).
  specs = {
    'experts': ((1, 16, 2048, 256), P(None, 'x')),
    'kernel': ((1, 2048, 2048), P(None, None, 'x')),
    'norm': ((1, 2048), P()),
    'table': ((4096, 2048), P('x')),
  }

  def tree(version):
    rng = np.random.default_rng(version)

    def put(shape, spec):
      values = np.random.default_rng(7).normal(size=shape)
      values *= 1 + 0.01 * (version and rng.random(shape) < 0.05)
      values = values.astype(ml_dtypes.bfloat16)
      sharding = jax.sharding.NamedSharding(mesh, spec)
      return jax.make_array_from_callback(shape, sharding, values.__getitem__)

    return {name: put(*fields) for name, fields in specs.items()}

  receiver, lines = None, []
  with sending(root, chain.BundleOptions(tier='fast')) as sender:
    for version in range(2):
      like = tree(version)
      sender.publish(like, version)
      sender.wait()
      wanted = subscriber.wanted_by(like)
      receiver = receiver or follower(root, wanted=wanted)
      placed = subscriber.place(receiver.poll(), like)
      for name, leaf in like.items():
        pairs = zip(
          leaf.addressable_shards, placed[name].addressable_shards, strict=True
        )
        for pair in pairs:
          had, has = (np.asarray(shard.data).tobytes() for shard in pair)
          assert had == has
      # Everyone reads the manifest whole.
      sealed, _ = stores.Store(root / 'store').read_pointer(RUN)
      key = keys.open_key(root / 'key')
      head = manifests.unseal(sealed, key, RUN).head.bytes
      whole = sender.results()[0].bytes
      lines.append(f'{whole - head},{receiver.stats.bytes - head}')
  return lines


@pytest.mark.slow
def test_two_processes_publish_one_bundle(tmp_path):
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{listener.getsockname()[1]}'
  flags = '--xla_force_host_platform_device_count=4'
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', PROCESS, str(i), address, str(tmp_path)],
      cwd=REPOSITORY,
      env=os.environ | {'XLA_FLAGS': flags},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  outputs = []
  try:
    for process in processes:
      outputs.append(process.communicate())
  finally:
    for process in processes:
      process.kill()
  for process, (out, errors) in zip(processes, outputs, strict=True):
    assert process.returncode == 0, errors[-4000:]
    status, target, cut_bytes, held, *counts = out.splitlines()[-1].split()
    assert (status, target) == ('OK', target_of(POLICIES[1]))
    # Boxes that shards cut are completed from the other process.
    assert int(cut_bytes) == cut_bytes_of(place(POLICIES[1], 'hybrid'))
    # To receive, a process holds its half of the table and no more.
    assert int(held) == POLICIES[1]['params']['table'].size // 2
    # Nor does it fetch more than its half, of the keyframe and of the delta.
    for count in counts:
      whole, fetched = map(int, count.split(','))
      assert 0.475 < fetched / whole < 0.525, counts
