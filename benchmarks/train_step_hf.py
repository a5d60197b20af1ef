"""The peer of `train_step`: Hugging Face transformers on torch, on one core."""

from collections.abc import Callable
from typing import Any

import numpy as np


def runner(tokens_BT: np.ndarray, *, experts: str) -> Callable[[], float]:
  """Returns a function that trains for one step and counts its tokens.

  Args:
    tokens_BT: token ids of the batch.
    experts: name of transformers' `experts_implementation`.
  """
  import torch
  import transformers

  torch.set_num_threads(1)
  torch.manual_seed(0)
  fields: dict[str, Any] = dict(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=8,
    num_experts_per_tok=2,
    decoder_sparse_step=1,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    use_cache=False,
    output_router_logits=False,
    experts_implementation=experts,
  )
  config = transformers.Qwen3MoeConfig(**fields)
  model = transformers.Qwen3MoeForCausalLM(config).float().train()
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=3e-4, weight_decay=0.01, fused=True
  )
  tokens = torch.tensor(tokens_BT, dtype=torch.long)

  def run() -> float:
    optimizer.zero_grad(set_to_none=True)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return float(tokens.numel())

  return run
