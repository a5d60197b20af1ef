"""The tasks of a run's family, and the environment of each.

`stages` plays them, `job` trains the tokenizer on their texts. A family is a
function here that makes `Tasks`; nothing else asks which one a run has, but for
the demonstrations of SFT, which a family has its own script for.
"""

import dataclasses
import hashlib
import logging
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.agent import summarize
from composer_jax.pipeline import spec as specs
from composer_jax.tasks import curriculum
from composer_jax.tasks.list_functions import (
  environment as function_environment,
)
from composer_jax.tasks.list_functions import family
from composer_jax.tasks.repository import (
  environment as repository_tools,
)
from composer_jax.tasks.repository import (
  scripts,
)
from composer_jax.tasks.repository import task_set as repository

# Tasks whose texts the tokenizer sees beside the corpus, so that the tool
# protocol costs few tokens; their seed is used for nothing else.
_PROTOCOL_TASKS = 1500
_PROTOCOL_SEED = 7_000_003
# Folder of the workdir with what every trained step showed of its tasks.
LEDGER = 'curriculum'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tasks:
  """The tasks of a split.

  Attributes:
    of_group: group id -> task, where no curriculum decides.
    of_id: task id -> task.
    pool: step -> what a curriculum may draw for it.
  """

  of_group: Callable[[int], Any]
  of_id: Callable[[str], Any]
  pool: Callable[[int], Sequence[curriculum.Candidate]]


def environment_of(
  spec: specs.Spec, runner: Any
) -> Callable[[Any], environments.Environment]:
  """Returns task -> a new environment for one episode of it.

  Args:
    spec: of the run.
    runner: of `job.open_runner` for this spec.
  """
  if spec.tasks.is_deletion:
    return lambda task: repository_tools.RepositoryEnvironment(
      task, runner, spec.tasks.repository, seed=spec.seed
    )
  return lambda task: function_environment.FunctionEnvironment(task, runner)


def tasks_of(
  spec: specs.Spec, tokenizer: Any, *, split: str, seed: int
) -> Tasks:
  """The tasks of a run.

  Args:
    spec: of the run.
    tokenizer: that measures whether a task's prompt fits a window.
    split: 'train' or 'held_out'.
    seed: of the split's tasks, or of their order.

  Raises:
    ValueError: there are fewer than the run needs.
  """
  if spec.tasks.is_deletion:
    return _deletion(spec, tokenizer, split, seed)
  return _list_functions(spec, split, seed)


def curriculum_of(
  spec: specs.Spec, tasks: Tasks, workdir: pathlib.Path, seed: int
) -> curriculum.Curriculum | None:
  """Who draws the tasks of training; None where they come in order."""
  if not spec.curriculum.enabled:
    return None
  return curriculum.Curriculum(
    tasks.pool,
    curriculum.Ledger(workdir / LEDGER),
    spec.curriculum,
    prompts=spec.rl.prompts,
    max_staleness=spec.rl.max_staleness,
    seed=seed,
  )


def _list_functions(spec: specs.Spec, split: str, seed: int) -> Tasks:
  # An endless family: what a step does not draw is never looked at again.
  count = spec.rl.prompts * spec.curriculum.candidates

  def pool(step: int) -> list[curriculum.Candidate]:
    found = []
    for index in range(step * count, (step + 1) * count):
      task_id, kinds = family.kinds_of(index, split, seed)
      parts = zip(('aggregate', 'map', 'filter'), kinds, strict=True)
      labels = tuple(f'{part}:{kind}' for part, kind in parts)
      found.append(curriculum.Candidate(task_id=task_id, labels=labels))
    return found

  return Tasks(
    of_group=lambda group: family.generate(group, split, seed),
    of_id=family.from_id,
    pool=pool,
  )


def _deletion(spec: specs.Spec, tokenizer: Any, split: str, seed: int) -> Tasks:
  everything = task_set(spec)
  if split == 'train':
    chosen = list(_divided(spec, everything)[0])
    needed, why = spec.rl.steps * spec.rl.prompts, '--config.rl.steps x prompts'
  else:
    chosen = _of_tiers(spec, everything, held_out=True)
    needed, why = spec.evaluation.episodes, '--config.evaluation.episodes'
  fitting = [t for t in chosen if _fits(spec, tokenizer, t)]
  if len(fitting) < len(chosen):
    logging.warning(
      '%d of %d %s tasks are left out: their prompts leave no room in a window '
      'of --config.episode.max_tokens.',
      len(chosen) - len(fitting), len(chosen), split,
    )  # fmt: skip
  if len(fitting) < needed:
    raise ValueError(
      f'{spec.tasks.folder} has {len(fitting)} {split} tasks for this run '
      f'({len(chosen)} before those whose prompts do not fit), and {why} needs '
      f'{needed}: no task is played twice. Lower it, or make more tasks with '
      '`python -m experiments.make_tasks`.'
    )
  random.Random(f'{seed}/{split}').shuffle(fitting)
  by_id = {t.task_id: t for t in fitting}
  candidates = [
    curriculum.Candidate(
      task_id=t.task_id, labels=(f'tier:{t.tier}', f'package:{t.package}')
    )
    for t in fitting
  ]
  return Tasks(
    of_group=lambda group: fitting[group],
    of_id=by_id.__getitem__,
    pool=lambda step: candidates,
  )


