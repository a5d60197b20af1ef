"""The task family of verifiers' environments, read from its own config file."""

import functools
import hashlib
import importlib.util
import pathlib
import threading
import weakref
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import spec as specs
from composer_jax.tasks.practice import splits
from composer_jax.tasks.verifiers import process

_PACKAGES = ('msgpack', 'zmq')


class VerifiersTasks(environments.TaskFamily):
  """An `agent.environment.TaskFamily` of the tasks of an environment.

  A tenth of the tasks, by the hash of their keys, is held out. Every process
  that plays has an env server of its own, which ends with it.
  """

  axes: tuple[str, ...] = ('held_out',)
  needs_execution = False
  finish_call = '{"tool": "finish", "arguments": {}}'

  def __init__(self, spec: specs.Spec):
    self._spec, self._lock = spec, threading.Lock()
    self._file = spec.systems['tasks'].folder
    self._options = spec.systems['tasks'].verifiers
    self.max_windows = self._options.max_windows

  def check(self) -> None:
    family = "family 'verifiers'"
    if not self._file:
      raise ValueError(
        f'--config.tasks.folder is needed by {family}: the TOML file of an '
        'environment, with a table [env].'
      )
    if not self._options.python:
      raise ValueError(
        f'--config.tasks.verifiers.python is needed by {family}: a Python that '
        'has verifiers, as python -m venv DIR and DIR/bin/pip install '
        '"verifiers>=0.4" uv make it.'
      )
    if not self._spec.initial:
      raise ValueError(
        f'--config.initial is needed by {family}: its harnesses speak the chat '
        'template of an imported model.'
      )
    if self._spec.summary.trigger:
      raise ValueError(
        f'--config.summary.trigger must be 0 with {family}, whose harnesses '
        'keep their own history.'
      )
    if self._spec.systems['tasks'].auditor.url:
      raise ValueError(
        f'--config.tasks.auditor reads calls of tools, and {family} has them '
        'made behind an env server: leave out auditor.url.'
      )

  def check_files(self) -> None:
    if any(importlib.util.find_spec(name) is None for name in _PACKAGES):
      raise ValueError(
        "Family 'verifiers' needs the packages pyzmq and msgpack: pip install "
        "-e '.[verifiers]' in the checkout."
      )
    for split in ('train', *self.axes):
      self._of_split(split)

  def _tasks(self) -> tuple[process.ListedTask, ...]:
    return process.listed(self._options.python, self._file, self._content)

  @functools.cached_property
  def _content(self) -> str:
    """Hashes the config and the modules beside it."""
    process.read_config(self._file)  # Refuses what is none.
    path, digest = pathlib.Path(self._file), hashlib.sha256()
    for part in [path, *sorted(path.parent.glob('*.py'))]:
      digest.update(part.name.encode() + b'\0' + part.read_bytes())
    return digest.hexdigest()

  def identity(self) -> str:
    digest = hashlib.sha256(self._content.encode())
    for task in self._tasks():
      digest.update(task.task_id.encode())
    return digest.hexdigest()

  def _of_split(self, split: str) -> list[process.ListedTask]:
    is_wanted = lambda name: splits.is_held_out(name) == (split != 'train')
    chosen = [t for t in self._tasks() if is_wanted(t.task_id)]
    if not chosen and (split == 'train' or self._spec.evaluation.episodes):
      raise ValueError(
        f'{self._file} selects {len(self._tasks())} tasks, none of them of the '
        f'split {split!r}: a tenth is held out. Select more.'
      )
    return chosen

  def texts(self) -> list[str]:
    return [task.prompt for task in self._of_split('train')]

  def tasks(
    self, tokenizer: Any, *, split: str, seed: int
  ) -> environments.TaskSource:
    """Returns a split's tasks; more groups than tasks play them again."""
    return splits.source_of(self._of_split(split), split=split, seed=seed)

  def listed(self, split: str, count: int) -> list[process.ListedTask]:
    fixed = dict(split=split, seed=self._spec.seed, place=self._file)
    return splits.listed(self._of_split(split), count, **fixed)

  def gold(self, task: Any, tokenizer: Any) -> environments.Policy:
    raise ValueError(
      "Family 'verifiers' knows no solutions: play a policy by --policy=tokens."
    )

  @functools.cached_property
  def _service(self) -> Any:
    # Packages of the extra 'verifiers', which other families do without.
    from composer_jax.tasks.verifiers import endpoint, environment

    env, limits = process.read_config(self._file)['env'], self._spec.episode
    # The turns after which a harness is told to stop, and still graded.
    for agent in env.values():
      if isinstance(agent, dict) and 'runtime' in agent:
        agent.setdefault('max_turns', limits.max_turns)
    program = process.start(self._options.python, self._file, env)
    service = environment.EnvService(
      program=program,
      route=endpoint.TokenRoute(program.key, limits.max_tokens),
      options=self._options,
      tokenizer=str(pathlib.Path(self._spec.initial).absolute()),
      vocab_size=self._spec.model.vocab_size,
      max_stops=self._spec.engine_options().max_stop_tokens,
    )
    weakref.finalize(self, service.close)
    return service

  def environment(self, task: Any, runner: Any) -> environments.Environment:
    from composer_jax.tasks.verifiers import environment

    with self._lock:  # The first of many threads starts the server.
      service = self._service
    return environment.HarnessedEnvironment(task, service)

  def demonstrations(self, job: jobs.Job) -> tuple[list, list]:
    if self._spec.systems['demonstrations'].conversations:
      return [], []  # SFT learns from those alone.
    raise ValueError(
      "Family 'verifiers' shows no demonstrations: begin with an imported "
      'model, --config.initial, and --config.sft.steps=0.'
    )
