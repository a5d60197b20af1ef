"""The trainer's forward pass uses the policy, its gradient the masters."""

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models import decoder
from composer_jax.train import policy_values


def test_values_are_the_policy_and_the_gradient_is_not_rounded():
  rng = np.random.default_rng(0)
  masters = {'w': jnp.asarray(rng.normal(size=(64,)), jnp.float32)}
  weight = rng.normal(size=(64,)).astype(np.float32)

  def loss(params):
    return (policy_values.straight_through(params)['w'] * weight).sum()

  rounded = jax.jit(policy_values.straight_through)(masters)
  served = decoder.policy({'params': masters})['params']
  np.testing.assert_array_equal(rounded['w'], served['w'].astype(jnp.float32))
  assert (rounded['w'] != masters['w']).any()
  np.testing.assert_array_equal(jax.jit(jax.grad(loss))(masters)['w'], weight)
