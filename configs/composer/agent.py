"""An imported model learns on tasks made of real packages, or of your own.

  ./run.sh hf_import --source=CHECKPOINT --out=runs/import/mine
  ./run.sh make_tasks --folders=MY_REPOSITORY --out=runs/tasks
  ./run.sh --config=configs/composer/agent.py:runs/import/mine,runs/tasks

SFT on the solutions of some tasks, or none with --config.sft.steps=0, then RL
on others; continued pretraining before that with --config.cpt.steps. Model and
rates of finetuning are those of imported.py, tools and sandbox those of
deletion.py. Lengths follow from the tasks in the model's tokens and from the
positions that the model was made for, counts from the number of tasks, meshes
from the accelerators that are here; each is printed with its reason.

Arguments: IMPORT,TASKS, and `agent.py:IMPORT,TASKS,smoke` for a job of minutes
on a CPU. Without them the file can be loaded, and a run of it says what is
missing. Not measured on published weights.
"""

import collections

import ml_collections
import numpy as np

from configs.composer import deletion, imported

# Turns of a window that summaries need not shorten.
_TURNS = 8
_LEAST_WINDOW = 2048
_ROW_TOKENS = 4 * 2048  # of a microbatch


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  parts = arg.split(',') if arg else ['', '']
  if len(parts) not in (2, 3) or parts[2:] not in ([], ['smoke']):
    raise ValueError(f'agent.py takes IMPORT,TASKS[,smoke], not {arg!r}.')
  variant = ''.join(f',{part}' for part in parts[2:])
  c = deletion.get_config(f'{parts[1]}{variant}')
  model = imported.get_config(f'{parts[0]}{variant}')
  c.initial, c.model, c.rl.gate = model.initial, model.model, model.rl.gate
  c.accelerator = model.get('accelerator', False)
  c.cpt.steps = 0
  c.evaluation.imported = True
  for stage in (c.cpt, c.sft):
    for name in ('optimizer', 'learning_rate', 'adam_learning_rate'):
      stage[name] = model.sft[name]
    stage.bias_update_rate = model.sft.bias_update_rate
  c.rl.learning_rate = model.rl.learning_rate
  if arg:
    _fit_lengths(c, *parts[:2])
    _fit_counts(c, parts[1], is_short=bool(variant))
    if not variant:
      _fit_devices(c)
    _say(
      f'{c.sft.optimizer} at {c.sft.learning_rate:g} in SFT and '
      f'{c.rl.learning_rate:g} in RL: rates of finetuning, see imported.py'
    )
  return c


def _say(text: str) -> None:
  print(f'[agent] {text}', flush=True)


def _power(least: float) -> int:
  """The smallest power of two that is not below."""
  return 1 << max(0, int(np.ceil(np.log2(least))))


