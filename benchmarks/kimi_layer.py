"""One layer of Kimi K2 at its real size, on one accelerator.

  python -m benchmarks.kimi_layer [--tiny]

A layer of latent attention and experts in bfloat16, with as many of the 384
experts as the memory holds twice (weights and their gradients): forward, and
forward with all gradients, on rows of 4,096 tokens. The figure is the share of
the peak that the necessary operations reach; recomputation is off. `--tiny`
runs the same code at a size whose figures mean nothing, on any device.
"""

import argparse
import dataclasses
import os
from typing import Any

from benchmarks import interleaved

_ROWS, _LENGTH = 2, 4096
# The rest is for activations and temporaries.
_SHARE_OF_WEIGHTS = 0.8
_GOAL = 0.4


def _config(memory: float, *, is_tiny: bool) -> Any:
  """Returns a model of one layer, with a small vocabulary.

  Raises:
    ValueError: the layer with 12 experts does not fit.
  """
  from composer_jax.models import config as model_config
  from composer_jax.models import flops
  from configs.models import kimi_k2

  whole = model_config.ModelConfig.from_dict(kimi_k2.get_config().to_dict())
  layer = dataclasses.replace(
    whole, vocab_size=512, num_layers=1, num_dense_layers=0, remat=False
  )
  if is_tiny:
    return dataclasses.replace(
      layer,
      embed_dim=64,
      attention=dataclasses.replace(layer.attention, num_heads=2),
      moe=dataclasses.replace(layer.moe, num_experts=16, ffw_dim=32),
    )
  for divisor in (1, 2, 4, 8, 16, 32):
    config = dataclasses.replace(
      layer, moe=dataclasses.replace(layer.moe, num_experts=384 // divisor)
    )
    if 4 * flops.params_total(config) <= _SHARE_OF_WEIGHTS * memory:
      return config
  raise ValueError(
    f'No layer with 12 or more experts fits into {memory / 1e9:.0f} GB.'
  )


def _variables(config: Any) -> Any:
  """Returns random weights, made in bfloat16."""
  import jax
  import jax.numpy as jnp

  from composer_jax.models import decoder

  leaves, tree = jax.tree.flatten(decoder.abstract(config)[0])

  @jax.jit
  def make(key):
    keys = jax.random.split(key, len(leaves))
    return [
      0.02 * jax.random.normal(k, x.shape, jnp.bfloat16)
      for k, x in zip(keys, leaves, strict=True)
    ]

  return jax.tree.unflatten(tree, make(jax.random.key(0)))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--tiny', action='store_true')
  is_tiny = parser.parse_args().tiny
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.95')

  import jax
  import jax.numpy as jnp

  from composer_jax.models import decoder, flops

  interleaved.need_accelerator('kimi_layer', is_tiny=is_tiny)
  stats: Any = jax.devices()[0].memory_stats()
  memory = 0.0 if is_tiny else float(stats['bytes_limit'])
  config = _config(memory, is_tiny=is_tiny)
  rows, length = (1, 32) if is_tiny else (_ROWS, _LENGTH)
  variables = _variables(config)
  shape = (rows, length)
  tokens_BT = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
  ones_BT = jnp.ones(shape, jnp.int32)
  positions_BT = jnp.broadcast_to(jnp.arange(length), shape)

  def loss(variables):
    output = decoder.Decoder(config).apply(
      variables, tokens_BT, ones_BT, positions_BT
    )
    return output.hidden_BTD.astype(jnp.float32).mean()

  per_token = flops.forward_per_token(config, length, causal=True)
  peak = interleaved.peak()
  for name, function, times in (
    ('forward', jax.jit(loss), 1),
    ('forward and gradients', jax.jit(jax.grad(loss)), 3),
  ):

    def run(function=function) -> float:
      jax.block_until_ready(function(variables))
      return float(rows * length)

    rates = interleaved.rates(run, run, 2 if is_tiny else 10)
    limit = peak / (times * per_token)
    interleaved.report(
      'kimi_layer',
      f'{name}, {config.moe.num_experts} of 384 experts, {rows} x {length}',
      (rates[0] + rates[1], []),
      limit=limit,
      goal=f'>= {_GOAL} of the limit',
      met=lambda rate, _, limit=limit: rate >= _GOAL * limit,
    )


if __name__ == '__main__':
  main()
