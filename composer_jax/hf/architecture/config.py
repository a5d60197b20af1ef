"""Converts a Hugging Face `config.json` to `ModelConfig` and back.

One table per family serves both directions. A key that the family's code reads
is refused by name if its value would change results and is not implemented.
Keys that the code does not read are ignored, as transformers does. Values on
which DeepSeek's own code and transformers disagree are refused too.

Not carried over are token ids, dtypes and the choices of a training run:
compute dtype, remat, and the weights of the router's losses
(`router_aux_loss_coef`, which transformers adds only where
`output_router_logits` is set, and DeepSeek's `aux_loss_alpha`, a loss per
sequence).
"""

import dataclasses
import re
from typing import Any

from composer_jax.core import files
from composer_jax.hf.architecture import keys as hf_keys
from composer_jax.hf.architecture import rope
from composer_jax.hf.tensors import names
from composer_jax.models import config as model_config

# Key of a config.json: field of ModelConfig, type, and the default of
# transformers where the key may be absent.
_Keys = dict[str, tuple]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
  """How a config.json describes a family, beside what all families share."""

  model_type: str
  architecture: str
  keys: _Keys
  fixed: dict[str, Any]
  implemented: dict[str, Any]


_KEYS: _Keys = {
  'vocab_size': ('vocab_size', int),
  'hidden_size': ('embed_dim', int),
  'num_hidden_layers': ('num_layers', int),
  'rms_norm_eps': ('norm_eps', float),
  'tie_word_embeddings': ('tie_embeddings', bool, False),
  'num_attention_heads': ('attention.num_heads', int),
  'num_experts_per_tok': ('moe.num_active', int),
}
_IMPLEMENTED = {'hidden_act': 'silu', 'attention_dropout': 0.0}
_EXPERT_KEYS = ('n_routed_experts', 'num_experts', 'num_local_experts')
_GQA = {
  'attention.kind': 'gqa',
  'rope.interleaved': False,
  'moe.router': 'softmax',
  'moe.num_shared': 0,
  'moe.num_groups': 1,
  'moe.num_active_groups': 1,
  'moe.routed_scale': 1.0,
}
_FAMILIES = {
  'qwen3_moe': _Family(
    model_type='qwen3_moe',
    architecture='Qwen3MoeForCausalLM',
    keys={
      'num_key_value_heads': ('attention.num_kv_heads', int),
      'head_dim': ('attention.head_dim', int, None),
      'attention_bias': ('attention.qkv_bias', bool, False),
      'intermediate_size': ('dense_ffw_dim', int),
      'moe_intermediate_size': ('moe.ffw_dim', int),
      'num_experts': ('moe.num_experts', int),
      'norm_topk_prob': ('moe.renormalize', bool, False),
    },
    fixed={**_GQA, 'attention.qk_norm': 'head'},
    implemented={'use_sliding_window': False, 'decoder_sparse_step': 1},
  ),
  'olmoe': _Family(
    model_type='olmoe',
    architecture='OlmoeForCausalLM',
    keys={
      'num_key_value_heads': ('attention.num_kv_heads', int, None),
      'attention_bias': ('attention.qkv_bias', bool, False),
      'intermediate_size': ('moe.ffw_dim', int),
      'num_experts': ('moe.num_experts', int),
      'norm_topk_prob': ('moe.renormalize', bool, False),
    },
    fixed={**_GQA, 'attention.qk_norm': 'projection'},
    implemented={'sliding_window': None, 'clip_qkv': None},
  ),
  'deepseek_v3': _Family(
    model_type='deepseek_v3',
    architecture='DeepseekV3ForCausalLM',
    keys={
      'q_lora_rank': ('attention.q_lora_dim', int, None),
      'kv_lora_rank': ('attention.kv_lora_dim', int),
      'qk_nope_head_dim': ('attention.nope_dim', int),
      'qk_rope_head_dim': ('attention.rope_dim', int),
      'v_head_dim': ('attention.value_dim', int),
      'rope_interleave': ('rope.interleaved', bool, True),
      'first_k_dense_replace': ('num_dense_layers', int),
      'intermediate_size': ('dense_ffw_dim', int),
      'moe_intermediate_size': ('moe.ffw_dim', int),
      'n_routed_experts': ('moe.num_experts', int),
      'n_shared_experts': ('moe.num_shared', int, 0),
      'n_group': ('moe.num_groups', int),
      'topk_group': ('moe.num_active_groups', int),
      'norm_topk_prob': ('moe.renormalize', bool),
      'routed_scaling_factor': ('moe.routed_scale', float),
    },
    fixed={
      'attention.kind': 'mla',
      # The default in DeepSeek's code, which `rms_norm_eps` does not change.
      'attention.latent_norm_eps': 1e-6,
      'moe.router': 'sigmoid',
    },
    implemented={
      'attention_bias': False,
      'scoring_func': 'sigmoid',
      'topk_method': 'noaux_tc',
      'moe_layer_freq': 1,
    },
  ),
}
# transformers has no other name for it.
_FAMILIES['kimi_k2'] = _FAMILIES['deepseek_v3']


