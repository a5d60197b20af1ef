"""Muon equals optax's on matrices and acts per layer, expert and head."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from composer_jax.optim import muon, newton_schulz


def _normal(seed, *shape):
  values = np.random.default_rng(seed).normal(size=shape)
  return values.astype(np.float32)


@pytest.fixture(scope='module')
def gradients():
  return [_normal(seed, 12, 8) for seed in range(3)]


# One compilation per shape, where running eagerly compiles every product.
orthogonalize = jax.jit(newton_schulz.orthogonalize, static_argnums=1)


def _first_update(gradient, matrix, rms=None):
  transform = muon.scale_by_muon({'w': matrix}, rms=rms)
  first = lambda g: transform.update(g, transform.init(g))[0]['w']
  return jax.jit(first)({'w': gradient})


def _run(transform, params, gradients):
  state = transform.init(params)
  update = jax.jit(transform.update)
  for gradient in gradients:
    updates, state = update(gradient, state, params)
    params = optax.apply_updates(params, updates)
  return params


@pytest.mark.parametrize('rms', [None, 0.2])
def test_equals_optax_on_a_matrix(gradients, rms):
  params = {'w': jnp.ones((12, 8))}
  ours = optax.chain(
    muon.scale_by_muon({'w': muon.Matrix(rows=(0,), columns=(1,))}, rms=rms),
    optax.add_decayed_weights(0.1),
    optax.scale_by_learning_rate(0.02),
  )
  theirs = contrib.muon(0.02, weight_decay=0.1, consistent_rms=rms)
  trees = [{'w': g} for g in gradients]
  # Two orders of the same float32 products.
  np.testing.assert_allclose(
    _run(ours, params, trees)['w'],
    _run(theirs, params, trees)['w'],
    rtol=0,
    atol=1e-6,
  )


def test_batch_axes_are_independent_matrices():
  # [layer, embed, heads, head_dim] with one matrix per layer and head.
  gradient = _normal(1, 2, 8, 3, 4)
  together = _first_update(
    gradient, muon.Matrix(rows=(1,), columns=(3,)), rms=0.2
  )
  alone = jax.jit(
    lambda g: (
      0.2
      * np.sqrt(8)
      * newton_schulz.orthogonalize(g, newton_schulz.NewtonSchulz())
    )
  )
  for layer in range(2):
    for head in range(3):
      np.testing.assert_allclose(
        together[layer, :, head],
        alone(gradient[layer, :, head]),
        rtol=0,
        atol=2e-6,
      )


def test_merged_axes_form_one_matrix():
  gradient = _normal(2, 8, 3, 4)
  merged = _first_update(gradient, muon.Matrix(rows=(0,), columns=(1, 2)))
  flat = _first_update(
    gradient.reshape(8, 12), muon.Matrix(rows=(0,), columns=(1,))
  )
  # The norm of two ranks of array sums in two orders.
  np.testing.assert_allclose(merged.reshape(8, 12), flat, rtol=0, atol=5e-6)


@pytest.mark.parametrize('shape', [(8, 8), (6, 16), (16, 6)])
def test_quintic_brings_singular_values_near_one(shape):
  x = _normal(3, *shape)
  y = orthogonalize(x, newton_schulz.NewtonSchulz(preset='quintic'))
  values = np.linalg.svd(np.asarray(y), compute_uv=False)
  # The range of the composed polynomial on [0.01, 1]: muon.md, 1.1.
  assert values.min() > 0.97 and values.max() < 1.15
  u, _, vt = np.linalg.svd(np.asarray(x), full_matrices=False)
  assert np.sum((u @ vt) * np.asarray(y)) / np.linalg.norm(y) > 0.99 * (
    np.sqrt(min(shape))
  )


def test_scale_of_the_gradient_does_not_matter():
  x = _normal(4, 6, 5)
  options = newton_schulz.NewtonSchulz()
  for scale in (2.0**-80, 2.0**80):
    np.testing.assert_array_equal(
      orthogonalize(x * np.float32(scale), options),
      orthogonalize(x, options),
    )


def test_zero_stays_zero_and_nan_stays_nan():
  options = newton_schulz.NewtonSchulz()
  zero = np.zeros((2, 3, 4), np.float32)
  np.testing.assert_array_equal(orthogonalize(zero, options), zero)
  poisoned = zero.copy()
  poisoned[0, 0, 0] = np.nan
  nan = orthogonalize(poisoned, options)
  assert np.isnan(nan[0]).all() and not np.isnan(nan[1]).any()


def test_unknown_preset_is_named():
  with pytest.raises(ValueError, match="'kellar'.*keller"):
    newton_schulz.NewtonSchulz(preset='kellar')
