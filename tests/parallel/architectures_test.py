"""Each architecture on 8 emulated devices, in three layouts, equals itself.

CP=2 with EP=8 is the mesh (2, 2, 2) of the dual-mesh layout: rows of a batch
over four devices, halves of a row over two, experts over all eight.
"""

import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder, placement
from composer_jax.parallel import layouts, shardings, topology
from configs.models import kimi_k2
from tests.parallel import collectives, on_mesh

GQA = dict(
  kind='gqa',
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  qk_norm='head',
  qkv_bias=False,
  out_bias=False,
)
MLA = dict(
  kind='mla',
  num_heads=4,
  q_lora_dim=16,
  kv_lora_dim=8,
  nope_dim=10,
  rope_dim=6,
  value_dim=10,
  latent_norm_eps=1e-6,
)
YARN = dict(
  factor=4.0,
  original_max_len=8,
  beta_fast=2.0,
  beta_slow=0.5,
  mscale=1.0,
  mscale_all_dim=1.0,
  truncate=True,
)
MOE = dict(
  num_experts=8,
  num_active=2,
  ffw_dim=7,
  num_shared=0,
  router='softmax',
  num_groups=1,
  num_active_groups=1,
  renormalize=True,
  routed_scale=1.0,
  aux_loss_weight=0.01,
  z_loss_weight=0.001,
)


def _config(**change):
  fields = dict(
    vocab_size=18,
    embed_dim=24,
    num_layers=3,
    num_dense_layers=0,
    dense_ffw_dim=12,
    norm_eps=1e-6,
    tie_embeddings=False,
    remat=False,
    compute_dtype='float32',
    attention=GQA,
    rope=dict(theta=1e4, interleaved=False, yarn=None),
    moe=MOE,
  )
  return model_config.ModelConfig.from_dict(fields | change)


ARCHITECTURES = {
  'qwen3_moe': _config(),
  'deepseek_v3': _config(
    num_dense_layers=1,
    remat=True,
    attention=MLA,
    rope=dict(theta=1e4, interleaved=True, yarn=YARN),
    moe=MOE
    | dict(
      num_shared=2,
      router='sigmoid',
      num_groups=4,
      num_active_groups=2,
      routed_scale=2.5,
    ),
  ),
  # Queries that are not compressed, and latents that do not divide over eight.
  'moonlight': _config(attention=MLA | dict(q_lora_dim=None, kv_lora_dim=6)),
  'olmoe': _config(
    attention=GQA | dict(num_kv_heads=4, qk_norm='projection'),
    moe=MOE | dict(renormalize=False),
  ),
  # Experts that do not divide over the devices, and biases.
  'mixtral': _config(
    tie_embeddings=True,
    attention=GQA | dict(qk_norm='none', qkv_bias=True, out_bias=True),
    moe=MOE | dict(num_experts=6),
  ),
}
LAYOUTS = {
  'cp2_ep8': ((2, 2, 2), layouts.TRAIN),
  'fsdp4_cp2': ((1, 4, 2), layouts.TRAIN),
  'data_parallel': ((4, 2, 1), layouts.REPLICATED),
}
# Without --slow: mesh_test's uneven case.
CASES = [
  pytest.param(name, layout, marks=pytest.mark.slow)
  for name in ARCHITECTURES
  for layout in LAYOUTS
]


@functools.cache
def _on_mesh(name, layout):
  shape, table = LAYOUTS[layout]
  return on_mesh.sharded(ARCHITECTURES[name], shape, layout=table)


@pytest.mark.parametrize('name,layout', CASES)
def test_loss_and_gradients_equal_one_device(name, layout):
  config = ARCHITECTURES[name]
  plan, result, _ = _on_mesh(name, layout)
  on_mesh.assert_equal(result, on_mesh.single(config))
  # Six experts do not divide over eight devices; two groups of them do.
  shards = 8 if config.moe.num_experts == 8 else 2
  if LAYOUTS[layout][1] is layouts.REPLICATED:
    shards = 1
  mesh = plan.mesh.shape
  assert math.prod(mesh[axis] for axis in plan.expert_axes) == shards


@pytest.mark.slow
def test_context_shards_exchange_latents_and_not_keys_or_values():
  _, _, found = _on_mesh('deepseek_v3', 'cp2_ep8')
  a = ARCHITECTURES['deepseek_v3'].attention
  pairs = collectives.blocks(8, 2)
  gathered = set()
  for collective in found:
    if collective.kind == 'all-gather' and collective.groups == pairs:
      gathered |= set(collective.sizes)
  rows = on_mesh.B // 4
  assert {
    rows * on_mesh.T * a.kv_lora_dim,
    rows * on_mesh.T * a.rope_dim,
  } <= gathered
  for width in (a.nope_dim, a.value_dim, a.head_dim):
    assert rows * on_mesh.T * a.num_heads * width not in gathered


