"""The peer of `train_step`: Hugging Face transformers on torch, on one core.

A process of `peer_process`; its task names the rows, their length, the
implementation of experts in transformers, and if torch compiles the model.
"""

import sys
from collections.abc import Callable
from typing import Any

from benchmarks import peer_process

_EXPERTS = ('grouped_mm', 'eager')


def variants(
  rows: int, length: int, environment: dict[str, str]
) -> dict[str, Callable[[], peer_process.Peer]]:
  """Returns what starts each variant, by name."""

  def start(experts: str, is_compiled: bool) -> peer_process.Peer:
    task = dict(
      rows=rows, length=length, experts=experts, is_compiled=is_compiled
    )
    command = [sys.executable, '-m', 'benchmarks.train_step_hf']
    return peer_process.Peer(command, task, environment)

  return {
    experts + ', compiled' * is_compiled: lambda e=experts, c=is_compiled: (
      start(e, c)
    )
    for experts in _EXPERTS
    for is_compiled in (False, True)
  }


def prepare(task: dict[str, Any]) -> Callable[[], float]:
  """Returns a function that trains for one step and counts its tokens."""
  import numpy as np
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
    experts_implementation=task['experts'],
  )
  config = transformers.Qwen3MoeConfig(**fields)
  model: Any = transformers.Qwen3MoeForCausalLM(config).float().train()
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=3e-4, weight_decay=0.01, fused=True
  )
  if task['is_compiled']:
    model = torch.compile(model)
  random = np.random.default_rng(0)
  size = (task['rows'], task['length'])
  tokens = torch.tensor(random.integers(0, 8192, size))

  def run() -> float:
    optimizer.zero_grad(set_to_none=True)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return float(tokens.numel())

  run()
  return run


if __name__ == '__main__':
  peer_process.serve(prepare)
