"""A tree of device arrays survives its blocks, on any mesh."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.delta import publisher, rebuild, subscriber
from composer_jax.delta.format import identity
from tests.delta import bundles, identities

P = jax.sharding.PartitionSpec
AUTO = jax.sharding.AxisType.Auto


def make_policy():
  values = np.arange(-16, 16, dtype=np.float32).reshape(4, 8) / 7
  values[0, :3] = [np.nan, -0.0, np.inf]
  experts = np.random.default_rng(0).normal(size=(2, 24, 6, 32))
  return {
    'params': {
      'embed': jnp.asarray(values, jnp.bfloat16),
      'experts': jnp.asarray(experts, jnp.bfloat16),
      'norm': jnp.ones(8, jnp.bfloat16),
      'scalar': jnp.bfloat16(3),
      'empty': jnp.zeros((0, 3), jnp.bfloat16),
    },
    'selection_bias': np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
  }


@pytest.fixture(scope='module')
def policy():
  return make_policy()


def mesh_of(*sizes):
  names = ('a', 'b', 'c')[: len(sizes)]
  devices = jax.devices()[: math.prod(sizes)]
  return jax.make_mesh(
    sizes, names, axis_types=(AUTO,) * len(sizes), devices=devices
  )


def sharded(tree, mesh, **specs):
  """Places jax arrays by the last part of their names; replicates others."""

  def place(name, leaf):
    if not isinstance(leaf, jax.Array):
      return leaf
    spec = specs.get(name.rpartition('/')[2], P())
    return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

  return trees.map_names(place, tree)


def assembled(blocks):
  """Assembles blocks and checks that each element comes once."""
  arrays, missing = {}, {}
  for name, dtype, shape, index, values in blocks:
    if name not in arrays:
      arrays[name] = np.empty(shape, identity.DTYPES[dtype])
      missing[name] = arrays[name].size
    box = tuple(slice(*ends) for ends in index)
    assert arrays[name][box].shape == values.shape
    arrays[name][box] = values
    missing[name] -= values.size
  assert not any(missing.values())
  return arrays


def assert_same_bits(tree, expected):
  assert jax.tree.structure(tree) == jax.tree.structure(expected)
  for x, y in zip(
    jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True
  ):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


LAYOUTS = [
  ((8,), dict(experts=P(None, 'a'), embed=P(None, 'a'))),
  ((2, 4), dict(experts=P(None, ('b', 'a')), embed=P('b', 'a'))),
  ((4, 2), dict(experts=P('b', None, None, 'a'), embed=P('a'))),
  ((2, 2, 2), dict(experts=P('c', 'b'), norm=P(('a', 'b', 'c')))),
  ((3, 2), dict(experts=P('b', 'a'))),
  ((6,), dict(experts=P(None, None, 'a'))),
]


@pytest.mark.parametrize('sizes, specs', LAYOUTS)
def test_every_sharding_gives_the_same_identity(policy, sizes, specs):
  expected = identities.target_id(assembled(publisher.blocks(policy)))
  tree = sharded(policy, mesh_of(*sizes), **specs)
  # Arrays move from devices to the host, and never between devices.
  with jax.transfer_guard_device_to_device('disallow_explicit'):
    pieces = list(publisher.blocks(tree))
  assert identities.target_id(assembled(pieces)) == expected
  leaves = trees.flatten_names(tree)
  for piece in pieces:
    if isinstance(leaves[piece.name], jax.Array):
      shard = leaves[piece.name].sharding.shard_shape(piece.shape)
      assert piece.values.shape == shard, 'a block is a shard'


def test_a_shard_is_touched_when_its_block_is_asked_for(policy):
  tree = {'a': jnp.arange(4.0), 'b': jnp.arange(4.0)}
  blocks = publisher.blocks(tree)
  tree['b'].delete()
  assert next(blocks).name == 'a'
  with pytest.raises(RuntimeError, match='deleted'):
    next(blocks)


def test_blocks_outlive_donated_buffers():
  step = jax.jit(lambda x: x + 1, donate_argnums=0)
  array = jnp.zeros(4096, jnp.float32)
  held = list(publisher.blocks({'x': array}))
  step(array).block_until_ready()
  np.testing.assert_array_equal(held[0].values, np.zeros(4096, np.float32))


class Recorder(rebuild.Held):
  """Host weights that record the requested blocks."""

  def block(self, name, index):
    ASKED.append((name, index))
    return super().block(name, index)


ASKED: list = []


@pytest.mark.parametrize('sizes, specs', LAYOUTS)
def test_result_takes_the_sharding_of_the_model(policy, sizes, specs):
  arrays = assembled(publisher.blocks(policy))
  held = bundles.from_arrays(arrays)
  held = Recorder(
    **{f.name: getattr(held, f.name) for f in dataclasses.fields(held)}
  )
  like = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(
      a.shape, a.dtype, sharding=getattr(a, 'sharding', None)
    ),
    sharded(policy, mesh_of(*sizes), **specs),
  )
  ASKED.clear()
  tree = subscriber.place(held, like)
  assert_same_bits(tree, policy)
  for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True):
    assert y.sharding is None or x.sharding == y.sharding
  # Every block is read once, whatever the number of replicas, one shard of an
  # array at a time.

  assert len(set(ASKED)) == len(ASKED)
  leaves = trees.flatten_names(like)
  for name, index in ASKED:
    if leaves[name].sharding is not None:
      shape = tuple(stop - start for start, stop in index)
      assert shape == leaves[name].sharding.shard_shape(leaves[name].shape)


def test_wanted_are_the_blocks_of_the_devices(policy):
  like = sharded(policy, mesh_of(2, 4), embed=P('a', 'b'))
  wanted = subscriber.wanted_by(like)
  assert sorted(wanted('params/embed', 'bfloat16', (4, 8))) == [
    ((row, row + 2), (column, column + 2))
    for row in (0, 2)
    for column in (0, 2, 4, 6)
  ]
  # Replicas need a block once; an array without sharding is needed whole.
  assert wanted('params/norm', 'bfloat16', (8,)) == [((0, 8),)]
  assert wanted('params/scalar', 'bfloat16', ()) == [()]
  assert wanted('selection_bias', 'float32', (2, 3)) == [((0, 2), (0, 3))]
  # Tensors that `place` will refuse are not fetched.
  assert wanted('params/other', 'bfloat16', (8,)) == []
  assert wanted('params/norm', 'bfloat16', (9,)) == []


def test_errors_name_the_tensor(policy):
  arrays = assembled(publisher.blocks(policy))
  other_arrays = {'params/more': arrays['params/norm'], **arrays}
  other_arrays.pop('params/embed')
  with pytest.raises(
    ValueError,
    match=r"missing \['params/embed'\], left over \['params/more'\]",
  ):
    subscriber.place(bundles.from_arrays(other_arrays), policy)
  wrong = {**arrays, 'params/norm': np.ones(8, np.float32)}
  with pytest.raises(ValueError, match=r'params/norm: .*float32.*bfloat16'):
    subscriber.place(bundles.from_arrays(wrong), policy)
  with pytest.raises(ValueError, match='Two leaves .* called a/b'):
    list(publisher.blocks({'a': {'b': 1.0}, 'a/b': 2.0}))
