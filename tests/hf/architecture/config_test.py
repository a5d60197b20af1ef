"""`config.json` there and back, and what it refuses."""

import copy
import dataclasses
import importlib

import pytest

from composer_jax.hf.architecture import config as hf_config
from composer_jax.models import config as model_config
from tests.hf import published, tiny

PUBLISHED = {
  'qwen3_30b_a3b': published.QWEN3_30B_A3B,
  'deepseek_v3': published.DEEPSEEK_V3,
  'kimi_k2': published.KIMI_K2_5,
}


def _fields(name, **changes):
  fields = copy.deepcopy(tiny.MODELS[name])
  fields.update(changes)
  return fields


def _without(fields, key):
  return {k: v for k, v in fields.items() if k != key}


def test_every_field_has_its_key():
  config, family, prefix = hf_config.from_hf(tiny.MODELS['deepseek_v3'])
  assert (family, prefix) == ('deepseek_v3', '')
  assert config == model_config.ModelConfig(
    vocab_size=40,
    embed_dim=32,
    num_layers=3,
    num_dense_layers=1,
    dense_ffw_dim=20,
    norm_eps=1e-5,
    tie_embeddings=False,
    remat=True,
    compute_dtype='bfloat16',
    attention=model_config.MLAConfig(
      kind='mla',
      num_heads=4,
      q_lora_dim=16,
      kv_lora_dim=12,
      nope_dim=6,
      rope_dim=8,
      value_dim=10,
      latent_norm_eps=1e-6,  # whatever rms_norm_eps says
    ),
    rope=model_config.RopeConfig(
      theta=100.0,
      interleaved=True,
      yarn=model_config.YarnConfig(
        factor=4.0,
        original_max_len=32,
        beta_fast=1.5,
        beta_slow=0.5,
        mscale=1.0,
        mscale_all_dim=0.7,
        truncate=True,
      ),
    ),
    moe=model_config.MoEConfig(
      num_experts=8,
      num_active=2,
      ffw_dim=12,
      num_shared=2,
      router='sigmoid',
      num_groups=4,
      num_active_groups=2,
      renormalize=True,
      routed_scale=2.5,
      aux_loss_weight=0.0,
      z_loss_weight=0.0,
    ),
  )


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_models_are_those_of_our_configs(name):
  config, _, _ = hf_config.from_hf(PUBLISHED[name])
  module = importlib.import_module(f'configs.models.{name}')
  ours = model_config.ModelConfig.from_dict(module.get_config().to_dict())
  # The weights of the router's losses are choices of a training run.
  moe = dataclasses.replace(
    config.moe,
    aux_loss_weight=ours.moe.aux_loss_weight,
    z_loss_weight=ours.moe.z_loss_weight,
  )
  assert dataclasses.replace(config, moe=moe) == ours


@pytest.mark.parametrize('fields', [*tiny.MODELS.values(), *PUBLISHED.values()])
def test_there_and_back(fields):
  config, family, _ = hf_config.from_hf(fields)
  back = hf_config.to_hf(config, family)
  want = {'kimi_k2': 'deepseek_v3'}.get(family, family)
  assert hf_config.from_hf(back) == (config, want, '')


def test_positions_are_those_that_yarn_stretches():
  assert hf_config.positions(published.QWEN3_30B_A3B) == 40960
  assert hf_config.positions(published.DEEPSEEK_V3) == 40 * 4096
  assert hf_config.positions(published.KIMI_K2_5) == 64 * 4096
  yarn = dict(rope_type='yarn', factor=4.0)
  yarn['original_max_position_embeddings'] = 32768
  fields = published.QWEN3_30B_A3B | {'rope_scaling': yarn}
  assert hf_config.positions(fields) == 4 * 32768
  fields = _without(published.QWEN3_30B_A3B, 'max_position_embeddings')
  assert hf_config.positions(fields) is None


def test_a_nested_language_model_has_a_prefix():
  _, family, prefix = hf_config.from_hf(published.KIMI_K2_5)
  assert (family, prefix) == ('kimi_k2', 'language_model.')
  fields = published.KIMI_K2_5 | {'tie_word_embeddings': True}
  with pytest.raises(ValueError, match="'tie_word_embeddings' is True and"):
    hf_config.from_hf(fields)
  with pytest.raises(ValueError, match="needs an object 'text_config'"):
    hf_config.from_hf({'model_type': 'kimi_k25'})


