"""Laws of the JSON tools: checked arguments, bounded answers, exact edits."""

import dataclasses
import random
import time

import pytest

from composer_jax.core import turns as turns_lib
from composer_jax.sandbox import base
from composer_jax.tasks import calls
from composer_jax.tasks.repository import schemas, scripts, tools
from composer_jax.text import tool_calls
from tests.tasks import small_package

BOUNDS = tools.Bounds(answer_chars=400, matches=3, paths=6)
LONG = ''.join(f'line {i}\n' for i in range(1, 501))
FILES = {
  'long.txt': LONG,
  'wide.txt': 'x' * 5000,
  'empty.txt': '',
  'dos.py': 'a = 1\r\nb = 2\r\n',
  'latin.py': b'# caf\xe9\n',
  'twice.py': 'x = 1\ny = 2\nx = 1\n',
  'alike.py': 'x\nx\nx\n',
}


@pytest.fixture(scope='module')
def box(larder, larder_sandbox):
  files = {
    p: text if isinstance(text, bytes) else text.encode()
    for p, text in FILES.items()
  }
  made = larder_sandbox.open(larder.tasks[0].image, files)
  yield made
  made.close()


def _check(name, **arguments):
  call = tool_calls.JsonCall(name=name, arguments=arguments)
  return schemas.check(call, schemas.TOOLS)


def test_examples_and_descriptions_tell_every_tool_and_argument():
  prompt = schemas.prompt(schemas.TOOLS)
  for tool in schemas.TOOLS.values():
    call = tool_calls.parse_json(tool.usage)
    assert schemas.check(call, schemas.TOOLS) == dict(tool.example)
    assert tool.description() in prompt
    function = tool.function()['function']
    assert list(function['parameters']['properties']) == list(tool.parameters)
    assert all(f'  {name}: ' in prompt for name in tool.parameters)


@pytest.mark.parametrize(
  'name, arguments, outcome, message',
  [
    (
      'raed',
      {},
      turns_lib.UNKNOWN_TOOL,
      'there is no tool "raed" (did you mean "read"?); the tools are read, '
      'search, list, edit, write, run, test, todo, finish',
    ),
    (
      'read',
      {},
      turns_lib.BAD_ARGUMENTS,
      'read: argument "path" is missing; it must be a string that is not '
      'empty. Example: {"tool": "read", "arguments": {"path": "src/a.py", '
      '"first": 1, "last": 80}}',
    ),
    (
      'read',
      {'file': 'a'},
      turns_lib.BAD_ARGUMENTS,
      'read: there is no argument "file"; there are: path, first, last.',
    ),
    (
      'read',
      {'path': 'a', 'first': '3'},
      turns_lib.BAD_ARGUMENTS,
      'argument "first" must be an integer of at least 1, but is "3".',
    ),
    ('read', {'path': 'a', 'first': 0}, turns_lib.BAD_ARGUMENTS, 'smaller'),
    ('read', {'path': 'a', 'first': True}, turns_lib.BAD_ARGUMENTS, 'is true'),
    (
      'read',
      {'path': 'a', 'first': 1.5},
      turns_lib.BAD_ARGUMENTS,
      'but is 1.5',
    ),
    ('read', {'path': None}, turns_lib.BAD_ARGUMENTS, 'but is null'),
    ('write', {'path': 'a', 'text': {}}, turns_lib.BAD_ARGUMENTS, 'but is {}'),
    ('edit', {'path': 'a', 'old': ''}, turns_lib.BAD_ARGUMENTS, 'is empty'),
    (
      'todo',
      {'action': 'drop'},
      turns_lib.BAD_ARGUMENTS,
      'argument "action" must be one of "add", "done", "list", but is "drop".',
    ),
    (
      'write',
      {'path': 'a', 'text': '\ud800'},
      turns_lib.BAD_ARGUMENTS,
      'half a surrogate pair',
    ),
  ],
)
def test_a_wrong_call_is_told_tool_argument_kind_and_example(
  name, arguments, outcome, message
):
  with pytest.raises(calls.InvalidCall) as caught:
    _check(name, **arguments)
  assert caught.value.outcome == outcome
  assert message in str(caught.value)
  if name in schemas.TOOLS:
    assert str(caught.value).endswith(schemas.TOOLS[name].usage)


