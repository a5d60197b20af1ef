"""Laws of the environment around a repository: answers, plans, verdicts."""

import dataclasses
import json
import random

import pytest

from composer_jax.core import records
from composer_jax.core import turns as turns_lib
from composer_jax.sandbox import base
from composer_jax.tasks import contained
from composer_jax.tasks.deletion import edit
from composer_jax.tasks.repository import (
  environment as repository_tools,
)
from composer_jax.tasks.repository import (
  schemas,
)
from composer_jax.text import tool_calls
from tests.tasks import small_package

OPTIONS = repository_tools.RepositoryOptions()
TASKS = {task.tier: task for task in small_package.tasks()}


def say(name, **arguments):
  call = tool_calls.JsonCall(name=name, arguments=arguments)
  return tool_calls.render_json(call)


@pytest.fixture
def make(larder_sandbox):
  """make(tier, sandbox, ...) -> an environment, closed at the end."""
  made = []

  def start(tier='symbol', sandbox=larder_sandbox, **options):
    changed = dataclasses.replace(OPTIONS, **options)
    task = TASKS[tier]
    made.append(repository_tools.RepositoryEnvironment(task, sandbox, changed))
    return made[-1]

  yield start
  for environment in made:
    environment.close()
    environment.close()


def test_the_prompt_tells_the_task_and_the_tools_of_this_environment(make):
  environment = make(tools=('read', 'edit', 'finish'))
  assert environment.prompt.startswith(TASKS['symbol'].prompt)
  assert 'belong to the grader' in environment.prompt
  for name, tool in schemas.TOOLS.items():
    assert (tool.description() in environment.prompt) == (
      name in environment.tools
    )
  result = environment.call(say('run', command='ls'))
  assert result.outcome == turns_lib.UNKNOWN_TOOL and not result.is_valid
  assert result.text == (
    'error: there is no tool "run"; the tools are read, edit, finish'
  )
  assert environment.usage('finish') == '{"tool": "finish", "arguments": {}}'


def test_a_missing_body_is_shown_in_its_place_and_written_alone(make):
  env = make('body', tools=('body', 'finish'), lines_around=2)
  path, text, name = repository_tools.missing_body(TASKS['body'])
  assert env.prompt.startswith(f'The body of `{name}` is missing:\n\n')
  assert edit.around(text, name, 2) in env.prompt
  assert 'belong to the grader' not in env.prompt
  refused = env.call(say('body', text='return ('))
  assert refused.outcome == turns_lib.FAILED_EDIT
  assert 'does not compile' in refused.text
  assert not env.verdict(True).passed
  body = edit.body(TASKS['body'].solution[path], name)
  assert env.call(say('body', text=body)).outcome == turns_lib.OK
  assert env.verdict(True).passed


def test_with_other_tools_a_missing_body_is_named_by_its_file(make):
  prompt = make('body', tools=('body', 'edit', 'finish'), lines_around=2).prompt
  path, _, name = repository_tools.missing_body(TASKS['body'])
  assert prompt.startswith(f'The body of `{name}` in `{path}` is missing:')
  assert 'belong to the grader' in prompt


def test_other_tasks_keep_their_prompts_and_have_no_body_to_write(make):
  env = make('symbol', tools=('body', 'finish'), lines_around=2)
  assert env.prompt.startswith(TASKS['symbol'].prompt)
  answer = env.call(say('body', text='pass'))
  assert answer.outcome == turns_lib.FAILED_EDIT
  assert answer.text == 'error: this task has no single missing body'


