"""The task family of Harbor's task directories, read from a folder."""

import base64
import functools
import hashlib
import io
import json
import logging
import pathlib
import tarfile
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import spec as specs
from composer_jax.tasks.harbor import environment, folders, manifest, prepared
from composer_jax.tasks.practice import splits
from composer_jax.tasks.repository import scripts
from composer_jax.text import tool_calls

# A command is an argument of the shell, which the kernel bounds.
_MAX_SOLUTION = 90_000


class HarborTasks(environments.TaskFamily):
  """An `agent.environment.TaskFamily` of the task directories of a folder.

  A tenth of the tasks, by the hash of their names, is held out. What cannot be
  played in a box is left out, and said.
  """

  axes: tuple[str, ...] = ('held_out',)
  needs_execution = True
  finish_call = '{"tool": "finish", "arguments": {}}'

  def __init__(self, spec: specs.Spec):
    self._spec = spec
    self._options = spec.systems['tasks']
    self._tools = environment.tools_of(self._options.repository)

  def check(self) -> None:
    sandbox, folder = self._spec.systems['sandbox'], self._options.folder
    if not folder:
      raise ValueError(
        "--config.tasks.folder is needed by family 'harbor': a folder whose "
        'folders are task directories.'
      )
    if sandbox.level not in ('auto', 'unshare'):
      raise ValueError(
        "--config.tasks.family 'harbor' needs a root of its own, for /app and "
        f"/tests: --config.sandbox.level must be 'auto', not {sandbox.level!r}."
      )

  @functools.cached_property
  def _read(self) -> dict[str, manifest.HarborTask]:
    return {name: task for name, (task, _) in self._found.items()}

  @functools.cached_property
  def _found(self) -> dict[str, tuple[manifest.HarborTask, pathlib.Path]]:
    """Returns tasks by id, and their directories."""
    root = pathlib.Path(self._options.folder)
    tasks, refused = {}, []
    for path in sorted(root.glob(f'*/{manifest.TOML}')):
      try:
        task = manifest.read(path.parent, self._options.harbor.bases)
      except folders.TaskRefused as error:
        refused.append(f'{error.reason}: {error}')
        continue
      # One odd directory must not end the others.
      except (ValueError, OSError, RecursionError) as error:
        refused.append(f'malformed: {path} cannot be read: {error!r:.300}')
        continue
      if task.task_id in tasks:
        refused.append(f'malformed: {path} has the name of another task.')
        continue
      tasks[task.task_id] = (task, path.parent)
    for line in refused:
      logging.warning('A task is left out. %s', line)
    if not tasks:
      more = f'; the first is left out: {refused[0]}' if refused else ''
      raise ValueError(f'{root} holds no task directory for boxes{more}')
    return tasks

  def check_files(self) -> None:
    limit_mb = self._spec.systems['sandbox'].memory_bytes >> 20
    for task in self._read.values():
      if task.memory_mb > limit_mb:
        raise ValueError(
          f'Task {task.task_id!r} asks for {task.memory_mb} MiB of memory: '
          f'raise --config.sandbox.memory_bytes from {limit_mb << 20}.'
        )
    for split in ('train', *self.axes):
      self._enough(split)

  def _enough(self, split: str) -> list[manifest.HarborTask]:
    spec = self._spec
    needed, field = spec.rl.steps * spec.rl.prompts, 'rl.steps x prompts'
    if split != 'train':
      needed, field = spec.evaluation.episodes, 'evaluation.episodes'
    chosen = self._of_split(split)
    if len(chosen) < min(needed, 1):
      raise ValueError(
        f'{self._options.folder} has no {split} task, and --config.{field} '
        f'needs {needed}.'
      )
    return chosen

  def _of_split(self, split: str) -> list[manifest.HarborTask]:
    is_wanted = lambda name: splits.is_held_out(name) == (split != 'train')
    return [t for t in self._read.values() if is_wanted(t.task_id)]

  def identity(self) -> str:
    digest = hashlib.sha256()
    for task_id, (_, folder) in self._found.items():
      for name, data in folders.read_tree(folder).items():
        digest.update(f'{task_id}/{name}\0'.encode())
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()

  def texts(self) -> list[str]:
    return [
      environment.prompt_of(task, self._tools)
      for task in self._of_split('train')
    ]

  def requirements(self) -> list[str]:
    names = set().union(*(task.packages for task in self._read.values()))
    return sorted(names)

  def root_folders(self) -> tuple[str, ...]:
    tasks = self._read.values()
    tops = set().union(*(task.root_folders for task in tasks))
    return tuple(sorted({*prepared.ROOT_FOLDERS, *tops}))

  def tasks(
    self, tokenizer: Any, *, split: str, seed: int
  ) -> environments.TaskSource:
    """Returns a split's tasks; more groups than tasks play them again."""
    return splits.source_of(self._enough(split), split=split, seed=seed)

  def listed(self, split: str, count: int) -> list[manifest.HarborTask]:
    fixed = dict(split=split, seed=self._spec.seed, place=self._options.folder)
    return splits.listed(self._of_split(split), count, **fixed)

  def gold(
    self, task: manifest.HarborTask, tokenizer: Any
  ) -> environments.Policy:
    """Returns a policy that runs the solution of every step."""
    if 'run' not in self._tools.tools:
      raise ValueError(
        'A solution is a program: --config.tasks.repository.tools must name '
        f"'run', not only {self._tools.tools}."
      )
    calls = []
    for step in task.steps:
      if 'solve.sh' not in step.solution:
        raise ValueError(f'Task {task.task_id!r} brings no solution/solve.sh.')
      command = solving(step, dict(task.solution_variables))
      call = tool_calls.JsonCall(name='run', arguments={'command': command})
      calls += [tool_calls.render_json(call), self.finish_call]
    query = self._spec.summary.query
    return scripts.ScriptedCalls(tokenizer, calls, query=query)

  def functions(self) -> list[Any]:
    return [tool.function() for tool in self._tools.schemas.values()]

  def environment(self, task: Any, runner: Any) -> environments.Environment:
    return environment.HarborEnvironment(
      task, runner, self._tools, self._options.harbor
    )

  def demonstrations(self, job: jobs.Job) -> tuple[list, list]:
    if self._spec.systems['demonstrations'].conversations:
      return [], []  # SFT learns from those alone.
    raise ValueError(
      "Family 'harbor' shows no demonstrations: begin with an imported model, "
      '--config.initial, and --config.sft.steps=0.'
    )


def solving(step: manifest.Step, variables: dict[str, str]) -> str:
  """Returns a command that places a solution at /solution and runs it."""
  packed = io.BytesIO()
  with tarfile.open(fileobj=packed, mode='w:gz') as archive:
    for path, data in step.solution.items():
      entry = tarfile.TarInfo(path)
      entry.size, entry.mode = len(data), 0o755
      archive.addfile(entry, io.BytesIO(data))
  text = base64.b64encode(packed.getvalue()).decode()
  if len(text) > _MAX_SOLUTION:
    raise ValueError(
      f'A solution of {len(text)} bytes, packed, is too long for one command.'
    )
  # The folder itself: a link at the root stands for it.
  lines = [
    'mkdir -p /work/solution',
    f'echo {text} | base64 -d | tar -xz -C /work/solution',
  ]
  lines += [f'export {n}={json.dumps(v)}' for n, v in variables.items()]
  return ' && '.join([*lines, 'bash /solution/solve.sh'])
