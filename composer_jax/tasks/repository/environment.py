"""An environment around a repository in a sandbox, with tools of JSON calls.

Tool calls are `{"tool": ..., "arguments": {...}}` (text.tool_calls); the tools
are an option of each environment. Any text is answered: one that is no call,
names no tool or has wrong arguments is an invalid call, whose error says how to
mend it; all others are carried out in the box.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from composer_jax.agent import environment
from composer_jax.core import checks, records
from composer_jax.core import turns as turns_lib
from composer_jax.sandbox import base
from composer_jax.tasks import calls
from composer_jax.tasks.deletion import edit
from composer_jax.tasks.grading import solution, suites
from composer_jax.tasks.monitors import watch
from composer_jax.tasks.repository import schemas as tool_schemas
from composer_jax.tasks.repository import task_set
from composer_jax.tasks.repository import tools as box_tools
from composer_jax.text import tokenizer, tool_calls

_OWNED = (
  'Tests and their configuration belong to the grader: do not change those '
  'that are there.'
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryOptions:
  """The tools of an environment, and their bounds.

  Attributes:
    tools: names out of `tasks.repository.schemas.KNOWN`, in the order of the
      prompt.
    lines_around: lines above and below a missing body that the prompt shows
      instead of the task's own text, for models of short contexts; 0 for that
      text, and where more than one body is missing.
    max_todos: most to-dos of a plan.
    bounds: bounds of single calls.
  """

  tools: tuple[str, ...] = tuple(tool_schemas.TOOLS)
  lines_around: int = 0
  max_todos: int = 30
  bounds: box_tools.Bounds = box_tools.Bounds()

  def __post_init__(self):
    unknown = set(self.tools) - set(tool_schemas.KNOWN)
    if unknown or 'finish' not in self.tools:
      raise ValueError(
        f'tools {self.tools} must be of {tuple(tool_schemas.KNOWN)}, "finish" '
        f'among them; there is no {sorted(unknown)}.'
      )
    checks.at_least(self, 1, 'max_todos')
    checks.at_least(self, 0, 'lines_around')

  @property
  def schemas(self) -> dict[str, tool_schemas.Tool]:
    return {name: tool_schemas.KNOWN[name] for name in self.tools}


def prompt_of(task: task_set.RepositoryTask, options: RepositoryOptions) -> str:
  """Returns the first message of an episode: the task, and its tools."""
  if options.lines_around and (place := missing_body(task)):
    path, text, name = place
    return prompt_around(path, text, name, options)
  return '\n\n'.join(
    [task.prompt, _OWNED, tool_schemas.prompt(options.schemas)]
  )


def prompt_around(
  path: str, text: str, name: str, options: RepositoryOptions
) -> str:
  """Returns the prompt that shows the lines around a body, and the tools."""
  shown = edit.around(text, name, options.lines_around)
  place, owned = '', ()
  # Whoever can change the body alone need not be told of other files.
  if not {*options.tools} <= {'body', 'finish'}:
    place, owned = f' in `{path}`', (_OWNED,)
  asked = f'The body of `{name}`{place} is missing:\n\n{shown}'
  return '\n\n'.join([asked, *owned, tool_schemas.prompt(options.schemas)])


def written(name: str) -> box_tools.Answer:
  """Returns the answer to a call of `body` that was carried out."""
  return f'wrote the body of {name}', turns_lib.OK


def missing_body(task: task_set.RepositoryTask) -> tuple[str, str, str] | None:
  """Returns path, text and definition of the only body that a task deletes."""
  if task.tier != 'body' or len(task.deleted) > 1:
    return None
  (deleted,) = task.deleted
  return deleted.path, task.changes[deleted.path] or '', deleted.symbol


class Plan:
  """The to-do list of an episode."""

  def __init__(self, max_todos: int):
    self._max_todos = max_todos
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
    """Carries out a call of `todo`; raises InvalidCall for wrong arguments."""
    action, items = arguments['action'], self._items
    if action == 'add':
      if 'text' not in arguments:
        raise _bad_todo('"add" needs the argument "text", a string')
      if len(items) == self._max_todos:
        return f'error: a plan holds {self._max_todos} items', turns_lib.FAILED
      text = ' '.join(arguments['text'].split())
      items.append((box_tools.clip(text, 200), False))
    elif action == 'done':
      # The argument is missing, or beyond the list.
      number = arguments.get('item', len(items) + 1)
      if number > len(items):
        raise _bad_todo(
          f'"done" needs the argument "item", a number of 1 to {len(items)}'
        )
      items[number - 1] = (items[number - 1][0], True)
    return str(self) or 'no items', turns_lib.OK


def _bad_todo(fault: str) -> calls.InvalidCall:
  return tool_schemas.bad_arguments(tool_schemas.TOOLS['todo'], fault)


class BoxEnvironment(environment.Environment):
  """An environment whose tools act on a box.

  A sandbox that fails raises; `tasks.contained` has it break the episode.

  Attributes:
    box: workspace of the episode.
  """

  def __init__(
    self,
    task_id: str,
    prompt: str,
    options: RepositoryOptions,
    box: base.Box,
  ):
    self.task_id, self.prompt = task_id, prompt
    self.protocol = tool_schemas.prompt(options.schemas)
    self.tools = options.tools
    self.calls: list[watch.WatchedCall] = []
    self._options, self._schemas = options, options.schemas
    self._plan = Plan(options.max_todos)
    self.box = box

  def usage(self, tool: str) -> str:
    return self._schemas[tool].usage

  def state(self) -> str:
    return str(self._plan)

  def close(self) -> None:
    self.box.close()

  def finish(self) -> tuple[str, bool]:
    """Returns the answer to `finish`, and whether it ends the episode."""
    return 'finished', True

  def call(self, text: str) -> environment.ToolResult:
    """Carries out one tool call; never raises for a policy's text."""
    name, is_final = '', False
    # Monitors also see well-formed calls that could not be carried out.
    tried, arguments = '', {'text': text}
    try:
      call = tool_calls.parse_json(text)
      arguments = tool_schemas.check(call, self._schemas)
      tried = call.name
      if tried == 'finish':
        answer, is_final = self.finish()
        outcome = turns_lib.OK
      else:
        answer, outcome = self._carry_out(call.name, arguments)
      name = call.name
    except tool_calls.ToolCallError as error:
      answer, outcome = f'error: {error}', turns_lib.NOT_A_CALL
    except calls.InvalidCall as error:
      answer, outcome = f'error: {error}', error.outcome
    # File names may hold lone surrogates, which no record can.
    answer = tokenizer.without_surrogates(answer)
    self.calls.append(
      watch.WatchedCall(tool=tried, arguments=arguments, output=answer)
    )
    return environment.ToolResult(
      text=answer, tool=name, outcome=outcome, is_final=is_final
    )

  def _carry_out(
    self, name: str, arguments: Mapping[str, Any]
  ) -> box_tools.Answer:
    if name == 'todo':
      answer = self._plan.change(arguments)
      self.open_todos = self._plan.num_open
      return answer
    return self.in_box(name, arguments)

  def in_box(self, name: str, arguments: Mapping[str, Any]) -> box_tools.Answer:
    """Carries out a call of a tool that acts on the box."""
    bounds = self._options.bounds
    if name in box_tools.COMMANDS:
      run_in = lambda command: self.timed(self.box.run(command))
      return box_tools.COMMANDS[name](run_in, arguments, bounds)
    return box_tools.FILES[name](self.box, arguments, bounds)

  def timed(self, result: Any) -> Any:
    """Returns the result of a run, whose time counts."""
    if result.status == 'infrastructure':
      raise base.SandboxLost(result.error)
    self.sandbox_seconds += result.wall_s
    return result


