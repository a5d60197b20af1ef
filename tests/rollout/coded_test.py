"""Engines that hold experts in their codes, and bundles that carry these."""

import dataclasses
import functools

import jax
import pytest

from composer_jax.models import decoder
from composer_jax.rollout import engine as engines
from tests.rl import replayed, zero_mismatch_test


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


def _expert_bits(layers):
  """Returns bits a weight of the experts of an engine's layers."""
  sizes = [
    (x.nbytes, x.size)
    for layer in layers
    for name in ('gate_up', 'down')
    for x in jax.tree.leaves(layer['params']['moe'][name])
  ]
  return 8 * sum(nbytes for nbytes, _ in sizes)


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
