"""An engine whose model lies over 8 emulated devices equals that of one.

Sums over devices round otherwise, so log-probabilities are compared up to
rounding, and tokens and routes exactly: these models leave no near ties.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.models import config as model_config
from composer_jax.parallel import topology
from composer_jax.rollout import engine as engines
from composer_jax.rollout import forward, placing
from tests.parallel import architectures_test, collectives, on_mesh
from tests.rollout import serving

OPTIONS = engines.EngineOptions(
  num_slots=4,
  max_len=24,
  prefill_chunk=8,
  prefill_rows=2,
  decode_steps=3,
  page_size=4,
)
GQA = architectures_test.ARCHITECTURES['qwen3_moe']
MLA = architectures_test.ARCHITECTURES['deepseek_v3']
# Four query heads, two key heads and 18 words over eight devices: axes that do
# not divide are replicated. Six experts lie on two groups of four devices that
# divide their hidden units.
_MOE = {**GQA.to_dict()['moe'], 'num_experts': 6, 'ffw_dim': 8}
UNEVEN = model_config.ModelConfig.from_dict({**GQA.to_dict(), 'moe': _MOE})
_MOE = {**MLA.to_dict()['moe'], 'num_experts': 6, 'num_groups': 2, 'ffw_dim': 8}
UNEVEN_MLA = model_config.ModelConfig.from_dict({**MLA.to_dict(), 'moe': _MOE})
CASES = {
  'uneven_mla': (UNEVEN_MLA, (2, 4, 1)),
  'gqa': (GQA, (1, 8, 1)),
  'mla': (MLA, (2, 2, 2)),
  'uneven': (UNEVEN, (2, 4, 1)),
}


def _requests():
  shared = [3, 1, 4, 1, 5, 9, 2, 6, 5]
  return [
    serving.request(i, [*shared, i], new=7, temperature=0.7) for i in range(5)
  ]


@functools.cache
def _engine(name, on_mesh_too):
  config, shape = CASES[name]
  mesh = topology.make_mesh(*shape) if on_mesh_too else None
  variables = jax.tree.map(np.asarray, on_mesh.initial(config))
  return engines.Engine(config, variables, 1, OPTIONS, mesh=mesh)


@pytest.mark.parametrize(
  'name',
  [
    'uneven_mla',
    *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n[-1] != 'a'),
  ],
)
def test_an_engine_over_a_mesh_equals_one_device(name):
  on_mesh = serving.complete(_engine(name, True), *_requests())
  on_one_device = serving.complete(_engine(name, False), *_requests())
  for have, want in zip(on_mesh, on_one_device, strict=True):
    np.testing.assert_array_equal(have.tokens_T, want.tokens_T)
    np.testing.assert_array_equal(
      have.consumed_expert_ids_TMA, want.consumed_expert_ids_TMA
    )
    np.testing.assert_allclose(have.logprobs_T, want.logprobs_T, atol=2e-5)
  assert _engine(name, True).stats().prefix_hit_tokens > 0


@pytest.mark.slow
def test_no_weight_and_no_page_moves():
  config, shape = CASES['uneven']
  place = placing.on_mesh(config, topology.make_mesh(*shape))
  variables = on_mesh.initial(config)
  weights = placing.put_weights(variables, config, place)
  down = weights.layers[0]['params']['moe']['down']
  assert tuple(down.sharding.spec)[:2] == ('replica', 'fsdp')
  cache = jax.eval_shape(
    lambda: forward.empty_cache(config, OPTIONS.pages, OPTIONS.page_size)
  )
  cache = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place.pools),
    cache,
  )
  # The first pool of a layer, [pages, K, H, page]: a key head on each half.
  assert place.pools.spec == P(None, ('replica', 'context'))
  rows = 2

  def step(weights, cache, tokens_BT, tables_BP):
    hidden_BTD, _, cache = forward.forward(
      weights,
      cache,
      tokens_BT,
      tokens_BT >= 0,
      tokens_BT,
      tables_BP,
      config=config,
      plan=place.plan,
    )
    return forward.logits(weights, hidden_BTD, config), cache

  inputs = [np.zeros((rows, 1), np.int32), np.zeros((rows, 6), np.int32)]
  compiled = (
    jax.jit(step, out_shardings=(place.whole, place.pools))
    .lower(weights, cache, *jax.device_put(inputs, place.whole))
    .compile(compiler_options={'xla_backend_optimization_level': 0})
  )
  program_collectives = collectives.read(compiled.as_text())
  assert any(c.kind == 'all-reduce' for c in program_collectives)
  # The largest rows are those of the residual stream, heads and vocabulary.
  widest = rows * config.embed_dim
  assert max(size for c in program_collectives for size in c.sizes) <= widest


def test_a_mesh_and_batch_invariance_exclude_each_other():
  config = dataclasses.replace(GQA, numerics='batch_invariant')
  with pytest.raises(ValueError, match=r"mesh of 8 .*numerics 'fast'"):
    placing.on_mesh(config, topology.make_mesh(1, 8, 1))
