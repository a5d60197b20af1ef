"""The implementations of attention agree, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import attention


def test_backends_agree_in_value_and_gradient():
  keys = jax.random.split(jax.random.key(0), 4)
  q = jax.random.normal(keys[0], (2, 6, 4, 8))
  k = jax.random.normal(keys[1], (2, 6, 2, 8))
  v = jax.random.normal(keys[2], (2, 6, 2, 8))
  d_out = jax.random.normal(keys[3], q.shape)
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), (2, 6, 6))
  mask = mask.at[1, 3:, :3].set(False)
  results = []
  for backend in attention.BACKENDS:

    @jax.jit
    def value_and_gradients(q, k, v, backend=backend):
      out, pull = jax.vjp(
        lambda *a: attention.attend(*a, mask, backend=backend), q, k, v
      )
      return out, *pull(d_out)

    results.append(value_and_gradients(q, k, v))
  for result in results[1:]:
    for have, want in zip(result, results[0], strict=True):
      np.testing.assert_allclose(have, want, atol=3e-6)


def test_unknown_backend_is_named():
  x = jnp.zeros((1, 1, 1, 2))
  with pytest.raises(ValueError, match="'flash' is not in"):
    attention.attend(x, x, x, jnp.ones((1, 1, 1), bool), backend='flash')
