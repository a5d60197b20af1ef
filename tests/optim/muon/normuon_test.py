"""NorMuon equals its formula, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.optim import roles
from composer_jax.optim.muon import normuon
from tests.parallel import collectives

BETA = 0.9
MATRICES = {
  # [layer, embed, heads, head_dim], a matrix for each layer and head.
  'query': roles.Matrix(rows=(1,), columns=(3,)),
  # [expert, ffw, embed].
  'down': roles.Matrix(rows=(1,), columns=(2,)),
  # [heads, head_dim, embed], heads merged into the input side.
  'out': roles.Matrix(rows=(0, 1), columns=(2,)),
  'norm': optax.MaskedNode(),
}
SHAPES = {'query': (2, 8, 3, 4), 'down': (4, 8, 16), 'out': (2, 8, 4)}


def _draw(seed):
  rng = np.random.default_rng(seed)
  arrays = {
    # Neurons of very different sizes.
    name: (rng.normal(size=s) * 10.0 ** rng.uniform(-3, 0, s[-1:])).astype('f4')
    for name, s in SHAPES.items()
  }
  return {**arrays, 'norm': optax.MaskedNode()}


STEPS = [_draw(seed) for seed in range(3)]


def _run(steps):
  """Returns the updates of each step and the last state."""
  transform = normuon.scale_by_neuron_norm(MATRICES, beta=BETA)
  state, results = transform.init(steps[0]), []
  for step in steps:
    updates, state = transform.update(step, state)
    results.append(updates)
  return results, state


@pytest.fixture(scope='module')
def ran():
  return jax.jit(_run)(STEPS)


def _by_hand(steps, rows):
  """Of one matrix [inputs, outputs] at a time, in float64."""
  moments, results = 0.0, []
  for step in steps:
    wide = np.float64(step)
    columns = tuple(set(range(wide.ndim)) - set(rows))
    moments = BETA * moments + (1 - BETA) * np.mean(wide**2, axis=rows)
    scaled = wide / (np.expand_dims(np.sqrt(moments), rows) + 1e-8)
    norms = [np.sqrt((x**2).sum(rows + columns)) for x in (wide, scaled)]
    results.append(scaled * norms[0] / norms[1])
  return results, moments


def test_equals_the_formula_matrix_by_matrix(ran):
  results, state = ran
  for name, places in (
    ('query', [(i, slice(None), n) for i in range(2) for n in range(3)]),
    ('down', [(e,) for e in range(4)]),
    ('out', [()]),
  ):
    for place in places:
      rows = (0, 1) if name == 'out' else (0,)
      want, moments = _by_hand([s[name][place] for s in STEPS], rows)
      for have, matrix in zip(results, want, strict=True):
        np.testing.assert_allclose(have[name][place], matrix, rtol=1e-5)
      kept = np.squeeze(state.second_moment[name][place])
      np.testing.assert_allclose(kept, moments, rtol=1e-5)


def test_keeps_one_number_per_neuron(ran):
  _, state = ran
  shapes = jax.tree.map(jnp.shape, state.second_moment)
  assert shapes == {
    'query': (2, 1, 3, 4),
    'down': (4, 1, 16),
    'out': (1, 1, 4),
    'norm': optax.MaskedNode(),
  }
  # Describable before it exists, and the same from bfloat16 parameters.
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), STEPS[0]
  )
  transform = normuon.scale_by_neuron_norm(MATRICES)
  described = jax.eval_shape(transform.init, abstract)
  assert described == jax.eval_shape(lambda: state)


def test_first_step_makes_neurons_equal_and_keeps_the_norm(ran):
  first, before = ran[0][0]['down'], STEPS[0]['down']
  norms = np.linalg.norm(first, axis=1)
  # Of the smallest root of a moment, eps is a few 1e-5.
  np.testing.assert_allclose(norms, norms[:, :1] * np.ones(16), rtol=1e-4)
  np.testing.assert_allclose(
    np.linalg.norm(first, axis=(1, 2)),
    np.linalg.norm(before, axis=(1, 2)),
    rtol=1e-6,
  )


def test_commutes_with_a_scale_of_the_matrix(ran):
  # A power of two is exact; the other way round from before to after.
  scaled = jax.jit(_run)([jax.tree.map(lambda x: 4 * x, s) for s in STEPS])
  np.testing.assert_allclose(
    scaled[0][-1]['query'], 4 * ran[0][-1]['query'], rtol=1e-5
  )


def test_zero_stays_zero_and_nan_in_its_matrix(ran):
  steps = jax.tree.map(np.copy, STEPS)
  for step in steps:
    step['down'][1] = 0
  steps[2]['down'][2, 0, 0] = np.nan
  results, _ = jax.jit(_run)(steps)
  for have, want in zip(results, ran[0], strict=True):
    assert (np.asarray(have['down'][1]) == 0).all()
    np.testing.assert_array_equal(have['down'][::3], want['down'][::3])
  assert np.isnan(results[2]['down'][2]).all()


MESHES = {
  'inputs': (
    (8,),
    {'query': P(None, 'a'), 'down': P(None, 'a'), 'out': P(None, 'a')},
  ),
  'both': (
    (4, 2),
    {
      'query': P('b', None, None, 'a'),
      'down': P('b', None, 'a'),
      'out': P('b', 'a'),
    },
  ),
}


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('name', MESHES)
def test_layout_changes_rounding_alone(name, axis_type, ran):
  shape, specs = MESHES[name]
  axes = ('a', 'b')[: len(shape)]
  mesh = jax.make_mesh(shape, axes, axis_types=(axis_type,) * len(shape))
  steps = [
    {n: jax.device_put(s[n], NamedSharding(mesh, p)) for n, p in specs.items()}
    for s in STEPS
  ]
  with jax.set_mesh(mesh):
    program = jax.jit(_run).lower(steps).compile()
    results, state = program(steps)
  # A number for each neuron travels, and two for each of eleven matrices.
  neurons = sum(x.size for x in jax.tree.leaves(ran[1]))
  exchanged = sum(sum(c.sizes) for c in collectives.read(program.as_text()))
  assert 0 < exchanged <= len(STEPS) * (neurons + 2 * 11)
  for have, want in zip(results, ran[0], strict=True):
    for n, spec in specs.items():
      np.testing.assert_allclose(have[n], want[n], rtol=1e-5)
      if axis_type == AxisType.Explicit:
        assert have[n].sharding.spec[: len(spec)] == tuple(spec)
  np.testing.assert_allclose(
    state.second_moment['down'], ran[1].second_moment['down'], rtol=1e-5
  )
