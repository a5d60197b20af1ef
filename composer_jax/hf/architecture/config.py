"""Converts a Hugging Face `config.json` to `ModelConfig` and back.

A key that the family's code reads is refused by name if its value would change
results and is not implemented. Keys that the code does not read are ignored, as
transformers does. Values on which DeepSeek's own code and transformers disagree
are refused too.

Carried over are sizes, norm eps and rotations (`hf.architecture.rope`). Not
carried over are token ids, dtypes and the choices of a training run: compute
dtype, remat, and the weights of the router's losses (`router_aux_loss_coef`,
which transformers adds only where `output_router_logits` is set, and DeepSeek's
`aux_loss_alpha`, a loss per sequence).
"""

import functools
import re
from typing import Any

from composer_jax.core import files
from composer_jax.hf.architecture import keys as hf_keys
from composer_jax.hf.architecture import rope
from composer_jax.hf.tensors import names
from composer_jax.models import config as model_config

_MLA = ('deepseek_v3', 'kimi_k2')
_QK_NORMS = {'qwen3_moe': 'head', 'olmoe': 'projection', 'mixtral': 'none'}
# DeepSeek's code has this eps for the latents, whatever `rms_norm_eps` is.
_LATENT_NORM_EPS = 1e-6

# The only implemented value of keys that a family's code reads.
_MODELLED: dict[str, dict[str, Any]] = {
  'qwen3_moe': {'use_sliding_window': False},
  'mixtral': {'sliding_window': None, 'router_jitter_noise': 0},
  'olmoe': {'sliding_window': None, 'clip_qkv': None},
  'deepseek_v3': {
    'attention_bias': False,
    'scoring_func': 'sigmoid',
    'topk_method': 'noaux_tc',
    'moe_layer_freq': 1,
  },
}
_MODELLED['kimi_k2'] = _MODELLED['deepseek_v3']
_MODELLED_EVERYWHERE = {'hidden_act': 'silu', 'attention_dropout': 0}
# Written as `max_position_embeddings` of a model without YaRN.
_CONTEXT = 4096
# Keys of the fields that errors of ModelConfig name.
_KEYS = {
  'num_heads': ('num_attention_heads',),
  'num_kv_heads': ('num_key_value_heads',),
  'num_layers': ('num_hidden_layers',),
  'num_dense_layers': ('first_k_dense_replace', 'mlp_only_layers'),
  'num_experts': ('n_routed_experts', 'num_experts', 'num_local_experts'),
  'num_active': ('num_experts_per_tok',),
  'num_groups': ('n_group',),
  'num_active_groups': ('topk_group',),
}


def from_hf(
  config_json: dict[str, Any],
) -> tuple[model_config.ModelConfig, str, str]:
  """Reads a parsed `config.json`.

  Returns:
    The config, its family (one of `hf.tensors.names.FAMILIES`), and the prefix
    of the language model's tensor names.
  """
  if not isinstance(config_json, dict):
    raise ValueError(
      f'config.json: it holds a {type(config_json).__name__}; it must be an '
      'object.'
    )
  fields, prefix = _language_model(config_json)
  family = fields.get('model_type')
  if family not in names.FAMILIES:
    raise ValueError(
      f'model_type {family!r} is not supported; '
      f'{sorted((*names.FAMILIES, "kimi_k25"))} are.'
    )
  is_mla = family in _MLA
  take = functools.partial(hf_keys.take, fields)
  try:
    _check_modelled(fields, family)
    attention = _mla(fields) if is_mla else _gqa(fields, family)
    moe = _sigmoid_moe(fields) if is_mla else _softmax_moe(fields, family)
    interleaved = is_mla and take('rope_interleave', bool, True)
    config = model_config.ModelConfig(
      vocab_size=take('vocab_size', int),
      embed_dim=take('hidden_size', int),
      num_layers=take('num_hidden_layers', int),
      num_dense_layers=_num_dense_layers(fields, family),
      dense_ffw_dim=take('intermediate_size', int),
      norm_eps=take('rms_norm_eps', float),
      tie_embeddings=take('tie_word_embeddings', bool, False),
      remat=True,
      compute_dtype='bfloat16',
      attention=attention,
      rope=rope.from_fields(
        fields, family, interleaved=interleaved, is_mla=is_mla
      ),
      moe=model_config.MoEConfig(**moe, aux_loss_weight=0.0, z_loss_weight=0.0),
    )
  except ValueError as error:
    raise ValueError(
      f'config.json: {error}{_keys_of(str(error), fields)}'
    ) from error
  return config, family, prefix


