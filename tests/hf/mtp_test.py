"""Heads for multi-token prediction under the names of DeepSeek's checkpoints.

transformers has no forward pass of them. The reference here takes its decoder
layers, and joins them as published (DeepSeek-V3, section 2.2): embedding before
state, the decoder's state after its final norm.
"""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import torch

from composer_jax.core import batches, files, trees
from composer_jax.hf import exporting, imported, importing
from composer_jax.hf.architecture import config as hf_config
from composer_jax.hf.tensors import names
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head, mtp
from composer_jax.train.checkpoints import export
from tests import compiling
from tests.hf import checkpoints, models, tiny, views

DEPTH, LAYERS = 2, 3
PLAIN = tiny.MODELS['deepseek_v3']
FIELDS = PLAIN | {'num_nextn_predict_layers': DEPTH}
LENGTHS = [[13], [5], [6, 1, 4]]


def _config():
  config, family, _ = hf_config.from_hf(FIELDS, mtp=True)
  changed = dict(compute_dtype='float32', remat=False)
  return dataclasses.replace(config, **changed), family


def _reference(seed):
  """Returns a transformers model whose last layers are those of heads.

  Also the other weights of the heads, by the names in checkpoints.
  """
  model = models.make(PLAIN | {'num_hidden_layers': LAYERS + DEPTH}, seed)
  model.config.num_hidden_layers = LAYERS  # of its forward pass
  generator, D = torch.Generator().manual_seed(seed), PLAIN['hidden_size']
  others = {}
  for layer in range(LAYERS, LAYERS + DEPTH):
    start = f'model.layers.{layer}'
    for name in ('enorm', 'hnorm', 'shared_head.norm'):
      noise = torch.randn(D, generator=generator)
      others[f'{start}.{name}.weight'] = 1 + 0.2 * noise
    noise = torch.randn(D, 2 * D, generator=generator)
    others[f'{start}.eh_proj.weight'] = noise * (2 * D) ** -0.5
  return model, others


def _theirs(model, others, tokens_T):
  """Returns the heads' logits of a document, [T - k, V] of the k-th."""
  eps = PLAIN['rms_norm_eps']

  def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

  ids = torch.tensor(tokens_T, dtype=torch.long)[None]
  with torch.no_grad():
    state = model.model(input_ids=ids).last_hidden_state
    embedded, made = model.model.embed_tokens(ids), []
    for depth in range(1, DEPTH + 1):
      if len(tokens_T) <= depth:
        break
      start = f'model.layers.{LAYERS + depth - 1}'
      state = state[:, : len(tokens_T) - depth]
      both = [
        norm(embedded[:, depth:], others[f'{start}.enorm.weight']),
        norm(state, others[f'{start}.hnorm.weight']),
      ]
      x = torch.cat(both, -1) @ others[f'{start}.eh_proj.weight'].T
      length = x.shape[1]
      places = torch.arange(length)[None]
      mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
      state = model.model.layers[LAYERS + depth - 1](
        x,
        attention_mask=mask,
        position_ids=places,
        position_embeddings=model.model.rotary_emb(x, places),
      )
      state = state[0] if isinstance(state, tuple) else state
      final = norm(state, others[f'{start}.shared_head.norm.weight'])
      made.append(model.lm_head(final)[0].numpy())
  return made


def _variables(model, others, config, family):
  state = {
    n: t.numpy() for n, t in models.as_stored(model.state_dict()).items()
  }
  state |= {name: tensor.numpy() for name, tensor in others.items()}
  table = names.tensors(config, family)
  shapes, _ = decoder.abstract(config)
  arrays = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), shapes)
  flat = trees.flatten_names(arrays)
  for name, tensor in table.items():
    values = state.get(names.original(name, table) or name)
    assert values.shape == tensor.shape, name
    for part in tensor.parts:
      flat[part.array][part.index] = views.block(part, values)
  return arrays


@functools.cache
def _ours():
  config, _ = _config()

  def run(variables, batch):
    tokens = (batch.tokens_BT, batch.segment_ids_BT, batch.positions_BT)
    hidden_BTD = decoder.Decoder(config).apply(variables, *tokens).hidden_BTD
    made = mtp.states(
      variables['mtp'], variables, hidden_BTD, batch, config=config, plan=None
    )
    return [head.logits(variables, state, config) for state, _ in made]

  return jax.jit(run, compiler_options=compiling.INIT)


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1])
def test_logits_are_those_of_the_reference(seed):
  config, family = _config()
  model, others = _reference(seed)
  variables = _variables(model, others, config, family)
  packed = models.batch(seed, LENGTHS, PLAIN['vocab_size'])
  batch = batches.LMBatch(
    tokens_BT=packed.tokens_BT,
    segment_ids_BT=packed.segment_ids_BT,
    positions_BT=packed.positions_BT,
    loss_weights_BT=np.ones(packed.tokens_BT.shape, np.float32),
  )
  have, compared = _ours()(variables, batch), 0
  for row, documents in enumerate(LENGTHS):
    start = 0
    for length in documents:
      here = slice(start, start + length)
      theirs = _theirs(model, others, packed.tokens_BT[row, here])
      for depth, want_TV in enumerate(theirs):
        have_TV = have[depth][row, start : start + len(want_TV)]
        np.testing.assert_allclose(have_TV, want_TV, atol=2e-5, rtol=0)
        compared += len(want_TV)
      start += length
  assert compared > 40 and max(np.abs(x).max() for x in have) > 1