def from_hf(
  config_json: dict[str, Any], *, mtp: bool = False
) -> tuple[model_config.ModelConfig, str, str]:
  """Reads config.json: the config, its family, the prefix of tensor names.

  With `mtp` the config has the heads for multi-token prediction that are told
  of; otherwise none.
  """
  if not isinstance(config_json, dict):
    raise ValueError(
      f'config.json: it holds a {type(config_json).__name__}; it must be an '
      'object.'
    )
  fields, prefix = _language_model(config_json)
  name = fields.get('model_type')
  if name not in names.FAMILIES:
    raise ValueError(
      f'model_type {name!r} is not supported; '
      f'{sorted((*names.FAMILIES, "kimi_k25"))} are.'
    )
  family = _FAMILIES[name]
  try:
    values = _values(fields, family)
    if mtp:
      values['mtp'] = {'depth': _heads(fields)}
    config = model_config.ModelConfig.from_dict(values)
  except ValueError as error:
    # Errors of ModelConfig name its fields; the keys are added.
    pairs = [
      f'{field} is {key!r}'
      for key, (path, *_) in (_KEYS | family.keys).items()
      if (field := path.rpartition('.')[2]) != key
      and re.search(rf'\b{field}\b', str(error))
    ]
    keys = f' Here {", ".join(pairs)}.' if pairs else ''
    raise ValueError(f'config.json: {error}{keys}') from error
  return config, name, prefix


def _heads(fields: dict[str, Any]) -> int:
  count = hf_keys.take(fields, 'num_nextn_predict_layers', int, 0)
  if count < 1:
    raise ValueError(
      f"'num_nextn_predict_layers' is {count}: there are no heads for "
      'multi-token prediction to import. Leave out --mtp.'
    )
  return count


def positions(config_json: dict[str, Any]) -> int | None:
  """Returns for how many positions a model was made; None if it is unsaid."""
  fields, _ = _language_model(config_json)
  yarn = from_hf(config_json)[0].rope.yarn
  stretched = round(yarn.factor * yarn.original_max_len) if yarn else 0
  given = hf_keys.take(fields, 'max_position_embeddings', int, 0)
  return max(given, stretched) or None


def _language_model(config_json: dict[str, Any]) -> tuple[dict[str, Any], str]:
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


def _values(fields: dict[str, Any], family: _Family) -> dict[str, Any]:
  hf_keys.check_only(fields, _IMPLEMENTED | family.implemented)
  layers = hf_keys.take_list(fields, 'layer_types', str)
  if set(layers) - {'full_attention'}:
    raise ValueError(
      f"'layer_types' has {sorted(set(layers))}; only 'full_attention' is "
      'implemented.'
    )
  experts = [fields[k] for k in _EXPERT_KEYS if fields.get(k) is not None]
  if any(value != experts[0] for value in experts):
    raise ValueError(f'{_EXPERT_KEYS} have different values: {experts}.')
  fields = fields | dict.fromkeys(_EXPERT_KEYS, experts[0] if experts else None)
  values = dict(family.fixed)
  for key, (field, *kind) in (_KEYS | family.keys).items():
    values[field] = hf_keys.take(fields, key, *kind)
  is_mla = values['attention.kind'] == 'mla'
  (_check_mla if is_mla else _complete_gqa)(fields, values)
  is_interleaved = values.pop('rope.interleaved')
  nested: dict[str, Any] = {'remat': True, 'compute_dtype': 'bfloat16'}
  nested['rope'] = dataclasses.asdict(
    rope.from_fields(fields, interleaved=is_interleaved, is_mla=is_mla)
  )
  values |= {'moe.aux_loss_weight': 0.0, 'moe.z_loss_weight': 0.0}
  for path, value in values.items():
    section, _, field = path.rpartition('.')
    (nested.setdefault(section, {}) if section else nested)[field] = value
  return nested


