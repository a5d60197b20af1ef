"""Peers of the rollout engine: two samplers and a plain read.

`generate` of Hugging Face transformers is a reference that runs any model on
any device and is tuned for accelerators, not for small models on one core.
Tunix's vanilla sampler serves RL on TPUs, where its loop over all experts costs
little. Neither batches requests that come and go, records routes or takes new
weights between two tokens.
"""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import peer_process, rollout_hf

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


def task(
  config: Any, batch: int, prompt: int, new: int, repeats: int = 1
) -> dict[str, Any]:
  """Returns what a sampler is asked: `repeats` batches of whole requests."""
  a, moe = config.attention, config.moe
  return {
    'num_layers': config.num_layers,
    'vocab_size': config.vocab_size,
    'embed_dim': config.embed_dim,
    'ffw_dim': moe.ffw_dim,
    'num_heads': a.num_heads,
    'head_dim': a.head_dim,
    'num_kv_heads': a.num_kv_heads,
    'num_experts': moe.num_experts,
    'num_active': moe.num_active,
    'tie_embeddings': config.tie_embeddings,
    'compute_dtype': config.compute_dtype,
    'batch': batch,
    'prompt': prompt,
    'new': new,
    'repeats': repeats,
  }


def transformers(
  task: dict[str, Any], rounds: int
) -> Iterator[tuple[str, peer_process.Peer]]:
  """Yields the fastest variant of transformers, with MKL unlocked and not.

  On a GPU, where MKL multiplies nothing, it yields one.
  """
  import jax

  on_cpu = jax.default_backend() == 'cpu'
  libraries = peer_process.libraries() if on_cpu else {'CUDA': {}}
  for library, environment in libraries.items():
    variants = rollout_hf.variants(task, environment)
    if not on_cpu:  # There the others are slower, and starting takes long.
      variants = {k: v for k, v in variants.items() if 'grouped_mm' in k}
    best = peer_process.fastest(variants, rounds)
    peer = variants[best]()
    yield f'transformers ({best}; {library})', peer
    peer.close()


def tunix(python: str, task: dict[str, Any]) -> peer_process.Peer:
  """Returns Tunix's sampler, run by the Python of its own environment.

  Raises:
    PeerError: that Python does not run google-tunix.
  """
  script = pathlib.Path(__file__).with_name('tunix_sampler.py')
  try:
    return peer_process.Peer([python, str(script)], task, {'PYTHONPATH': ''})
  except peer_process.PeerError as error:
    raise peer_process.PeerError(
      f'{python} does not run google-tunix; make an environment for it: pip '
      f'install google-tunix==0.1.7 (Python 3.12). It says: {error}'
    ) from error
