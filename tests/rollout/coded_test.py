"""Engines that hold experts in their codes, and bundles that carry these."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from composer_jax.delta import chunking, publisher
from composer_jax.models import config as model_config
from composer_jax.models import decoder, experts
from composer_jax.parallel import topology
from composer_jax.plan import memory
from composer_jax.rollout import engine as engines
from configs.models import tiny
from tests.parallel import on_mesh
from tests.rl import replayed, zero_mismatch_test
from tests.rollout import mesh_test, serving


def _coded(config):
  precision = dataclasses.replace(config.precision, codes=True)
  return dataclasses.replace(config, precision=precision)


@functools.cache
def _policies(config):
  """Returns two policies: values, and what bundles with codes have."""
  variables = replayed.variables(config)
  other = jax.tree.map(lambda x: 1.01 * x, variables)
  cast = lambda c: jax.jit(functools.partial(decoder.policy, config=c))
  return [
    [cast(c)(v) for v in (variables, other)] for c in (config, _coded(config))
  ]


def _experts(tree):
  moe = tree['params']['moe']
  return jax.tree.leaves([moe[name] for name in ('gate_up', 'down')])


def test_an_engine_of_nvfp4_has_4_6_bits_a_weight():
  """In its arrays, for the width of the tiny model, as the plan counts."""
  fields = tiny.get_config().to_dict() | {'num_layers': 2}
  fields['moe']['num_experts'] = 4
  config = model_config.ModelConfig.from_dict(fields)
  options = engines.EngineOptions(num_slots=1, max_len=64)
  size, counted = {}, {}
  for name in ('', 'nvfp4'):
    held = dataclasses.replace(options, experts=name)
    variables = jax.tree.map(
      lambda x: np.zeros(x.shape, x.dtype), decoder.abstract(config)[0]
    )
    engine = engines.Engine(config, variables, 0, held)
    counted[name] = memory.serving(config, held).terms['served weights']
    size[name] = sum(
      x.nbytes for x in _experts(engine._served.weights.layers[1])
    )
  weights = config.moe.num_experts * 3 * config.embed_dim * config.moe.ffw_dim
  assert size[''] == 4 * weights  # Computes in float32.
  assert counted[''] - counted['nvfp4'] == size[''] - size['nvfp4']
  assert 4.5 < 8 * size['nvfp4'] / weights <= 4.6


@pytest.mark.parametrize(
  'name',
  [
    'nvfp4',
    *(
      pytest.param(n, marks=pytest.mark.slow) for n in ('mxfp8', 'fp8', 'int4')
    ),
  ],
)
def test_identities_of_values_and_of_codes_name_the_same_policies(name):
  """One layer stays in bfloat16. Codes are those of an engine's own, too."""
  precision = model_config.PrecisionConfig(experts=name, first=1)
  config = replayed.CONFIGS['gqa_softmax']
  config = dataclasses.replace(config, precision=precision)
  values, codes = _policies(config)
  with_codes = _coded(config)
  identities = [
    [chunking.identify(publisher.blocks(policy))[0] for policy in policies]
    for policies in (values, codes)
  ]
  assert len({*identities[0], *identities[1]}) == 4
  for value, code in zip(values, codes, strict=True):
    own = experts.held(value, config, config, True)
    chex.assert_trees_all_equal(own, code)
    assert experts.held(code, with_codes, config, True) is code
    back = experts.held(code, with_codes, config, False)
    chex.assert_trees_all_equal(back, value)
  shapes = experts.abstract_codes(decoder.abstract(config)[0], config)
  chex.assert_trees_all_equal_shapes_and_dtypes(
    shapes['params']['moe_layers']['moe']['down'],
    codes[0]['params']['moe_layers']['moe']['down'],
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  [
    'gqa_softmax-float32-nvfp4',
    'gqa_softmax-bfloat16-int4',
    'gqa_softmax-float32-fp8',
    'mla_sigmoid-bfloat16-nvfp4',
    'mla_sigmoid-float32-mxfp8',
  ],
)
def test_codes_change_no_bit_of_what_is_sampled(name):
  """From bundles of values and of codes, and after a swap in flight."""
  config = zero_mismatch_test._config(*name.split('-'))
  values, codes = _policies(config)
  options = zero_mismatch_test.OPTIONS
  held = dataclasses.replace(options, experts=config.precision.experts)

  def play(config, policies, options):
    engine = engines.Engine(config, policies[0], 0, options)
    swap = functools.partial(engine.swap, policies[1], 1)
    played, _ = zero_mismatch_test._play(engine, range(9), 0, {25: swap})
    assert {v for t in played for v in t.policy_version_T.tolist()} >= {0, 1}
    return played

  wanted = play(config, values, options)
  for how in (
    (config, values, held),
    (_coded(config), codes, held),
    (_coded(config), codes, options),
  ):
    zero_mismatch_test._assert_same(play(*how), wanted)


@pytest.mark.slow
def test_codes_lie_over_a_mesh():
  """Each device has whole experts; sums over devices round otherwise."""
  config = dataclasses.replace(
    mesh_test.GQA,
    moe=dataclasses.replace(mesh_test.GQA.moe, ffw_dim=8),
    precision=model_config.PrecisionConfig(experts='nvfp4'),
  )
  variables = jax.tree.map(np.asarray, on_mesh.initial(config))
  options = dataclasses.replace(mesh_test.OPTIONS, experts='nvfp4')
  results = []
  for mesh in (None, topology.make_mesh(1, 8, 1)):
    engine = engines.Engine(config, variables, 1, options, mesh=mesh)
    results.append(serving.complete(engine, *mesh_test._requests()))
  codes = _experts(engine._served.weights.layers[-1])[0]
  assert len(codes.addressable_shards) == 8
  assert codes.addressable_shards[0].data.nbytes * 8 == codes.nbytes
  for one, other in zip(*results, strict=True):
    np.testing.assert_array_equal(one.tokens_T, other.tokens_T)
    np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=2e-5)
