"""A model of 13M parameters on the smallest functions of real packages.

  python -m experiments.studies.real_code.run --workdir=runs/real_code

The study makes the tasks, bodies of one to three lines, and names their folder
after the colon: `real_code.py:DIR`. Without a folder the file can be loaded.
`real_code.py:DIR,smoke` is a job of seconds on a small set.

Half of the training tasks are demonstrated, RL plays most of the others, and
both policies are asked for nearly all tasks of held-out packages: the rest is
room for prompts that do not fit a window. Not measured at these steps; what a
few showed: experiments/studies/real_code.
"""

import ml_collections

from configs.composer import deletion

_SHARE = 0.9  # of a set's tasks; the prompts of some are too long


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  c = deletion.get_config(arg)
  folder, _, variant = arg.partition(',')
  if variant:
    c.episode.max_call_tokens = 768  # the set's functions are of any length
    return c
  c.tasks.tiers = ('body',)
  # Signature, path and description stand in the prompt; a search shows lines
  # of the same module. What remains is to write the body.
  c.tasks.repository.tools = ('search', 'edit', 'finish')
  c.tasks.repository.bounds.answer_chars = 400
  c.episode.max_turns = 6
  c.episode.max_call_tokens = 160
  c.curriculum.enabled = False
  c.data.max_bytes = 24_000_000
  c.tokenizer.train_bytes = 2_000_000
  c.model.update(vocab_size=2048, embed_dim=192, num_layers=5)
  c.model.dense_ffw_dim = 512
  c.model.attention.update(num_heads=6, num_kv_heads=2)
  c.model.moe.update(num_experts=32, ffw_dim=160)
  c.cpt.update(steps=6000, batch_size=16, seq_len=512, decay_steps=2000)
  c.cpt.update(learning_rate=5e-3, adam_learning_rate=2e-3, warmup_steps=50)
  for section in (c.sft, c.rl):
    section.seq_len = 1536
  c.episode.max_tokens = c.summary.trigger = 1536
  c.sft.update(steps=400, batch_size=4, decay_steps=200)
  c.sft.update(learning_rate=2e-3, adam_learning_rate=1e-3)
  c.rollout.num_slots = 32
  c.rl.update(prompts=4, rollouts_per_prompt=8, rows=4, learning_rate=1e-4)
  if folder:
    _count(c, folder)
  return c


def _count(c: ml_collections.ConfigDict, folder: str) -> None:
  """Sets numbers of tasks by those of the set."""
  from composer_jax.tasks.repository import task_set

  known = task_set.load(folder)
  train, held_out = (len(list(known.split(x))) for x in (False, True))
  c.demonstrations.count = max(1, train // 2)
  left = int(_SHARE * (train - c.demonstrations.count))
  c.rl.steps = max(1, left // c.rl.prompts)
  c.rl.decay_steps = c.rl.steps // 2
  c.evaluation.episodes = max(1, int(_SHARE * held_out))
