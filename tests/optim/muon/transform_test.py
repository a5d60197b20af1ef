"""Muon equals its formulae and optax's, and acts per layer, expert and head."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

from composer_jax.optim import roles
from composer_jax.optim.muon import newton_schulz, planner
from composer_jax.optim.muon import plan as muon_plan
from composer_jax.optim.muon import transform as muon
from tests import compiling

PLAIN = roles.Matrix(rows=(0,), columns=(1,))


def _normal(seed, *shape):
  values = np.random.default_rng(seed).normal(size=shape)
  return values.astype(np.float32)


# RMS of an orthogonal 12 x 8 matrix.
ONE = 12**-0.5


def _options(rms=ONE, **fields):
  keller = dict(coefficients='keller', method='standard', dtype='float32')
  return muon.MuonChoices(**{'rms': rms, **keller, **fields})


@pytest.fixture(scope='module')
def gradients():
  return [_normal(seed, 12, 8) for seed in range(3)]


def _first_update(gradient, matrix, rms=ONE):
  transform = muon.scale_by_muon({'w': matrix}, options=_options(rms))

  def first(gradient):
    return transform.update(gradient, transform.init(gradient))[0]['w']

  run = jax.jit(first, compiler_options=compiling.QUICKLY)
  return run({'w': gradient})


def _run(transform, params, gradients):
  state = transform.init(params)
  update = jax.jit(transform.update, compiler_options=compiling.QUICKLY)
  for gradient in gradients:
    updates, state = update({'w': gradient}, state, params)
    params = optax.apply_updates(params, updates)
  return params['w']


def _transform(rms):
  return optax.chain(
    muon.scale_by_muon({'w': PLAIN}, options=_options(rms)),
    optax.add_decayed_weights(0.1),
    optax.scale_by_learning_rate(0.02),
  )


@pytest.mark.parametrize('rms', [None, 0.2])
def test_equals_optax_on_a_matrix(gradients, rms):
  params = {'w': jnp.ones((12, 8))}
  theirs = contrib.muon(0.02, weight_decay=0.1, consistent_rms=rms)
  ours = _transform(ONE if rms is None else rms)
  # Two orders of the same float32 products.
  np.testing.assert_allclose(
    _run(ours, params, gradients),
    _run(theirs, params, gradients),
    rtol=0,
    atol=1e-6,
  )


def _keller(x):
  """KellerJordan/Muon's iteration in float64."""
  is_tall = x.shape[0] > x.shape[1]
  x = x.T if is_tall else x
  x = x / (np.linalg.norm(x) + 1e-7)
  for a, b, c in newton_schulz.COEFFICIENTS['keller']:
    gram = x @ x.T
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x.T if is_tall else x


@pytest.mark.parametrize('style', ['keller_jordan', 'moonlight'])
def test_equals_the_published_step_once_the_momentum_is_warm(gradients, style):
  # The published steps have no bias correction; after 2,000 steps it is 1.
  beta, rate, decay = 0.95, 0.02, 0.1
  matrix, m = np.ones((12, 8)), _normal(9, 12, 8).astype(np.float64)
  state = muon.MuonState(jnp.int32(2000), {'w': m.astype(np.float32)})
  params = {'w': jnp.asarray(matrix, jnp.float32)}
  transform = _transform(ONE if style == 'keller_jordan' else 0.2)
  state = (state, *transform.init(params)[1:])
  for gradient in gradients:
    updates, state = transform.update({'w': gradient}, state, params)
    params = optax.apply_updates(params, updates)
    if style == 'keller_jordan':
      m = beta * m + (1 - beta) * gradient
      # Published for [output, input]: max(1, rows / columns).
      scale = max(1, 8 / 12) ** 0.5
      ahead = beta * m + (1 - beta) * gradient
    else:
      # A sum instead of an average: the iteration drops the factor.
      m = beta * m + gradient * (1 - beta)
      ahead = gradient + beta * m / (1 - beta)
      scale = 0.2 * 12**0.5
    matrix = matrix * (1 - rate * decay) - rate * scale * _keller(ahead)
  np.testing.assert_allclose(params['w'], matrix, rtol=0, atol=1e-5)


def test_batch_axes_are_independent_matrices():
  # [layer, embed, heads, head_dim], each layer's and head's a matrix to embed.
  gradient = _normal(1, 2, 8, 3, 4)
  together = _first_update(
    gradient, roles.Matrix(rows=(3,), columns=(1,)), rms=0.2
  )
  for layer in range(2):
    for head in range(3):
      alone = 0.2 * 8**0.5 * _keller(gradient[layer, :, head])
      np.testing.assert_allclose(
        together[layer, :, head], alone, rtol=0, atol=5e-6
      )


