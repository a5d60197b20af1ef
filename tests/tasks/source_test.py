"""Laws of editing one function's body, hostile bodies included."""

import ast
import gc
import re
import sys
import threading
import time

import pytest

from composer_jax.tasks import source

MODULE = '''"""Module."""


def first(values):
    """Return the first."""
    raise NotImplementedError


def second(values):
    """Say "hi"."""
    return [
        len(values),
    ]
'''


def test_only_the_body_changes():
  edited = source.replace_body(MODULE, 'first', 'return values[0]')
  assert edited == MODULE.replace(
    'raise NotImplementedError', 'return values[0]'
  )
  again = source.replace_body(edited, 'second', 'return 2')
  assert again.endswith('"""Say "hi"."""\n    return 2\n')


def test_indentation_of_the_body_does_not_matter():
  plain = 'if values:\n    return 1\nreturn 2'
  edited = source.replace_body(MODULE, 'first', plain)
  for prefix in ('  ', '\t', '            '):
    moved = '\n'.join(prefix + line for line in plain.split('\n'))
    assert source.replace_body(MODULE, 'first', moved) == edited


@pytest.mark.parametrize(
  'body',
  [
    '',
    'return (',
    'x = """',
    'x = "',
    'return 1 \\',
    'return )',
    'return 1\x00',
    'return ' + '(' * 400 + ')' * 400,
  ],
)
def test_a_body_that_does_not_parse_alone_is_refused(body):
  with pytest.raises(ValueError, match='.'):
    source.replace_body(MODULE, 'first', body)


@pytest.mark.parametrize(
  'body',
  [
    'return 1\n\ndef second(values):\n    return 0',
    'x = 1\rreturn x',
    'x = "\x0c"\nreturn x',
    'x = "\u2028"\nreturn x',
    'pass # """',
    '"""\n    return 1\ndef second(values): return 0\n"""',
  ],
)
def test_a_body_cannot_change_what_follows_it(body):
  edited = ast.parse(source.replace_body(MODULE, 'first', body))
  assert len(edited.body) == 3
  assert ast.dump(edited.body[2]) == ast.dump(ast.parse(MODULE).body[2])
  assert ast.get_docstring(edited.body[1]) == 'Return the first.'


@pytest.mark.parametrize('mark', ['\r', '\r\n', '\x0c', '\x1c', '\u2028'])
def test_no_kind_of_line_end_shifts_a_later_edit(mark):
  body = f'x = 1 # {mark}return x\nreturn 2'
  edited = source.replace_body(MODULE, 'first', body)
  again = source.replace_body(edited, 'second', 'return 0')
  before, after = (ast.parse(text).body for text in (edited, again))
  assert [ast.dump(n) for n in before[:2]] == [ast.dump(n) for n in after[:2]]
  assert ast.unparse(after[2].body[1]) == 'return 0'
  assert len(after[2].body) == 2


@pytest.mark.parametrize(
  'body', ['# nothing', '\x0c  return 1', '\x0creturn 1', 'x = 1\n\x0cy = 2']
)
def test_what_would_not_stand_in_the_file_is_refused(body):
  with pytest.raises(ValueError, match=r'no statement|indent|leaves'):
    source.replace_body(MODULE, 'first', body)


def test_a_missing_function_is_a_lookup_error():
  with pytest.raises(LookupError, match='third'):
    source.replace_body(MODULE, 'third', 'pass')


def test_normal_form_forgets_bound_names_and_nothing_else():
  form = source.normal_body('return [v for v in values if v > 2]', 'values')
  assert form == source.normal_body('return [x for x in a if x > 2]', 'a')
  assert form == source.normal_body('return [x  for x in a if (x>2)]', 'a')
  for other in (
    'return [x for x in a if x > 3]',
    'return [a for x in a if x > 2]',
    'return [x for x in b if x > 2]',
    'return (x for x in a if x > 2)',
  ):
    assert form != source.normal_body(other, 'a')


def test_normal_form_keeps_bound_names_apart():
  forms = {
    source.normal_body(f'x, y = a\nreturn {name}', 'a') for name in 'xya'
  }
  assert len(forms) == 3


def test_no_free_name_is_taken_for_a_bound_one():
  used = source.normal_body('return [v for v in values]', 'values')
  names = set(re.findall("id='([^']*)'", used))
  assert len(names) == 2 and not any(n.isidentifier() for n in names)
  for free in (*names, 'bound0', 'bound1', 'a0'):
    try:
      other = source.normal_body(f'return [v for v in {free}]', 'values')
    except ValueError:
      continue
    assert other != used


@pytest.mark.parametrize(
  'body', ['break', 'nonlocal values', 'values = 1; global values', 'await 1']
)
def test_what_parses_and_does_not_compile_is_found_without_execution(body):
  edited = source.replace_body(MODULE, 'second', body)
  source.parse(edited)
  with pytest.raises(ValueError, match=r"'break'|nonlocal|global|'await'"):
    source.check(edited)


def test_too_deep_a_body_is_a_value_error():
  with pytest.raises(ValueError, match=r'deeply|nested'):
    source.normal_body('return ' + '-' * 900 + '1', 'a')


def test_many_threads_may_parse_at_once():
  # The depth counter of Python 3.11's parser is shared by threads, and garbage
  # collection in the parser, as with jax's callback, lets other threads run.
  text = 'def f(xs):\n' + '  return [x + (1 * (2 - x)) for x in xs]\n' * 16
  failed = []

  def parse_often():
    for _ in range(60):
      try:
        source.parse(text)
      except SystemError as error:
        failed.append(error)

  def give_way(phase, info):
    del phase, info
    time.sleep(0)

  threshold, interval = gc.get_threshold(), sys.getswitchinterval()
  gc.callbacks.append(give_way)
  try:
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=parse_often) for _ in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  finally:
    gc.callbacks.remove(give_way)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)
  assert not failed
