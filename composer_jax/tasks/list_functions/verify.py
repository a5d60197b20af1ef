"""Judges the final files of an episode by the hidden examples.

The code runs in the runner; expected values stay here. Whatever the code
prints, raises or returns, the comparison is not its own.
"""

import json
from typing import Any

from composer_jax.core import records
from composer_jax.tasks.list_functions import runners
from composer_jax.tasks.list_functions import task as task_lib


def equal(value: Any, expected: Any) -> bool:
  """Equality of JSON values in which 1, 1.0 and true differ."""
  return json.dumps(value, sort_keys=True) == json.dumps(
    expected, sort_keys=True
  )


def outcomes(
  result: runners.RunResult, examples: tuple[task_lib.Example, ...]
) -> list[bool] | None:
  """Which examples hold, or None when the run did not give all answers."""
  value = result.value
  if result.status != 'ok' or not isinstance(value, list):
    return None
  if len(value) != len(examples):
    return None
  return [
    kind == 'ok' and equal(answer, expected)
    for (kind, answer), (_, expected) in zip(value, examples, strict=True)
  ]


def verify(
  task: task_lib.Task,
  files: dict[str, str],
  runner: runners.Runner,
  finished: bool,
) -> records.Verdict:
  """Runs the hidden examples; an unfinished episode is judged too but fails.

  A failure of the sandbox, after one retry, is status INFRASTRUCTURE: it says
  nothing about the policy.
  """
  arguments = [list(args) for args, _ in task.hidden]
  result = runners.call(runner, files, task.module, task.function, arguments)
  num_tests = len(task.hidden)
  if result.status == 'infrastructure':
    return records.Verdict(
      passed=False,
      num_passed=0,
      num_tests=num_tests,
      status=records.INFRASTRUCTURE,
      sandbox_level=result.level,
      detail=result.error,
    )
  held = outcomes(result, task.hidden)
  num_passed = sum(held) if held is not None else 0
  detail = f'{num_passed} of {num_tests} hidden tests passed'
  if held is None:
    detail = f'{result.status}: {result.error}'
  return records.Verdict(
    passed=finished and num_passed == num_tests,
    num_passed=num_passed,
    num_tests=num_tests,
    status=records.GRADED if finished else records.UNFINISHED,
    sandbox_level=result.level,
    detail=detail,
  )