def _language_model(config_json: dict[str, Any]) -> tuple[dict[str, Any], str]:
  """Returns the fields of the language model and the prefix of its tensors."""
  if config_json.get('model_type') != 'kimi_k25':
    return config_json, ''
  fields = config_json.get('text_config')
  if not isinstance(fields, dict):
    raise ValueError(
      f"config.json: model_type 'kimi_k25' needs an object 'text_config', not "
      f'{fields!r}.'
    )
  tied = [d.get('tie_word_embeddings') for d in (config_json, fields)]
  if tied[0] is not None and tied[0] != bool(tied[1]):
    raise ValueError(
      f"config.json: 'tie_word_embeddings' is {tied[0]!r} and that of "
      f"'text_config' {tied[1]!r}; they must be equal."
    )
  return fields, 'language_model.'


def _check_modelled(fields: dict[str, Any], family: str) -> None:
  hf_keys.check_only(fields, _MODELLED_EVERYWHERE | _MODELLED[family])
  layers = hf_keys.take_list(fields, 'layer_types', str)
  if set(layers) - {'full_attention'}:
    raise ValueError(
      f"'layer_types' has {sorted(set(layers))}; only 'full_attention' is "
      'implemented.'
    )


def _mla(fields: dict[str, Any]) -> model_config.MLAConfig:
  take = functools.partial(hf_keys.take, fields)
  num_heads = take('num_attention_heads', int)
  num_kv_heads = take('num_key_value_heads', int, num_heads)
  if num_kv_heads != num_heads:
    raise ValueError(
      f"'num_key_value_heads' ({num_kv_heads}) must be 'num_attention_heads' "
      f'({num_heads}): a latent serves all heads.'
    )
  # transformers has a default for these that differs from null.
  for key in ('q_lora_rank', 'n_shared_experts'):
    if key not in fields:
      raise ValueError(f'{key!r} is missing; it must be int or null.')
  return model_config.MLAConfig(
    kind='mla',
    num_heads=num_heads,
    q_lora_dim=take('q_lora_rank', int, None),
    kv_lora_dim=take('kv_lora_rank', int),
    nope_dim=take('qk_nope_head_dim', int),
    rope_dim=take('qk_rope_head_dim', int),
    value_dim=take('v_head_dim', int),
    latent_norm_eps=_LATENT_NORM_EPS,
  )


def _gqa(fields: dict[str, Any], family: str) -> model_config.GQAConfig:
  take = functools.partial(hf_keys.take, fields)
  num_heads = take('num_attention_heads', int)
  width = take('hidden_size', int)
  has_bias = family != 'mixtral' and take('attention_bias', bool, False)
  kv_heads_default = num_heads if family == 'olmoe' else hf_keys.NO_DEFAULT
  default_head_dim = width // max(num_heads, 1)
  head_dim = take('head_dim', int, default_head_dim)
  if family == 'olmoe' and head_dim != default_head_dim:
    raise ValueError(
      f"'head_dim' is {head_dim}; models of family 'olmoe' can only have "
      f"'hidden_size' / 'num_attention_heads' ({default_head_dim})."
    )
  return model_config.GQAConfig(
    kind='gqa',
    num_heads=num_heads,
    num_kv_heads=take('num_key_value_heads', int, kv_heads_default),
    head_dim=head_dim,
    qk_norm=_QK_NORMS[family],
    qkv_bias=has_bias,
    out_bias=has_bias,
  )