def task_set(spec: specs.Spec) -> repository.TaskSet:
  return repository.load(spec.tasks.folder)


def _of_tiers(
  spec: specs.Spec, everything: repository.TaskSet, *, held_out: bool
) -> list[repository.RepositoryTask]:
  tiers = spec.tasks.tiers or repository.TIERS
  return [t for t in everything.split(held_out) if t.tier in tiers]


def _divided(
  spec: specs.Spec, everything: repository.TaskSet
) -> tuple[list[repository.RepositoryTask], list[repository.RepositoryTask]]:
  """Tasks of RL, and those that SFT is shown the solutions of."""
  tasks = _of_tiers(spec, everything, held_out=False)
  random.Random(f'{spec.seed}/demonstrations').shuffle(tasks)
  count = spec.demonstrations.count
  if count >= len(tasks):
    raise ValueError(
      f'--config.demonstrations.count ({count}) of the {len(tasks)} tasks of '
      f'{spec.tasks.folder} leaves none for RL, which may not train on tasks '
      'that were demonstrated.'
    )
  return tasks[count:], tasks[:count]


def demonstrated(spec: specs.Spec) -> list[repository.RepositoryTask]:
  """The deletion tasks whose solutions SFT learns from, in order."""
  return _divided(spec, task_set(spec))[1]


def _fits(
  spec: specs.Spec, tokenizer: Any, task: repository.RepositoryTask
) -> bool:
  prompt = repository_tools.prompt_of(task, spec.tasks.repository)
  try:
    made = summarize.Summarizer(
      tokenizer,
      prompt,
      spec.summary,
      max_tokens=spec.episode.max_tokens,
      max_call_tokens=spec.episode.max_call_tokens,
    )
  except ValueError:
    return False
  room = spec.episode.max_tokens - len(made.opening_T)
  return room >= spec.episode.max_call_tokens


def protocol_texts(spec: specs.Spec) -> list[str]:
  """What tasks and their calls look like, for the tokenizer beside the corpus.

  Of a set, the demonstrated tasks alone.
  """
  if not spec.tasks.is_deletion:
    return function_texts()
  options = spec.tasks.repository
  texts = []
  for task in demonstrated(spec):
    calls = scripts.gold_calls(task, options.tools)
    prompt = repository_tools.prompt_of(task, options)
    texts.append('\n'.join([prompt, *calls]))
  return texts


def function_texts() -> list[str]:
  """Texts of list_functions for the tokenizer; for audits, too."""
  texts = []
  for index in range(_PROTOCOL_TASKS):
    task = family.generate(index, 'train', _PROTOCOL_SEED)
    calls = (
      f'read {task.path}\nedit {task.path} {task.function}\n'
      f'{task.reference}\ntest\nfinish\n'
    )
    texts.append('\n'.join([task.prompt, *task.files.values(), calls]))
  return texts


def identity(spec: specs.Spec) -> str:
  """Hash of the tasks of a set; '' of a family that is generated."""
  if not spec.tasks.is_deletion:
    return ''
  found = hashlib.sha256()
  root = task_set(spec).root
  for folder in ('packages', 'tasks'):
    for path in sorted((root / folder).rglob('*.json')):
      found.update(str(path.relative_to(root)).encode() + b'\0')
      found.update(hashlib.sha256(path.read_bytes()).digest())
  return found.hexdigest()


def requirements(folder: str) -> list[str]:
  """Distributions that the test suites of a set import."""
  packages = repository.load(folder).packages.values()
  return sorted(
    {name for p in packages for name in p.facts.get('requires', ())}
  )


def held_out_names(spec: specs.Spec) -> tuple[str, ...]:
  """Packages that no corpus may have: those that tasks were made of."""
  if not spec.tasks.is_deletion:
    return ()
  return tuple(sorted(task_set(spec).packages))
