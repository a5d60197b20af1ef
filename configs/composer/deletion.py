"""The whole loop on features deleted from real packages, through JSON tools.

  python -m experiments.make_tasks --out=runs/deletion_tasks
  python -m experiments.composer \
      --config=configs/composer/deletion.py:runs/deletion_tasks \
      --workdir=runs/deletion

The tasks come from the folder after the colon. Without a folder the file can be
loaded, and a run of it says what is missing. `deletion.py:DIR,smoke` is a job
of seconds on a small set, such as the tests make.

A model of this size solves none of the tasks. The config shows that the loop on
real repositories works, and which fields another model has to set (`initial`,
lengths, `mesh`). SFT sees the solutions of `demonstrations.count` tasks, RL
trains on each of the others at most once, and held-out packages are only for
evaluation. Not measured with a model that could solve a task.
"""

import pathlib

import ml_collections

from configs.composer import tiny

_UNNAMED = 'DIR'  # value of `tasks.folder` if no set is named


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  folder, comma, variant = arg.partition(',')
  if comma and variant != 'smoke':
    raise ValueError(f'deletion.py:DIR[,smoke] has no variant {variant!r}.')
  if folder and not (pathlib.Path(folder) / 'packages').is_dir():
    raise ValueError(
      f'{folder!r} is no set of tasks; make it with `python -m '
      f'experiments.make_tasks --out={folder}`.'
    )
  c = tiny.get_config(variant)
  c.tasks.update(family='deletion', folder=folder or _UNNAMED)
  # Without `run`: a shell teaches little here and lengthens the prompt.
  c.tasks.repository.tools = (
    *('read', 'search', 'edit', 'write', 'test', 'finish'),
  )
  c.tasks.repository.bounds.answer_chars = 1500
  c.sandbox.update(
    packages=('pytest',),
    wall_s=300.0,
    cpu_s=60.0,
    memory_bytes=1024 * 2**20,
    processes=64,
    file_bytes=64 * 2**20,
    output_bytes=4 * 2**20,
  )
  # Room for real code; longer episodes go on from summaries.
  c.episode.max_tokens = 2048
  c.episode.max_turns = 24
  c.episode.max_call_tokens = 256
  c.summary.trigger = 2048
  c.rewards.failed_edit_penalty = 0.05
  c.rewards.open_todo_penalty = 0.05
  c.rewards.shell_only_penalty = 0.1
  c.rewards.effort_scale = 400.0
  c.curriculum.enabled = True
  for stage in (c.sft, c.rl):
    stage.seq_len = 2048
  if variant != 'smoke':
    # Rows are 6 times as long as tiny.py's; its rates are for short ones.
    c.sft.update(steps=280, batch_size=12, decay_steps=100)
    c.sft.update(learning_rate=5e-3, adam_learning_rate=2e-3)
  c.demonstrations.count = 80
  c.rollout.num_slots = 16
  c.rollout.prefill_chunk = 128
  c.rl.prompts = 4
  c.rl.rollouts_per_prompt = 4
  c.rl.steps = 20
  c.rl.warmup_steps = 1
  c.rl.decay_steps = 10
  c.rl.rows = 4
  c.evaluation.episodes = 20
  if variant == 'smoke':
    _shrink(c)
  return c


def _shrink(c: ml_collections.ConfigDict) -> None:
  c.episode.max_turns = 4
  c.episode.max_call_tokens = 96
  c.demonstrations.count = 2
  c.rollout.num_slots = 4
  c.rl.steps = 2
  c.rl.warmup_steps = 0
  c.rl.decay_steps = 1
  c.rl.prompts = 1
  c.rl.rollouts_per_prompt = 2
  c.evaluation.episodes = 1
