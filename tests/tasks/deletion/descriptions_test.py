"""What describes a deletion is its package's own words, or tests that stay."""

import textwrap
import types
from typing import Any

import pytest

from composer_jax.tasks.deletion import descriptions, prompt
from composer_jax.tasks.repository import task_set

TEXTS = {
  'p/base.py': textwrap.dedent('''\
    class Reader:
        def read(self, text):
            """Splits a text at commas."""

        def close(self):
            pass


    class Other:
        def read(self, text):
            """Of another class."""
    '''),
  'p/a.py': textwrap.dedent('''\
    from p import base


    class Middle(base.Reader):
        pass


    class Fast(Middle):
        """A reader that holds at most `limit` parts."""

        def __init__(self, limit):
            self.limit = limit

        def read(self, text):
            return text.split(',')[: self.limit]

        def close(self):
            self.limit = 0


    class Vague(Fast):
        """A reader."""

        def __init__(self, limit):
            self.limit = limit + 1


    def join(parts, mark):
        return mark.join(str(part) for part in parts)


    def told():
        """One."""
    '''),
}
TESTS = {
  'test_a.py': textwrap.dedent("""\
    from p import a


    def test_join():
        assert a.join([1], '-') == '1'


    def test_join_two():
        assert a.join([1, 2], '-') == '1-2'


    class TestJoin:
        def test_none(self):
            assert a.join([], '-') == ''

        def test_other(self):
            assert a.told() is None
    """)
}
IDS = tuple(
  f'test_a.py::{name}'
  for name in (
    'test_join',
    'test_join_two[1-x]',
    'TestJoin::test_none',
    'TestJoin::test_other',
  )
)


def describe(symbol, texts=TEXTS, shown=IDS, least=3, path='p/a.py'):
  work: Any = types.SimpleNamespace(texts=texts, tests=TESTS)
  return descriptions.describe(
    work, [task_set.Deleted(path=path, symbol=symbol)], shown, least
  )


def test_docstrings_within_describe_a_definition():
  text = 'def f():\n  return 1\n\n\nclass A:\n  def g(self):\n    """One."""\n'
  by = lambda symbol: describe(symbol, {'p/a.py': text}).by
  assert [by(name) for name in ('f', 'A', 'A.g', '')] == [
    '',
    'docstring',
    'docstring',
    'docstring',
  ]


def test_a_method_has_the_docstring_of_what_it_overrides():
  found = describe('Fast.read')
  assert found.by == 'override'
  assert found.said['p/a.py:Fast.read'] == (
    'Docstring of `Reader.read`, which it overrides:\n\n'
    'Splits a text at commas.'
  )
  assert describe('Fast.close').by == ''  # nor is what it overrides described


def test_one_of_two_classes_of_a_name_describes_nothing():
  twice = {**TEXTS, 'p/b.py': 'class Reader:\n    pass\n'}
  assert describe('Fast.read', twice).by == ''


def test_a_class_describes_its_constructor_if_it_tells_of_a_parameter():
  assert describe('Fast.__init__').by == 'class'
  assert describe('Vague.__init__').by == ''


def test_what_repeats_the_code_describes_nothing():
  code = 'parts = text.strip().split(self.mark)[: self.limit]; return parts'
  texts = {
    'p/base.py': TEXTS['p/base.py'].replace('at commas.', f'at commas: {code}'),
    'p/a.py': TEXTS['p/a.py'].replace(
      "return text.split(',')[: self.limit]", code
    ),
  }
  assert describe('Fast.read', texts).by == ''


def test_enough_tests_that_stay_and_name_it_describe_it():
  found = describe('join')
  assert found.by == 'examples' and not found.said
  assert found.examples.count('a.join(') == 3 and 'told' not in found.examples
  # One of them is hidden: too few are left.
  assert describe('join', shown=IDS[1:]).by == ''
  assert describe('join', shown=IDS[1:], least=2).by == 'examples'
  assert describe('told').by == 'docstring'


def test_a_name_that_two_definitions_have_does_not_say_which_is_meant():
  other = 'class Path:\n    def join(self):\n        return 1\n'
  assert describe('join', {**TEXTS, 'p/b.py': other}).by == ''


@pytest.mark.parametrize(
  'symbol, words',
  [
    ('Fast.read', 'Splits a text at commas.'),
    ('Fast.__init__', 'at most `limit` parts'),
    ('join', "a.join([1, 2], '-') == '1-2'"),
  ],
)
def test_prompts_say_what_was_found(symbol, words):
  deleted = [task_set.Deleted(path='p/a.py', symbol=symbol)]
  tell = lambda described: prompt.prompt(
    'p', '1.0', 'body', deleted, TEXTS, described
  )
  assert words in tell(describe(symbol))
  assert words not in tell(descriptions.Description())
