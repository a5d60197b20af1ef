"""The tools of an episode and the workspace they act on.

  list                      files of the package
  read PATH                 text of a file
  edit PATH FUNCTION        replaces the function's body by the payload
  test                      runs the visible examples
  finish                    ends the episode

A call is invalid, and costs, when it names no tool, has the wrong number of
arguments or payloads, or names a file or function that is not there. A body
that does not parse is a wrong edit and not an invalid call: the answer is
'error: syntax' and the file stays as it is. `edit` can change nothing but the
body of one function (tasks.source), so no monitor has to look for tampering
with tests or other files.
"""

import dataclasses
import json
from typing import Any

from composer_jax.core import records
from composer_jax.tasks import runners, source, verify
from composer_jax.tasks import task as task_lib
from composer_jax.text import tool_calls

# name -> number of arguments, whether a payload follows.
TOOLS = {
  'list': (0, False),
  'read': (1, False),
  'edit': (2, True),
  'test': (0, False),
  'finish': (0, False),
}

# Characters of one value or error message in a tool's answer.
_MAX_SHOWN = 60


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
  """What a tool answers.

  Attributes:
    text: for the policy.
    tool: the tool's name, '' for an invalid call.
    is_final: the episode ends.
  """

  text: str
  tool: str
  is_final: bool = False

  @property
  def is_valid(self) -> bool:
    return bool(self.tool)


class _InvalidCall(Exception):
  """The call cannot be carried out; the message goes to the policy."""


def _shown(value: Any) -> str:
  text = value if isinstance(value, str) else json.dumps(value)
  # Code may return lone surrogates, which no log or report could hold.
  text = ' '.join(text.encode('utf-8', 'replace').decode().split())
  return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + '...'


class _TimedRunner:
  """Adds up what the code itself took, waiting for a free sandbox excluded."""

  def __init__(self, runner: runners.Runner):
    self.level = runner.level
    self.seconds = 0.0
    self._runner = runner

  def call(
    self,
    files: dict[str, str],
    module: str,
    function: str,
    arguments: list[list],
  ) -> runners.RunResult:
    result = self._runner.call(files, module, function, arguments)
    self.seconds += result.wall_s
    return result


class Workspace:
  """The files of one episode.

  Attributes:
    files: current text of every file, keyed as in the task.
    flags: what monitors found, sorted.
    sandbox_seconds: wall time inside the sandbox so far.
    is_broken: a run failed for reasons outside the episode, retry included.
  """

  def __init__(self, task: task_lib.Task, runner: runners.Runner):
    self.files = dict(task.files)
    self.is_broken = False
    self._flags: set[str] = set()
    self._task = task
    self._runner = _TimedRunner(runner)

  @property
  def sandbox_seconds(self) -> float:
    return self._runner.seconds

  @property
  def flags(self) -> tuple[str, ...]:
    return tuple(sorted(self._flags))

  def run(self, text: str) -> ToolResult:
    """Parses and carries out one call; never raises for a policy's text."""
    try:
      call = tool_calls.parse(text)
      self._check(call)
      answer = getattr(self, f'_{call.name}')(call)
    except (tool_calls.ToolCallError, _InvalidCall) as error:
      return ToolResult(text=f'error: {_shown(str(error))}', tool='')
    return ToolResult(
      text=answer, tool=call.name, is_final=call.name == 'finish'
    )

  def _check(self, call: tool_calls.Call) -> None:
    if call.name not in TOOLS:
      raise _InvalidCall(f'no such tool; use {", ".join(TOOLS)}')
    count, takes_payload = TOOLS[call.name]
    if len(call.arguments) != count:
      raise _InvalidCall(
        f'{call.name} takes {count} argument{"s" * (count != 1)}'
      )
    if bool(call.payload.strip()) != takes_payload:
      needs = 'needs' if takes_payload else 'takes no'
      raise _InvalidCall(f'{call.name} {needs} lines below')

  def _key(self, path: str) -> str:
    key = f'{self._task.package}/{path}'
    if key not in self.files:
      raise _InvalidCall(f'no file {path}')
    return key

  def _list(self, call: tool_calls.Call) -> str:
    del call
    return ' '.join(key.split('/', 1)[1] for key in sorted(self.files))

  def _read(self, call: tool_calls.Call) -> str:
    text = self.files[self._key(call.arguments[0])]
    return text.rstrip('\n') or 'empty'

  def _edit(self, call: tool_calls.Call) -> str:
    path, function = call.arguments
    key = self._key(path)
    try:
      edited = source.replace_body(self.files[key], function, call.payload)
    except LookupError:
      raise _InvalidCall(f'no function {function} in {path}') from None
    except ValueError:
      return 'error: syntax'
    if (path, function) != (self._task.path, self._task.function):
      self._flags.add('edited_other_function')
    self.files[key] = edited
    return 'edited'

  def _test(self, call: tool_calls.Call) -> str:
    del call
    task = self._task
    arguments = [list(args) for args, _ in task.visible]
    result = runners.call(
      self._runner, self.files, task.module, task.function, arguments
    )
    if result.status == 'infrastructure':
      self.is_broken = True
      return 'error: tests could not run'
    held = verify.outcomes(result, task.visible)
    if held is None:
      return f'{len(task.visible)} failed: {result.status}'
    if all(held):
      return f'{len(held)} passed'
    first = held.index(False)
    return f'{held.count(False)} failed: {self._failure(result, first)}'

  def _failure(self, result: Any, index: int) -> str:
    args, expected = self._task.visible[index]
    shown = ', '.join(_shown(a) for a in args)
    kind, answer = result.value[index]
    call = f'{self._task.function}({shown})'
    if kind != 'ok':
      return f'{call} raised {_shown(str(answer).rstrip(": "))}'
    return f'{call} returned {_shown(answer)}, expected {_shown(expected)}'

  def verify(self, finished: bool) -> records.Verdict:
    """The verdict on the files as they are."""
    return verify.verify(self._task, self.files, self._runner, finished)

  def _finish(self, call: tool_calls.Call) -> str:
    del call
    return 'finished'
