"""A tree of device arrays survives blocks, a bundle and the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.checkpoint import weights
from composer_jax.delta import bundle, publish, subscribe
from composer_jax.delta import store as store_lib

P = jax.sharding.PartitionSpec


@pytest.fixture(scope='module')
def policy():
  values = np.arange(-16, 16, dtype=np.float32).reshape(4, 8) / 7
  values[0, :3] = [np.nan, -0.0, np.inf]
  return {
    'params': {
      'embed': jnp.asarray(values, jnp.bfloat16),
      'norm': jnp.ones(8, jnp.bfloat16),
      'scalar': jnp.bfloat16(3),
    },
    'selection_bias': np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
  }


def sharded(tree, specs):
  mesh = jax.make_mesh(
    (2, 4), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  place = lambda x, spec: jax.device_put(
    x, jax.sharding.NamedSharding(mesh, spec)
  )
  return jax.tree.map(place, tree, specs)


def assert_same_bits(tree, wanted):
  assert jax.tree.structure(tree) == jax.tree.structure(wanted)
  for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_every_sharding_gives_the_same_identity(policy):
  wanted = bundle.target_id(bundle.assemble(weights.blocks(policy)))
  for embed in (P('a', 'b'), P(None, ('a', 'b')), P('b'), P()):
    specs = jax.tree.map(lambda _: P(), policy)
    specs['params']['embed'] = embed
    pieces = list(weights.blocks(sharded(policy, specs)))
    assert bundle.target_id(bundle.assemble(pieces)) == wanted
    # Replicas are not sent twice.
    assert sum(p.values.size for p in pieces) == sum(
      x.size for x in jax.tree.leaves(policy)
    )


def test_bundle_brings_the_policy_to_another_process(policy, tmp_path):
  store = store_lib.Store(tmp_path)
  publisher = publish.Publisher(store, 'run')
  info = publisher.publish(weights.blocks(policy), 0)
  assert info.full_bytes == weights.num_bytes(policy)
  update = subscribe.Subscriber(store, 'run').poll()
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), policy)
  tree = weights.to_tree(update.weights, like)
  assert_same_bits(tree, policy)
  again = bundle.assemble(weights.blocks(tree))
  assert bundle.target_id(again) == info.target_id


def test_result_takes_the_sharding_of_the_model(policy):
  specs = jax.tree.map(lambda _: P(), policy)
  specs['params']['embed'] = P('a', 'b')
  like = sharded(policy, specs)
  arrays = bundle.assemble(weights.blocks(policy))
  tree = weights.to_tree(arrays, like)
  assert_same_bits(tree, policy)
  assert tree['params']['embed'].sharding == like['params']['embed'].sharding


def test_published_weights_outlive_donated_buffers(policy):
  step = jax.jit(lambda x: x + 1, donate_argnums=0)
  array = jnp.zeros(4096, jnp.float32)
  held = bundle.assemble(weights.blocks({'x': array}))
  step(array).block_until_ready()
  np.testing.assert_array_equal(held['x'], np.zeros(4096, np.float32))


def test_errors_name_the_tensor(policy):
  arrays = bundle.assemble(weights.blocks(policy))
  other = {'params/more': arrays['params/norm'], **arrays}
  other.pop('params/embed')
  with pytest.raises(
    ValueError,
    match=r"missing \['params/embed'\], left over \['params/more'\]",
  ):
    weights.to_tree(other, policy)
  wrong = {**arrays, 'params/norm': np.ones(8, np.float32)}
  with pytest.raises(ValueError, match=r'params/norm: .*float32.*bfloat16'):
    weights.to_tree(wrong, policy)
  with pytest.raises(ValueError, match='same .* name'):
    list(weights.blocks({'a': {'b': 1.0}, 'a/b': 2.0}))
