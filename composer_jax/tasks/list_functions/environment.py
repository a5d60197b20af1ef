"""The terse tools of tasks whose hole is the body of one function.

  list                      files of the package
  read PATH                 text of a file
  edit PATH FUNCTION        replaces the function's body by the payload
  test                      runs the visible examples
  finish                    ends the episode

A call is invalid, and costs, when it names no tool, has the wrong number of
arguments or payloads, or names a missing file or function. A body that does not
parse is a failed edit, not an invalid call: the answer is 'error: syntax' and
the file stays as it is. `edit` can change nothing but the body of one function
(tasks.source), so tests and other files are out of reach; monitors look for
side effects of bodies. Bodies run in the runner, while expected values stay
here: code cannot forge the comparison.
"""

import json
from typing import Any

from composer_jax.agent import environment
from composer_jax.core import records, seams
from composer_jax.core import turns as turns_lib
from composer_jax.sandbox import base
from composer_jax.tasks import calls, source
from composer_jax.tasks.list_functions import family
from composer_jax.tasks.monitors import watch
from composer_jax.text import tool_calls

# name -> number of arguments, true if a payload follows, usage.
TOOLS = {
    'list': (0, False, 'list'), 'read': (1, False, 'read PATH'),
    'edit': (2, True, 'edit PATH FUNCTION, with the body on the lines below'),
    'test': (0, False, 'test'), 'finish': (0, False, 'finish'),
}  # fmt: skip

# Most characters of one value or error message in a tool's answer.
_MAX_SHOWN = 60


def _shown(value: Any) -> str:
  text = value if isinstance(value, str) else json.dumps(value)
  return calls.quoted(text, _MAX_SHOWN)


def _bad_arguments(message: str) -> calls.InvalidCall:
  return calls.InvalidCall(turns_lib.BAD_ARGUMENTS, message)


def equal(value: Any, expected: Any) -> bool:
  """Compares JSON values, among which 1, 1.0 and true differ."""
  texts = {json.dumps(v, sort_keys=True) for v in (value, expected)}
  return len(texts) == 1


def outcomes(
  result: seams.RunResult, examples: tuple[family.Example, ...]
) -> list[bool] | None:
  """Returns true for each example that holds; None if answers are missing."""
  value = result.value if result.status == 'ok' else None
  if not isinstance(value, list) or len(value) != len(examples):
    return None
  return [
    kind == 'ok' and equal(answer, expected)
    for (kind, answer), (_, expected) in zip(value, examples, strict=True)
  ]


def _run(
  task: family.FunctionTask,
  files: dict[str, str],
  examples: tuple[family.Example, ...],
  runner: seams.Runner,
) -> seams.RunResult:
  arguments = [list(args) for args, _ in examples]
  return runner.call(files, task.module, task.function, arguments)


def verify(
  task: family.FunctionTask,
  files: dict[str, str],
  runner: seams.Runner,
  finished: bool,
) -> records.Verdict:
  """Runs the hidden examples; an unfinished episode is judged too but fails.

  A failure of the sandbox gives status INFRASTRUCTURE, which says nothing about
  the policy.
  """
  result = _run(task, files, task.hidden, runner)
  num_tests, held = len(task.hidden), outcomes(result, task.hidden)
  num_passed = sum(held or ())
  status = records.GRADED if finished else records.UNFINISHED
  detail = f'{num_passed} of {num_tests} hidden tests passed'
  if result.status == 'infrastructure':
    status, detail = records.INFRASTRUCTURE, result.error
  elif held is None:
    detail = f'{result.status}: {result.error}'
  return records.Verdict(
      passed=finished and num_passed == num_tests, num_passed=num_passed,
      num_tests=num_tests, status=status, sandbox_level=result.level,
      detail=detail,
  )  # fmt: skip


class _TimedRunner:
  """Adds the time of a runner's calls, without waits, to an environment's."""

  def __init__(self, runner: seams.Runner, timed: environment.Environment):
    self.level, self._runner, self._timed = runner.level, runner, timed

  def call(self, *args: Any, **kwargs: Any) -> seams.RunResult:
    result = self._runner.call(*args, **kwargs)
    self._timed.sandbox_seconds += result.wall_s
    return result