def test_errors_stay_short_and_quick_whatever_is_named():
  start = time.process_time()
  for name in ('x' * (1 << 20), 'réad\ud800', ' ' * 300, 'a\n' * 999):
    for call in ({'name': name}, {'name': 'read', name: 1}):
      with pytest.raises(calls.InvalidCall) as caught:
        _check(**call)
      assert len(str(caught.value)) < 300
      assert str(caught.value).encode()
  assert time.process_time() - start < 5  # Seconds of CPU time.


@pytest.mark.parametrize('size', [399, 400, 401, 5000, 10**5])
def test_clipped_texts_keep_both_ends_and_count_what_is_left_out(size):
  draw = random.Random(size)
  text = ''.join(draw.choices('abc\n', k=size))
  cut = tools.clip(text, 400)
  assert len(cut) <= 405
  if size <= 400:
    assert cut == text
    return
  head, _, note = cut.partition('\n[... ')
  count, _, tail = note.partition(' characters are left out ...]\n')
  assert text.startswith(head) and text.endswith(tail)
  assert len(head) + int(count) + len(tail) == size


def test_read_gives_lines_as_they_are_and_says_where_it_stops(box):
  def read(path, **lines):
    return tools.read(box, {'path': path, **lines}, BOUNDS)[0]

  words = small_package.FILES['larder/__init__.py']
  assert read('larder/__init__.py') == words.removesuffix('\n')
  assert read('./larder//__init__.py') == read('larder/__init__.py')
  assert read('empty.txt') == 'empty.txt is empty'
  middle = read('long.txt', first=3, last=4)
  assert middle == '[lines 3 to 4 of 500]\nline 3\nline 4'
  lines = []
  while not lines or lines[-1] != 'line 500':
    head, *more = read('long.txt', first=len(lines) + 1).split('\n')
    assert head.startswith(f'[lines {len(lines) + 1} to ')
    lines += more
    if f'read on with "first": {len(lines) + 1}]' not in head:
      break
  assert lines == LONG.split('\n')[:-1]
  assert len(read('wide.txt')) <= 405


@pytest.mark.parametrize(
  'path, message',
  [
    ('/etc/passwd', 'path "/etc/passwd" leaves the workspace'),
    ('../x', 'leaves the workspace; it must be relative to its root'),
    ('larder/../../x', 'leaves the workspace'),
    ('nowhere.py', "'nowhere.py'"),
    ('larder', "'larder'"),
    ('a\0b', 'cannot be the name of a file'),
    ('x' * 300, 'cannot be the name of a file'),
    ('a/' * 900, 'cannot be the name of a file'),
    ('latin.py', 'is no text: it is not UTF-8'),
    ('wide.txt/a', "'wide.txt/a'"),
  ],
)
def test_paths_that_cannot_be_read_are_bad_arguments(box, path, message):
  with pytest.raises(calls.InvalidCall) as caught:
    tools.read(box, {'path': path}, BOUNDS)
  assert caught.value.outcome == turns_lib.BAD_ARGUMENTS
  assert message in str(caught.value)
  assert str(caught.value).endswith(schemas.TOOLS['read'].usage)


def test_a_file_beyond_the_bound_is_refused_and_not_half_read(box):
  bounds = dataclasses.replace(BOUNDS, file_bytes=4999)
  with pytest.raises(calls.InvalidCall, match='5000 bytes, more than 4999'):
    tools.read(box, {'path': 'wide.txt'}, bounds)
  with pytest.raises(calls.InvalidCall, match='would hold 5000 bytes'):
    arguments = {'path': 'new.txt', 'text': 'x' * 5000}
    tools.write(box, arguments, bounds)
  assert 'new.txt' not in box.files()