def test_merged_axes_form_one_matrix():
  gradient = _normal(2, 8, 3, 4)
  merged = _first_update(gradient, roles.Matrix(rows=(0,), columns=(1, 2)))
  flat = _keller(gradient.reshape(8, 12))
  np.testing.assert_allclose(merged.reshape(8, 12), flat, rtol=0, atol=5e-6)
  by_head = _first_update(gradient, roles.Matrix(rows=(0,), columns=(2,)))
  assert np.abs(by_head - merged).max() > 0.1


def test_bfloat16_momentum_is_what_it_was_and_nobody_elses(gradients):
  transform = muon.scale_by_muon({'w': PLAIN}, options=_options())
  gradient = {'w': jnp.asarray(gradients[0], jnp.bfloat16)}
  state = transform.init(gradient)
  kept = np.asarray(gradient['w'])
  updates, state = jax.jit(transform.update)(gradient, state)
  assert state.momentum['w'].dtype == updates['w'].dtype == jnp.bfloat16
  np.testing.assert_array_equal(gradient['w'], kept)
  # Not normalised: a twentieth of the gradient, rounded once.
  expected = (np.float32(1 - 0.95) * kept.astype(np.float32)).astype(kept.dtype)
  np.testing.assert_array_equal(state.momentum['w'], expected)


def test_new_coefficients_act_on_an_old_state(gradients):
  gradient = {'w': gradients[0]}
  old = muon.scale_by_muon({'w': PLAIN}, options=_options())
  new = muon.scale_by_muon({'w': PLAIN}, options=muon.MuonChoices(rms=ONE))
  _, state = old.update(gradient, old.init(gradient))
  assert jax.tree.structure(state) == jax.tree.structure(new.init(gradient))
  after_old, _ = old.update({'w': gradients[1]}, state)
  after_new, _ = new.update({'w': gradients[1]}, state)
  # Polar Express raises what keller leaves at 0.7.
  assert np.linalg.norm(after_new['w']) > 1.05 * np.linalg.norm(after_old['w'])


def test_init_needs_shapes_only():
  shapes = {
    'w': jax.ShapeDtypeStruct((7168, 2048), jnp.bfloat16),
    'masked': optax.MaskedNode(),
  }
  matrices = {'w': PLAIN, 'masked': optax.MaskedNode()}
  transform = muon.scale_by_muon(matrices)
  state = jax.eval_shape(transform.init, shapes)
  assert state.momentum['w'] == shapes['w']
  plan = planner.make(shapes, matrices, newton_schulz=muon.MuonChoices())
  assert [g.mode for g in plan.groups] == [muon_plan.LOCAL]


def test_without_memory_the_gradient_itself_is_orthogonalised(gradients):
  transform = muon.scale_by_muon({'w': PLAIN}, options=_options(beta=0.0))
  state = muon.MuonState(jnp.int32(3), {'w': gradients[1]})
  updates, state = transform.update({'w': gradients[0]}, state)
  np.testing.assert_allclose(
    state.momentum['w'], gradients[0], rtol=0, atol=1e-6
  )
  # Roundings of float32 that five steps of slope 3.4 have amplified; numpy's
  # products add in another order.
  np.testing.assert_allclose(
    updates['w'], _keller(gradients[0]), rtol=0, atol=1e-5
  )


def test_a_count_at_its_end_is_a_large_count(gradients):
  transform = muon.scale_by_muon({'w': PLAIN}, options=_options())

  def update(count):
    state = muon.MuonState(jnp.int32(count), {'w': gradients[1]})
    return transform.update({'w': gradients[0]}, state)

  last = np.iinfo(np.int32).max
  (actual, state), (expected, _) = update(last), update(10_000)
  assert state.count == last
  np.testing.assert_array_equal(actual['w'], expected['w'])


def test_a_mesh_of_one_device_may_have_explicit_axes(gradients):
  mesh = jax.make_mesh((1,), ('d',), axis_types=(AxisType.Explicit,))
  # Members of one group, sharded along different dimensions.
  places = {
    'w': NamedSharding(mesh, P('d', None)),
    'v': NamedSharding(mesh, P(None, 'd')),
  }
  values = {'w': gradients[0], 'v': gradients[1]}

  def update(gradient, places=None):
    transform = muon.scale_by_muon(
      {'w': PLAIN, 'v': PLAIN}, shardings=places, options=_options()
    )
    state = transform.init(gradient)
    return jax.jit(transform.update)(gradient, state)[0]

  with jax.set_mesh(mesh):
    actual = update(jax.device_put(values, places), places)
  expected = update(values)
  for name, sharding in places.items():
    assert actual[name].sharding == sharding
    np.testing.assert_array_equal(actual[name], expected[name])