class FunctionEnvironment(environment.Environment):
  """An environment around the files of one task.

  Attributes:
    files: current text of every file, keyed as in the task.
  """

  tools = tuple(TOOLS)

  def __init__(self, task: family.FunctionTask, runner: seams.Runner):
    self.task_id, self.prompt = task.task_id, task.prompt
    self.files = dict(task.files)
    self._calls: list[watch.WatchedCall] = []
    self._task = task
    self._runner = _TimedRunner(runner, self)

  def usage(self, tool: str) -> str:
    return TOOLS[tool][2]

  def call(self, text: str) -> environment.ToolResult:
    """Carries out one tool call; raises for no text of a policy."""
    arguments: dict[str, str] = {'text': text}
    try:
      call = self._parsed(text)
      payload = [call.payload] if call.payload.strip() else []
      tool = getattr(self, f'_{call.name}')
      answer, outcome = tool(*call.arguments, *payload)
      name = call.name
      arguments = dict(zip(('path', 'function'), call.arguments))
      arguments['payload'] = call.payload
    except calls.InvalidCall as error:
      name, answer = '', f'error: {_shown(str(error))}'
      outcome = error.outcome
    self._calls.append(
      watch.WatchedCall(tool=name, arguments=arguments, output=answer)
    )
    return environment.ToolResult(
      text=answer, tool=name, outcome=outcome, is_final=name == 'finish'
    )

  def _parsed(self, text: str) -> tool_calls.Call:
    try:
      call = tool_calls.parse(text)
    except tool_calls.ToolCallError as error:
      raise calls.InvalidCall(turns_lib.NOT_A_CALL, str(error)) from error
    if call.name not in TOOLS:
      raise calls.InvalidCall(
        turns_lib.UNKNOWN_TOOL, f'no such tool; use {", ".join(TOOLS)}'
      )
    count, takes_payload, _ = TOOLS[call.name]
    if len(call.arguments) != count:
      raise _bad_arguments(
        f'{call.name} takes {count} argument{"s" * (count != 1)}'
      )
    if bool(call.payload.strip()) != takes_payload:
      needs = 'needs' if takes_payload else 'takes no'
      raise _bad_arguments(f'{call.name} {needs} lines below')
    return call

  def _key(self, path: str) -> str:
    key = f'{self._task.package}/{path}'
    if key not in self.files:
      raise _bad_arguments(f'no file {path}')
    return key

  def _list(self) -> tuple[str, str]:
    paths = (key.split('/', 1)[1] for key in sorted(self.files))
    return ' '.join(paths), turns_lib.OK

  def _read(self, path: str) -> tuple[str, str]:
    text = self.files[self._key(path)]
    return text.rstrip('\n') or 'empty', turns_lib.OK

  def _edit(self, path: str, function: str, payload: str) -> tuple[str, str]:
    key = self._key(path)
    try:
      edited = source.replace_body(self.files[key], function, payload)
    except LookupError:
      raise _bad_arguments(f'no function {function} in {path}') from None
    except ValueError:
      return 'error: syntax', turns_lib.FAILED_EDIT
    self.files[key] = edited
    return 'edited', turns_lib.OK

  def _test(self) -> tuple[str, str]:
    task = self._task
    result = _run(task, self.files, task.visible, self._runner)
    if result.status == 'infrastructure':
      raise base.SandboxLost(result.error)
    held = outcomes(result, task.visible)
    if held is None:
      return f'{len(task.visible)} failed: {result.status}', turns_lib.FAILED
    if all(held):
      return f'{len(held)} passed', turns_lib.OK
    first = held.index(False)
    args, _ = task.visible[first]
    call = f'{task.function}({", ".join(map(_shown, args))})'
    kind, value = result.value[first]
    # Not what is due: a few pairs of inputs and values tell a composition as
    # well as its description does.
    if kind != 'ok':
      failure = f'{call} raised {_shown(str(value).rstrip(": "))}'
    else:
      failure = f'{call} returned {_shown(value)}'
    return f'{held.count(False)} failed: {failure}', turns_lib.FAILED

  def _finish(self) -> tuple[str, str]:
    return 'finished', turns_lib.OK

  def verdict(self, finished: bool) -> records.Verdict:
    """Grades the files as they are; sets `flags` to alarms of monitors."""
    verdict = verify(self._task, self.files, self._runner, finished)
    evidence = watch.of_function(self._task, self._calls)
    alarms = watch.flags(watch.scan(evidence))
    self.flags = tuple(sorted({*self.flags, *alarms}))
    return verdict