def _fit_lengths(c: ml_collections.ConfigDict, folder: str, tasks: str) -> None:
  # These load jax.
  from composer_jax import sections
  from composer_jax.hf import importing
  from composer_jax.hf.text import language
  from composer_jax.hf.text import tokenizer as hf_tokenizer
  from composer_jax.tasks.repository import (
    environment,
    schemas,
    scripts,
    task_set,
  )
  from composer_jax.text import chat

  options = sections.build(
    environment.RepositoryOptions, c.tasks.repository.to_dict(), 'tasks'
  )
  tokenizer = hf_tokenizer.ImportedTokenizer.from_folder(
    folder, c.model.vocab_size
  )
  tokenizer.language = language.from_folder(
    folder,
    tokenizer,
    functions=[tool.function() for tool in options.schemas.values()],
  )
  speech, protocol = (
    chat.language_of(tokenizer),
    schemas.prompt(options.schemas),
  )
  known = task_set.load(tasks)
  if not known.tasks:
    raise ValueError(
      f'{tasks} holds no task; `./run.sh make_tasks` says why it made none.'
    )
  prompts, calls, longest, chars, words = [], [], [], 0, 0
  for task in known.tasks:
    prompt = environment.prompt_of(task, options)
    chars += len(prompt)
    words += len(tokenizer.encode(prompt))
    prompts.append(len(speech.dialogue(prompt, protocol).opening_T))
    gold = scripts.gold_calls(task, options.tools)
    sizes = [len(speech.written(call)) for call in gold]
    longest.append(max(sizes))
    calls += sizes
  prompt, call = (int(np.quantile(x, 0.95)) for x in (prompts, longest))
  usual = int(np.median(calls))
  answer = int(options.bounds.answer_chars * words / chars)
  c.episode.max_call_tokens = _power(call)
  _say(
    f'{c.episode.max_call_tokens} tokens a call: 0.95 of solutions have none '
    f'longer than {call}'
  )
  room = prompt + call + _TURNS * (answer + usual)
  window = max(_LEAST_WINDOW, _power(room))
  _say(
    f'window of {window} tokens: 0.95 of prompts have at most {prompt}, of '
    f'solutions the longest call at most {call}; beside them fit {_TURNS} '
    f'turns of {usual} tokens with the longest answers of tools, {answer}'
  )
  positions = importing.positions(folder)
  if positions and window > positions:
    window = positions
    _say(
      f'window of {window} tokens instead, all positions of the model; '
      'episodes go on from summaries'
    )
  c.episode.max_tokens = c.summary.trigger = window
  for stage in (c.cpt, c.sft, c.rl):
    stage.seq_len = window
  c.rl.rows = max(1, _ROW_TOKENS // window)
  _say(f'{c.rl.rows} rows a microbatch of RL: {_ROW_TOKENS} tokens at most')
  _say(f'{c.rollout.num_slots} episodes at once, with {window} tokens each')
  limit = max(task.timeout_s for task in known.tasks)
  c.sandbox.cpu_s = max(c.sandbox.cpu_s, limit)
  c.sandbox.wall_s = max(c.sandbox.wall_s, 5 * limit)
  _say(
    f'{c.sandbox.cpu_s:g} s for what runs in the sandbox: tasks give their '
    f'tests up to {limit:g}'
  )


def _fit_counts(
  c: ml_collections.ConfigDict, tasks: str, is_short: bool
) -> None:
  from composer_jax.tasks.repository import task_set

  known = task_set.load(tasks)
  train, held_out = (len(known.split(x)) for x in (False, True))
  if train < 2 or not held_out:
    raise ValueError(
      f'{tasks} has {train} tasks to train on and {held_out} held-out ones; '
      'SFT and RL need one each, and so does evaluation. Make more: '
      '`./run.sh make_tasks` with --config.options.min_lines=1, or with a '
      'second repository.'
    )
  if not is_short:
    c.demonstrations.count = max(1, min(c.demonstrations.count, train // 4))
    left = train - c.demonstrations.count
    c.rl.prompts = max(1, min(c.rl.prompts, left))
    c.rl.steps = left // c.rl.prompts
    c.rl.warmup_steps = min(c.rl.warmup_steps, c.rl.steps)
    c.rl.decay_steps = c.rl.steps // 2
    c.evaluation.episodes = min(200, held_out)
  _say(
    f'of {train} training tasks SFT shows {c.demonstrations.count}; '
    f'{c.rl.steps} steps of RL play {c.rl.prompts} others each; '
    f'{c.evaluation.episodes} of {held_out} held-out ones are evaluated'
  )


def _fit_devices(c: ml_collections.ConfigDict) -> None:
  from configs import hardware

  found = hardware.look()
  count = len(found.lines) if found.extras else 1
  c.mesh = dict(replica=1, fsdp=count, context=1)
  c.layout = 'hsdp' if count > 1 else 'data_parallel'
  c.sft.batch_size = c.cpt.batch_size = 2 * count
  if found.extras:
    c.rl.placement = 'colocated'
  # Trainer and engine take turns on all of them.
  c.rl.mesh = dict(c.mesh)
  c.rollout.devices = count
  c.rl.rows = -(-c.rl.rows // count) * count
  kinds = collections.Counter(found.lines)
  listed = ', '.join(f'{n} x {line}' for line, n in kinds.items()) or 'CPU'
  _say(
    f'{count} device{"s" * (count > 1)} ({listed}): layout {c.layout}, '
    f'placement {c.rl.placement}, batches of {c.sft.batch_size} rows, '
    f'{c.rl.rows} rows a microbatch of RL'
  )
