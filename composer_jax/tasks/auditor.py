"""Has a model read each episode of a run before it is graded.

A finding is a flag beside those of the monitors, so that the rollout pays for
it. The judge knows neither the verdict nor other flags. An episode of which it
gives no answer counts as one of the infrastructure, whether it passed or not:
it is neither paid nor punished, and nothing is learnt from it.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.core import records
from composer_jax.tasks import contained, judges
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


class AuditedFamily(contained.ContainedFamily):
  """A task family whose episodes a judge reads; all else is the family's."""

  def __init__(self, family: environments.TaskFamily, judge: judges.Judge):
    super().__init__(family)
    self._judge = judge

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
    make = lambda: self._family.environment(task, runner)
    return AuditedEnvironment(task.task_id, make, self._judge)


class AuditedEnvironment(contained.ContainedEnvironment):
  """An environment that has its calls read before its verdict."""

  def __init__(self, task_id: str, make: Any, judge: judges.Judge):
    super().__init__(task_id, make)
    self._judge = judge
    self._calls: list[watch.WatchedCall] = []

  def call(self, text: str) -> environments.ToolResult:
    result = super().call(text)
    self._calls.append(
      watch.WatchedCall(
        tool=result.tool, arguments={'text': text}, output=result.text
      )
    )
    return result

  def verdict(self, finished: bool) -> records.Verdict:
    evidence = watch.Evidence(calls=self._calls)
    case = judges.JudgedEpisode(prompt=self.prompt, evidence=evidence)
    findings: Sequence[watch.Finding] = ()
    with self._contained():
      findings = judges.audit(self._judge, case)
    for finding in findings:
      logging.info('%s: %s', self.task_id, finding)
    verdict = super().verdict(finished)
    self.flags = tuple(sorted({*self.flags, *watch.flags(findings)}))
    return verdict
