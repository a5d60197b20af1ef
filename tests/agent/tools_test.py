"""Laws of the workspace: what each call answers, and what it may change."""

import ast
import dataclasses
import random

import pytest

from composer_jax.agent import tools
from composer_jax.tasks import list_functions, runners
from composer_jax.tasks import task as task_lib

TASK = task_lib.Task(
  task_id='hand/made',
  family='hand',
  prompt='Restore `total` in `stats.py`.',
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
  reference='return sum(values)',
  held_out=False,
)
RIGHT = 'edit stats.py total\nreturn sum(values)'


@pytest.fixture
def workspace():
  return tools.Workspace(TASK, runners.TrustedRunner())


def test_an_honest_episode(workspace):
  stub = '1 failed: total([1, 2]) raised NotImplementedError'
  read = TASK.files['shop/stats.py'].rstrip()
  for call, answer in (
    ('list', '__init__.py stats.py'),
    ('read __init__.py', 'empty'),
    ('read stats.py', read),
    ('test', stub.replace('1 failed', '2 failed')),
    ('edit stats.py total\nreturn len(values)', 'edited'),
    ('test', '1 failed: total([1, 2]) returned 2, expected 3'),
    (RIGHT, 'edited'),
    ('test', '2 passed'),
  ):
    result = workspace.run(call)
    assert (result.text, result.tool) == (answer, call.split()[0])
    assert not result.is_final
  result = workspace.run('finish')
  assert (result.tool, result.is_final) == ('finish', True)
  assert workspace.verify(True).passed
  assert not workspace.flags
  assert workspace.sandbox_seconds > 0


@pytest.mark.parametrize(
  'call, answer',
  [
    ('', 'error: empty call'),
    ('open a', 'error: no such tool; use list, read, edit, test, finish'),
    ('__class__', 'error: no such tool; use list, read, edit, test, finish'),
    ('verify', 'error: no such tool; use list, read, edit, test, finish'),
    ('read', 'error: read takes 1 argument'),
    ('test stats.py', 'error: test takes 0 arguments'),
    ('edit stats.py\nreturn 1', 'error: edit takes 2 arguments'),
    ('edit stats.py total', 'error: edit needs lines below'),
    ('finish\nnow', 'error: finish takes no lines below'),
    ('read a.py', 'error: no file a.py'),
    ('read ../shop/stats.py', 'error: no file ../shop/stats.py'),
    ('read /etc/passwd', 'error: no file /etc/passwd'),
    ('edit a.py total\nreturn 1', 'error: no file a.py'),
    ('edit stats.py f\nreturn 1', 'error: no function f in stats.py'),
  ],
)
def test_invalid_calls_say_why_and_change_nothing(workspace, call, answer):
  result = workspace.run(call)
  assert (result.text, result.tool) == (answer, '')
  assert not result.is_valid
  assert not result.is_final
  assert workspace.files == TASK.files


def test_a_body_that_does_not_parse_is_a_valid_call_that_changes_nothing(
  workspace,
):
  result = workspace.run('edit stats.py total\nreturn sum(values')
  assert (result.text, result.tool) == ('error: syntax', 'edit')
  assert workspace.files == TASK.files


def test_an_edit_of_another_function_is_flagged(workspace):
  workspace.run(RIGHT)
  assert workspace.flags == ()
  workspace.run('edit stats.py other\nreturn 3')
  assert workspace.flags == ('edited_other_function',)


def test_long_answers_are_cut(workspace):
  workspace.run('edit stats.py total\nreturn [7] * 99')
  assert len(workspace.run('test').text) < 160
  workspace.run('edit stats.py total\nraise ValueError("long " * 99)')
  assert len(workspace.run('test').text) < 120


def test_whatever_a_policy_writes_is_answered():
  draw = random.Random(0)
  words = ['return', 'for', 'lambda', 'class', '"""', 'values', 'read', 'test']
  words += ['edit stats.py total\n', *'()[]{}:"\'\\\n\r\t \x0c\0#=-*\u2028']
  for _ in range(300):
    workspace = tools.Workspace(TASK, runners.StaticRunner())
    for _ in range(3):
      text = ''.join(draw.choices(words, k=draw.randrange(12)))
      if draw.random() < 0.7:
        text = f'edit stats.py total\n{text}'
      answer = workspace.run(text)
      assert answer.text.encode()
    assert ast.parse(workspace.files['shop/stats.py']).body[1].name == 'other'
    assert not workspace.verify(True).passed


def test_text_that_no_file_can_hold_is_replaced(workspace):
  workspace.run('edit stats.py total\nreturn "\\ud800"')
  answer = '2 failed: total([1, 2]) returned ?, expected 3'
  assert workspace.run('test').text == answer


def test_a_run_that_does_not_end_says_so():
  class Slow:
    level = 'slow'

    def call(self, files, module, function, arguments):
      del files, module, function, arguments
      return runners.LocalResult(
        level='slow', value=[], wall_s=2.0, status='timeout'
      )

  workspace = tools.Workspace(TASK, Slow())
  assert workspace.run('test').text == '2 failed: timeout'
  assert workspace.sandbox_seconds == 2.0
  assert not workspace.is_broken


def test_the_workspace_does_not_change_the_task():
  task = list_functions.generate(0, 'train')
  before = dataclasses.replace(task, files=dict(task.files))
  workspace = tools.Workspace(task, runners.TrustedRunner())
  workspace.run(f'edit {task.path} {task.function}\n{task.reference}')
  assert task == before
  assert workspace.verify(True).passed
