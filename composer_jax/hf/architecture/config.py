"""`config.json` of Hugging Face to `ModelConfig` and back.

What would change results and is not modelled is refused by name: a key that
the family's code reads with another value than the one modelled. Keys it does
not read are passed over, as transformers passes over them; where DeepSeek's
own code and transformers disagree, the value is refused too.

Carried over: sizes; norm eps, except that of MLA's latents, which is 1e-6 in
DeepSeek's code whatever `rms_norm_eps` says; rotations (see
`hf.architecture.rope`).

Not carried over, since they are choices of a training run: compute dtype,
remat, and the weights of the router's losses (`router_aux_loss_coef`, which
transformers adds only where `output_router_logits` is set, and DeepSeek's
`aux_loss_alpha`, a loss per sequence). Nor are token ids and dtypes.
"""

import functools
import re
from typing import Any

from composer_jax.hf.architecture import keys as hf_keys
from composer_jax.hf.architecture import rope
from composer_jax.hf.tensors import names
from composer_jax.models import config as model_config

_MLA = ('deepseek_v3', 'kimi_k2')
_QK_NORMS = {'qwen3_moe': 'head', 'olmoe': 'projection', 'mixtral': 'none'}
# Of DeepSeek's code, whatever `rms_norm_eps` says.
_LATENT_NORM_EPS = 1e-6

# The only value modelled of each key that a family's code reads.
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
# What is said to be the context of a model without YaRN.
_CONTEXT = 4096
# Fields that errors of ModelConfig name, and the keys they come from.
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
    The config, the family of `hf.tensors.names`, and the prefix of its tensors.
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
    check_family(config, family)
  except ValueError as error:
    raise ValueError(
      f'config.json: {error}{_keys_meant(str(error), fields)}'
    ) from error
  return config, family, prefix


def _language_model(config_json: dict[str, Any]) -> tuple[dict[str, Any], str]:
  """Returns the config of the language model and the prefix of its tensors."""
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
  # Null says something of these, and silence something else.
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
  return model_config.GQAConfig(
    kind='gqa',
    num_heads=num_heads,
    num_kv_heads=take('num_key_value_heads', int, kv_heads_default),
    head_dim=take('head_dim', int, width // max(num_heads, 1)),
    qk_norm=_QK_NORMS[family],
    qkv_bias=has_bias,
    out_bias=has_bias,
  )


def _sigmoid_moe(fields: dict[str, Any]) -> dict[str, Any]:
  take = functools.partial(hf_keys.take, fields)
  return dict(
    num_experts=_num_experts(fields),
    num_active=take('num_experts_per_tok', int),
    ffw_dim=take('moe_intermediate_size', int),
    num_shared=take('n_shared_experts', int, 0),
    router='sigmoid',
    num_groups=take('n_group', int),
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
  """Returns how many layers lead before the first mixture."""
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


def _keys_meant(message: str, fields: dict[str, Any]) -> str:
  """Says which keys of the file the fields in a message come from."""
  meant = [
    f'{field} is {key!r}'
    for field, keys in _KEYS.items()
    for key in keys
    if key in fields and re.search(rf'\b{field}\b', message)
  ]
  return f' Here {", ".join(meant)}.' if meant else ''


def to_hf(config: model_config.ModelConfig, family: str) -> dict[str, Any]:
  """Returns a `config.json` that transformers loads.

  `from_hf` of it gives `config` again, but for the choices of a training run
  and for family 'kimi_k2', which is written as the 'deepseek_v3' it is:
  transformers knows no other name for it. What the family cannot express is
  refused by name.
  """
  check_family(config, family)
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
    # Of the tokenizer, unknown here; the defaults are those of other models.
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


def check_family(config: model_config.ModelConfig, family: str) -> None:
  """Raises a ValueError that names what models of a family cannot have."""
  if family not in names.FAMILIES:
    raise ValueError(f'family {family!r} is not one of {names.FAMILIES}.')
  for name, (value, allowed) in _demands(config, family).items():
    if value not in allowed:
      raise ValueError(
        f'{name} is {value!r}, but a model of family {family!r} can only have '
        f'{" or ".join(map(repr, allowed))}; change it or the family.'
      )
  if config.rope.yarn is not None:
    rope.check_yarn(config.rope.yarn, is_mla=family in _MLA)


def _demands(
  config: model_config.ModelConfig, family: str
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
  """Returns {field: (its value, the values that the family has)}."""
  c, a, moe = config, config.attention, config.moe
  demands: dict[str, tuple[Any, tuple[Any, ...]]]
  if family in _MLA:
    demands = {
      'attention.kind': (a.kind, ('mla',)),
      'moe.router': (moe.router, ('sigmoid',)),
    }
    if isinstance(a, model_config.MLAConfig):
      demands['attention.latent_norm_eps'] = (
        a.latent_norm_eps,
        (_LATENT_NORM_EPS,),
      )
    # transformers sums the two best of each group, even where all may choose.
    E = moe.num_experts
    divisors = tuple(n for n in range(1, E // 2 + 1) if E % n == 0)
    demands['moe.num_groups'] = (moe.num_groups, divisors)
    return demands
  demands = {
    'attention.kind': (a.kind, ('gqa',)),
    'moe.router': (moe.router, ('softmax',)),
    'moe.num_shared': (moe.num_shared, (0,)),
    'moe.num_groups': (moe.num_groups, (1,)),
    'moe.routed_scale': (moe.routed_scale, (1.0,)),
    'rope.interleaved': (c.rope.interleaved, (False,)),
  }
  if isinstance(a, model_config.GQAConfig):
    biases = (False,) if family == 'mixtral' else (False, True)
    demands['attention.qk_norm'] = (a.qk_norm, (_QK_NORMS[family],))
    demands['attention.qkv_bias'] = (a.qkv_bias, biases)
    demands['attention.out_bias'] = (a.out_bias, (a.qkv_bias,))
    if family == 'olmoe':
      head_dim = c.embed_dim // a.num_heads
      demands['attention.head_dim'] = (a.head_dim, (head_dim,))
  if family != 'qwen3_moe':
    demands['num_dense_layers'] = (c.num_dense_layers, (0,))
    # One key says both, and no layer uses this one.
    demands['dense_ffw_dim'] = (c.dense_ffw_dim, (moe.ffw_dim,))
  if family == 'mixtral':
    demands['moe.renormalize'] = (moe.renormalize, (True,))
  return demands