def _sigmoid_moe(fields: dict[str, Any]) -> dict[str, Any]:
  take = functools.partial(hf_keys.take, fields)
  num_experts, num_groups = _num_experts(fields), take('n_group', int)
  if num_groups < 1 or num_experts % num_groups or num_experts < 2 * num_groups:
    raise ValueError(
      f"'n_group' ({num_groups}) must divide the {num_experts} experts into "
      'groups of at least two: transformers ranks a group by the sum of its '
      'two best scores.'
    )
  return dict(
    num_experts=num_experts,
    num_active=take('num_experts_per_tok', int),
    ffw_dim=take('moe_intermediate_size', int),
    num_shared=take('n_shared_experts', int, 0),
    router='sigmoid',
    num_groups=num_groups,
    num_active_groups=take('topk_group', int),
    renormalize=take('norm_topk_prob', bool),
    routed_scale=take('routed_scaling_factor', float),
  )


def _softmax_moe(fields: dict[str, Any], family: str) -> dict[str, Any]:
  take = functools.partial(hf_keys.take, fields)
  has_own_width = family == 'qwen3_moe'
  width = 'moe_intermediate_size' if has_own_width else 'intermediate_size'
  return dict(
    num_experts=_num_experts(fields),
    num_active=take('num_experts_per_tok', int),
    ffw_dim=take(width, int),
    num_shared=0,
    router='softmax',
    num_groups=1,
    num_active_groups=1,
    renormalize=family == 'mixtral' or take('norm_topk_prob', bool, False),
    routed_scale=1.0,
  )


def _num_experts(fields: dict[str, Any]) -> int:
  return hf_keys.take_any(fields, _KEYS['num_experts'], int)


def _num_dense_layers(fields: dict[str, Any], family: str) -> int:
  """Returns the number of dense layers before the first mixture layer."""
  if family in _MLA:
    return hf_keys.take(fields, 'first_k_dense_replace', int)
  if family != 'qwen3_moe':
    return 0
  num_layers = hf_keys.take(fields, 'num_hidden_layers', int)
  step = hf_keys.take(fields, 'decoder_sparse_step', int, 1)
  if step < 1:
    raise ValueError(f"'decoder_sparse_step' ({step}) must be at least 1.")
  named = set(hf_keys.take_list(fields, 'mlp_only_layers', int))
  is_dense = [i in named or (i + 1) % step != 0 for i in range(num_layers)]
  num_dense = sum(is_dense)
  if not all(is_dense[:num_dense]):
    raise ValueError(
      f"'mlp_only_layers' ({sorted(named)}) and 'decoder_sparse_step' ({step}) "
      'must make the first layers dense and no other.'
    )
  return num_dense


def _keys_of(message: str, fields: dict[str, Any]) -> str:
  """Returns a sentence on the keys from which the fields in a message come."""
  pairs = [
    f'{field} is {key!r}'
    for field, keys in _KEYS.items()
    for key in keys
    if key in fields and re.search(rf'\b{field}\b', message)
  ]
  return f' Here {", ".join(pairs)}.' if pairs else ''


def to_hf(config: model_config.ModelConfig, family: str) -> dict[str, Any]:
  """Returns a `config.json` that transformers loads.

  Family 'kimi_k2' is written as 'deepseek_v3', the only name that transformers
  has for it.

  Raises:
    ValueError: models of the family cannot have a field's value; names both.
  """
  if family not in names.FAMILIES:
    raise ValueError(f'family {family!r} is not one of {names.FAMILIES}.')
  kind = 'mla' if family in _MLA else 'gqa'
  if config.attention.kind != kind:
    raise ValueError(
      _impossible(family, {'attention.kind': (config.attention.kind, kind)})
    )
  fields = _fields(config, family)
  # A value that the file cannot hold comes back as another one.
  ours, theirs = (
    files.flatten(c.to_dict()) for c in (config, from_hf(fields)[0])
  )
  differing = {
    name: (value, theirs.get(name))
    for name, value in ours.items()
    if name not in model_config.FREE and theirs.get(name) != value
  }
  if differing:
    raise ValueError(_impossible(family, differing))
  return fields


