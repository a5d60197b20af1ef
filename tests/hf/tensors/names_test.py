"""The table of names: blocks that tile both sides, and what a list lacks."""

import dataclasses
import math
import time
import tracemalloc

import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.hf.architecture import config as hf_config
from composer_jax.hf.tensors import names as hf_names
from composer_jax.models import decoder
from tests.hf import published, tiny, views


def _table(name, prefix=''):
  config, family, _ = hf_config.from_hf(tiny.MODELS[name])
  table = hf_names.tensors(config, family, prefix=prefix)
  return config, family, table


@pytest.fixture(scope='module')
def shapes():
  """Shapes of our arrays, by model; tracing is slow."""
  return {
    name: {
      array: leaf.shape
      for array, leaf in trees.flatten_names(
        decoder.abstract(hf_config.from_hf(fields)[0])[0]
      ).items()
    }
    for name, fields in tiny.MODELS.items()
  }


def _numbered(table):
  """Returns tensors in which every number is another."""
  first, tensors = 0, {}
  for tensor in table.values():
    size = int(np.prod(tensor.shape))
    numbers = np.arange(first, first + size, dtype=np.int32)
    tensors[tensor.name] = numbers.reshape(tensor.shape)
    first += size
  return tensors


def _ours(table, tensors, shapes):
  arrays = {array: np.zeros(shape, np.int32) for array, shape in shapes.items()}
  for tensor in table.values():
    for part in tensor.parts:
      arrays[part.array][part.index] = views.block(part, tensors[tensor.name])
  return arrays


@pytest.mark.parametrize('name', tiny.MODELS)
def test_blocks_tile_every_array_and_every_tensor(name, shapes):
  _, _, table = _table(name)
  times = {array: np.zeros(shape) for array, shape in shapes[name].items()}
  block_shapes = {}
  for tensor in table.values():
    read = np.zeros(tensor.shape)
    for part in tensor.parts:
      times[part.array][part.index] += 1
      read.reshape(part.view)[part.select] += 1
      assert times[part.array][part.index].shape == part.block_shape
      block_shapes.setdefault(part.array, set()).add(part.block_shape)
    np.testing.assert_array_equal(read, 1, err_msg=tensor.name)
  for array, count in times.items():
    np.testing.assert_array_equal(count, 1, err_msg=array)
    assert len(block_shapes[array]) == 1


@pytest.mark.parametrize('name', tiny.MODELS)
def test_there_and_back_is_the_identity(name, shapes):
  _, _, table = _table(name)
  tensors = _numbered(table)
  arrays = _ours(table, tensors, shapes[name])
  for tensor in table.values():
    back = np.full(tensor.shape, -1, np.int32)
    for part in tensor.parts:
      views.put(part, arrays[part.array][part.index], back)
    np.testing.assert_array_equal(back, tensors[tensor.name])


def test_entries_are_where_the_heads_say(shapes):
  _, _, table = _table('deepseek_v3')
  tensors = _numbered(table)
  arrays = _ours(table, tensors, shapes['deepseek_v3'])
  start, stack = 'model.layers.2.self_attn.', 'params/moe_layers/attention/'
  q_b = tensors[f'{start}q_b_proj.weight']
  assert arrays[f'{stack}query_up'][1, 5, 3, 7] == q_b[3 * 14 + 7, 5]
  kv_b = tensors[f'{start}kv_b_proj.weight']
  assert arrays[f'{stack}key_up'][1, 5, 3, 2] == kv_b[3 * 16 + 2, 5]
  assert arrays[f'{stack}value_up'][1, 5, 3, 2] == kv_b[3 * 16 + 6 + 2, 5]
  kv_a = tensors[f'{start}kv_a_proj_with_mqa.weight']
  assert arrays[f'{stack}key_rope'][1, 9, 4] == kv_a[12 + 4, 9]
  out = tensors[f'{start}o_proj.weight']
  assert arrays[f'{stack}out'][1, 3, 7, 30] == out[30, 3 * 10 + 7]
  up = tensors['model.layers.1.mlp.experts.6.up_proj.weight']
  assert arrays['params/moe_layers/moe/gate_up'][0, 6, 31, 1, 11] == up[11, 31]


def test_a_prefix_changes_names_only():
  _, _, table = _table('deepseek_v3')
  _, _, prefixed = _table('deepseek_v3', prefix='language_model.')
  for name, tensor in table.items():
    other = prefixed.pop(f'language_model.{name}')
    assert dataclasses.replace(other, name=name) == tensor
  assert not prefixed


def test_tied_embeddings_have_no_head():
  _, _, table = _table('qwen3_moe_dense')
  assert 'lm_head.weight' not in table
  assert 'lm_head.weight' in _table('qwen3_moe')[2]


def test_unknown_families_are_refused():
  config, _, _ = _table('deepseek_v3')
  with pytest.raises(ValueError, match="'llama' is not one of"):
    hf_names.tensors(config, 'llama')


def test_what_may_be_carried_along_contradicts_nothing():
  config, _, table = _table('deepseek_v3')
  names = list(table)
  predictor = [
    'model.layers.3.eh_proj.weight',
    'model.layers.3.mlp.gate.weight',
  ]
  rotary = ['model.layers.0.self_attn.rotary_emb.inv_freq']
  tower = ['vision_tower.norm.weight']
  names += predictor + rotary + tower
  assert not hf_names.contradicting(names, table, config)


@pytest.mark.parametrize(
  'name',
  [
    'model.layers.2.self_attn.q_proj.bias',
    'model.layers.2.mlp.experts.8.up_proj.weight',
    'model.layers.3.self_attn.o_proj.weight',  # no predictor: no eh_proj
    'model.layers.2.eh_proj.weight',  # within the layers
    'model.embed_positions.weight',
  ],
)
@pytest.mark.parametrize('prefix', ['', 'language_model.'])
def test_tensors_that_contradict_the_config_are_named(name, prefix):
  config, _, table = _table('deepseek_v3', prefix=prefix)
  names = [*table, prefix + name, 'mm_projector.proj.0.weight']
  unmodelled = hf_names.contradicting(names, table, config, prefix=prefix)
  assert unmodelled == [prefix + name]


def test_a_head_beside_tied_embeddings_contradicts():
  config, _, table = _table('qwen3_moe_dense')
  names = [*table, 'lm_head.weight']
  assert hf_names.contradicting(names, table, config) == ['lm_head.weight']


def test_the_table_of_a_trillion_parameters_is_quick_and_small():
  config, family, prefix = hf_config.from_hf(published.KIMI_K2_5)
  start = time.process_time()
  tracemalloc.start()
  table = hf_names.tensors(config, family, prefix=prefix)
  memory, _ = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  # It takes a third of a second on a slow idle core.
  assert time.process_time() - start < 10
  # A mixture layer has 14 tensors beside the experts, the dense layer 12.
  assert len(table) == 60 * (384 * 3 + 14) + 12 + 3
  parameters = sum(
    math.prod(tensor.shape)
    for name, tensor in table.items()
    if not name.endswith('e_score_correction_bias')
  )
  assert parameters == 1_026_408_209_408
  # Less than three kilobytes a tensor.
  assert memory < 200e6