@pytest.mark.parametrize(
  'text, outcome, message',
  [
    ('', turns_lib.NOT_A_CALL, 'error: empty call'),
    ('read a.py', turns_lib.NOT_A_CALL, 'error: not JSON: Expecting value'),
    ('```json\n{}\n```', turns_lib.NOT_A_CALL, 'error: not JSON'),
    ('[' * 200_000, turns_lib.NOT_A_CALL, 'too deeply nested'),
    ('{"tool": "x' + 'y' * (4 << 20), turns_lib.NOT_A_CALL, 'Unterminated'),
    (say('open'), turns_lib.UNKNOWN_TOOL, 'the tools are read, search'),
    (say('read'), turns_lib.BAD_ARGUMENTS, 'argument "path" is missing'),
    (say('read', path='gone.py'), turns_lib.BAD_ARGUMENTS, "'gone.py'"),
    (say('read', path='../../etc/passwd'), turns_lib.BAD_ARGUMENTS, 'leaves'),
    (say('write', path='/tmp/x', text=''), turns_lib.BAD_ARGUMENTS, 'leaves'),
    (say('write', path='larder', text=''), turns_lib.BAD_ARGUMENTS, 'larder'),
    (say('todo', action='add'), turns_lib.BAD_ARGUMENTS, '"add" needs'),
    (say('todo', action='done', item=1), turns_lib.BAD_ARGUMENTS, '1 to 0'),
    (say('finish', now=True), turns_lib.BAD_ARGUMENTS, 'there are: none'),
  ],
)
def test_what_cannot_be_carried_out_is_invalid_and_says_why(
  make, text, outcome, message
):
  result = make().call(text)
  assert (result.tool, result.outcome) == ('', outcome)
  assert result.text.startswith('error: ') and message in result.text
  assert not result.is_final and len(result.text) < 400


def test_whatever_a_policy_writes_is_answered(make):
  draw = random.Random(0)
  environment = make()
  values = ['larder', 'a/../b', '..', '\0', 'x' * 999, '\ud800', -1, 0, 2, 1e99]
  values += [None, True, [], {}, 'add', 'done', '[', 'larder/words.py', 10**400]
  names = [*schemas.TOOLS, 'nothing']
  names = [n for n in names if n not in ('run', 'test', 'search')]
  for _ in range(300):
    name = draw.choice(names)
    tool = schemas.TOOLS.get(name, schemas.TOOLS['read'])
    arguments = {
      key: draw.choice(values) for key in tool.parameters if draw.random() < 0.8
    }
    text = json.dumps({'tool': name, 'arguments': arguments})
    if draw.random() < 0.2:
      text = text[: draw.randrange(len(text))] + draw.choice(
        ['', '}', '\ud800']
      )
    result = environment.call(text)
    assert result.text.encode() and len(result.text) < 9000
    assert result.outcome in turns_lib.OUTCOMES
  assert not environment.is_broken


def test_names_that_are_no_text_are_answered_all_the_same(make):
  environment = make()
  name = '$(printf "larder/x\\377.py")'
  environment.call(say('run', command=f'echo strange > "{name}"'))
  assert environment.call(say('list', path='larder')).text.encode()
  result = environment.call(say('search', pattern='strange'))
  assert (result.text, result.outcome) == ('larder/x?.py:1: strange', 'ok')


def test_a_plan_is_kept_and_told(make):
  environment = make(max_todos=2)
  assert (environment.state(), environment.open_todos) == ('', 0)
  add = say('todo', action='add', text='restore\nchunks')
  assert environment.call(add).text == '1. [ ] restore chunks'
  environment.call(say('todo', action='add', text='test'))
  full = environment.call(add)
  assert full.text == 'error: a plan holds 2 items'
  assert full.outcome == turns_lib.FAILED
  done = environment.call(say('todo', action='done', item=1))
  assert done.text == '1. [x] restore chunks\n2. [ ] test'
  assert environment.state() == done.text
  assert environment.call(say('todo', action='list')).text == done.text
  assert environment.open_todos == 1


def test_test_shows_what_fails_and_then_that_all_pass(make):
  environment = make()
  task = TASKS['symbol']
  failing = environment.call(say('test'))
  assert (failing.tool, failing.outcome) == ('test', turns_lib.FAILED)
  head, *rows = failing.text.split('\n')
  assert head == f'0 of {len(task.shown)} tests pass'
  assert rows[: len(task.shown)] == [f'failed: {i}' for i in task.shown]
  assert "has no attribute 'chunks'" in failing.text
  assert not set(task.hidden) & set(failing.text.split())
  for path, text in task.solution.items():
    environment.call(say('write', path=path, text=text))
  passing = environment.call(say('test'))
  assert passing.text == f'{len(task.shown)} of {len(task.shown)} tests pass'
  assert passing.outcome == turns_lib.OK
  assert environment.sandbox_seconds > 0