class RepositoryEnvironment(BoxEnvironment):
  """An environment around a box with the task's repository."""

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
      sandbox: sandbox whose images are the task's set.
      seed: seed of the grader's draws.
    """
    self._task, self._sandbox, self._seed = task, sandbox, seed
    box = sandbox.open(task.image, task.view())
    super().__init__(task.task_id, prompt_of(task, options), options, box)
    self._files = box.files()

  def in_box(self, name: str, arguments: Mapping[str, Any]) -> box_tools.Answer:
    if name == 'body':
      return self._fill(arguments['text'])
    if name != 'test':
      return super().in_box(name, arguments)
    if not self._task.shown:
      return 'no test is shown to you', turns_lib.OK
    result = self.timed(solution.visible(self._task, self.box))
    return tested(result, self._task.shown, self._options.bounds)

  def _fill(self, new: str) -> box_tools.Answer:
    """Carries out a call of `body`."""
    try:
      if (place := missing_body(self._task)) is None:
        raise edit.CannotEdit('this task has no single missing body')
      path, text, name = place
      self.box.write(path, edit.fill(text, name, new).encode())
    except edit.CannotEdit as error:
      return f'error: {error}', turns_lib.FAILED_EDIT
    return written(name)

  def verdict(self, finished: bool) -> records.Verdict:
    """Grades the workspace as it is; sets `flags` to the alarms of that."""
    changes, special = solution.changes_of(self._task, self.box)
    grade = solution.grade(
      self._task,
      changes,
      self._sandbox,
      finished=finished,
      seed=self._seed,
      special=special,
    )
    evidence = watch.of_repository(
      self._task, self.calls, changes, grade, files=self._files
    )
    findings = watch.scan(evidence)
    for finding in findings:
      logging.info('%s: %s', self.task_id, finding)
    self.flags = tuple(sorted({*grade.flags, *watch.flags(findings)}))
    return grade.verdict


def tested(
  result: suites.SuiteResult, ids: tuple[str, ...], bounds: box_tools.Bounds
) -> box_tools.Answer:
  """Returns how many tests pass, which fail, and the output of pytest."""
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