def test_list_shows_files_or_folders_where_they_are_many(box):
  def listed(**arguments):
    return tools.list_files(box, arguments, BOUNDS)[0].split('\n')

  assert listed(path='tests') == sorted(small_package.TESTS)
  top = listed()
  assert top[-1] == '[5 more; list a folder, or search]' and len(top) == 7
  wide = dataclasses.replace(BOUNDS, paths=12)
  rows = tools.list_files(box, {}, wide)[0].split('\n')
  assert 'larder/ (4 files)' in rows and 'README.md' in rows
  for path in ('larder/nothing', 'README.md', 'x/' * 9):
    with pytest.raises(calls.InvalidCall, match='there is no folder "'):
      listed(path=path)


def test_an_edit_replaces_what_occurs_once_and_nothing_else(larder_sandbox):
  box = larder_sandbox.open('', {'a.py': b'x = 1\ny = x\n'})
  arguments = {'path': 'a.py', 'old': 'y = x', 'new': 'y = [x,\n  x]'}
  text, outcome = tools.edit(box, arguments, BOUNDS)
  assert (text, outcome) == ('edited a.py at lines 2 to 3', turns_lib.OK)
  assert box.read('a.py', 100) == b'x = 1\ny = [x,\n  x]\n'
  box.close()


@pytest.mark.parametrize(
  'path, old, new, message',
  [
    ('twice.py', 'x = 1', 'x = 3', 'occurs more than once (at lines 1, 3)'),
    ('alike.py', 'x\nx\n', 'y\n', 'more than once (at lines 1, 2)'),
    ('twice.py', 'z = 1', 'x = 3', '"old" does not occur; read the file'),
    ('twice.py', 'y =  2', 'y = 3', 'does not occur'),
    ('twice.py', '  y = 2\n', 'y = 3', 'line 2 is like its first line'),
    ('twice.py', 'y = 2', 'y = 2', '"old" and "new" are the same'),
  ],
)
def test_an_edit_that_fails_is_valid_and_changes_nothing(
  box, path, old, new, message
):
  before = box.read(path, 1000)
  arguments = {'path': path, 'old': old, 'new': new}
  text, outcome = tools.edit(box, arguments, BOUNDS)
  assert outcome == turns_lib.FAILED_EDIT
  assert message in text
  assert box.read(path, 1000) == before


def test_an_edit_keeps_the_carriage_returns_of_a_file(larder_sandbox):
  box = larder_sandbox.open('', {'dos.py': FILES['dos.py'].encode()})
  arguments = {'path': 'dos.py', 'old': 'a = 1\nb', 'new': 'a = 3\n\nb'}
  assert tools.edit(box, arguments, BOUNDS)[1] == turns_lib.OK
  assert box.read('dos.py', 100) == b'a = 3\r\n\r\nb = 2\r\n'
  arguments = {'path': 'dos.py', 'old': 'a = 3', 'new': 'a = 4\r\nc = 5'}
  assert tools.edit(box, arguments, BOUNDS)[1] == turns_lib.OK
  assert box.read('dos.py', 100).startswith(b'a = 4\r\nc = 5\r\n\r\nb')
  box.close()


def _search(box, bounds=BOUNDS, **arguments):
  return tools.search(box.run, arguments, bounds)


def test_search_finds_lines_and_counts_what_it_does_not_show(box):
  text, _ = _search(box, pattern=r'def (slug|label)\(')
  places = {p: t.split('\n').index for p, t in small_package.FILES.items()}
  assert text.split('\n') == [
    f'{path}:{places[path](line) + 1}: {line}'
    for path, line in (
      ('larder/shelf.py', 'def label(shelf):'),
      ('larder/words.py', 'def slug(text):'),
    )
  ]
  text, _ = _search(box, pattern='line', path='long.txt')
  assert text.split('\n')[2:] == [
    'long.txt:3: line 3',
    '[497 more matches; search for less, or in a "path"]',
  ]
  assert _search(box, pattern='nowhere to be')[0] == 'no match'
  small = dataclasses.replace(BOUNDS, file_bytes=100)
  assert '[9 files are too large' in _search(box, small, pattern='x{50}')[0]