def test_nothing_done_fails_and_raises_no_alarm(make, larder_sandbox):
  environment = make()
  assert environment.call(say('finish')).is_final
  verdict = environment.verdict(True)
  assert verdict.status == records.GRADED and not verdict.passed
  assert verdict.num_tests == len(TASKS['symbol'].fail_to_pass)
  assert verdict.sandbox_level == larder_sandbox.level
  assert environment.flags == ()


def test_alarms_of_grader_and_monitors_become_flags(make):
  environment = make()
  # An attempt is enough: plain processes must not reach the network here.
  environment.call(say('run', command='false && pip download larder'))
  environment.call(say('read', path='larder/__pycache__/numbers.pyc'))
  path = 'tests/test_numbers.py'
  result = environment.call(say('write', path=path, text='def test_x(): pass'))
  assert result.outcome == turns_lib.OK
  assert not environment.verdict(True).passed
  assert environment.flags == ('leak_read', 'network', 'protected_file')


SOURCE = 'larder/numbers.py'


@pytest.mark.parametrize(
  'command',
  [
    'rm -rf *',
    f'printf "x = 1\\0" > {SOURCE}',
    f'rm {SOURCE}; ln -s /etc/passwd {SOURCE}',
    f'rm {SOURCE}; mkfifo {SOURCE}; (setsid sleep 99 &)',
    f'rm {SOURCE}; mkdir {SOURCE}; chmod 000 larder',
  ],
)
def test_whatever_becomes_of_the_workspace_is_graded(make, command):
  environment = make()
  environment.call(say('run', command=command))
  for tool in ('read', 'edit', 'write'):
    arguments = {'path': SOURCE, 'old': 'a', 'new': 'b', 'text': 'c'}
    parameters = schemas.TOOLS[tool].parameters
    arguments = {k: v for k, v in arguments.items() if k in parameters}
    environment.call(say(tool, **arguments))
  environment.call(say('list'))
  assert not environment.is_broken
  verdict = environment.verdict(True)
  assert verdict.status == records.GRADED and not verdict.passed


class _Failing:
  """A sandbox whose boxes are made by `box`, or fail to open for None."""

  def __init__(self, sandbox, box):
    self.level = sandbox.level
    self._sandbox, self._box = sandbox, box

  def open(self, image, changes=None):
    real = self._sandbox.open(image, changes)
    if self._box is None:
      real.close()
      raise base.SandboxLost('no zygote')
    return self._box(real)


class _Box:
  def __init__(self, real):
    self._real = real
    self.close, self.files = real.close, real.files


class _Lost(_Box):
  def read(self, path, max_bytes):
    raise base.SandboxLost('the zygote died')


class _Odd(_Box):
  def read(self, path, max_bytes):
    raise IndexError('what nobody thought of')


class _Idle(_Box):
  runs = 0

  def run(self, command):
    type(self).runs += 1
    return base.CommandResult(level='unshare', status='infrastructure')


@pytest.mark.parametrize(
  'box, call',
  [
    (None, say('list')),
    (_Lost, say('read', path='README.md')),
    (_Odd, say('read', path='README.md')),
    (_Idle, say('run', command='ls')),
    (_Idle, say('search', pattern='x')),
    (_Idle, say('test')),
  ],
)
def test_a_broken_sandbox_is_not_the_policys_failure(
  make, larder_sandbox, box, call
):
  _Idle.runs = 0
  failing = _Failing(larder_sandbox, box)
  environment = contained.ContainedEnvironment(
    'symbol', lambda: make(sandbox=failing)
  )
  assert environment.call(call).text == 'error: the environment failed'
  assert environment.is_broken
  assert _Idle.runs == (box is _Idle)
  assert environment.verdict(True).status == records.INFRASTRUCTURE


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'tools': ('read', 'open', 'finish')}, r"there is no \['open'\]"),
    ({'tools': ('read',)}, '"finish" among them'),
    ({'max_todos': 0}, 'max_todos must be .* at least 1; got 0'),
  ],
)
def test_options_that_make_no_sense_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(OPTIONS, **fields)
