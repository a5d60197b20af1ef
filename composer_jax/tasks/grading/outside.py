"""Runs a task's tests where the solution's code never runs.

Two boxes: one holds the tests and the original package, whose deleted functions
are stand-ins that answer from a table; the other holds the solution and no
test. A call without an answer ends its test; the host has the solution's
process answer the call, adds the value to the table and runs the tests again.

Only functions of plain values can be replaced, and only tests that pass so with
the original prove anything (`reference`).
"""

import ast
import json
from collections.abc import Mapping

from composer_jax.sandbox import base
from composer_jax.tasks import source as python_source
from composer_jax.tasks.grading import held_out, suites
from composer_jax.tasks.repository import task_set

_MAX_ROUNDS = 6


class NotEnded(base.SandboxLost):
  """Tests did not end; of the original, this says nothing of a solution."""


def replaced(task: task_set.RepositoryTask) -> list[list[str]]:
  """Public functions of modules that were deleted, as [module, name]."""
  functions = []
  for item in task.deleted:
    module = task_set.module_of(item.path, task.source_roots)
    names = [item.symbol]
    if not item.symbol:  # a whole file
      tree = python_source.parse(task.solution[item.path])
      names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    functions += [
      [module, name]
      for name in names
      if name.isidentifier() and not name.startswith('_')
    ]
  return functions


def passed(
  task: task_set.RepositoryTask,
  source: Mapping[str, bytes | None],
  sandbox: base.Sandbox,
  answers: Mapping[str, list],
) -> frozenset[str]:
  """Runs the feature's tests on values of a solution alone.

  Args:
    task: the task.
    source: changes that turn the image into the solution.
    sandbox: sandbox with the images of the task's set.
    answers: what the solution answered before, by the JSON of the call.

  Returns:
    Ids of the tests that passed.

  Raises:
    NotEnded: a run was cut short.
    base.SandboxLost: the sandbox failed.
  """
  table, ids = dict(answers), task.fail_to_pass
  functions = replaced(task)
  if not functions:
    return frozenset()
  good: frozenset[str] = frozenset()
  for _ in range(_MAX_ROUNDS):
    result = suites.run_fresh(
        sandbox, task.image, {}, task.task_id,
        arguments=('-q', '--tb=no', *task.test_arguments), ids=ids,
        source_roots=task.source_roots, cpu_s=task.timeout_s,
        stand_ins={'functions': functions, 'answers': table},
    )  # fmt: skip
    if result.status in ('timeout', 'killed'):
      raise NotEnded('tests on values of a solution did not end')
    if result.status != 'ok':
      return frozenset()
    good = frozenset(
      i for i in ids if result.outcomes.get(i) == 'passed' and
      result.entered.get(i)
    )  # fmt: skip
    if not result.inputs:
      break
    answered, _ = held_out.answers(task, source, sandbox, result.inputs)
    if answered is None:
      break
    table |= {
      json.dumps(call): outcome
      for call, (outcome, _) in zip(result.inputs, answered, strict=True)
    }
  return good


def reference(
  task: task_set.RepositoryTask, sandbox: base.Sandbox
) -> frozenset[str]:
  """Tests that pass on values of the original, found once per task.

  Raises:
    NotEnded: they take too long.
    base.SandboxLost: the sandbox failed.
  """
  facts = held_out.facts_of(task)
  if 'outside' not in facts:
    facts['outside'] = passed(task, {}, sandbox, {})
  return facts['outside']