def _specs(config, mesh):
  shapes, axes = decoder.abstract(config)
  specs = shardings.specs(shapes, axes, layout=layouts.TRAIN, mesh=mesh)
  return trees.flatten_names(specs['params'])


def test_no_matrix_of_attention_is_replicated():
  both = ('fsdp', 'context')
  mesh = topology.make_mesh(1, 4, 2)
  specs = _specs(ARCHITECTURES['deepseek_v3'], mesh)
  layer = 'moe_layers/attention/'
  assert specs[layer + 'query_down'] == P(None, both, None)
  assert specs[layer + 'query_up'] == P(None, both, None, None)
  assert specs[layer + 'key_up'] == P(None, both, None, None)
  assert specs[layer + 'out'] == P(None, None, None, both)
  for config in ARCHITECTURES.values():
    for name, spec in _specs(config, mesh).items():
      if '/attention/' in name and len(spec) > 2 and 'norm' not in name:
        is_bias = name.endswith('_bias')
        assert is_bias or any(spec), name


def test_latents_take_the_devices_that_divide_them():
  config = ARCHITECTURES['moonlight']
  specs = _specs(config, topology.make_mesh(1, 4, 2))
  # Six over the two of 'context' and not over all eight.
  assert specs['moe_layers/attention/key_up'] == P(
    None, ('context',), None, None
  )
  # Thousands of devices, which only a description of a mesh can have here.
  mesh = jax.sharding.AbstractMesh((2, 512, 2), ('replica', 'fsdp', 'context'))
  k2 = model_config.ModelConfig.from_dict(kimi_k2.get_config().to_dict())
  specs = _specs(k2, mesh)
  layer = 'moe_layers/attention/'
  assert specs[layer + 'key_up'] == P(None, ('fsdp',), None, None)
  assert specs[layer + 'query_up'] == P(None, ('fsdp',), None, None)
  assert specs[layer + 'kv_down'] == P(None, ('fsdp', 'context'), None)


def test_a_mesh_axis_goes_to_the_first_dimension_that_wants_it():
  mesh = topology.make_mesh(2, 2, 2)
  have = shardings.spec(
    'x', (4, 8), ('kv_lora', 'embed'), layout=layouts.TRAIN, mesh=mesh
  )
  assert have == P(('fsdp', 'context'), None)


@pytest.mark.parametrize(
  'rows,columns,message',
  [
    (6, 8, r'batch size \(6\) .*replica=2 x fsdp=2 \(4\); .* is 4 or 8'),
    (8, 7, r'sequence size \(7\) .*context=2 \(2\); .* is 6 or 8'),
  ],
)
def test_a_batch_that_does_not_divide_is_refused(rows, columns, message):
  config = ARCHITECTURES['deepseek_v3']
  mesh = topology.make_mesh(2, 2, 2)
  plan = placement.exchange_plan(config, layout=layouts.TRAIN, mesh=mesh)
  zeros_BT = jax.ShapeDtypeStruct((rows, columns), 'int32')
  shapes, _ = decoder.abstract(config)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(decoder.Decoder(config, plan).apply, shapes, *[zeros_BT] * 3)


def test_a_layout_whose_devices_all_see_every_token_does_not_train():
  config = ARCHITECTURES['deepseek_v3']
  mesh = topology.make_mesh(2, 2, 2)
  plan = placement.exchange_plan(config, layout=layouts.DECODE, mesh=mesh)
  zeros_BT = jax.ShapeDtypeStruct((8, 8), 'int32')
  shapes, _ = decoder.abstract(config)
  with pytest.raises(ValueError, match='a layout whose tokens use all axes'):
    jax.eval_shape(decoder.Decoder(config, plan).apply, shapes, *[zeros_BT] * 3)


def test_variables_of_one_layout_are_the_same_numbers_in_another():
  config = ARCHITECTURES['deepseek_v3']
  variables = on_mesh.initial(config)
  mesh = topology.make_mesh(2, 2, 2)
  places = placement.variable_shardings(config, layout=layouts.TRAIN, mesh=mesh)
  placed = jax.device_put(variables, places)
  jax.tree.map(np.testing.assert_array_equal, placed, variables)
