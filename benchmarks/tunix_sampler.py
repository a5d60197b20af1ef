"""The vanilla sampler of google-tunix as a process that samples on request.

`benchmarks.rollout --tunix-python=PATH` runs this file in an environment with
google-tunix, which has another version of JAX. It reads one line of JSON with
the model's shape and the lengths; then, for each further line, it samples one
batch and prints the CPU seconds. It imports nothing of this project.
"""

import json
import os
import sys
import time


class _Numbers:
  """A tokenizer of texts whose words are token ids."""

  def encode(self, text: str, **_) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids, **_) -> str:
    return ' '.join(str(i) for i in ids)

  def bos_id(self) -> int:
    return 0

  def eos_id(self) -> int:
    return 1

  def pad_id(self) -> int:
    return 2


def main() -> None:
  shape = json.loads(sys.stdin.readline())
  flags = os.environ.get('XLA_FLAGS', '')
  if '--xla_cpu_multi_thread_eigen=false' not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} --xla_cpu_multi_thread_eigen=false'
  os.environ['JAX_PLATFORMS'] = 'cpu'

  import jax
  import numpy as np
  from flax import nnx
  from tunix.generate import sampler as samplers
  from tunix.models.qwen3 import model as qwen3

  config = qwen3.ModelConfig(
    num_layers=shape['num_layers'],
    vocab_size=shape['vocab_size'],
    embed_dim=shape['embed_dim'],
    hidden_dim=shape['ffw_dim'],
    num_heads=shape['num_heads'],
    head_dim=shape['head_dim'],
    num_kv_heads=shape['num_kv_heads'],
    rope_theta=10_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
    num_experts=shape['num_experts'],
    num_experts_per_tok=shape['num_active'],
  )
  model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
  params = jax.tree.leaves(nnx.state(model, nnx.Param))
  sampler = samplers.Sampler(
    model,
    _Numbers(),
    samplers.CacheConfig(
      cache_size=256,
      num_layers=config.num_layers,
      num_kv_heads=config.num_kv_heads,
      head_dim=config.head_dim,
    ),
  )
  rng = np.random.default_rng(0)

  def sample(seed: int) -> int:
    # One token fewer, because the sampler prepends its own first token.
    size = (shape['batch'], shape['prompt'] - 1)
    prompts = [
      ' '.join(map(str, row))
      for row in rng.integers(3, config.vocab_size, size)
    ]
    output = sampler(
      prompts,
      max_generation_steps=shape['new'],
      max_prompt_length=64,
      temperature=1.0,
      top_p=1.0,
      # An id outside of the vocabulary, so that no row ends early.
      eos_tokens=[config.vocab_size],
      seed=seed,
    )
    return sum(len(tokens) for tokens in output.tokens)

  sample(0)
  print(json.dumps({'params': sum(p.size for p in params)}), flush=True)
  for turn, _ in enumerate(sys.stdin):
    start = time.process_time()
    tokens = sample(turn + 1)
    seconds = time.process_time() - start
    print(json.dumps({'units': tokens, 'seconds': seconds}), flush=True)


if __name__ == '__main__':
  main()