def _impossible(family: str, differing: dict[str, tuple[Any, Any]]) -> str:
  pairs = [
    f'{name} is {value!r}, but a model of family {family!r} can only have '
    f'{other!r}'
    for name, (value, other) in differing.items()
  ]
  return f'{"; ".join(pairs)}. Change the config or the family.'


def _fields(config: model_config.ModelConfig, family: str) -> dict[str, Any]:
  c, a, yarn = config, config.attention, config.rope.yarn
  context = _CONTEXT
  if yarn is not None:
    context = round(yarn.factor * yarn.original_max_len)
  fields = {
    'vocab_size': c.vocab_size,
    'hidden_size': c.embed_dim,
    'num_hidden_layers': c.num_layers,
    'num_attention_heads': a.num_heads,
    'intermediate_size': c.dense_ffw_dim,
    'rms_norm_eps': c.norm_eps,
    'tie_word_embeddings': c.tie_embeddings,
    'hidden_act': 'silu',
    'max_position_embeddings': context,
    **rope.to_fields(c.rope),
    'num_experts_per_tok': c.moe.num_active,
    # The tokenizer is unknown here, and the defaults belong to other models.
    'bos_token_id': None,
    'eos_token_id': None,
    'pad_token_id': None,
  }
  if isinstance(a, model_config.MLAConfig):
    return fields | _mla_fields(c, a)
  return fields | _gqa_fields(c, a, family)


def _gqa_fields(
  c: model_config.ModelConfig, a: model_config.GQAConfig, family: str
) -> dict[str, Any]:
  fields = {'model_type': family, 'num_key_value_heads': a.num_kv_heads}
  if family != 'qwen3_moe':  # All layers are mixtures, of this width.
    fields['intermediate_size'] = c.moe.ffw_dim
  if family == 'mixtral':
    return fields | {
      'architectures': ['MixtralForCausalLM'],
      'head_dim': a.head_dim,
      'num_local_experts': c.moe.num_experts,
    }
  fields |= {
    'attention_bias': a.qkv_bias,
    'num_experts': c.moe.num_experts,
    'norm_topk_prob': c.moe.renormalize,
  }
  if family == 'olmoe':
    return fields | {'architectures': ['OlmoeForCausalLM']}
  return fields | {
    'architectures': ['Qwen3MoeForCausalLM'],
    'head_dim': a.head_dim,
    'moe_intermediate_size': c.moe.ffw_dim,
    'decoder_sparse_step': 1,
    'mlp_only_layers': list(range(c.num_dense_layers)),
  }


def _mla_fields(
  c: model_config.ModelConfig, a: model_config.MLAConfig
) -> dict[str, Any]:
  return {
    'model_type': 'deepseek_v3',
    'architectures': ['DeepseekV3ForCausalLM'],
    'num_key_value_heads': a.num_heads,
    'q_lora_rank': a.q_lora_dim,
    'kv_lora_rank': a.kv_lora_dim,
    'qk_nope_head_dim': a.nope_dim,
    'qk_rope_head_dim': a.rope_dim,
    'v_head_dim': a.value_dim,
    'rope_interleave': c.rope.interleaved,
    'first_k_dense_replace': c.num_dense_layers,
    'moe_intermediate_size': c.moe.ffw_dim,
    'n_routed_experts': c.moe.num_experts,
    'n_shared_experts': c.moe.num_shared,
    'n_group': c.moe.num_groups,
    'topk_group': c.moe.num_active_groups,
    'norm_topk_prob': c.moe.renormalize,
    'routed_scaling_factor': c.moe.routed_scale,
    'scoring_func': 'sigmoid',
    'topk_method': 'noaux_tc',
    'num_nextn_predict_layers': 0,
  }
