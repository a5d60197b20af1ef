"""A model of 10M parameters on the smallest functions of real packages.

  python -m experiments.studies.real_code.run --workdir=runs/real_code

The study makes the tasks, bodies of one to three lines, and names their folder
after the colon: `real_code.py:DIR`. Without a folder the file can be loaded.
`real_code.py:DIR,smoke` is a job of seconds on a small set.

The language of actions is narrow: a prompt shows the lines around the place,
and a call writes the body alone. SFT shows thousands of short functions of the
corpus in that form and the solutions of a few tasks; RL plays the other
training tasks, and both policies several episodes of each held-out task. What
that gave: experiments/studies/real_code.
"""

import ml_collections

from configs.composer import deletion

_SHARE = 0.53  # of a set's tasks; the prompts of others are too long
_SHOWN = 4  # tasks whose solutions SFT shows


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  c = deletion.get_config(arg)
  folder, _, variant = arg.partition(',')
  if variant:
    c.episode.max_call_tokens = 768  # the set's functions are of any length
    return c
  c.tasks.tiers = ('body',)
  c.tasks.repository.update(tools=('body', 'finish'), lines_around=5)
  c.episode.update(max_turns=3, max_call_tokens=128, max_tokens=512)
  c.summary.trigger = 0
  c.curriculum.enabled = False
  c.mesh.replica = 1
  c.data.update(sources=('pinned', 'stdlib'), max_bytes=24_000_000)
  c.data.fim_rate = 0.5
  c.tokenizer.train_bytes = 2_000_000
  c.model.update(vocab_size=2048, embed_dim=192, num_layers=4)
  c.model.dense_ffw_dim = 512
  c.model.attention.update(num_heads=6, num_kv_heads=2)
  c.model.moe.update(num_experts=32, ffw_dim=160)
  c.cpt.update(steps=90, batch_size=16, seq_len=512, decay_steps=30)
  c.cpt.update(learning_rate=5e-3, adam_learning_rate=3e-3, warmup_steps=20)
  c.cpt.eval_every = 30
  c.sft.update(steps=450, batch_size=6, seq_len=1024, decay_steps=225)
  c.sft.update(learning_rate=5e-3, adam_learning_rate=2e-3, warmup_steps=20)
  c.sft.update(eval_every=50, eval_batches=4)
  c.demonstrations.update(count=_SHOWN, practice=20_000, context_loss=0.7)
  c.rollout.num_slots = 32
  c.rl.update(prompts=4, rollouts_per_prompt=8, rows=8, seq_len=512)
  c.rl.update(learning_rate=2e-4, warmup_steps=1)
  c.evaluation.samples = 4
  if folder:
    _count(c, folder)
  return c


def _count(c: ml_collections.ConfigDict, folder: str) -> None:
  """Sets numbers of tasks by those of the set."""
  from composer_jax.tasks.repository import task_set

  known = task_set.load(folder)
  train, held_out = (len(list(known.split(x))) for x in (False, True))
  left = int(_SHARE * (train - c.demonstrations.count))
  c.rl.steps = max(1, left // c.rl.prompts)
  c.rl.decay_steps = c.rl.steps // 2
  c.evaluation.episodes = max(1, int(_SHARE * held_out))
