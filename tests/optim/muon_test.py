"""Muon equals optax's on matrices and acts per layer, expert and head."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from composer_jax.optim import muon
from composer_jax.optim import newton_schulz


@pytest.fixture(scope='module')
def gradients():
  keys = jax.random.split(jax.random.key(0), 3)
  return [jax.random.normal(k, (12, 8)) for k in keys]


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
      muon.scale_by_muon(
          {'w': muon.Matrix(rows=(0,), columns=(1,))}, rms=rms
      ),
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
  gradient = jax.random.normal(jax.random.key(1), (2, 8, 3, 4))
  stacked = muon.scale_by_muon(
      {'w': muon.Matrix(rows=(1,), columns=(3,))}, rms=0.2
  )
  single = muon.scale_by_muon(
      {'w': muon.Matrix(rows=(0,), columns=(1,))}, rms=0.2
  )
  params = {'w': jnp.zeros_like(gradient)}
  together, _ = stacked.update({'w': gradient}, stacked.init(params))
  for layer in range(2):
    for head in range(3):
      g = {'w': gradient[layer, :, head]}
      alone, _ = single.update(g, single.init(g))
      np.testing.assert_allclose(
          together['w'][layer, :, head], alone['w'], rtol=0, atol=2e-6
      )


def test_merged_axes_form_one_matrix():
  gradient = jax.random.normal(jax.random.key(2), (8, 3, 4))
  merged = muon.scale_by_muon({'w': muon.Matrix(rows=(0,), columns=(1, 2))})
  flat = muon.scale_by_muon({'w': muon.Matrix(rows=(0,), columns=(1,))})
  a, _ = merged.update({'w': gradient}, merged.init({'w': gradient}))
  g = {'w': gradient.reshape(8, 12)}
  b, _ = flat.update(g, flat.init(g))
  np.testing.assert_array_equal(a['w'].reshape(8, 12), b['w'])


@pytest.mark.parametrize('shape', [(8, 8), (6, 16), (16, 6)])
def test_quintic_brings_singular_values_near_one(shape):
  x = jax.random.normal(jax.random.key(3), shape)
  y = newton_schulz.orthogonalize(
      x, newton_schulz.NewtonSchulz(preset='quintic')
  )
  values = np.linalg.svd(np.asarray(y), compute_uv=False)
  # The range of the composed polynomial on [0.01, 1]: muon.md, 1.1.
  assert values.min() > 0.97 and values.max() < 1.15
  u, _, vt = np.linalg.svd(np.asarray(x), full_matrices=False)
  assert np.sum((u @ vt) * np.asarray(y)) / np.linalg.norm(y) > 0.99 * (
      np.sqrt(min(shape))
  )


def test_scale_of_the_gradient_does_not_matter():
  x = jax.random.normal(jax.random.key(4), (6, 5))
  options = newton_schulz.NewtonSchulz()
  for scale in (2.0**-80, 2.0**80):
    np.testing.assert_array_equal(
        newton_schulz.orthogonalize(x * scale, options),
        newton_schulz.orthogonalize(x, options),
    )


def test_zero_stays_zero_and_nan_stays_nan():
  options = newton_schulz.NewtonSchulz()
  zero = jnp.zeros((2, 3, 4))
  np.testing.assert_array_equal(newton_schulz.orthogonalize(zero, options), zero)
  nan = newton_schulz.orthogonalize(zero.at[0, 0, 0].set(jnp.nan), options)
  assert np.isnan(nan[0]).all() and not np.isnan(nan[1]).any()


def test_unknown_preset_is_named():
  with pytest.raises(ValueError, match="'kellar'.*keller"):
    newton_schulz.NewtonSchulz(preset='kellar')
