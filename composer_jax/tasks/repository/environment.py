"""An environment around a repository in a sandbox, with tools of JSON calls.

Calls are `{"tool": ..., "arguments": {...}}` (text.tool_calls); which tools
there are is an option of each environment. Whatever a policy writes is
answered: what is no call, names no tool or has wrong arguments is an invalid
call with an error to mend it by, all else is carried out in the box.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from composer_jax.agent import environment
from composer_jax.core import records
from composer_jax.core import turns as turns_lib
from composer_jax.sandbox import base
from composer_jax.tasks import calls
from composer_jax.tasks.grading import solution, suites
from composer_jax.tasks.monitors import watch
from composer_jax.tasks.repository import schemas as tool_schemas
from composer_jax.tasks.repository import task_set
from composer_jax.tasks.repository import tools as box_tools
from composer_jax.text import tool_calls

_OWNED = (
  'Tests and their configuration belong to the grader: do not change those '
  'that are there.'
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryOptions:
  """Which tools an environment has, and their bounds.

  Attributes:
    tools: names out of `tasks.repository.schemas.TOOLS`, in the order of
      telling.
    max_todos: items that a plan may hold.
    bounds: of single calls.
  """

  tools: tuple[str, ...] = tuple(tool_schemas.TOOLS)
  max_todos: int = 30
  bounds: box_tools.Bounds = dataclasses.field(default_factory=box_tools.Bounds)

  def __post_init__(self):
    unknown = set(self.tools) - set(tool_schemas.TOOLS)
    if unknown or 'finish' not in self.tools:
      raise ValueError(
        f'tools {self.tools} must be of {tuple(tool_schemas.TOOLS)}, "finish" '
        f'among them; there is no {sorted(unknown)}.'
      )
    if self.max_todos < 1:
      raise ValueError(f'max_todos ({self.max_todos}) must be at least 1.')


def prompt_of(task: task_set.RepositoryTask, options: RepositoryOptions) -> str:
  """What an episode begins with: the task, and how to call the tools."""
  schemas = {name: tool_schemas.TOOLS[name] for name in options.tools}
  return '\n\n'.join([task.prompt, _OWNED, tool_schemas.prompt(schemas)])


class Plan:
  """The to-do list of an episode."""

  def __init__(self, most: int):
    self._most = most
    self._items: list[tuple[str, bool]] = []

  @property
  def num_open(self) -> int:
    return sum(not done for _, done in self._items)

  def __str__(self) -> str:
    return '\n'.join(
      f'{number}. [{"x" if done else " "}] {text}'
      for number, (text, done) in enumerate(self._items, 1)
    )

  def change(self, arguments: Mapping[str, Any]) -> box_tools.Answer:
    """Carries out a call of `todo`; `calls.InvalidCall` as of a tool."""
    action = arguments['action']
    if action == 'add':
      if 'text' not in arguments:
        raise _bad_todo('"add" needs the argument "text", a string')
      if len(self._items) == self._most:
        return f'error: a plan holds {self._most} items', turns_lib.FAILED
      text = ' '.join(arguments['text'].split())
      self._items.append((box_tools.clip(text, 200), False))
    elif action == 'done':
      number = arguments.get('item')
      if number is None or number > len(self._items):
        raise _bad_todo(
          '"done" needs the argument "item", a number of 1 to '
          f'{len(self._items)}'
        )
      self._items[number - 1] = (self._items[number - 1][0], True)
    return str(self) or 'no items', turns_lib.OK


def _bad_todo(fault: str) -> calls.InvalidCall:
  return tool_schemas.bad_arguments(tool_schemas.TOOLS['todo'], fault)


class RepositoryEnvironment:
  """An `environment.Environment` around a box with the task's repository.

  Attributes:
    is_broken: the sandbox failed, retry included.
    sandbox_seconds: wall time of everything that ran in the box so far.
  """

  def __init__(
    self,
    task: task_set.RepositoryTask,
    sandbox: base.Sandbox,
    options: RepositoryOptions,
    *,
    seed: int = 0,
  ):
    """Opens a box.

    Args:
      sandbox: with the set of the task as its images.
      seed: of what the grader draws.
    """
    self.task_id, self.prompt = task.task_id, prompt_of(task, options)
    self.num_tests, self.sandbox_level = len(task.fail_to_pass), sandbox.level
    self.tools = options.tools
    self.flags: tuple[str, ...] = ()
    self.is_broken = False
    self.sandbox_seconds = 0.0
    self._task, self._sandbox, self._seed = task, sandbox, seed
    self._options = options
    self._schemas = {name: tool_schemas.TOOLS[name] for name in options.tools}
    self._plan = Plan(options.max_todos)
    self._calls: list[watch.WatchedCall] = []
    self._files: tuple[str, ...] = ()
    self._box: base.Box | None = None
    try:
      self._box = sandbox.open(task.image, task.view())
      self._files = self._box.files()
    except base.SandboxLost as error:
      logging.warning('No box for %s: %s', task.task_id, error)
      self.is_broken = True

  @property
  def open_todos(self) -> int:
    return self._plan.num_open

  def usage(self, tool: str) -> str:
    return self._schemas[tool].usage

  def state(self) -> str:
    return str(self._plan)

  def close(self) -> None:
    if self._box is not None:
      self._box.close()
      self._box = None

  def call(self, text: str) -> environment.ToolResult:
    """Parses and carries out one call; never raises for a policy's text."""
    name = ''
    # For monitors, what is carried out in vain counts as a call, too.
    tried, arguments = '', {'text': text}
    try:
      call = self._parsed(text)
      arguments = tool_schemas.check(call, self._schemas)
      tried = call.name
      answer, outcome = self._carry_out(call.name, arguments)
      name = call.name
    except calls.InvalidCall as error:
      answer, outcome = f'error: {error}', error.outcome
    # What no record could hold, such as a file name of half a character.
    answer = answer.encode('utf-8', 'replace').decode()
    self._calls.append(
      watch.WatchedCall(tool=tried, arguments=arguments, output=answer)
    )
    return environment.ToolResult(
      text=answer, tool=name, outcome=outcome, is_final=name == 'finish'
    )

  def _parsed(self, text: str) -> tool_calls.JsonCall:
    try:
      return tool_calls.parse_json(text)
    except tool_calls.ToolCallError as error:
      raise calls.InvalidCall(turns_lib.NOT_A_CALL, str(error)) from error

  def _carry_out(
    self, name: str, arguments: Mapping[str, Any]
  ) -> box_tools.Answer:
    if name == 'todo':
      return self._plan.change(arguments)
    if name == 'finish':
      return 'finished', turns_lib.OK
    if self._box is None:
      return 'error: the sandbox failed', turns_lib.FAILED
    try:
      return self._in_box(self._box, name, arguments)
    except base.SandboxLost as error:
      logging.warning('Box of %s lost: %s', self.task_id, error)
      self.is_broken = True
      return 'error: the sandbox failed', turns_lib.FAILED

  def _in_box(
    self, box: base.Box, name: str, arguments: Mapping[str, Any]
  ) -> box_tools.Answer:
    bounds = self._options.bounds
    if name == 'run':
      command = box_tools.run_command(arguments, bounds)
      return box_tools.ran(self._twice(lambda: box.run(command)), bounds)
    if name == 'search':
      command = box_tools.search_command(arguments, bounds)
      result = self._twice(lambda: box.run(command))
      return box_tools.search(result, arguments, bounds)
    if name == 'test':
      if not self._task.shown:
        return 'no test is shown to you', turns_lib.OK
      result = self._twice(lambda: solution.visible(self._task, box))
      return tested(result, self._task.shown, bounds)
    does: dict[str, Callable[..., box_tools.Answer]] = {
        'read': box_tools.read, 'list': box_tools.list_files,
        'edit': box_tools.edit, 'write': box_tools.write,
    }  # fmt: skip
    return does[name](box, arguments, bounds)

  def _twice(self, run: Callable[[], Any]) -> Any:
    """What ran in the box, run once more where the sandbox failed."""
    for _ in range(2):
      result = run()
      self.sandbox_seconds += result.wall_s
      if result.status != 'infrastructure':
        return result
      logging.warning('%s: sandbox failed: %s', self.task_id, result.error)
    raise base.SandboxLost(result.error)

  def verdict(self, finished: bool) -> records.Verdict:
    """Grades the workspace as it is; whatever alarms that raises are flags."""
    if self.is_broken or self._box is None:
      return calls.broken_verdict(self, 'the sandbox failed twice')
    try:
      changes, special = solution.changes_of(self._task, self._box)
      grade = solution.grade(
          self._task, changes, self._sandbox, finished=finished,
          seed=self._seed, special=special,
      )  # fmt: skip
    except base.SandboxLost as error:
      self.is_broken = True
      return calls.broken_verdict(self, str(error))
    evidence = watch.of_repository(
      self._task, self._calls, changes, grade, files=self._files
    )
    found = watch.scan(evidence)
    for finding in found:
      logging.info('%s: %s', self.task_id, finding)
    self.flags = tuple(sorted({*grade.flags, *watch.flags(found)}))
    return grade.verdict


def tested(
  result: suites.SuiteResult, ids: tuple[str, ...], bounds: box_tools.Bounds
) -> box_tools.Answer:
  """How many of the tests pass, which do not, and what pytest printed."""
  passed = result.passed(ids)
  rows = [f'{passed} of {len(ids)} tests pass']
  if result.status != 'ok':
    rows.append(f'[{result.error}]')
  failed = [i for i in ids if result.outcomes.get(i) != 'passed']
  rows += [f'{result.outcomes.get(i, "not run")}: {i}' for i in failed[:20]]
  if len(failed) > 20:
    rows.append(f'[and {len(failed) - 20} more]')
  if failed and result.output:
    rows += ['', result.output.rstrip('\n')]
  text = box_tools.clip('\n'.join(rows), bounds.answer_chars)
  return text, turns_lib.FAILED if failed else turns_lib.OK
