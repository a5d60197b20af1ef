"""Qwen3-235B-A22B (Qwen3 Technical Report, arXiv:2505.09388; config.json).

235.09B parameters, 22.19B of them active, both untied tables included: the 235B
and 22B of its model card. Keys and values of 192,512 bytes per token in
bfloat16. Qwen3-30B-A3B made wider and deeper.
"""

import ml_collections

from configs.models import qwen3_30b_a3b


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the fields of ModelConfig; it takes no `arg`."""
  c = qwen3_30b_a3b.get_config(arg)
  c.embed_dim = 4096
  c.num_layers = 94
  c.dense_ffw_dim = 12288  # unused: no layer is dense
  c.attention.num_heads = 64
  c.moe.ffw_dim = 1536
  # moe.aux_loss_weight as published too: 94 / 8 times as hard as it sounds.
  return c
