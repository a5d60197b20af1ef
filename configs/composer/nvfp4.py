"""The main job with the experts' forward pass in NVFP4 and backward in MXFP8.

  ./run.sh --config=configs/composer/nvfp4.py

All else is as in tiny.py. With --config.rollout.experts=nvfp4 the engine holds
codes of 4.5 bits a weight, and with --config.model.precision.codes=True bundles
carry them; no result depends on either in batch-invariant numerics. Sampler and
trainer multiply the same rounded numbers (`numerics.products`); a CPU emulates
them, which takes longer than bfloat16, not shorter.

Argument after a colon: `nvfp4.py:smoke`, as of tiny.py.
"""

import ml_collections

from configs.composer import tiny


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  c = tiny.get_config(arg)
  c.model.precision = dict(experts='nvfp4', backward='mxfp8')
  # In fast numerics engine and trainer add in other orders, and a last bit of
  # an activation can change its code: up to 1e-5 nats in a step of 12 episodes.
  c.rl.gate.max_kl_exact = 1e-4
  return c
