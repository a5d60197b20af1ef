"""Keeps faults of one environment from ending a run or an evaluation.

Families may be anybody's code. What an environment raises, or gives in another
form than its protocol has it, breaks its own episode alone: the verdict is
INFRASTRUCTURE and names the fault, so that it is counted and teaches nothing.
Errors of the policy pass, and so does a ValueError of `drive`, by which a
harness of its own says that no episode can be played as the config has it.
"""

import contextlib
import dataclasses
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.core import records, turns
from composer_jax.text import tokenizer

_FAILED = environments.ToolResult(
  text='error: the environment failed', tool='', outcome=turns.NOT_A_CALL
)


class ContainedFamily:
  """A task family whose environments are contained; all else is its own."""

  def __init__(self, family: environments.TaskFamily):
    self._family = family

  def __getattr__(self, name: str) -> Any:
    return getattr(self._family, name)

  def environment(self, task: Any, runner: Any) -> 'ContainedEnvironment':
    make = lambda: self._family.environment(task, runner)
    return ContainedEnvironment(task.task_id, make)


class ContainedEnvironment(environments.Environment):
  """An environment that never raises, but where the module says so."""

  def __init__(
    self, task_id: str, make: Callable[[], environments.Environment]
  ):
    """Makes the environment; one that cannot be made is broken."""
    self.task_id, self.prompt, self.tools = task_id, '', ()
    self._fault = ''
    self._env: Any = None
    text = tokenizer.without_surrogates
    with self._contained():
      self._env = env = make()
      self.prompt, self.protocol = text(env.prompt), text(env.protocol)
      self.history = [
        (text(call), text(answer)) for call, answer in env.history
      ]
      self.tools, self.single_turn = tuple(env.tools), bool(env.single_turn)
      self._look()

  @contextlib.contextmanager
  def _contained(
    self, passes: Callable[[BaseException], Any] = lambda error: False
  ) -> Iterator[None]:
    try:
      yield
    except (Exception, SystemExit) as error:
      if passes(error):
        raise
      logging.exception('The environment of %s failed', self.task_id)
      # Unlike `str`, this does not fail, whatever the error is.
      said = ''.join(traceback.format_exception_only(error)).strip()
      self._fault, self.is_broken = self._fault or said, True

  def _look(self) -> None:
    """Reads what may have changed."""
    env = self._env
    self.flags = tuple(sorted(map(str, env.flags)))
    self.sandbox_seconds = float(env.sandbox_seconds)
    self.open_todos = int(env.open_todos)
    self.is_broken = self.is_broken or bool(env.is_broken)

  def call(self, text: str) -> environments.ToolResult:
    with self._contained():
      result = self._env.call(text)
      self._look()
      answer = tokenizer.without_surrogates(result.text)
      return dataclasses.replace(result, text=answer)
    return _FAILED

  def drive(self, chain: Any, limits: Any) -> bool:
    ends = lambda error: isinstance(error, ValueError) or chain.failure
    with self._contained(ends):
      return not self._fault and bool(self._env.drive(chain, limits))
    # A rollout has tokens: a policy that was not asked is asked once.
    return chain.num_sampled > 0

  def verdict(self, finished: bool) -> records.Verdict:
    if not self._fault:
      with self._contained():
        verdict = self._env.verdict(finished)
        self._look()
        if isinstance(verdict, records.Verdict):
          return verdict
        raise TypeError(f'{verdict!r} is no verdict')
    return records.broken(0, '', self._fault)

  def usage(self, tool: str) -> str:
    with self._contained():
      return tokenizer.without_surrogates(self._env.usage(tool))
    return tool

  def state(self) -> str:
    with self._contained():
      return tokenizer.without_surrogates(self._env.state())
    return ''

  def close(self) -> None:
    with self._contained():
      if self._env is not None:
        self._env.close()
