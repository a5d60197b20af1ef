"""A peer of the rollout engine: `generate` of Hugging Face transformers.

A process of `peer_process`; its task is `rollout_peers.task` with transformers'
implementation of experts and kind of cache. The model is a Qwen3-MoE with
random weights, on CUDA if torch has it, else on one thread.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import peer_process

_EXPERTS = ('grouped_mm', 'batched_mm', 'eager')
_CACHES = ('static', 'dynamic')


def variants(
  task: dict[str, Any], environment: dict[str, str]
) -> dict[str, Callable[[], peer_process.Peer]]:
  """Returns what starts each variant of a task, by name."""

  def start(experts: str, cache: str) -> peer_process.Peer:
    command = [sys.executable, '-m', 'benchmarks.rollout_hf']
    choices = {'experts': experts, 'cache': cache}
    return peer_process.Peer(command, task | choices, environment)

  return {
    f'{experts}, {cache} cache': lambda e=experts, c=cache: start(e, c)
    for experts, cache in itertools.product(_EXPERTS, _CACHES)
  }


def prepare(task: dict[str, Any]) -> Callable[[], float]:
  """Returns a function that samples for a batch and counts new tokens."""
  import torch
  import transformers

  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  torch.set_num_threads(1)
  transformers.logging.set_verbosity_error()
  # transformers annotates neither the config's extra fields nor `generate`.
  library: Any = transformers
  config = library.Qwen3MoeConfig(
    vocab_size=task['vocab_size'],
    hidden_size=task['embed_dim'],
    intermediate_size=task['ffw_dim'],
    moe_intermediate_size=task['ffw_dim'],
    num_hidden_layers=task['num_layers'],
    num_attention_heads=task['num_heads'],
    num_key_value_heads=task['num_kv_heads'],
    head_dim=task['head_dim'],
    num_experts=task['num_experts'],
    num_experts_per_tok=task['num_active'],
    decoder_sparse_step=1,
    norm_topk_prob=True,
    tie_word_embeddings=task['tie_embeddings'],
    max_position_embeddings=512,
  )
  # Made where it stays: a model of 7B takes minutes to make on the host.
  torch.set_default_dtype(getattr(torch, task['compute_dtype']))
  with torch.device(device):
    model = library.Qwen3MoeForCausalLM(config).eval()
  model.set_experts_implementation(task['experts'])
  batch, prompt, new = task['batch'], task['prompt'], task['new']

  def sample() -> int:
    size = (batch, prompt)
    tokens = torch.randint(0, task['vocab_size'], size, device=device)
    with torch.no_grad():
      generated = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        cache_implementation=task['cache'],
        pad_token_id=0,
        eos_token_id=None,
      )
    assert generated.shape == (batch, prompt + new)
    return batch * new

  def run() -> float:
    return float(sum(sample() for _ in range(task['repeats'])))

  run()
  return run


if __name__ == '__main__':
  peer_process.serve(prepare)
