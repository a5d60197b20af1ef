"""Laws of the verdict, and of the runners that execute no policy's text."""

import ast
import dataclasses
import random

import pytest

from composer_jax.core import records
from composer_jax.tasks import source
from composer_jax.tasks.list_functions import environment, family, runners

RUNNERS = (runners.TrustedRunner(), runners.StaticRunner())


@pytest.fixture(scope='module')
def tasks():
  train_tasks = [family.generate(i, 'train') for i in range(40)]
  return train_tasks + [family.generate(i, 'unseen_all') for i in range(40)]


def _with_body(task, body):
  path = f'{task.package}/{task.path}'
  text = source.replace_body(task.files[path], task.function, body)
  return {**task.files, path: text}


class _FailingRunner:
  level = 'trusted'

  def call(self, files, module, function, arguments):
    result = RUNNERS[0].call(files, module, function, arguments)
    return dataclasses.replace(
      result, status='infrastructure', value=None, error='no zygote'
    )


@pytest.mark.parametrize('runner', RUNNERS, ids=lambda r: r.level)
def test_references_pass_and_stubs_score_nothing(tasks, runner):
  for task in tasks:
    files = _with_body(task, task.reference)
    verdict = environment.verify(task, files, runner, True)
    assert verdict.passed
    assert verdict.num_passed == verdict.num_tests == len(task.hidden)
    stub = environment.verify(task, task.files, runner, True)
    assert (stub.passed, stub.num_passed) == (False, 0)
    assert stub.status == records.GRADED
    assert stub.sandbox_level == runner.level


def test_executing_and_recognising_agree_on_wrong_bodies(tasks):
  draw = random.Random(0)
  for task in tasks[:40]:
    right = family.composition_of(task)
    wrong = family.draw_composition(draw, like=right)
    body = wrong.body(family.names_of(task)[0], 'w')
    counts = set()
    for runner in RUNNERS:
      verdict = environment.verify(task, _with_body(task, body), runner, True)
      assert not verdict.passed
      counts.add(verdict.num_passed)
    assert len(counts) == 1


def test_the_static_runner_executes_nothing(tasks, tmp_path):
  mark = tmp_path / 'executed'
  body = f'open({str(mark)!r}, "w")\nreturn 1'
  task = tasks[0]
  for text in (body, 'return (', 'return ' + '-' * 900 + '1'):
    # Written as a file, since `edit` refuses text that does not parse.
    path = f'{task.package}/{task.path}'
    files = {**task.files, path: f'def {task.function}(v):\n {text}\n'}
    verdict = environment.verify(task, files, RUNNERS[1], True)
    assert (verdict.passed, verdict.num_passed) == (False, 0)
  assert not mark.exists()


@pytest.mark.parametrize('runner', RUNNERS, ids=lambda r: r.level)
def test_a_neighbour_that_does_not_compile_fails_the_task(tasks, runner):
  task = next(t for t in tasks if _neighbour(t))
  right = _with_body(task, task.reference)
  path = f'{task.package}/{task.path}'
  text = source.replace_body(right[path], _neighbour(task), 'break')
  assert environment.verify(task, right, runner, True).passed
  verdict = environment.verify(task, {**right, path: text}, runner, True)
  assert (verdict.passed, verdict.num_passed) == (False, 0)


def _neighbour(task):
  """Returns the name of another function of the module, or None."""
  tree = ast.parse(task.files[f'{task.package}/{task.path}'])
  names = [node.name for node in tree.body if node.name != task.function]
  return names[0] if names else None


def test_a_free_name_is_not_recognised_as_a_bound_one(tasks):
  task = tasks[0]
  argument, variable = family.names_of(task)
  body = task.reference.replace(f'in {argument}', 'in bound0')
  assert body != task.reference
  for runner in RUNNERS:
    verdict = environment.verify(task, _with_body(task, body), runner, True)
    assert (verdict.passed, verdict.num_passed) == (False, 0)


def test_a_module_without_the_function_recognises_nothing(tasks):
  path = f'{tasks[0].package}/{tasks[0].path}'
  for text in ('', f'{tasks[0].function} = 1\n'):
    files = {**tasks[0].files, path: text}
    assert environment.verify(tasks[0], files, RUNNERS[1], True).num_passed == 0


def test_an_unfinished_episode_fails_however_right(tasks):
  files = _with_body(tasks[0], tasks[0].reference)
  verdict = environment.verify(tasks[0], files, RUNNERS[0], False)
  assert verdict.status == records.UNFINISHED
  assert not verdict.passed
  assert verdict.num_passed == verdict.num_tests


def test_a_sandbox_that_fails_gives_no_verdict(tasks):
  files = _with_body(tasks[0], tasks[0].reference)
  verdict = environment.verify(tasks[0], files, _FailingRunner(), True)
  assert verdict.status == records.INFRASTRUCTURE
  assert verdict.detail == 'no zygote'


def test_equality_is_that_of_json_and_not_of_python():
  assert environment.equal([1, {'a': None}], [1, {'a': None}])
  for value, expected in ((True, 1), (1.0, 1), ('1', 1), ([1], [1, 1])):
    assert not environment.equal(value, expected)


def test_an_answer_of_the_wrong_shape_is_no_answer(tasks):
  examples = tasks[0].hidden
  good = RUNNERS[0].call(
    _with_body(tasks[0], tasks[0].reference),
    tasks[0].module,
    tasks[0].function,
    [list(args) for args, _ in examples],
  )
  assert environment.outcomes(good, examples) == [True] * len(examples)
  for value in (good.value[:-1], None, 'ok'):
    bad = dataclasses.replace(good, value=value)
    assert environment.outcomes(bad, examples) is None
  late = dataclasses.replace(good, status='timeout')
  assert environment.outcomes(late, examples) is None