def test_old_and_new_spellings_say_the_same():
  old = tiny.MODELS['qwen3_moe_dense']
  new = _without(
    _without(_without(old, 'rope_scaling'), 'rope_theta'), 'num_experts'
  )
  theta = {'rope_theta': old['rope_theta']}
  new['rope_parameters'] = old['rope_scaling'] | theta
  new['num_local_experts'] = old['num_experts']
  assert hf_config.from_hf(new) == hf_config.from_hf(old)
  typed = _without(old['rope_scaling'], 'rope_type') | {'type': 'yarn'}
  old = old | {'rope_scaling': typed}
  assert hf_config.from_hf(new) == hf_config.from_hf(old)
  default = {'rope_type': 'default', 'rope_theta': 7e4}
  fields = _without(_fields('olmoe', rope_parameters=default), 'rope_theta')
  assert hf_config.from_hf(fields)[0].rope.theta == 7e4
  # An absent key means the default of transformers.
  fields = _without(fields, 'rope_parameters')
  assert hf_config.from_hf(fields)[0].rope.theta == 1e4


def test_yarn_takes_the_defaults_of_transformers():
  scaling = {'type': 'yarn', 'factor': 8, 'beta_fast': 0, 'mscale': None}
  fields = _fields('qwen3_moe', rope_scaling=scaling)
  yarn = hf_config.from_hf(fields)[0].rope.yarn
  assert yarn == model_config.YarnConfig(
    factor=8.0,
    original_max_len=128,  # max_position_embeddings
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=None,
    mscale_all_dim=None,
    truncate=True,
  )
  # 0.1 log(8) + 1 is the value that transformers computes.
  scaling |= {'attention_factor': 1.2079441541679836}
  assert hf_config.from_hf(fields)[0].rope.yarn == yarn


@pytest.mark.parametrize(
  'num_layers, only, num_dense',
  [
    (4, [], 0),
    (4, [0], 1),
    (4, [1, 0], 2),
  ],
)
def test_leading_dense_layers_of_qwen(num_layers, only, num_dense):
  fields = _fields(
    'qwen3_moe',
    num_hidden_layers=num_layers,
    mlp_only_layers=only,
  )
  assert hf_config.from_hf(fields)[0].num_dense_layers == num_dense


def _yarn(**changes):
  return {'rope_scaling': {**tiny.YARN, **changes}}


@pytest.mark.parametrize(
  'name, changes, message',
  [
    ('qwen3_moe', {'model_type': 'llama'}, "model_type 'llama' is not supp"),
    ('qwen3_moe', {'model_type': None}, "None is not supported; .*'kimi_k25'"),
    (
      'qwen3_moe',
      {'hidden_act': 'gelu'},
      "'hidden_act' is 'gelu'.*only 'silu'",
    ),
    ('qwen3_moe', {'attention_dropout': 0.1}, "'attention_dropout' is 0.1"),
    ('qwen3_moe', {'use_sliding_window': True}, "'use_sliding_window' is True"),
    ('qwen3_moe', {'layer_types': ['sliding_attention']}, "'layer_types' has"),
    ('qwen3_moe', {'mlp_only_layers': [1]}, r"'mlp_only_layers' \(\[1\]\)"),
    ('qwen3_moe', {'decoder_sparse_step': 2}, "'decoder_sparse_step' is 2"),
    (
      'qwen3_moe',
      {'mlp_only_layers': [0, 1, 2]},
      'at least one layer is a mix',
    ),
    (
      'qwen3_moe',
      {'hidden_size': '32'},
      "'hidden_size' is '32'; it must be int",
    ),
    ('qwen3_moe', {'vocab_size': None}, "'vocab_size' is missing"),
    ('qwen3_moe', {'norm_topk_prob': 1}, "'norm_topk_prob' is 1; .* bool"),
    ('qwen3_moe', {'vocab_size': True}, "'vocab_size' is True; .* int"),
    ('qwen3_moe', {'num_local_experts': 4}, 'have different values'),
    ('qwen3_moe', {'num_key_value_heads': 3}, "num_kv_heads is 'num_key_value"),
    ('qwen3_moe', {'num_experts_per_tok': 9}, "num_active is 'num_experts_per"),
    ('qwen3_moe', {'head_dim': 7}, 'head_dim must be even.*got 7'),
    ('olmoe', {'clip_qkv': 8.0}, "'clip_qkv' is 8.0"),
    ('olmoe', {'head_dim': 6}, "'head_dim' is 6, .* only 8 is implemented"),
    ('deepseek_v3', {'attention_bias': True}, "'attention_bias' is True"),
    ('deepseek_v3', {'topk_method': 'greedy'}, "'topk_method' is 'greedy'"),
    ('deepseek_v3', {'scoring_func': 'softmax'}, "'scoring_func' is 'softmax'"),
    ('deepseek_v3', {'moe_layer_freq': 2}, "'moe_layer_freq' is 2"),
    ('deepseek_v3', {'num_key_value_heads': 2}, 'a latent serves all heads'),
    ('deepseek_v3', {'num_experts_per_tok': 9}, "num_experts is 'n_routed_exp"),
    ('deepseek_v3', {'topk_group': 5}, "num_active_groups is 'topk_group'"),
    (
      'deepseek_v3',
      {'n_group': 3, 'topk_group': 3},
      r"'n_group' \(3\) must divide the 8 experts",
    ),
    ('deepseek_v3', {'first_k_dense_replace': 3}, "is 'first_k_dense_replace'"),
    ('qwen3_moe', {'partial_rotary_factor': 0.5}, "'partial_rotary_factor' is"),
    ('qwen3_moe', _yarn(rope_type='llama3'), "rope type 'llama3' is not supp"),
    ('qwen3_moe', _yarn(type='linear'), 'contradict each other'),
    ('qwen3_moe', _yarn(mrope_section=[1, 2]), r"\['mrope_section'\] are unk"),
    ('qwen3_moe', _yarn(rope_theta=5.0), "'rope_theta' is 100.0, but 5.0"),
    ('qwen3_moe', _yarn(factor=None), "'factor' is missing"),
    ('qwen3_moe', _yarn(factor=0.5), 'factor must be .* at least 1'),
    ('qwen3_moe', _yarn(attention_factor=1.0), r"'attention_factor' \(1.0\)"),
    ('qwen3_moe', _yarn(partial_rotary_factor=0.5), 'partial_rotary_factor'),
    ('qwen3_moe', _yarn(mscale=0.7), 'must both be given'),
    ('qwen3_moe', _yarn(mscale=1.0, mscale_all_dim=1.0), 'latent attention'),
    ('deepseek_v3', _yarn(mscale_all_dim=1.0), 'must both be given'),
    (
      'qwen3_moe',
      {'rope_scaling': {'full_attention': {'rope_type': 'default'}}},
      'one flat object for all layers',
    ),
    (
      'qwen3_moe',
      {'rope_scaling': tiny.YARN, 'rope_parameters': {'rope_type': 'default'}},
      'differ; remove one',
    ),
    (
      'qwen3_moe',
      {'original_max_position_embeddings': 8, **_yarn()},
      "'original_max_position_embeddings' is 8, but 32",
    ),
  ],
)
def test_what_is_not_modelled_is_refused_by_name(name, changes, message):
  hf_config.from_hf(_fields(name))
  with pytest.raises(ValueError, match=message):
    hf_config.from_hf(_fields(name, **changes))


