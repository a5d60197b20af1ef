"""Our names, shapes and configs against those that transformers has."""

import copy
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from composer_jax.core import trees
from composer_jax.hf.architecture import config as hf_config
from composer_jax.hf.tensors import names
from composer_jax.models import decoder
from tests.hf import models, published, tiny

PUBLISHED = {
  'qwen3_30b_a3b': published.QWEN3_30B_A3B,
  'deepseek_v3': published.DEEPSEEK_V3,
  'kimi_k2': published.KIMI_K2_5['text_config'],
}


@pytest.mark.parametrize('name', tiny.MODELS)
def test_transformers_reads_the_configs_we_write(name, tmp_path):
  config, family, _ = hf_config.from_hf(tiny.MODELS[name])
  (tmp_path / 'config.json').write_text(
    json.dumps(hf_config.to_hf(config, family))
  )
  reference = transformers.AutoConfig.from_pretrained(tmp_path)
  # Read back from transformers' own spelling it is the same model.
  assert hf_config.from_hf(reference.to_dict()) == (config, family, '')


@pytest.mark.parametrize('name', tiny.MODELS)
def test_saved_checkpoints_have_our_names_and_values(name, tmp_path):
  """`save_pretrained` writes the layout of the hub: a matrix per expert."""
  model = models.make(tiny.MODELS[name], 0)
  model.save_pretrained(tmp_path)
  saved = safetensors.numpy.load_file(tmp_path / 'model.safetensors')
  config, family, _ = hf_config.from_hf(
    json.loads((tmp_path / 'config.json').read_text())
  )
  table = names.tensors(config, family)
  assert {n: t.shape for n, t in table.items()} == {
    n: t.shape for n, t in saved.items()
  }
  # The experts that transformers stacked in memory are those of the file.
  variables, _ = models.to_ours(model, config, family)
  for tensor_name, values in models.to_theirs(variables, table).items():
    np.testing.assert_array_equal(values, saved[tensor_name], tensor_name)


def test_a_language_model_inside_kimi_k25(tmp_path):
  fields = {
    'model_type': 'kimi_k25',
    'text_config': tiny.MODELS['deepseek_v3'],
    'vision_config': {
      'hidden_size': 16,
      'num_attention_heads': 2,
      'num_hidden_layers': 1,
      'intermediate_size': 8,
      'patch_size': 2,
    },
    'projection_hidden_size': 16,
    'tie_word_embeddings': False,
  }
  auto = transformers.AutoModelForImageTextToText
  model = auto.from_config(
    transformers.AutoConfig.for_model(**copy.deepcopy(fields))
  )
  model.save_pretrained(tmp_path)
  path = tmp_path / 'model.safetensors'
  # transformers 5.23 writes `blocks` for `layers`, although it reads the names
  # of the hub, which have `layers`.
  saved = {
    n.replace('language_model.model.blocks', 'language_model.model.layers'): t
    for n, t in safetensors.numpy.load_file(path).items()
  }
  safetensors.numpy.save_file(saved, path, metadata={'format': 'pt'})
  loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
  assert not info['missing_keys'] and not info['unexpected_keys']
  for name, tensor in model.state_dict().items():
    assert torch.equal(loaded.state_dict()[name], tensor), name
  ours, family, prefix = hf_config.from_hf(
    json.loads((tmp_path / 'config.json').read_text())
  )
  table = names.tensors(ours, family, prefix=prefix)
  assert not table.keys() - saved.keys()
  assert names.contradicting(saved, table, ours, prefix=prefix) == []
  carried = [n for n in saved if n not in table]
  assert carried and not any(n.startswith(prefix) for n in carried)
  for tensor_name, tensor in table.items():
    assert saved[tensor_name].shape == tensor.shape


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_sizes_have_our_names_and_shapes(name):
  config, family, _ = hf_config.from_hf(PUBLISHED[name])
  reference = transformers.AutoConfig.for_model(
    **hf_config.to_hf(config, family)
  )
  with torch.device('meta'):
    model = transformers.AutoModelForCausalLM.from_config(reference)
  table = names.tensors(config, family)
  state = models.as_stored(model.state_dict())
  held = {n: tuple(t.shape) for n, t in state.items()}
  assert {n: t.shape for n, t in table.items()} == held
  # The numbers of parameters agree.
  ours = jax.tree.leaves(decoder.abstract(config)[0])
  assert sum(leaf.size for leaf in ours) == sum(map(np.prod, held.values()))
  arrays = {part.array for t in table.values() for part in t.parts}
  assert arrays == set(trees.flatten_names(decoder.abstract(config)[0]))
