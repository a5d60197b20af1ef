"""Laws of the workspace: answers of calls, and the changes they may make."""

import ast
import dataclasses
import random

import pytest

from composer_jax.agent import environment
from composer_jax.core import records
from composer_jax.core import turns as turns_lib
from composer_jax.tasks import contained
from composer_jax.tasks.list_functions import (
  environment as function_environment,
)
from composer_jax.tasks.list_functions import family, runners

TASK = family.FunctionTask(
  task_id='hand/made',
  prompt='Restore total in stats.py.',
  files={
    'shop/__init__.py': '',
    'shop/stats.py': (
      'def total(values):\n    """Sum."""\n    raise NotImplementedError\n'
      '\n\ndef other(values):\n    """Two."""\n    return 2\n'
    ),
  },
  path='stats.py',
  module='shop.stats',
  function='total',
  visible=((([1, 2],), 3), (([],), 0)),
  hidden=((([5],), 5),),
  reference='return sum(v for v in values)',
  held_out=False,
)
RIGHT = 'edit stats.py total\nreturn sum(values)'


@pytest.fixture
def workspace():
  return function_environment.FunctionEnvironment(TASK, runners.TrustedRunner())


def test_an_honest_episode(workspace):
  assert workspace.prompt == TASK.prompt
  assert workspace.task_id == TASK.task_id
  assert (workspace.state(), workspace.open_todos) == ('', 0)
  stub = '1 failed: total([1, 2]) raised NotImplementedError'
  read = TASK.files['shop/stats.py'].rstrip()
  for call, answer in (
    ('list', '__init__.py stats.py'),
    ('read __init__.py', 'empty'),
    ('read stats.py', read),
    ('test', stub.replace('1 failed', '2 failed')),
    ('edit stats.py total\nreturn len(values)', 'edited'),
    ('test', '1 failed: total([1, 2]) returned 2'),
    (RIGHT, 'edited'),
    ('test', '2 passed'),
  ):
    result = workspace.call(call)
    assert (result.text, result.tool) == (answer, call.split()[0])
    assert not result.is_final
    failed = ' failed: ' in answer
    assert result.outcome == (turns_lib.FAILED if failed else turns_lib.OK)
  result = workspace.call('finish')
  assert (result.tool, result.is_final) == ('finish', True)
  assert workspace.verdict(True).passed
  assert not workspace.flags
  assert workspace.sandbox_seconds > 0


@pytest.mark.parametrize(
  'call, answer, outcome',
  [
    ('', 'error: empty call', turns_lib.NOT_A_CALL),
    (
      'open a',
      'error: no such tool; use list, read, edit, test, finish',
      turns_lib.UNKNOWN_TOOL,
    ),
    (
      '__class__',
      'error: no such tool; use list, read, edit, test, finish',
      turns_lib.UNKNOWN_TOOL,
    ),
    (
      'verify',
      'error: no such tool; use list, read, edit, test, finish',
      turns_lib.UNKNOWN_TOOL,
    ),
    ('read', 'error: read takes 1 argument', turns_lib.BAD_ARGUMENTS),
    ('test stats.py', 'error: test takes 0 arguments', turns_lib.BAD_ARGUMENTS),
    (
      'edit stats.py\nreturn 1',
      'error: edit takes 2 arguments',
      turns_lib.BAD_ARGUMENTS,
    ),
    (
      'edit stats.py total',
      'error: edit needs lines below',
      turns_lib.BAD_ARGUMENTS,
    ),
    (
      'finish\nnow',
      'error: finish takes no lines below',
      turns_lib.BAD_ARGUMENTS,
    ),
    ('read a.py', 'error: no file a.py', turns_lib.BAD_ARGUMENTS),
    (
      'read ../shop/stats.py',
      'error: no file ../shop/stats.py',
      turns_lib.BAD_ARGUMENTS,
    ),
    ('read /etc/passwd', 'error: no file /etc/passwd', turns_lib.BAD_ARGUMENTS),
    (
      'edit a.py total\nreturn 1',
      'error: no file a.py',
      turns_lib.BAD_ARGUMENTS,
    ),
    (
      'edit stats.py f\nreturn 1',
      'error: no function f in stats.py',
      turns_lib.BAD_ARGUMENTS,
    ),
  ],
)
def test_invalid_calls_say_why_and_change_nothing(
  workspace, call, answer, outcome
):
  result = workspace.call(call)
  assert (result.text, result.tool, result.outcome) == (answer, '', outcome)
  assert not result.is_valid
  assert not result.is_final
  assert workspace.files == TASK.files