@pytest.mark.parametrize('key', ['q_lora_rank', 'n_shared_experts', 'n_group'])
def test_silence_is_refused_where_it_would_mean_something(key):
  fields = _without(tiny.MODELS['deepseek_v3'], key)
  with pytest.raises(ValueError, match=f"'{key}' is missing"):
    hf_config.from_hf(fields)


def _changed(config, **changes):
  fields = config.to_dict()
  for path, value in changes.items():
    place, *names = path.split('__')
    inner = fields
    for name in names:
      inner, place = inner[place], name
    inner[place] = value
  return model_config.ModelConfig.from_dict(fields)


@pytest.mark.parametrize(
  'name, family, changes, message',
  [
    ('qwen3_moe', 'llama', {}, "family 'llama' is not one of"),
    ('qwen3_moe', 'deepseek_v3', {}, "attention.kind is 'gqa', but .* 'mla'"),
    ('deepseek_v3', 'olmoe', {}, "attention.kind is 'mla', but .* 'gqa'"),
    ('qwen3_moe', 'olmoe', {}, "attention.qk_norm is 'head', .* 'projection'"),
    ('olmoe', 'olmoe', {'attention__head_dim': 6}, 'attention.head_dim is 6'),
    ('qwen3_moe', 'qwen3_moe', {'attention__out_bias': True}, 'out_bias is'),
    ('qwen3_moe', 'qwen3_moe', {'moe__num_shared': 1}, 'num_shared is 1'),
    ('qwen3_moe', 'qwen3_moe', {'moe__routed_scale': 2.0}, 'routed_scale is 2'),
    ('qwen3_moe', 'qwen3_moe', {'rope__interleaved': True}, 'interleaved is T'),
    ('qwen3_moe', 'qwen3_moe', {'moe__router': 'sigmoid'}, 'router is'),
    (
      'deepseek_v3',
      'kimi_k2',
      {'attention__latent_norm_eps': 1e-5},
      'latent_norm_eps is 1e-05, but .* only have 1e-06',
    ),
  ],
)
def test_what_a_family_cannot_express_is_refused(
  name, family, changes, message
):
  config, _, _ = hf_config.from_hf(tiny.MODELS[name])
  with pytest.raises(ValueError, match=message):
    hf_config.to_hf(_changed(config, **changes), family)
