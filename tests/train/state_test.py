"""Arrays of the optimizer are sharded as their parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.models import decoder
from composer_jax.parallel import topology
from composer_jax.train import state as train_state
from tests.train import loop_test


@pytest.fixture(scope='module')
def place():
  """Returns a function from states' shapes to specs, for up[E, D, F]."""
  mesh = topology.make_mesh(2, 4, 1)
  up = NamedSharding(mesh, P(('replica', 'context'), 'fsdp'))

  def specs(**shapes):
    leaf = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    abstract = train_state.TrainState(
      step=leaf(()),
      params={'moe': {'up': leaf((4, 8, 6))}},
      selection_bias={},
      opt_state=[{n: {'moe': {'up': leaf(s)}} for n, s in shapes.items()}],
    )
    actual = train_state.shardings(
      abstract, {'params': {'moe': {'up': up}}}, mesh
    )
    assert actual.step.spec == P()
    return {n: s['moe']['up'].spec for n, s in actual.opt_state[0].items()}

  return specs


def test_moments_are_sharded_as_their_parameters_and_scalars_replicated(place):
  spec = P(('replica', 'context'), 'fsdp')
  assert place(momentum=(4, 8, 6), count=()) == {
    'momentum': spec,
    'count': P(),
  }


@pytest.mark.parametrize('shape', [(4, 8), (4, 1, 6), (4, 8, 6, 1)])
def test_another_shape_is_named(place, shape):
  with pytest.raises(ValueError, match=r'0/second/moe/up .*\(4, 8, 6\)'):
    place(second=shape)


def test_values_are_the_policy_and_the_gradient_is_not_rounded():
  rng = np.random.default_rng(0)
  masters = {'w': jnp.asarray(rng.normal(size=(64,)), jnp.float32)}
  weight = rng.normal(size=(64,)).astype(np.float32)

  def loss(params):
    return (policy_values(params)['w'] * weight).sum()

  policy_values = functools.partial(
    train_state.policy_values, config=loop_test.MODEL
  )
  rounded = jax.jit(policy_values)(masters)
  served = decoder.policy({'params': masters})['params']
  np.testing.assert_array_equal(rounded['w'], served['w'].astype(jnp.float32))
  assert (rounded['w'] != masters['w']).any()
  np.testing.assert_array_equal(jax.jit(jax.grad(loss))(masters)['w'], weight)
