"""`config.json` of tiny models, one for each thing that a family can have."""

from typing import Any

# With `rope_theta` this makes some wavelengths keep their frequency, some lose
# all of it and some a part.
YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 32,
  'beta_fast': 1.5,
  'beta_slow': 0.5,
}
_COMMON = {
  'vocab_size': 40,
  'hidden_size': 32,
  'num_attention_heads': 4,
  'num_hidden_layers': 3,
  'num_experts_per_tok': 2,
  'rms_norm_eps': 1e-5,
  'rope_theta': 100.0,
  'max_position_embeddings': 128,
  'tie_word_embeddings': False,
  'bos_token_id': None,
  'eos_token_id': None,
  'pad_token_id': None,
}
_DEEPSEEK = {
  **_COMMON,
  'model_type': 'deepseek_v3',
  'num_key_value_heads': 4,
  'intermediate_size': 20,
  'moe_intermediate_size': 12,
  'first_k_dense_replace': 1,
  'n_routed_experts': 8,
  'n_shared_experts': 2,
  'n_group': 4,
  'topk_group': 2,
  'norm_topk_prob': True,
  'routed_scaling_factor': 2.5,
  'q_lora_rank': 16,
  'kv_lora_rank': 12,
  'qk_nope_head_dim': 6,
  'qk_rope_head_dim': 8,
  'v_head_dim': 10,
  'rope_scaling': {**YARN, 'mscale': 1.0, 'mscale_all_dim': 0.7},
}
_QWEN = {
  **_COMMON,
  'model_type': 'qwen3_moe',
  'num_key_value_heads': 2,
  'head_dim': 6,
  'intermediate_size': 20,
  'moe_intermediate_size': 12,
  'num_experts': 8,
  'norm_topk_prob': True,
}

MODELS: dict[str, dict[str, Any]] = {
  'qwen3_moe': _QWEN,
  # Qwen3 with all its options.
  'qwen3_moe_dense': {
    **_QWEN,
    'attention_bias': True,
    'mlp_only_layers': [0],
    'norm_topk_prob': False,
    'tie_word_embeddings': True,
    'rope_scaling': {**YARN, 'truncate': False},
  },
  'deepseek_v3': _DEEPSEEK,
  # Like Moonlight: queries not compressed, no groups, no YaRN.
  'moonlight': {
    **_DEEPSEEK,
    'q_lora_rank': None,
    'n_group': 1,
    'topk_group': 1,
    'n_shared_experts': 1,
    'rope_scaling': None,
  },
  'olmoe': {
    **_COMMON,
    'model_type': 'olmoe',
    'num_key_value_heads': 2,
    'intermediate_size': 12,
    'num_experts': 8,
    'norm_topk_prob': False,
  },
}
