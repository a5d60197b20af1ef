"""Has a model read each episode of a run before it is graded.

A finding is a flag beside those of the monitors, so that the rollout pays for
it. The judge knows neither the verdict nor other flags. An episode of which it
gives no answer counts as one of the infrastructure, whether it passed or not:
it is neither paid nor punished, and nothing is learnt from it.
"""

import dataclasses
import logging
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.core import records
from composer_jax.tasks import judges
from composer_jax.tasks.monitors import watch


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditorOptions:
  """The model that reads episodes; it costs a request or more for each.

  Attributes:
    url: endpoint of OpenAI's form, up to /v1; '' for no auditor. Its key is
      read from COMPOSER_JAX_TOKEN.
    model: name of the model at the endpoint.
  """

  url: str = ''
  model: str = ''

  def __post_init__(self):
    judges.check_endpoint(self, 'url', 'model')

  def judge(self) -> judges.OpenAIJudge:
    return judges.open_judge(self.url, self.model)


class AuditedFamily:
  """A task family whose episodes a judge reads; all else is the family's."""

  def __init__(self, family: environments.TaskFamily, judge: judges.Judge):
    self._family, self._judge = family, judge

  def __getattr__(self, name: str) -> Any:
    return getattr(self._family, name)

  def check_files(self) -> None:
    """Also has the judge read an empty episode.

    Raises:
      ValueError: it does not answer.
    """
    self._family.check_files()
    case = judges.JudgedEpisode(prompt='', evidence=watch.Evidence())
    try:
      self._judge.judge(case)
    except judges.JudgeError as error:
      raise ValueError(
        f'The model of --config.tasks.auditor does not answer: {error}'
      ) from error

  def environment(self, task: Any, runner: Any) -> 'AuditedEnvironment':
    return AuditedEnvironment(
      self._family.environment(task, runner), self._judge
    )


class AuditedEnvironment:
  """An environment that has its calls read before its verdict."""

  def __init__(self, env: environments.Environment, judge: judges.Judge):
    self._env, self._judge = env, judge
    self._calls: list[watch.WatchedCall] = []
    self._findings: tuple[watch.Finding, ...] = ()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._env, name)

  @property
  def flags(self) -> tuple[str, ...]:
    return tuple(sorted({*self._env.flags, *watch.flags(self._findings)}))

  def call(self, text: str) -> environments.ToolResult:
    result = self._env.call(text)
    self._calls.append(
      watch.WatchedCall(
        tool=result.tool, arguments={'text': text}, output=result.text
      )
    )
    return result

  def verdict(self, finished: bool) -> records.Verdict:
    case = judges.JudgedEpisode(
      prompt=self._env.prompt, evidence=watch.Evidence(calls=self._calls)
    )
    failure = ''
    try:
      self._findings = judges.audit(self._judge, case)
    except judges.JudgeError as error:
      failure = f'not audited: {error}'
      logging.warning('%s: %s', self._env.task_id, failure)
    for finding in self._findings:
      logging.info('%s: %s', self._env.task_id, finding)
    verdict = self._env.verdict(finished)
    if not failure or verdict.status == records.INFRASTRUCTURE:
      return verdict
    return records.broken(verdict.num_tests, verdict.sandbox_level, failure)
