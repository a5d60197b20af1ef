"""A world to learn from live use in, with users of known taste.

  ./run.sh live

Trains a policy that has no taste by short SFT, and then from simulated users:
`experiments/studies/live` has the world, its users and results.
"""

import ml_collections

from configs.composer import tiny


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  if arg:
    raise ValueError(f'live.py takes no argument, not {arg!r}.')
  c = tiny.get_config('smoke')
  c.mesh.replica = 1
  c.tasks.family = 'experiments.studies.live.world:LiveRequests'
  c.model.update(num_layers=2, embed_dim=64, dense_ffw_dim=128, vocab_size=512)
  c.model.attention.update(head_dim=16, num_heads=4, num_kv_heads=2)
  c.model.moe.update(ffw_dim=64)
  c.demonstrations.count = 4000
  c.sft.update(
    opening=0,
    steps=400,
    batch_size=16,  # rows of several demonstrations
    seq_len=96,
    warmup_steps=10,
    decay_steps=200,
    checkpoint_every=200,
    eval_every=100,
    log_every=20,
  )
  c.sandbox.level = 'static'  # nothing is executed
  c.episode.update(max_tokens=64, max_turns=1, max_call_tokens=24)
  c.rewards.update(effort_coefficient=0.0, unfinished_penalty=0.0)
  c.hints.loss.weight = 0.0
  c.evaluation.episodes = 100
  c.rollout.update(num_slots=16, prefill_rows=16)
  c.rl.update(
    # Of live learning: no schedule may end it.
    steps=1000,
    decay_steps=0,
    prompts=8,  # with the next, 64 episodes a step
    rollouts_per_prompt=8,
    max_staleness=4,
    placement='colocated',
    learning_rate=2e-3,
    rows=16,
    seq_len=64,
  )
  c.live.update(
    steps=4,  # at most, in a cycle
    least_steps=4,
    max_age=4,  # versions that an episode may be behind
    # A suite must be of a few hundred tasks to exclude such a loss.
    gate=dict(margin=0.05, canary_margin=0.05, alpha=0.05),
    trial=dict(share=0.5, margin=0.1, most_users=500),
  )
  return c
