"""What a train step costs in processor time where devices share its experts.

  python -m benchmarks.expert_parallel [--quick]

The whole step (forward, backward, clipping, AdamW) of a Qwen3-MoE of 17.6M
parameters: 4 layers of 8 experts, 2 of them active, embed 256, ffw 512,
vocabulary 8192, float32, 4 rows of 256 tokens. Four emulated devices of one
process on one core run it with two experts and a row each, by each transport
and size of buffers. The peer is one device with everything. The ratio falls
below 1 by collectives, rows of padding, smaller products and four times the
overhead. CPU seconds say nothing about the time of an accelerator's network.
"""

import argparse
import dataclasses
import os
from typing import Any

from benchmarks import interleaved

DEVICES = 4
ROWS, LENGTH = 4, 256


def _config():
  from benchmarks import train_step_case

  shape = train_step_case.qwen3_17m()
  # Without this loss routers collapse, since the batch is always the same.
  moe = dataclasses.replace(shape.moe, aux_loss_weight=0.01)
  return dataclasses.replace(shape, moe=moe, remat_saves=())


def _batch(vocab_size: int):
  import numpy as np

  from composer_jax.core import batches

  random = np.random.default_rng(0)
  positions_BT = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
  fields: Any = dict(
    tokens_BT=random.integers(0, vocab_size, (ROWS, LENGTH)).astype(np.int32),
    segment_ids_BT=np.ones((ROWS, LENGTH), np.int32),
    positions_BT=positions_BT,
    loss_weights_BT=(positions_BT > 0).astype(np.float32),
  )
  return batches.LMBatch(**fields)


def _runner(transport: str | None, room: float, steps: int) -> Any:
  """Returns a function that trains for `steps` and counts its tokens.

  Args:
    transport: one of `rounds.TRANSPORTS`; None runs on one device.
    room: copies that a buffer holds over their mean.
    steps: training steps of each call.
  """
  import jax
  import optax

  from composer_jax.models import decoder
  from composer_jax.parallel import topology
  from composer_jax.train import placement as train_placement
  from composer_jax.train import state as train_state
  from composer_jax.train import step as train_step

  model = _config()
  devices = jax.devices()[: DEVICES if transport else 1]
  placement = train_placement.build(
    model,
    mesh=topology.make_mesh(1, len(devices), 1, devices=devices),
    options=train_placement.ParallelOptions(
      transport=transport or 'auto', room=room
    ),
  )
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.01)
  )

  def create(key):
    return train_state.create(decoder.init(model, key), optimizer)

  key = jax.random.key(0)
  places = train_state.shardings(
    jax.eval_shape(create, key), placement.variables, placement.mesh
  )
  state = jax.jit(create, out_shardings=places)(key)
  batch = placement.put(_batch(model.vocab_size))
  step = train_step.make(model, optimizer, plan=placement.plan, bias_rate=0.0)
  compiled = (
    jax.jit(
      step,
      in_shardings=(places, placement.batch),
      out_shardings=(places, None),
      donate_argnums=0,
    )
    .lower(state, batch)
    .compile()
  )

  def run() -> float:
    nonlocal state
    for _ in range(steps):
      state, _ = compiled(state, batch)
    jax.block_until_ready(state)
    return float(steps * ROWS * LENGTH)

  return run


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='under a minute')
  quick = parser.parse_args().quick
  interleaved.pin_to_one_core()
  flags = os.environ.get('XLA_FLAGS', '')
  count = '--xla_force_host_platform_device_count'
  os.environ['XLA_FLAGS'] = f'{flags} {count}={DEVICES}'

  from composer_jax.models import flops

  per_token = flops.train_per_token(_config(), LENGTH, causal=True)
  limit = interleaved.peak() / per_token
  alone = _runner(None, 1.0, 1)
  cases = [('a2a', 1.25), ('a2a', 0.5), ('a2a', 2.0), ('ragged_a2a', 1.25)]
  for transport, room in cases[:1] if quick else cases:
    interleaved.report(
      'expert_parallel',
      f'17.6M on {DEVICES} emulated devices: {transport}, room for {room:g} '
      'means',
      interleaved.rates(_runner(transport, room, 1), alone, 3 if quick else 9),
      against='one device',
      limit=limit,
      goal='ratio >= 0.5',
      met=lambda rate, ratio: ratio >= 0.5,
    )


if __name__ == '__main__':
  main()
