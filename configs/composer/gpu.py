"""The whole loop on one GPU in bfloat16, trainer and engine taking turns.

  ./run.sh --config=configs/composer/gpu.py

One process owns the GPU (`colocated`): two JAX processes would each
preallocate it. Not measured on a GPU.
"""

import ml_collections

from configs.composer import tiny


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Takes the argument of tiny.py: `gpu.py:smoke` is for tests."""
  c = tiny.get_config(arg)
  c.mesh = dict(replica=1, fsdp=1, context=1)
  c.model.compute_dtype = 'bfloat16'
  c.rl.placement = 'colocated'
  c.rl.max_staleness = 0
  # Nats a token. Rounding to bfloat16 on a CPU gives less than 1e-6 with replay
  # and at most 2e-5 without (studies/mismatch); a GPU may round more. A band so
  # wide overlooks a rollout that names a wrong policy version, if the step
  # between the two versions was small.
  c.rl.gate.max_kl_exact = 1e-4
  c.rl.gate.min_exact_agreement = 0.97  # some near ties go the other way
  c.rl.gate.max_kl_afresh = 1e-3
  if arg == 'smoke':
    return c
  c.accelerator = True
  c.delta.threads = 4
  c.model.embed_dim = 256
  c.model.attention.head_dim = 64
  c.model.dense_ffw_dim = 768
  c.model.moe.ffw_dim = 256
  for stage in (c.cpt, c.sft):
    stage.batch_size = 32
    stage.steps = 2000
  c.demonstrations.count = 20_000
  c.rollout.num_slots = 256
  c.rollout.prefill_rows = 64
  c.rollout.decode_steps = 8
  c.rl.prompts = 16
  c.rl.rollouts_per_prompt = 16
  c.rl.rows = 32
  c.rl.steps = 200
  c.evaluation.episodes = 400
  return c
