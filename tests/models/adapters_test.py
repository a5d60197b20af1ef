"""Low-rank adapters beside frozen weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups as optim_groups
from composer_jax.rollout import engine as engines
from composer_jax.train import state as train_state
from tests import compiling
from tests.models import decoder_test
from tests.parallel import mesh_test, on_mesh
from tests.rl import replayed
from tests.rollout import mesh_test as engine_mesh_test
from tests.rollout import serving

# Ranks that divide over no mesh, and alpha / rank that is no power of two.
ALL = model_config.AdapterConfig(
  attention=3, dense=2, shared=5, routed=3, router=2, alpha=7.0
)
SLOW = pytest.mark.slow
CONFIGS = {
  **decoder_test.CONFIGS,
  'small': replayed.CONFIGS['gqa_softmax'],
  'invariant': dataclasses.replace(
    replayed.CONFIGS['gqa_softmax'], numerics='batch_invariant'
  ),
}


def adapted(config):
  return dataclasses.replace(config, adapters=ALL)


def merged(variables, config):
  """Returns float32 parameters, W + (alpha / rank) A B for each pair."""
  params = trees.flatten_names(variables['params'])
  pairs = trees.flatten_names(variables['adapters'])
  axes = trees.flatten_names(decoder.abstract(config)[1]['adapters'])

  def sum_of(name, weight):
    if f'{name}/a' not in pairs:
      return weight.astype(jnp.float32)
    a, b = pairs[f'{name}/a'], pairs[f'{name}/b']
    batch = sum(axis in ('layer', 'expert') for axis in axes[f'{name}/a'])
    rank, lead = a.shape[-1], a.shape[:batch]
    product = a.reshape(*lead, -1, rank) @ b.reshape(*lead, rank, -1)
    scaled = product * (config.adapters.alpha / rank)
    return weight.astype(jnp.float32) + scaled.reshape(weight.shape)

  assert len(pairs) > 0 and {n.rpartition('/')[0] for n in pairs} < set(params)
  return trees.map_names(sum_of, variables['params'])


@functools.cache
def _apply(config):
  return jax.jit(
    lambda variables: decoder.Decoder(config).apply(variables, *on_mesh.batch())
  )


@SLOW
@pytest.mark.parametrize('name', CONFIGS)
def test_at_first_they_change_no_bit(name):
  config = adapted(CONFIGS[name])
  variables = decoder.init(config, jax.random.key(0))
  base = decoder.without_base(variables) | {'params': variables['params']}
  base.pop('adapters')
  have, want = _apply(config)(variables), _apply(CONFIGS[name])(base)
  np.testing.assert_array_equal(have.hidden_BTD, want.hidden_BTD)
  np.testing.assert_array_equal(have.expert_ids_MBTA, want.expert_ids_MBTA)


@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=SLOW) for n in ('small', 'gqa', 'mla')]
)
def test_outputs_and_gradients_are_those_of_the_merged_weights(name):
  """By the chain rule through the sum of the weights."""
  config, plain = adapted(CONFIGS[name]), CONFIGS[name]
  variables = on_mesh.initial(config)
  run = lambda step: jax.jit(step, compiler_options=compiling.QUICKLY)
  step = run(on_mesh._step(config, None))
  (loss, (_, ids_MBTA)), gradients = step(variables, on_mesh.batch(), None)
  merge = lambda adapters: merged({**variables, 'adapters': adapters}, config)
  params, pull = jax.vjp(merge, variables['adapters'])
  whole = {k: v for k, v in variables.items() if k != 'adapters'}
  (want, _), by_weight = run(on_mesh._step(plain, None))(
    {**whole, 'params': params}, on_mesh.batch(), ids_MBTA
  )
  np.testing.assert_allclose(loss, want, rtol=2e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, atol=2e-5 * np.abs(b).max() + 1e-9
    ),
    gradients,
    pull(by_weight)[0],
  )


@pytest.mark.parametrize(
  'config,shape',
  [
    pytest.param(mesh_test.UNEVEN, (1, 2, 4), marks=SLOW),
    pytest.param(mesh_test.WIDE, (2, 2, 2), marks=SLOW),
  ],
)
def test_a_mesh_equals_one_device(config, shape):
  config = adapted(config)
  single = on_mesh.single(config)
  _, result, _ = on_mesh.sharded(config, shape, single[0][1][1])
  on_mesh.assert_equal(result, single)


@SLOW
@pytest.mark.parametrize('name', ['uneven', 'uneven_mla'])
def test_an_engine_over_a_mesh_equals_one_device(name, monkeypatch):
  config, shape = engine_mesh_test.CASES[name]
  case = {name: (adapted(config), shape)}
  monkeypatch.setattr(engine_mesh_test, 'CASES', case)
  engine_mesh_test._engine.cache_clear()
  engine_mesh_test.test_an_engine_over_a_mesh_equals_one_device(name)
  engine_mesh_test._engine.cache_clear()


def _frozen(engine):
  """Returns where the frozen weights of an engine lie."""
  weights = engine._served.weights
  trees = [weights.outer, *(layer['params'] for layer in weights.layers)]
  return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(trees)]


@pytest.mark.slow
def test_an_engine_takes_adapters_and_keeps_its_frozen_weights():
  config = adapted(CONFIGS['small'])
  variables = jax.tree.map(jnp.asarray, on_mesh.initial(config))
  options = engine_mesh_test.OPTIONS
  requests = [serving.request(i, [3, 1, 4, i], new=5) for i in range(3)]
  engine = engines.Engine(config, variables, 0, options)
  first, frozen = serving.complete(engine, *requests), _frozen(engine)
  for request in requests:
    engine.close(request.session)
  other = jax.tree.map(lambda x: x * 1.5, variables['adapters'])
  engine.swap(decoder.without_base({**variables, 'adapters': other}), 1)
  assert _frozen(engine) == frozen
  have = serving.complete(engine, *requests)
  fresh = engines.Engine(config, {**variables, 'adapters': other}, 1, options)
  want = serving.complete(fresh, *requests)
  for now, anew, before in zip(have, want, first, strict=True):
    serving.assert_same_bits(now, anew)
    assert (now.logprobs_T != before.logprobs_T).any()


@pytest.mark.slow
def test_an_engine_serves_the_frozen_arrays_of_its_caller():
  config = adapted(CONFIGS['invariant'])
  variables = jax.tree.map(jnp.asarray, on_mesh.initial(config))
  options = dataclasses.replace(engine_mesh_test.OPTIONS, page_size=32)
  requests = [serving.request(i, [3, 1, 4, i], new=5) for i in range(3)]
  engines_by_way, grown, outcomes = {}, {}, {}
  for shares in (True, False):
    before = sum(x.nbytes for x in jax.live_arrays())
    engine = engines_by_way[shares] = engines.Engine(
      config, variables, 0, options, shares_base=shares
    )
    grown[shares] = sum(x.nbytes for x in jax.live_arrays()) - before
    outcomes[shares] = serving.complete(engine, *requests)
  base = sum(x.nbytes for x in jax.tree.leaves(variables['params']))
  assert grown[False] - grown[True] >= base
  for one, other in zip(outcomes[True], outcomes[False], strict=True):
    serving.assert_same_bits(one, other)
  engine = engines_by_way[True]
  for request in requests:
    engine.close(request.session)
  engine.swap(decoder.without_base(variables), 1)
  weights = engine._served.weights
  held = jax.tree.leaves((weights.outer, weights.stacked))
  own = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(variables)}
  assert {x.unsafe_buffer_pointer() for x in held} < own


def test_the_optimizer_has_no_state_of_frozen_weights():
  config = adapted(CONFIGS['small'])
  variables, axes = decoder.abstract(config)
  transform = optim_groups.optimizer(
    optim_groups.OptimizerOptions(name='adam'),
    params=variables['adapters'],
    axes=axes['adapters'],
    total_steps=1000,
  )
  create = functools.partial(train_state.create, optimizer=transform)
  state = jax.eval_shape(create, variables)
  adapters = sum(x.size for x in jax.tree.leaves(variables['adapters']))
  moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
  assert 2 * adapters <= moments <= 2 * adapters + 3
  assert jax.tree.leaves(state.base) and not jax.tree.leaves(state.own().base)
