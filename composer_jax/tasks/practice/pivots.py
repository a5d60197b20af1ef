"""The task family of pivots, cut from a file of recorded conversations."""

import functools
import hashlib
import logging
import pathlib
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.agent import summarize
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import spec as specs
from composer_jax.tasks.pivots import environment, recorded
from composer_jax.tasks.practice import splits
from composer_jax.tasks.repository import scripts
from composer_jax.text import tool_calls


class Pivots(environments.TaskFamily):
  """An `agent.environment.TaskFamily` of the pivots of a file.

  All turns of a tenth of the conversations, by their names, are held out.
  """

  axes: tuple[str, ...] = ('held_out',)
  needs_execution = False
  # Any call ends an episode; this one is right for no task.
  finish_call = '{"tool": "finish", "arguments": {}}'

  def __init__(self, spec: specs.Spec):
    self._spec = spec
    self._file = spec.systems['tasks'].folder

  def check(self) -> None:
    if not self._file:
      raise ValueError(
        "--config.tasks.folder is needed by family 'pivots': a file of "
        'conversations, one a line.'
      )

  @functools.cached_property
  def _recorded(self) -> recorded.RecordedPivots:
    found = recorded.read(self._file)
    if not found.pivots:
      raise ValueError(
        f'{self._file} has no turn that is a single call of a tool.'
      )
    return found

  def _of_split(self, split: str) -> list[recorded.Pivot]:
    return [
      pivot
      for pivot in self._recorded.pivots
      if splits.is_held_out(pivot.source) == (split != 'train')
    ]

  def check_files(self) -> None:
    for split in ('train', *self.axes):
      self._some(split, self._of_split(split))

  def _some(self, split: str, chosen: list[Any]) -> list[Any]:
    if not chosen and (split == 'train' or self._spec.evaluation.episodes):
      raise ValueError(
        f'{self._file} gives no {split} task for this run: a tenth of the '
        'conversations is held out, and prompts must fit '
        '--config.episode.max_tokens.'
      )
    return chosen

  def identity(self) -> str:
    return hashlib.sha256(pathlib.Path(self._file).read_bytes()).hexdigest()

  def texts(self) -> list[str]:
    """Returns the conversations of training, each as one text."""
    texts = {}
    for pivot in self._of_split('train'):
      call = tool_calls.render_json(pivot.call)
      said = [word for pair in pivot.history for word in pair]
      texts[pivot.source] = '\n'.join([pivot.prompt, *said, call])
    return list(texts.values())

  def _fits(self, tokenizer: Any, pivot: recorded.Pivot) -> bool:
    spec, env = self._spec, self.environment(pivot, None)
    most, most_call = spec.episode.max_tokens, spec.episode.max_call_tokens
    try:
      opened = summarize.Summarizer(
        tokenizer,
        env.prompt,
        spec.summary,
        max_tokens=most,
        max_call_tokens=most_call,
        protocol=env.protocol,
      )
    except ValueError:
      return False
    return len(opened.opening(env.history)) + most_call <= most

  def tasks(
    self, tokenizer: Any, *, split: str, seed: int
  ) -> environments.TaskSource:
    """Returns a split's tasks; more groups than tasks play them again."""
    chosen = self._of_split(split)
    fitting = [p for p in chosen if self._fits(tokenizer, p)]
    if len(fitting) < len(chosen):
      logging.warning(
        '%d of %d %s pivots do not fit a window of --config.episode.max_tokens '
        'and are left out.',
        *(len(chosen) - len(fitting), len(chosen), split),
      )
    self._some(split, fitting)
    fixed = dict(split=split, seed=seed)
    return splits.source_of(
      fitting, **fixed, labels_of=lambda p: (f'tool:{p.call.name}',)
    )

  def listed(self, split: str, count: int) -> list[recorded.Pivot]:
    fixed = dict(split=split, seed=self._spec.seed, place=self._file)
    return splits.listed(self._of_split(split), count, **fixed)

  def gold(self, task: recorded.Pivot, tokenizer: Any) -> environments.Policy:
    """Returns a policy that makes the expert's call."""
    call = tool_calls.render_json(task.call)
    return scripts.ScriptedCalls(tokenizer, [call])

  def functions(self) -> list[Any]:
    return list(self._recorded.tools.values())

  def environment(self, task: Any, runner: Any) -> environments.Environment:
    return environment.PivotEnvironment(task, self._recorded.tools)

  def demonstrations(self, job: jobs.Job) -> tuple[list, list]:
    if self._spec.systems['demonstrations'].conversations:
      return [], []  # SFT learns from those alone.
    raise ValueError(
      "Family 'pivots' shows no demonstrations: learn from the conversations "
      'by --config.demonstrations.conversations, or begin with '
      '--config.initial and --config.sft.steps=0.'
    )