def _stored():
  config, family, _ = hf_config.from_hf(FIELDS, mtp=True)
  table, rng = names.tensors(config, family), np.random.default_rng(0)
  arrays = {n: checkpoints.random_bits(rng, t.shape) for n, t in table.items()}
  for name in arrays:
    arrays[name] = arrays[names.original(name, table) or name]
  return arrays


def test_names_are_those_of_published_checkpoints():
  arrays = _stored()
  config = hf_config.from_hf(FIELDS, mtp=True)[0]
  assert config.mtp == model_config.MTPConfig(depth=DEPTH, layer='moe')
  layer = {n for n in arrays if n.startswith('model.layers.3.')}
  ordinary = {n for n in arrays if n.startswith('model.layers.2.')}
  own = (
    *('enorm', 'hnorm', 'eh_proj', 'embed_tokens'),
    *('shared_head.norm', 'shared_head.head'),
  )
  assert layer == {n.replace('layers.2.', 'layers.3.') for n in ordinary} | {
    f'model.layers.3.{name}.weight' for name in own
  }
  table = names.tensors(config, 'deepseek_v3')
  filled = {part.array for t in table.values() for part in t.parts}
  assert filled == set(trees.flatten_names(decoder.abstract(config)[0]))
  assert hf_config.to_hf(config, 'deepseek_v3')['num_nextn_predict_layers'] == 2
  dense = dataclasses.replace(config, mtp=model_config.MTPConfig(layer='dense'))
  with pytest.raises(ValueError, match="mtp.layer is 'dense'.*can only"):
    hf_config.to_hf(dense, 'deepseek_v3')
  with pytest.raises(ValueError, match='num_nextn_predict_layers.* is 0'):
    hf_config.from_hf(PLAIN, mtp=True)


@pytest.mark.slow
@pytest.mark.parametrize('has_copies', [True, False])
def test_there_and_back_every_file_is_the_same(tmp_path, has_copies):
  arrays = _stored()
  if not has_copies:
    copies = ('.embed_tokens.weight', '.head.weight')
    own = 'model.embed_tokens.weight'
    arrays = {
      n: a for n, a in arrays.items() if n == own or not n.endswith(copies)
    }
  source = checkpoints.write(tmp_path / 'hf', FIELDS, arrays, num_files=2)
  ours = tmp_path / 'ours'
  importing.convert(source, ours, mtp=True)
  assert importing.read_record(ours)['carried'] == []
  exporting.write(exporting.of_import(ours), tmp_path / 'back')
  for path in source.iterdir():
    assert (tmp_path / 'back' / path.name).read_bytes() == path.read_bytes()
  # Without the option they are carried, as ever.
  importing.convert(source, tmp_path / 'carried')
  carried = importing.read_record(tmp_path / 'carried')['carried']
  assert carried and all('layers.3.' in n or 'layers.4.' in n for n in carried)
  fields = json.loads((tmp_path / 'carried' / 'model.json').read_text())
  with_heads = model_config.ModelConfig.from_dict(
    fields | {'mtp': {'depth': 2}}
  )
  with pytest.raises(ValueError, match='carried along. Import it with `--mtp`'):
    imported.check_model(tmp_path / 'carried', with_heads)


def test_a_head_with_its_own_embedding_is_refused(tmp_path):
  arrays = _stored()
  name = 'model.layers.4.shared_head.head.weight'
  arrays[name] = arrays[name].copy()
  arrays[name][1, 2] += 1
  source = checkpoints.write(tmp_path / 'hf', FIELDS, arrays)
  with pytest.raises(ValueError, match=f'{name} differs from lm_head.weight'):
    importing.convert(source, tmp_path / 'ours', mtp=True)


@pytest.mark.slow
def test_heads_that_a_run_made_are_exported_beside_the_import(tmp_path):
  arrays = checkpoints.tensors(PLAIN)
  source = checkpoints.write(tmp_path / 'hf', PLAIN, arrays)
  importing.convert(source, tmp_path / 'ours')
  base = exporting.of_import(tmp_path / 'ours')
  model = dataclasses.replace(base.config, mtp=model_config.MTPConfig(depth=1))
  imported.check_model(tmp_path / 'ours', model)
  start = imported.ImportedModel(
    folder=str(tmp_path / 'ours'),
    model=model,
    conversations_file='',
    seq_len=8,
    windows={},
  )
  shapes, _ = decoder.abstract(model)
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = jax.tree.map(lambda x: x.update(sharding=place), shapes)
  variables = start.variables(like)
  assert variables.keys() == shapes.keys() - {'mtp'}
  rng = np.random.default_rng(0)
  variables['mtp'] = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), shapes['mtp']
  )
  export.save(tmp_path / 'run', 'sft', 1, variables)
  origin = dataclasses.replace(
    base,
    config=model,
    weights=tmp_path / 'run' / 'exports' / 'sft',
    is_trained=True,
  )
  exporting.write(origin, tmp_path / 'back')
  fields = files.read_json(tmp_path / 'back' / 'config.json')
  assert fields['num_nextn_predict_layers'] == 1
  importing.convert(tmp_path / 'back', tmp_path / 'again', mtp=True)
  again = importing.load_variables(tmp_path / 'again', like)
  narrow = lambda x: np.asarray(x).astype('bfloat16').astype(np.float32)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a, narrow(b)),
    again['mtp']['params'],
    variables['mtp']['params'],
  )
