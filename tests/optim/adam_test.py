"""Adam and clipping equal optax's, state included, with less work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.optim import groups

_PARAMS = {'up': np.linspace(-1, 1, 12).reshape(3, 4), 'norm': np.ones(4)}


def _follow(transform, steps=4):
  """Returns the updates of some steps of changing gradients, and the state."""
  params = jax.tree.map(jnp.float32, _PARAMS)
  state = transform.init(params)
  all_updates = []
  for step in range(steps):
    gradients = jax.tree.map(lambda p, s=step: jnp.sin(5 * p + s), params)
    updates, state = transform.update(gradients, state, params)
    all_updates.append(updates)
  return all_updates, state


def _same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(
    # Rounding of a few operations.
    functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-9),
    a,
    b,
  )


def test_adam_equals_optax():
  _same(
    _follow(groups.scale_by_adam(0.9, 0.95, 1e-3)),
    _follow(optax.scale_by_adam(0.9, 0.95, 1e-3)),
  )


@pytest.mark.parametrize('limit', [0.5, 1e3])
def test_clipping_equals_optax(limit):
  ours = groups.clip_by_global_norm(limit)
  _same(_follow(ours), _follow(optax.clip_by_global_norm(limit)))


def test_gradients_below_the_limit_keep_their_bits():
  gradients = jax.tree.map(lambda p: jnp.sin(p).astype(jnp.float32), _PARAMS)
  clip = groups.clip_by_global_norm(1e3)
  clipped, _ = clip.update(gradients, clip.init(gradients))
  jax.tree.map(np.testing.assert_array_equal, clipped, gradients)


def test_one_nan_makes_every_gradient_nan():
  gradients = {'up': jnp.array([1.0, 2.0]), 'norm': jnp.array([jnp.nan])}
  clip = groups.clip_by_global_norm(1.0)
  clipped, _ = clip.update(gradients, clip.init(gradients))
  jax.tree.map(lambda g: np.testing.assert_array_equal(g, np.nan), clipped)


def test_the_moments_need_no_array_beside_them():
  # Moments and parameters are donated; other buffers are scalars.
  params = {'up': jnp.zeros((256, 256))}
  transform = optax.chain(
    groups.clip_by_global_norm(1.0),
    groups.scale_by_adam(0.9, 0.95, 1e-8),
    optax.scale_by_learning_rate(1e-3),
  )

  def step(params, state, gradients):
    updates, state = transform.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  arguments = (params, transform.init(params), params)
  compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
  sizes = compiled.memory_analysis()
  assert sizes.temp_size_in_bytes < params['up'].nbytes / 4
