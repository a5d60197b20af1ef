"""The task family of deletion tasks, read from a folder."""

import contextlib
import functools
import hashlib
import itertools
import logging
import random
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.agent import episode, summarize
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import spec as specs
from composer_jax.tasks import contained, curriculum
from composer_jax.tasks.deletion import edit
from composer_jax.tasks.practice import bodies, transcripts
from composer_jax.tasks.repository import (
  environment,
  schemas,
  scripts,
  task_set,
)
from composer_jax.telemetry import progress


class RepositoryTasks(environments.TaskFamily):
  """An `agent.environment.TaskFamily` of a folder's tasks."""

  axes: tuple[str, ...] = ('held_out',)
  needs_execution = True

  def __init__(self, spec: specs.Spec):
    self._spec = spec
    self._options = spec.systems['tasks']
    self._tools = self._options.repository

  def check(self) -> None:
    sandbox, folder = self._spec.systems['sandbox'], self._options.folder
    if not folder:
      raise ValueError(
        f"--config.tasks.folder ({folder!r}) is needed by family 'deletion'. A "
        'folder is made by `python -m experiments.make_tasks --out=FOLDER`.'
      )
    if sandbox.level == 'static':
      raise ValueError(
        "--config.tasks.family 'deletion' is judged by running tests, and "
        "--config.sandbox.level 'static' executes nothing: choose 'auto'."
      )
    shown, tools = self._spec.systems['demonstrations'], self._tools.tools
    if shown.practice and {*tools} != {'body', 'finish'}:
      raise ValueError(
        f'--config.demonstrations.practice ({shown.practice}) shows how to '
        "write a body through the tools ('body', 'finish'), but "
        f'--config.tasks.repository.tools is {tools}: set it to these two, or '
        'practice to 0.'
      )
    if 'pytest' not in sandbox.packages:
      raise ValueError(
        "--config.tasks.family 'deletion' is judged by pytest: "
        "--config.sandbox.packages must name 'pytest', not only "
        f'{sandbox.packages}.'
      )

  @functools.cached_property
  def _set(self) -> task_set.TaskSet:
    return task_set.load(self._options.folder)

  def check_files(self) -> None:
    for split in ('train', *self.axes):
      chosen, needed, field = self._chosen(split)
      if len(chosen) < needed:
        shown = self._spec.systems['demonstrations'].count
        beside = f' beside the {shown} of --config.demonstrations.count'
        cure = 'Lower it, or make more tasks'
        if split != 'train' and not chosen:
          cure = 'Hold out a package: with --held_out or --only'
        raise ValueError(
          f'{self._options.folder} has {len(chosen)} {split} tasks'
          f'{beside if split == "train" else ""}, and {field} needs {needed}: '
          f'no task is played twice. {cure} of '
          '`python -m experiments.make_tasks`.'
        )

  def identity(self) -> str:
    digest = hashlib.sha256()
    root = self._set.root
    for folder in ('packages', 'tasks'):
      for path in sorted((root / folder).rglob('*.json')):
        digest.update(str(path.relative_to(root)).encode() + b'\0')
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()

  def texts(self) -> list[str]:
    """Returns the demonstrated tasks' prompts and calls."""
    texts = []
    for task in self._divided()[1]:
      calls = scripts.gold_calls(task, self._tools.tools)
      prompt = environment.prompt_of(task, self._tools)
      texts.append('\n'.join([prompt, *calls]))
    return texts

  def held_out_packages(self) -> tuple[str, ...]:
    """Returns the packages of the set, which no corpus may contain."""
    return tuple(sorted(self._set.packages))

  def images(self) -> str:
    return self._options.folder

  def requirements(self) -> list[str]:
    """Returns the distributions that the set's test suites import."""
    packages = self._set.packages.values()
    return sorted({r for p in packages for r in p.facts.get('requires', ())})

  def of_split(self, split: str) -> list[task_set.RepositoryTask]:
    """Returns a split's tasks of the config's tiers, in the folder's order."""
    tiers = self._options.tiers or task_set.TIERS
    tasks = self._set.split(split == 'held_out')
    return [t for t in tasks if t.tier in tiers]

  def _divided(self) -> tuple[list, list]:
    """Returns the tasks of RL, and those whose solutions SFT shows."""
    spec = self._spec
    tasks = self.of_split('train')
    random.Random(f'{spec.seed}/demonstrations').shuffle(tasks)
    count = spec.systems['demonstrations'].count
    if count >= len(tasks):
      raise ValueError(
        f'--config.demonstrations.count ({count}) of the {len(tasks)} tasks of '
        f'{self._options.folder} leaves none for RL, which may not train on '
        'demonstrated tasks. Lower it.'
      )
    return tasks[count:], tasks[:count]

  def _chosen(self, split: str) -> tuple[list, int, str]:
    """Returns a split's tasks, how many a run needs, and the field of that."""
    spec = self._spec
    if split == 'train':
      needed = spec.rl.steps * spec.rl.prompts
      return self._divided()[0], needed, '--config.rl.steps x prompts'
    needed = spec.evaluation.episodes
    return self.of_split(split), needed, '--config.evaluation.episodes'

  def tasks(
    self, tokenizer: Any, *, split: str, seed: int
  ) -> environments.TaskSource:
    chosen, needed, field = self._chosen(split)
    fitting = [t for t in chosen if self._fits(tokenizer, t)]
    if len(fitting) < len(chosen):
      logging.warning(
        '%d of %d %s tasks are left out: their prompts leave no room in a '
        'window of --config.episode.max_tokens.',
        *(len(chosen) - len(fitting), len(chosen), split),
      )
    if len(fitting) < needed:
      raise ValueError(
        f'{self._options.folder} has {len(fitting)} {split} tasks for this run '
        f'({len(chosen)} before those whose prompts do not fit), and {field} '
        f'needs {needed}: no task is played twice. Lower it, or make more '
        'tasks with `python -m experiments.make_tasks`.'
      )
    random.Random(f'{seed}/{split}').shuffle(fitting)

    def candidate(task: task_set.RepositoryTask) -> curriculum.Candidate:
      labels = (f'tier:{task.tier}', f'package:{task.package}')
      return curriculum.Candidate(task_id=task.task_id, labels=labels)

    candidates = [candidate(t) for t in fitting]
    return environments.TaskSource(
      of_group=fitting.__getitem__,
      of_id={t.task_id: t for t in fitting}.__getitem__,
      pool=lambda step: candidates,
    )

  def _fits(self, tokenizer: Any, task: task_set.RepositoryTask) -> bool:
    spec, prompt = self._spec, environment.prompt_of(task, self._tools)
    most, most_call = spec.episode.max_tokens, spec.episode.max_call_tokens
    try:
      summarizer = summarize.Summarizer(
        tokenizer,
        prompt,
        spec.summary,
        max_tokens=most,
        max_call_tokens=most_call,
        protocol=schemas.prompt(self._tools.schemas),
      )
    except ValueError:
      return False
    return most - len(summarizer.dialogue.opening_T) >= most_call

  def listed(self, split: str, count: int) -> list[task_set.RepositoryTask]:
    """Returns `count` tasks of a split, 0 for all, for evaluations."""
    tasks = self.of_split(split)
    if len(tasks) < max(count, 1):
      raise ValueError(
        f'{self._options.folder} has {len(tasks)} {split} tasks of tiers '
        f'{self._options.tiers or task_set.TIERS}; --tasks asks for '
        f'{count or "all"}.'
      )
    random.Random(f'{self._spec.seed}/{split}').shuffle(tasks)
    return tasks[: count or None]

  finish_call = '{"tool": "finish", "arguments": {}}'

  def gold(
    self, task: task_set.RepositoryTask, tokenizer: Any
  ) -> environments.Policy:
    """Returns a policy that restores what was deleted, through the tools."""
    calls = scripts.gold_calls(task, self._tools.tools)
    query = self._spec.summary.query
    return scripts.ScriptedCalls(tokenizer, calls, query=query)

  def functions(self) -> list[Any]:
    """Returns the tools in the form of chat endpoints."""
    return [tool.function() for tool in self._tools.schemas.values()]

  def environment(self, task: Any, runner: Any) -> environments.Environment:
    return environment.RepositoryEnvironment(
      task, runner, self._tools, seed=self._spec.seed
    )

  def demonstrations(self, job: jobs.Job) -> tuple[list, list]:
    """Returns windows of solutions to learn from and to hold out."""
    chains = self._solutions(job)
    count = len(chains) - max(1, len(chains) // 20)
    # Whole chains, since windows of a learnt task would hold nothing out.
    learnt, held_out = chains[:count], chains[count:]
    learnt += [[window] for window in self._practice(job)]
    return [*itertools.chain(*learnt)], [*itertools.chain(*held_out)]

  def _practice(self, job: jobs.Job) -> list:
    """Returns windows (tokens_T, loss_mask_T) on functions of the corpus."""
    shown = job.spec.systems['demonstrations']
    if not shown.practice:
      return []
    # Without the marks of the document's begin and end.
    texts = (job.tokenizer.decode(ids[1:-1]) for ids in job.documents[0])
    draw, kept = random.Random(f'practice/{self._spec.seed}'), []
    for text, name in bodies.functions(texts, self._spec.seed):
      with contextlib.suppress(edit.CannotEdit):
        window = bodies.episode(text, name, self._tools, job.tokenizer)
        if len(window[0]) <= self._spec.episode.max_tokens:
          kept.append(window)
    draw.shuffle(kept)
    progress.teller('sft')(f'{len(kept)} functions of the corpus to practise')
    return [
      (tokens_T, mask_T | (draw.random() < shown.context_loss))
      for tokens_T, mask_T in kept[: shown.practice]
    ]

  def _solutions(self, job: jobs.Job) -> list[list]:
    """Returns chains of (tokens_T, loss_mask_T) of demonstrated tasks.

    An episode with a call cut off by a limit is left out: it would teach such
    calls. One that a limit ended is kept, since its calls are right.
    """
    spec = self._spec
    tasks = [t for t in self._divided()[1] if self._fits(job.tokenizer, t)]
    progress.teller('sft')(f'playing the solutions of {len(tasks)} tasks')
    rollouts = []
    with job.runner() as runner, progress.Progress('sft', len(tasks)) as bar:
      for index, task in enumerate(tasks):
        rollout = episode.run(
          contained.ContainedFamily(self).environment(task, runner),
          self.gold(task, job.tokenizer),
          job.tokenizer,
          spec.episode,
          group=index,
          member=0,
          seed=spec.seed + transcripts.SEED,
          summary=spec.summary,
        )
        rollouts.append(rollout)
        bar.update(len(rollouts))
    kept = [r for r in rollouts if not r.num_invalid]
    if len(kept) < 2:
      raise ValueError(
        f'Of {len(tasks)} demonstrated tasks {len(kept)} have solutions whose '
        'calls fit --config.episode.max_call_tokens '
        f'({spec.episode.max_call_tokens}); SFT needs two. Raise it, or '
        '--config.demonstrations.count.'
      )
    counts = {
      'tasks': len(tasks),
      'episodes': len(kept),
      'tokens': sum(len(t) for r in kept for t in r.trajectories) / len(kept),
      'turns': sum(r.num_turns for r in kept) / len(kept),
      'passed': sum(r.verdict.passed for r in kept) / len(kept),
    }
    windows = iter(transcripts.shown(job, kept, counts))
    return [[next(windows) for _ in r.trajectories] for r in kept]