def _check_mla(fields: dict[str, Any], values: dict[str, Any]) -> None:
  # transformers has a default for these that differs from null.
  for key in ('q_lora_rank', 'n_shared_experts'):
    if key not in fields:
      raise ValueError(f'{key!r} is missing; it must be int or null.')
  heads = values['attention.num_heads']
  kv_heads = hf_keys.take(fields, 'num_key_value_heads', int, heads)
  if kv_heads != heads:
    raise ValueError(
      f"'num_key_value_heads' ({kv_heads}) must be 'num_attention_heads' "
      f'({heads}): a latent serves all heads.'
    )
  experts, groups = values['moe.num_experts'], values['moe.num_groups']
  if groups < 1 or experts % groups or experts < 2 * groups:
    raise ValueError(
      f"'n_group' ({groups}) must divide the {experts} experts into groups of "
      'at least two: transformers ranks a group by its two best scores.'
    )


def _complete_gqa(fields: dict[str, Any], values: dict[str, Any]) -> None:
  """Adds the fields whose keys are absent, or say more than one thing."""
  heads = values['attention.num_heads']
  head_dim = values['embed_dim'] // max(heads, 1)
  if 'attention.head_dim' not in values:  # OLMoE has no such key.
    hf_keys.check_only(fields, {'head_dim': head_dim})
  values['attention.head_dim'] = values.get('attention.head_dim') or head_dim
  if values['attention.num_kv_heads'] is None:
    values['attention.num_kv_heads'] = heads
  values['attention.out_bias'] = values['attention.qkv_bias']
  dense = set()
  if 'dense_ffw_dim' in values:
    dense = set(hf_keys.take_list(fields, 'mlp_only_layers', int))
  if dense != set(range(len(dense))):
    raise ValueError(
      f"'mlp_only_layers' ({sorted(dense)}) must be the first layers."
    )
  values['num_dense_layers'] = len(dense)
  values.setdefault('dense_ffw_dim', values['moe.ffw_dim'])


def to_hf(config: model_config.ModelConfig, family: str) -> dict[str, Any]:
  """Returns a `config.json`; a ValueError if the family lacks a value."""
  if family not in names.FAMILIES:
    raise ValueError(f'family {family!r} is not one of {names.FAMILIES}.')
  known, flat = _FAMILIES[family], files.flatten(config.to_dict())
  differing = {'attention.kind': known.fixed['attention.kind']}
  if config.attention.kind == differing['attention.kind']:
    fields = _fields(config, known)
    # A value that the file cannot hold is read back as another one.
    has_heads = bool(fields.get('num_nextn_predict_layers'))
    as_read = files.flatten(from_hf(fields, mtp=has_heads)[0].to_dict())
    differing = {
      name: as_read.get(name)
      for name, value in flat.items()
      if name not in model_config.FREE and as_read.get(name) != value
    }
    if not differing:
      return fields
  pairs = [
    f'{name} is {flat[name]!r}, but a model of family {family!r} can only '
    f'have {other!r}'
    for name, other in differing.items()
  ]
  raise ValueError(f'{"; ".join(pairs)}. Change the config or the family.')


def _fields(
  config: model_config.ModelConfig, family: _Family
) -> dict[str, Any]:
  flat, yarn = files.flatten(config.to_dict()), config.rope.yarn
  fields = {
    'model_type': family.model_type,
    'architectures': [family.architecture],
    **{key: flat[field] for key, (field, *_) in (_KEYS | family.keys).items()},
    **_IMPLEMENTED,
    **family.implemented,
    **rope.to_fields(config.rope),
    'max_position_embeddings': (
      round(yarn.factor * yarn.original_max_len) if yarn else 4096
    ),
    # The tokenizer is unknown here, and the defaults belong to other models.
    **dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id')),
  }
  if config.attention.kind == 'mla':
    fields['num_key_value_heads'] = config.attention.num_heads
    heads = config.mtp.depth if config.mtp else 0
    fields['num_nextn_predict_layers'] = heads
  elif family.model_type == 'qwen3_moe':
    fields['mlp_only_layers'] = list(range(config.num_dense_layers))
  return fields
