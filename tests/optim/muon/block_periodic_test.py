"""Blocks between full steps: no communication, the same state and step size."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.optim import roles
from composer_jax.optim.muon import (
  block_periodic,
  newton_schulz,
  normuon,
  plan,
)
from composer_jax.optim.muon import (
  transform as muon,
)
from composer_jax.plan.hlo import overlap, text
from tests import compiling

MATRICES = {
  # Both sides sharded; a stack over layers of which each device has all.
  'up': roles.Matrix(rows=(1,), columns=(2,)),
  # One side sharded.
  'out': roles.Matrix(rows=(0,), columns=(1,)),
  # Whole matrices on each device.
  'expert': roles.Matrix(rows=(1,), columns=(2,)),
  'norm': optax.MaskedNode(),
}
SPECS = {
  'up': P(None, 'a', 'b'),
  'out': P(('a', 'b')),
  'expert': P(('a', 'b')),
}
SHAPES = {'up': (2, 16, 24), 'out': (32, 8), 'expert': (8, 4, 6)}
# Between two programs: Polar Express multiplies small singular values by up to
# 930, and so the rounding of what goes in.
ATOL = 3e-5
NS = newton_schulz.NewtonSchulz(dtype='float32', method='standard')
MESHES = {'4x2': (4, 2), '2x4': (2, 4)}
# On the second mesh two devices share a matrix of 'up' or 'out'.
GIANTS = {'4x2': 'owner', '2x4': 2}
AXIS_TYPES = {'4x2': AxisType.Auto, '2x4': AxisType.Explicit}
RATIOS = {'4x2': 1.0, '2x4': 2.0}


def _draw(seed):
  rng = np.random.default_rng(seed)
  arrays = {n: rng.normal(size=s).astype('f4') for n, s in SHAPES.items()}
  return {**arrays, 'norm': optax.MaskedNode()}


STEPS = [_draw(seed) for seed in range(4)]


@functools.cache
def _placed(name):
  types = (AXIS_TYPES[name],) * 2
  mesh = jax.make_mesh(MESHES[name], ('a', 'b'), axis_types=types)
  placed = {n: NamedSharding(mesh, spec) for n, spec in SPECS.items()}
  return {**placed, 'norm': optax.MaskedNode()}


def _transform(name, period):
  return block_periodic.orthogonalize_momentum(
    MATRICES,
    period=period,
    shardings=_placed(name),
    options=muon.MuonOptions(
      newton_schulz=NS, plan=plan.PlanOptions(giants=GIANTS[name])
    ),
    ratio=RATIOS[name],
  )


@functools.cache
def _compiled(name, period):
  transform, where = _transform(name, period), _placed(name)
  first = jax.device_put(STEPS[0], where)
  state = muon.MuonState(
    count=jnp.zeros([], jnp.int32), momentum=jax.tree.map(jnp.zeros_like, first)
  )
  assert jax.tree.structure(transform.init(first)) == jax.tree.structure(state)
  with jax.set_mesh(where['up'].mesh):
    lowered = jax.jit(transform.update).lower(first, state)
  return state, lowered.compile(compiler_options=compiling.QUICKLY)


@functools.cache
def _run(name, period):
  """Returns (updates, state) of each step."""
  state, update = _compiled(name, period)
  results = []
  for step in STEPS:
    updates, state = update(jax.device_put(step, _placed(name)), state)
    results.append((updates, state))
  return results


@pytest.fixture(scope='module', params=MESHES)
def mesh_name(request):
  return request.param


def test_full_steps_are_those_of_whole_matrices(mesh_name):
  whole, mixed = _run(mesh_name, 1), _run(mesh_name, 3)
  for step in range(4):
    # The state does not depend on what is orthogonalised.
    jax.tree.map(
      # A sum of two terms about 1, rounded once or twice.
      functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7),
      mixed[step][1],
      whole[step][1],
    )
    for name in SHAPES:
      have, want = mixed[step][0][name], whole[step][0][name]
      # A matrix that is whole on its device is so at every step.
      if step % 3 == 0:
        np.testing.assert_allclose(have, want, atol=ATOL)
      elif name == 'expert':
        ratio = RATIOS[mesh_name]
        np.testing.assert_allclose(have, ratio * want, atol=ratio * ATOL)
      else:
        assert np.abs(have - want).max() > 1000 * ATOL


def test_period_one_is_the_transform_itself():
  full, between = optax.scale(1.0), optax.scale(2.0)
  assert block_periodic.every(1, full, between) is full
  with pytest.raises(ValueError, match='at least 1 step, not 0'):
    block_periodic.every(0, full, between)


def test_blocks_are_orthogonalised_shard_by_shard(mesh_name):
  updates, state = _run(mesh_name, 3)[1]
  assert state.count == 2
  orthogonalize = jax.jit(newton_schulz.orthogonalize, static_argnums=1)
  for name in SHAPES:
    # Nesterov's look-ahead, up to a factor that Newton-Schulz drops.
    gradient, momentum = STEPS[1][name], np.asarray(state.momentum[name])
    ahead = 0.95 * momentum / (1 - 0.95**3) + 0.05 * gradient / (1 - 0.95**2)
    for shard in updates[name].addressable_shards:
      block = orthogonalize(ahead[shard.index], NS)
      # So that `scale_by_shape`, by the whole sides, gives it its own scale.
      longest = [max(x.shape[-2:]) for x in (block, gradient)]
      factor = RATIOS[mesh_name] * np.sqrt(longest[0] / longest[1])
      np.testing.assert_allclose(shard.data, factor * block, atol=ATOL)


def test_blocks_have_the_step_size_of_whole_matrices(mesh_name):
  scaling = muon.scale_by_shape(MATRICES, 0.2)
  for step, (updates, _) in enumerate(_run(mesh_name, 3)):
    scaled, _ = scaling.update(updates, optax.EmptyState())
    want = 0.2 if step % 3 == 0 else 0.2 * RATIOS[mesh_name]
    for name in SHAPES:
      # Polar Express leaves singular values within 0.87 and 1.13.
      rms = np.sqrt(np.square(scaled[name]).mean())
      assert 0.87 * want < rms < 1.13 * want, name


@pytest.mark.slow
@pytest.mark.parametrize('name', MESHES)
def test_neurons_are_normalised_after_whole_matrices_and_blocks(name):
  """Of some parameters, by a jitted transform that makes its own state."""
  where = _placed(name)

  def run(directions):
    normalised = optax.chain(
      directions,
      normuon.scale_by_neuron_norm(MATRICES),
      muon.scale_by_shape(MATRICES, 0.2),
    )
    labels = dict.fromkeys(SHAPES, 'muon') | {'norm': 'rest'}
    transform = optax.partition(
      {'muon': normalised, 'rest': optax.identity()}, labels
    )
    bias = np.ones(3, np.float32)
    state = jax.jit(transform.init)(
      jax.device_put(STEPS[0], where) | {'norm': bias}
    )
    update, results = jax.jit(transform.update), []
    for step in STEPS:
      updates, state = update(
        jax.device_put(step, where) | {'norm': bias}, state
      )
      results.append(updates)
    return results

  with jax.set_mesh(where['up'].mesh):
    have = run(_transform(name, 3))
    whole = run(_transform(name, 1))
  for step, updates in enumerate(have):
    want = 0.2 if step % 3 == 0 else 0.2 * RATIOS[name]
    for n in SHAPES:
      rms = np.sqrt(np.square(updates[n]).mean())
      assert 0.87 * want < rms < 1.13 * want, n
      if step == 0:
        np.testing.assert_allclose(updates[n], whole[0][n], atol=ATOL)
    np.testing.assert_array_equal(updates['norm'], np.ones(3))
  # All neurons of a matrix alike: what a first step makes of them.
  squares = np.square(have[0]['expert']).sum(1)
  np.testing.assert_allclose(squares, squares[:, :1] * np.ones(6), rtol=1e-4)


def _collectives(module, name):
  """Returns those of a computation and all that it calls."""
  found, seen, left = [], set(), [name]
  while left:
    name = left.pop()
    if name in seen:
      continue
    seen.add(name)
    for instruction in module.computations[name].values():
      if instruction.operation.removesuffix('-start') in overlap.KINDS:
        found.append(instruction.operation)
      tokens = re.findall(r'[\w.-]+', instruction.rest)
      left += [token for token in tokens if token in module.computations]
  return sorted(found)


def test_nothing_is_exchanged_between_full_steps(mesh_name):
  module = text.parse(_compiled(mesh_name, 3)[1].as_text())
  (conditional,) = [
    instruction
    for computation in module.computations.values()
    for instruction in computation.values()
    if instruction.operation == 'conditional'
  ]
  branches = [_collectives(module, name) for name in conditional.branches()]
  whole = text.parse(_compiled(mesh_name, 1)[1].as_text())
  exchanged = _collectives(whole, whole.entry)
  assert 'all-to-all' in exchanged
  assert ('reduce-scatter' in exchanged) == (GIANTS[mesh_name] != 'owner')
  assert sorted(branches) == [[], exchanged]
  # And nothing outside of the branches.
  assert _collectives(module, module.entry) == exchanged
