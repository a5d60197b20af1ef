"""Peers of the rollout engine: two samplers and a plain read.

`generate` of Hugging Face transformers is a reference that runs any model on
any device and is tuned for accelerators, not for small models on one core.
Tunix's vanilla sampler serves RL on TPUs, where its loop over all experts costs
little. Neither batches requests that come and go, records routes or takes new
weights between two tokens.
"""

import json
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

# Bytes of one array of a plain read.
_CHUNK = 1 << 20


def last_level_cache() -> int:
  """Returns the bytes of the last-level cache, or 32 MiB if unknown."""
  size_files = pathlib.Path('/sys/devices/system/cpu/cpu0/cache').glob(
    'index*/size'
  )
  sizes = [int(path.read_text().strip().rstrip('K')) for path in size_files]
  return max(sizes, default=1 << 15) << 10


def plain_read(total: int, step: int) -> Callable[[], float]:
  """Returns a function that reads like decode steps and counts its bytes.

  It sums float32 arrays, the fastest read that XLA has. Each step reads `step`
  bytes of a working set of `total`, in whole arrays chosen at random, as tokens
  choose experts. A sum of a slice would copy the slice first.
  """
  import jax
  import jax.numpy as jnp
  import numpy as np

  count = max(1, round(total / _CHUNK))
  arrays_per_step = max(1, min(count, round(step / _CHUNK)))
  steps = max(1, round((1 << 30) / (arrays_per_step * _CHUNK)))
  arrays = [jnp.full(_CHUNK // 4, i, jnp.float32) for i in range(count)]
  rng = np.random.default_rng(0)
  order = [rng.permutation(count)[:arrays_per_step] for _ in range(steps)]
  ids = jnp.asarray(np.concatenate(order), jnp.int32)

  @jax.jit
  def read(arrays, ids):
    branches = [lambda a=a: a.sum() for a in arrays]

    def body(i, total):
      return total + jax.lax.switch(ids[i], branches)

    return jax.lax.fori_loop(0, ids.shape[0], body, jnp.float32(0))

  def run() -> float:
    jax.block_until_ready(read(arrays, ids))
    return float(ids.shape[0] * _CHUNK)

  return run


def transformers_generate(
  config: Any, batch: int, prompt: int
) -> Callable[[int], float]:
  """Returns a function that samples so many new tokens and counts them.

  The model is a Qwen3-MoE of the same shape and dtype with random weights and a
  static cache, on CUDA if JAX computes on a GPU. On a CPU it has one thread,
  and the implementation of experts that is fastest there.
  """
  import jax
  import torch
  import transformers

  device = 'cuda' if jax.default_backend() == 'gpu' else 'cpu'
  torch.set_num_threads(1)
  transformers.logging.set_verbosity_error()
  a, moe = config.attention, config.moe
  # transformers annotates neither the config's extra fields nor `generate`.
  library: Any = transformers
  model = library.Qwen3MoeForCausalLM(
    library.Qwen3MoeConfig(
      vocab_size=config.vocab_size,
      hidden_size=config.embed_dim,
      intermediate_size=moe.ffw_dim,
      moe_intermediate_size=moe.ffw_dim,
      num_hidden_layers=config.num_layers,
      num_attention_heads=a.num_heads,
      num_key_value_heads=a.num_kv_heads,
      head_dim=a.head_dim,
      num_experts=moe.num_experts,
      num_experts_per_tok=moe.num_active,
      decoder_sparse_step=1,
      norm_topk_prob=True,
      tie_word_embeddings=config.tie_embeddings,
      max_position_embeddings=512,
    )
  )
  model = model.to(device, getattr(torch, config.compute_dtype)).eval()
  model.set_experts_implementation('grouped_mm')

  def run(new: int) -> float:
    size = (batch, prompt)
    tokens = torch.randint(0, config.vocab_size, size, device=device)
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
        cache_implementation='static',
        pad_token_id=0,
        eos_token_id=None,
      )
    assert generated.shape == (batch, prompt + new)
    return float(batch * new)

  return run


class Tunix:
  """The vanilla sampler in a process of its own, one batch at a time."""

  def __init__(self, python: str, config: Any, batch: int, prompt: int, new):
    self._python = python
    a, moe = config.attention, config.moe
    script = pathlib.Path(__file__).with_name('tunix_sampler.py')
    # The child inherits the core to which this process is pinned.
    self._process = subprocess.Popen(
      [python, str(script)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      env={k: v for k, v in os.environ.items() if k != 'PYTHONPATH'},
    )
    shape = {
      'num_layers': config.num_layers,
      'vocab_size': config.vocab_size,
      'embed_dim': config.embed_dim,
      'ffw_dim': moe.ffw_dim,
      'num_heads': a.num_heads,
      'head_dim': a.head_dim,
      'num_kv_heads': a.num_kv_heads,
      'num_experts': moe.num_experts,
      'num_active': moe.num_active,
      'batch': batch,
      'prompt': prompt,
      'new': new,
    }
    self.num_params = self._ask(json.dumps(shape))['params']

  def _ask(self, line: str) -> dict[str, Any]:
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    self._process.stdin.write(line + '\n')
    self._process.stdin.flush()
    answer = self._process.stdout.readline()
    if not answer:
      raise ValueError(
        f'{self._python} does not run google-tunix; make an '
        'environment for it: pip install google-tunix==0.1.7 (Python 3.12).'
      )
    return json.loads(answer)

  def rate(self) -> float:
    """Returns tokens per CPU second of one batch."""
    answer = self._ask('')
    return answer['tokens'] / answer['seconds']

  def close(self) -> None:
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait()


def in_turns(
  ours: Callable[[], float], peer: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
  """Returns rates like `interleaved.rates`; the peer measures its own rate."""
  rates_of_both: tuple[list[float], list[float]] = ([], [])
  for turn in range(rounds + 1):
    start = time.process_time()
    units = ours()
    rate = units / (time.process_time() - start)
    peer_rate = peer()
    if turn:
      rates_of_both[0].append(rate)
      rates_of_both[1].append(peer_rate)
  return rates_of_both


def median(values: list[float]) -> float:
  return statistics.median(values)