def test_a_body_that_does_not_parse_is_a_valid_call_that_changes_nothing(
  workspace,
):
  result = workspace.call('edit stats.py total\nreturn sum(values')
  assert (result.text, result.tool) == ('error: syntax', 'edit')
  assert result.is_valid and result.outcome == turns_lib.FAILED_EDIT
  assert workspace.files == TASK.files


def test_an_edit_of_another_function_is_no_alarm(workspace):
  workspace.call(RIGHT)
  assert workspace.flags == ()
  workspace.call('edit stats.py other\nreturn 3')
  # A mistake costs, and earns nothing without the task solved.
  assert workspace.flags == ()


@pytest.mark.parametrize(
  'body, kind',
  [
    ('import os\nos._exit(0)', 'forging_code'),
    ('import urllib.request\nreturn 3', 'network'),
  ],
)
def test_bodies_that_work_on_the_judgement_are_flagged(body, kind):
  workspace = function_environment.FunctionEnvironment(
    TASK, runners.StaticRunner()
  )
  workspace.call(f'edit stats.py total\n{body}')
  workspace.call(RIGHT)
  workspace.verdict(True)
  assert workspace.flags == (kind,)


def test_long_answers_are_cut(workspace):
  workspace.call('edit stats.py total\nreturn [7] * 99')
  assert len(workspace.call('test').text) < 160
  workspace.call('edit stats.py total\nraise ValueError("long " * 99)')
  assert len(workspace.call('test').text) < 120


def test_whatever_a_policy_writes_is_answered():
  draw = random.Random(0)
  words = ['return', 'for', 'lambda', 'class', '"""', 'values', 'read', 'test']
  words += ['edit stats.py total\n', *'()[]{}:"\'\\\n\r\t \x0c\0#=-*\u2028']
  for _ in range(300):
    workspace = function_environment.FunctionEnvironment(
      TASK, runners.StaticRunner()
    )
    for _ in range(3):
      text = ''.join(draw.choices(words, k=draw.randrange(12)))
      if draw.random() < 0.7:
        text = f'edit stats.py total\n{text}'
      answer = workspace.call(text)
      assert answer.text.encode()
    assert ast.parse(workspace.files['shop/stats.py']).body[1].name == 'other'
    assert not workspace.verdict(True).passed


def test_text_that_no_file_can_hold_is_replaced(workspace):
  workspace.call('edit stats.py total\nreturn "\\ud800"')
  answer = '2 failed: total([1, 2]) returned ?'
  assert workspace.call('test').text == answer


def test_a_run_that_does_not_end_says_so():
  class Slow:
    level = 'slow'

    def call(self, files, module, function, arguments):
      del files, module, function, arguments
      return runners.LocalResult(
        level='slow', value=[], wall_s=2.0, status='timeout'
      )

  workspace = function_environment.FunctionEnvironment(TASK, Slow())
  assert workspace.call('test').text == '2 failed: timeout'
  assert workspace.sandbox_seconds == 2.0
  assert not workspace.is_broken


def test_a_sandbox_that_fails_breaks_the_episode_and_not_the_policy():
  class Broken:
    level = 'unshare'
    calls = 0

    def call(self, files, module, function, arguments):
      del files, module, function, arguments
      self.calls += 1
      return runners.LocalResult(
        level='unshare', value=[], wall_s=0.0, status='infrastructure'
      )

  runner = Broken()
  workspace = contained.ContainedEnvironment(
    TASK.task_id,
    lambda: function_environment.FunctionEnvironment(TASK, runner),
  )
  assert workspace.call('test').text == 'error: the environment failed'
  assert workspace.is_broken and runner.calls == 1
  verdict = workspace.verdict(True)
  assert (verdict.status, runner.calls) == (records.INFRASTRUCTURE, 1)


def test_tools_tell_how_they_are_called(workspace):
  assert workspace.usage('read') == 'read PATH'
  assert workspace.usage('edit').startswith('edit PATH FUNCTION')
  assert [workspace.usage(t).split()[0] for t in workspace.tools] == list(
    workspace.tools
  )


def test_the_workspace_does_not_change_the_task():
  task = family.generate(0, 'train')
  before = dataclasses.replace(task, files=dict(task.files))
  workspace = function_environment.FunctionEnvironment(
    task, runners.TrustedRunner()
  )
  workspace.call(f'edit {task.path} {task.function}\n{task.reference}')
  assert task == before
  assert workspace.verdict(True).passed


@pytest.mark.parametrize(
  'fields',
  [
    {'tool': 'read', 'outcome': turns_lib.BAD_ARGUMENTS},
    {'tool': '', 'outcome': turns_lib.OK},
    {'tool': 'read', 'outcome': 'fine'},
  ],
)
def test_a_result_that_contradicts_itself_is_refused(fields):
  with pytest.raises(ValueError, match=r'ToolResult\.'):
    environment.ToolResult(text='', **fields)
