"""Kimi K2.5's text model, which is Kimi K2 with a longer context.

Sources: Kimi K2 (arXiv:2507.20534) and the text_config of Kimi-K2.5's
config.json. DeepSeek-V3 with half the heads, half as many experts again and no
groups.

1026.41B parameters, 32.86B of them active, both untied tables included. The
advertised 1.04T is this with all 61 layers counted as mixtures (1.043T). The
paper says 32.6B active, the model card 32B; without the embedding, of which a
token reads a row, it is 31.69B. Routed experts hold 1014.69B, 98.9 %. The
vision tower (0.4B) is not part of it.
Latents of 70,272 bytes per token in bfloat16, 18.4 GB at the full context.

The context is K2.5's: YaRN x64 from 4,096 to 262,144 tokens. The first
Kimi-K2-Instruct differs in norm_eps (1e-6), factor (32) and beta_fast (1).
"""

import ml_collections

from configs.models import deepseek_v3


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the fields of ModelConfig; it takes no `arg`."""
  c = deepseek_v3.get_config(arg)
  c.vocab_size = 163840
  c.num_dense_layers = 1
  c.norm_eps = 1e-5
  c.attention.num_heads = 64
  c.rope.theta = 50000.0
  c.rope.yarn.factor = 64.0
  c.moe.num_experts = 384
  c.moe.num_groups = 1
  c.moe.num_active_groups = 1
  c.moe.routed_scale = 2.827
  return c
