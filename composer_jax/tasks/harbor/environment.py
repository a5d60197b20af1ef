"""An environment around a box with the file system of a Harbor task.

Its tools are those of repositories, in the task's working folder. `finish` has
the step verified, and answers with the instruction of the next one, if there is
one and the rewards suffice.
"""

import dataclasses
import logging
import pathlib

from composer_jax.core import files, records
from composer_jax.sandbox import base
from composer_jax.tasks import calls
from composer_jax.tasks.harbor import manifest, rewards, verifier
from composer_jax.tasks.repository import environment, schemas

_MAX_DETAIL = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarborOptions:
  """Harbor's task directories as tasks.

  Attributes:
    bases: patterns of the base images that a box stands for, such as
      'python:3.*': for tasks that need no more of it than Python and a shell.
    pass_reward: least reward of a task that counts as solved.
    artifacts: folder in which the artefacts of each episode are kept; '' keeps
      none.
  """

  bases: tuple[str, ...] = ()
  pass_reward: float = 1.0
  artifacts: str = ''


def tools_of(
  options: environment.RepositoryOptions,
) -> environment.RepositoryOptions:
  """Returns the tools without `test`: a task shows none of its tests."""
  tools = tuple(name for name in options.tools if name != 'test')
  return dataclasses.replace(options, tools=tools)


class HarborEnvironment(environment.BoxEnvironment):
  """One episode of a Harbor task."""

  def __init__(
    self,
    task: manifest.HarborTask,
    sandbox: base.Sandbox,
    tools: environment.RepositoryOptions,
    options: HarborOptions,
  ):
    """Opens a box of a sandbox that has the task's folders at its root."""
    self._task, self._sandbox, self._harbor = task, sandbox, options
    self._step = 0
    self._verified: list[verifier.Verified] = []
    tools = tools_of(tools)
    self._whole = verifier.open_box(sandbox, task.environment)
    box = verifier.Within(self._whole, task.environment)
    super().__init__(task.task_id, prompt_of(task, tools), tools, box)

  def finish(self) -> tuple[str, bool]:
    """Verifies the step; the answer is the next instruction, if one follows."""
    is_last = self._step + 1 == len(self._task.steps)
    if is_last:
      return super().finish()
    self._verify()
    step = self._task.steps[self._step]
    scores = self._verified[-1].rewards
    if any(scores.get(n, -1e9) < least for n, least in step.least.items()):
      return super().finish()
    self._step += 1
    return self._task.steps[self._step].instruction, False

  def _verify(self) -> None:
    step = self._task.steps[self._step]
    left = verifier.left_in(self._whole)
    verified = verifier.verify(step, left, self._sandbox)
    self.sandbox_seconds += verified.wall_s
    self._verified.append(verified)
    if self._harbor.artifacts:
      self._keep(step, left)

  def _keep(self, step: manifest.Step, left: verifier.Left) -> None:
    name = self.task_id.replace('/', '__')
    root = pathlib.Path(self._harbor.artifacts, name, step.name)
    for path, data in verifier.artifacts(step, left).items():
      # Paths of a box hold no '..'; a later episode replaces an earlier one.
      try:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(root / path, data)
      except (OSError, ValueError) as error:
        # A name that this file system does not take is no fault of the sandbox.
        logging.warning('%s: artefact %.200r is lost: %s', name, path, error)

  def verdict(self, finished: bool) -> records.Verdict:
    """Verifies the step that the episode ended in, and joins the rewards."""
    num_steps = len(self._task.steps)
    if len(self._verified) == self._step:
      self._verify()
    scores = [v.rewards for v in self._verified]
    # Steps that were not reached earn nothing, by any name.
    scores += [{}] * (num_steps - len(scores))
    named = rewards.joined(scores, self._task.strategy)
    passed = finished and rewards.main(named) >= self._harbor.pass_reward
    solved = sum(
      bool(s) and rewards.main(s) >= self._harbor.pass_reward for s in scores
    )
    if passed:
      solved = num_steps
    detail = '; '.join(
      [f'{name} {value:g}' for name, value in named.items()]
      + [v.fault for v in self._verified if v.fault]
    )
    for verified in self._verified:
      logging.debug('%s: %s', self.task_id, verified.output)
    return records.Verdict(
      passed=passed,
      num_passed=solved,
      num_tests=num_steps,
      status=records.GRADED if finished else records.UNFINISHED,
      sandbox_level=self._sandbox.level,
      detail=calls.quoted(detail, _MAX_DETAIL),
    )


def prompt_of(
  task: manifest.HarborTask, options: environment.RepositoryOptions
) -> str:
  """Returns the first message: the instruction, where it begins, the tools."""
  place = '/' + '/'.join(task.environment.workdir)
  where = f'You work in {place}; paths of tools are relative to it.'
  tools = schemas.prompt(options.schemas)
  return '\n\n'.join([task.steps[0].instruction, where, tools])
