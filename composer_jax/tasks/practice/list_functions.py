"""The task family of generated functions of lists."""

import itertools
import random
from typing import Any

import numpy as np

from composer_jax.agent import environment as environments
from composer_jax.core import seams
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import spec as specs
from composer_jax.tasks import curriculum
from composer_jax.tasks.list_functions import (
  demonstrations,
  environment,
  family,
)
from composer_jax.tasks.practice import transcripts
from composer_jax.telemetry import progress

# Tasks whose texts train the tokenizer beside the corpus, so that the tool
# protocol costs few tokens; their seed serves nothing else.
_PROTOCOL_TASKS = 1500
_PROTOCOL_SEED = 7_000_003


class ListFunctions(environments.TaskFamily):
  """An `agent.environment.TaskFamily` of endless tasks."""

  axes: tuple[str, ...] = tuple(family.AXES)
  needs_execution = False

  def __init__(self, spec: specs.Spec):
    self._spec = spec

  def check(self) -> None:
    folder = self._spec.systems['tasks'].folder
    if folder:
      raise ValueError(
        f"--config.tasks.folder ({folder!r}) is for family 'deletion', and "
        f"--config.tasks.family is 'list_functions', which generates its tasks."
      )

  def texts(self) -> list[str]:
    return protocol_texts()

  def tasks(
    self, tokenizer: Any, *, split: str, seed: int
  ) -> environments.TaskSource:
    # Candidates that a step does not draw are never seen again.
    candidates_per_prompt = self._spec.systems['curriculum'].candidates
    count = self._spec.rl.prompts * candidates_per_prompt

    def pool(step: int) -> list[curriculum.Candidate]:
      candidates = []
      for index in range(step * count, (step + 1) * count):
        task_id, kinds = family.kinds_of(index, split, seed)
        parts = zip(('aggregate', 'map', 'filter'), kinds, strict=True)
        labels = tuple(f'{part}:{kind}' for part, kind in parts)
        candidates.append(curriculum.Candidate(task_id=task_id, labels=labels))
      return candidates

    return environments.TaskSource(
      of_group=lambda group: family.generate(group, split, seed),
      of_id=family.from_id,
      pool=pool,
    )

  def listed(self, split: str, count: int) -> list[Any]:
    """Returns the first tasks of a split, for evaluations."""
    if not count:
      raise ValueError(
        "--tasks=0 takes all tasks of a folder, and family 'list_functions' "
        'generates tasks without end: give a number.'
      )
    seed = self._spec.seed
    return [family.generate(i, split, seed) for i in range(count)]

  finish_call = 'finish'

  def is_right_edit(self, task_id: str, call: str) -> bool | None:
    return demonstrations.is_right_edit(family.from_id(task_id), call)

  def gold(self, task: Any, tokenizer: Any) -> environments.Policy:
    """Returns a policy that solves the task without a mistake."""
    return demonstrations.ScriptedPolicy(
      task, tokenizer, demonstrations.FLAWLESS, random.Random(task.task_id)
    )

  def environment(
    self, task: Any, runner: seams.Runner
  ) -> environments.Environment:
    return environment.FunctionEnvironment(task, runner)

  def demonstrations(self, job: jobs.Job) -> tuple[list, list]:
    """Returns finished functions, transcripts, and calls that follow a hint.

    The calls (`demonstrations.hindsight`) stand beside each transcript, if RL
    gives hints: the model after SFT reads them as a teacher. What is longer
    than a row is left out, and such calls are counted.
    """
    options = job.spec.systems['demonstrations']
    count = options.count
    shown, advised = _play(job, count + max(32, count // 20))
    draw = random.Random(f'context_loss/{job.spec.seed}')
    whole = [
      (tokens_T, mask_T | (draw.random() < options.context_loss))
      for tokens_T, mask_T in shown[:count]
    ]
    ids, texts = job.tokenizer, []
    for i in range(options.functions):
      text = family.finished_function(i, job.spec.seed)
      texts.append(np.array([ids.BOS, *ids.encode(text), ids.EOD], np.int32))
    whole += itertools.chain(*advised[:count])
    texts = [t for t in texts if len(t) <= job.spec.sft.seq_len]
    return [*texts, *whole], shown[count:]


def protocol_texts() -> list[str]:
  """Returns texts of generated tasks, to train the tokenizer on."""
  texts = []
  for index in range(_PROTOCOL_TASKS):
    task = family.generate(index, 'train', _PROTOCOL_SEED)
    calls = (
      f'read {task.path}\nedit {task.path} {task.function}\n'
      f'{task.reference}\ntest\nfinish\n'
    )
    texts.append('\n'.join([task.prompt, *task.files.values(), calls]))
  return texts


# tokens_T and loss_mask_T.
Example = tuple[np.ndarray, np.ndarray]


def _play(
  job: jobs.Job, count: int
) -> tuple[list[Example], list[list[Example]]]:
  """Returns transcripts as Examples, and the calls after hints of each."""
  progress.teller('sft')(f'playing {count} demonstrations')
  rollouts = []
  with progress.Progress('sft', count) as bar:
    for rollout in demonstrations.transcripts(
      job.tokenizer,
      seed=job.spec.seed + transcripts.SEED,
      count=count,
      noise=job.spec.systems['demonstrations'],
      options=job.spec.episode,
      hints=job.systems.hints,
    ):
      rollouts.append(rollout)
      bar.update(len(rollouts))
  rates = demonstrations.describe(rollouts[:500], job.tokenizer)
  every = [list(demonstrations.hindsight(r)) for r in rollouts]
  # A transcript fits a row, but with a hint in it may not.
  seq_len = job.spec.sft.seq_len
  advised = [[c for c in calls if len(c[0]) <= seq_len] for calls in every]
  rates['advised'] = sum(map(len, advised)) / count
  rates['advice_too_long'] = sum(map(len, every)) / count - rates['advised']
  return transcripts.shown(job, rollouts, rates), advised