def test_a_search_whose_answer_is_cut_off_says_so():
  for report in (b'', b'{"found": [["a.py", 1, "x'):
    result = base.CommandResult(level='unshare', status='ok', report=report)
    arguments = {'pattern': 'x'}
    text, outcome = tools.search(lambda command, r=result: r, arguments, BOUNDS)
    assert outcome == turns_lib.FAILED and 'was stopped' in text


def test_a_search_that_cannot_be_made_is_told(box):
  for arguments, message in (
    ({'pattern': '('}, 'is no regular expression: missing )'),
    ({'pattern': '(' * 500}, 'is no regular expression'),
    ({'pattern': f'(?P<{"x" * 9999}>a)' * 2}, 'characters are left out'),
    ({'pattern': 'x', 'path': 'gone'}, 'no file or folder "gone"'),
    ({'pattern': 'x', 'path': '/etc'}, 'leaves the workspace'),
  ):
    with pytest.raises(calls.InvalidCall) as caught:
      _search(box, **arguments)
    assert message in str(caught.value)


def test_a_pattern_that_never_ends_is_stopped(box):
  bounds = dataclasses.replace(BOUNDS, search_s=0.5)
  text, outcome = _search(box, bounds, pattern='(x+x+)+y', path='wide.txt')
  assert outcome == turns_lib.FAILED
  assert text == 'error: the search was stopped: it took over 0.5 s'


def _run(box, command, bounds=BOUNDS, **more):
  return tools.run(box.run, {'command': command, **more}, bounds)


def test_run_tells_the_exit_code_and_both_streams(box):
  assert _run(box, 'echo a; echo b >&2') == (
    '[exit code 0]\na\nb',
    turns_lib.OK,
  )
  assert _run(box, 'exit 3') == ('[exit code 3]', turns_lib.FAILED)
  assert _run(box, 'cat') == ('[exit code 0]', turns_lib.OK)


def test_megabytes_of_output_are_cut_and_said_to_be(box):
  text, _ = _run(box, 'head -c 5000000 /dev/zero | tr "\\0" x; echo; echo end')
  assert len(text) < 500
  assert text.startswith('[exit code 0; it printed more than is kept]\nxxx')
  assert ' characters are left out ...]' in text


def test_a_command_that_does_not_end_is_stopped(box):
  bounds = dataclasses.replace(BOUNDS, run_s=0.3)
  text, outcome = _run(box, 'echo begun; sleep 20', bounds)
  assert outcome == turns_lib.FAILED
  assert text == '[stopped: it took too long]\nbegun'
  commands = []

  def run_in(command):
    commands.append(command)
    return box.run(command)

  tools.run(run_in, {'command': 'true', 'seconds': 9}, bounds)
  assert commands[0].wall_s == pytest.approx(0.3)


@pytest.mark.parametrize('command', ['a\0b', 'x' * 100_001])
def test_a_command_that_no_kernel_takes_is_a_bad_argument(box, command):
  with pytest.raises(calls.InvalidCall, match='at most 100000 bytes'):
    _run(box, command)


def test_edits_of_a_script_turn_one_text_into_the_other():
  draw = random.Random(0)
  for _ in range(200):
    before, after = (
      ''.join(
        draw.choices(['a\n', 'b\n', 'c\n', '\n'], k=draw.randrange(1, 30))
      )
      for _ in range(2)
    )
    text = before
    for old, new in scripts.edits(before, after):
      assert text.count(old) == 1
      text = text.replace(old, new)
    assert text == after


def test_bounds_that_make_no_sense_are_refused():
  with pytest.raises(ValueError, match='run_s must be positive; got 0'):
    tools.Bounds(run_s=0)
  with pytest.raises(ValueError, match='answer_chars must be .* 200; got 10'):
    tools.Bounds(answer_chars=10)


def test_a_result_of_a_killed_program_says_so():
  result = base.CommandResult(level='unshare', status='killed', output='half')
  arguments = {'command': 'true'}
  text, outcome = tools.run(lambda command: result, arguments, BOUNDS)
  assert text == '[killed: a crash, or too much memory]\nhalf'
  assert outcome == turns_lib.FAILED
