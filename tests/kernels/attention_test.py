"""The implementations of attention agree, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import attention


# Values narrower than keys, and a scale of their own, as latent attention has.
@pytest.mark.parametrize('width,scale', [(8, None), (5, 0.2)])
def test_backends_agree_in_value_and_gradient(width, scale):
  keys = jax.random.split(jax.random.key(0), 4)
  q = jax.random.normal(keys[0], (2, 6, 4, 8))
  k = jax.random.normal(keys[1], (2, 6, 2, 8))
  v = jax.random.normal(keys[2], (2, 6, 2, width))
  d_out = jax.random.normal(keys[3], (2, 6, 4, width))
  mask = jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), (2, 6, 6))
  mask = mask.at[1, 3:, :3].set(False)
  results = []
  for backend in attention.BACKENDS:

    @jax.jit
    def value_and_gradients(q, k, v, backend=backend):
      out, pull = jax.vjp(
        lambda *a: attention.attend(*a, mask, scale=scale, backend=backend),
        q,
        k,
        v,
      )
      return out, *pull(d_out)

    results.append(value_and_gradients(q, k, v))
  for result in results[1:]:
    for have, want in zip(result, results[0], strict=True):
      np.testing.assert_allclose(have, want, atol=3e-6)


def test_scale_multiplies_scores():
  keys = jax.random.split(jax.random.key(1), 3)
  q, k, v = (jax.random.normal(key, (1, 3, 1, 4)) for key in keys)
  seen = jnp.ones((1, 3, 3), bool)
  scaled = attention.attend(q, k, v, seen, scale=1.5)
  np.testing.assert_allclose(
    scaled, attention.attend(3 * q, k, v, seen), rtol=1e-5
  )


def test_unknown_backend_is_named():
  x = jnp.zeros((1, 1, 1, 2))
  with pytest.raises(ValueError, match="'flash' is not in"):
    attention.attend(x, x, x, jnp.ones((1, 1, 1), bool), backend='flash')
