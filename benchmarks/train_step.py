"""Tokens per second of the pretraining step, beside dense experts.

  python -m benchmarks.train_step [--quick]

One jitted, donated step of the tiny model (forward, backward, clipping, Muon
and AdamW, the routers' bias) on one device and a packed batch. The peer is the
same step with every expert computed for every token, which is what
`jax.lax.ragged_dot` does on a CPU. The limit counts the useful operations of a
step (`models.flops`, optimizer left out) at the speed of the machine's own
matrix product.
"""

import argparse
import functools
from unittest import mock

from benchmarks import interleaved


def _batch(rows: int, length: int, vocab_size: int):
  """Returns a batch of two documents a row."""
  import jax
  import jax.numpy as jnp

  from composer_jax.core import batches

  tokens_BT = jax.random.randint(
    jax.random.key(1), (rows, length), 0, vocab_size
  )
  half = jnp.arange(length) // (length // 2)
  positions_T = jnp.arange(length) % (length // 2)
  weights_T = (positions_T > 0).astype(jnp.float32)
  return batches.LMBatch(
    tokens_BT=tokens_BT,
    segment_ids_BT=jnp.broadcast_to(half + 1, tokens_BT.shape),
    positions_BT=jnp.broadcast_to(positions_T, tokens_BT.shape),
    loss_weights_BT=jnp.broadcast_to(weights_T, tokens_BT.shape),
  )


def _optimizer(config):
  from composer_jax.models import decoder
  from composer_jax.optim import groups

  shapes, axes = decoder.abstract(config)
  options = groups.OptimizerOptions(
    name='muon',
    learning_rate=2e-3,
    adam_learning_rate=2e-3,
    warmup_steps=1,
    decay_steps=1,
    final_ratio=0.1,
  )
  return groups.optimizer(
    options, params=shapes['params'], axes=axes['params'], total_steps=100
  )


def _runner(config, batch, steps: int, backend: str):
  """Returns a function that trains for `steps` and counts its tokens."""
  import jax

  from composer_jax.kernels import grouped_matmul
  from composer_jax.models import decoder
  from composer_jax.train import state as train_state
  from composer_jax.train import step as train_step

  optimizer = _optimizer(config)
  init = jax.jit(functools.partial(decoder.init, config))
  state = train_state.create(init(jax.random.key(0)), optimizer)
  step = train_step.make(config, optimizer, plan=None, bias_rate=1e-3)
  chosen = {**grouped_matmul._PLATFORM_BACKENDS, 'cpu': backend}
  # The backend is picked while tracing, by platform: nothing else differs.
  with mock.patch.object(grouped_matmul, '_PLATFORM_BACKENDS', chosen):
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()

  def run() -> float:
    nonlocal state
    for _ in range(steps):
      state, _ = compiled(state, batch)
    jax.block_until_ready(state)
    return float(steps * batch.tokens_BT.size)

  return run


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='under a minute')
  quick = parser.parse_args().quick
  interleaved.pin_to_one_core()

  from composer_jax.models import config as config_lib
  from composer_jax.models import flops
  from configs.models import tiny

  config = config_lib.ModelConfig.from_dict(tiny.get_config().to_dict())
  rows, length = 8, 512
  batch = _batch(rows, length, config.vocab_size)
  steps = 1 if quick else 3
  # A limit counts what no program can do without, unlike MFU: two documents a
  # row, of which a token sees half of its own.
  per_token = flops.train_per_token(config, length // 2, causal=True)
  interleaved.report(
    'train_step',
    f'tiny model, {rows} x {length} tokens, {config.moe.num_active} of '
    f'{config.moe.num_experts} experts',
    interleaved.rates(
      _runner(config, batch, steps, 'blocked'),
      _runner(config, batch, steps, 'ragged'),
      2 if quick else 9,
    ),
    limit=interleaved.peak() / per_token,
    goal='ratio >= 1.2',
    met=lambda rate, ratio: ratio >= 1.2,
  )


if __name__ == '__main__':
  main()
