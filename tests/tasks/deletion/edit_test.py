"""Deletions take out the right lines and nothing else."""

import ast
import textwrap
import types

import pytest

from composer_jax.tasks.deletion import candidates, edit

TEXT = textwrap.dedent('''\
    """A module."""

    import os

    # About f:
    # much.
    @property
    def f(x):
        """Does f."""
        # At once.
        y = x + 1
        return y
        # The end.

    LIMIT = 3  # stays


    class C(dict):
        """Holds."""

        def m(self, a, *, b=2):
            return a + b

        async def n(self):
            """Waits."""
            await self.m(1)
            return 2


    class D:
        def only(self):
            return 1


    def g(): return 4
    ''')


def names(text):
  return [s.name for s in edit.symbols('a.py', text)]


def test_symbols_are_definitions_with_their_signatures():
  by_name = {s.name: s for s in edit.symbols('a.py', TEXT)}
  assert list(by_name) == ['f', 'C', 'D', 'g', 'C.m', 'C.n', 'D.only']
  assert (by_name['f'].start, by_name['f'].stop) == (5, 13)
  assert by_name['f'].docstring == 'Does f.'
  assert by_name['f'].num_lines == 2
  assert by_name['C'].signature == 'class C(dict)'
  assert by_name['C.m'].signature == 'def m(self, a, *, b=2)'
  assert by_name['C.n'].signature == 'async def n(self)'
  assert by_name['C'].num_methods == 2
  assert {s.kind for s in by_name.values()} == {'function', 'class', 'method'}


def test_a_name_defined_twice_is_no_symbol():
  twice = 'class A:\n  def f(self): pass\n  def f(self, x): pass\n'
  assert names(twice) == ['A']


@pytest.mark.parametrize('name', ['f', 'C.m', 'C.n', 'D.only'])
def test_a_body_that_is_taken_out_can_be_filled_in_again(name):
  stubbed = edit.stub(TEXT, [name])
  body = edit.body(TEXT, name)
  assert edit.fill(stubbed, name, body) == TEXT
  assert edit.fill(TEXT, name, 'raise NotImplementedError') == stubbed
  assert edit.fill(stubbed, name, f'\n    {"x = 1"}\n') == edit.fill(
    TEXT, name, 'x = 1'
  )
  # What is shown of it does not depend on whether the body is there.
  shown = edit.around(TEXT, name, 2)
  assert shown == edit.around(stubbed, name, 2)
  assert 'raise NotImplementedError' in shown
  assert body.split('\n')[-1] not in shown


def test_a_body_is_shown_with_lines_on_both_sides():
  assert edit.around(TEXT, 'C.m', 1) == (
    '    def m(self, a, *, b=2):\n        raise NotImplementedError'
  )
  assert edit.around(TEXT, 'C.m', 2) == (
    '    """Holds."""\n\n    def m(self, a, *, b=2):\n'
    '        raise NotImplementedError\n\n    async def n(self):'
  )


@pytest.mark.parametrize('new', ['return (', 'x = 1\n  y = 2', 'break'])
def test_a_body_that_does_not_compile_is_refused(new):
  with pytest.raises(edit.CannotEdit, match='does not compile'):
    edit.fill(TEXT, 'C.m', new)


def test_a_stub_keeps_signature_docstring_and_the_rest():
  stubbed = edit.stub(TEXT, ['f', 'C.n'])
  before, after = TEXT.split('\n'), stubbed.split('\n')
  assert after[:9] == before[:9]
  assert after[9] == '    raise NotImplementedError'
  assert 'At once' not in stubbed and 'The end' not in stubbed
  assert '"Waits."""\n        raise NotImplementedError\n\n\nclass D' in stubbed
  assert len(after) == len(before) - 4
  assert names(stubbed) == names(TEXT)


def test_a_body_on_the_line_of_its_signature_is_refused():
  with pytest.raises(edit.CannotEdit, match='g has its body on'):
    edit.stub(TEXT, ['g'])


def test_a_removal_takes_decorators_and_comments_along():
  left = edit.remove(TEXT, ['f', 'C.m', 'D.only'])
  assert names(left) == ['C', 'D', 'g', 'C.n']
  for gone in ('About f', 'much', '@property', 'The end', 'return 1'):
    assert gone not in left
  assert 'LIMIT = 3  # stays' in left
  assert '    pass' in left.split('class D:')[1]
  for name in ('f', 'g', 'C', 'D'):
    ast.parse(edit.remove(TEXT, [name]))


PACKAGE = {
  'p/__init__.py': (
    'from p.a import (\n    f,  # best\n    g,\n)\nfrom .b import *\n'
    "from . import c\n\n__all__ = ['f', 'g', 'h']\n"
  ),
  'p/a.py': 'def f():\n  return 1\n\n\ndef g():\n  return f()\n',
  'p/b.py': (
    'from p import a\nfrom .a import f as better\n\n\ndef h():\n  return 1\n'
  ),
  'p/c.py': (
    'try:\n  from p.a import f\nexcept ImportError:\n  f = None\n'
    'import p.b\n\n\ndef k():\n  from p import f\n  return f\n'
  ),
}
MODULES = {p: p[:-3].replace('/', '.').removesuffix('.__init__')
           for p in PACKAGE}  # fmt: skip


def test_repairs_follow_a_name_through_the_package():
  left = {**PACKAGE, 'p/a.py': edit.remove(PACKAGE['p/a.py'], ['f'])}
  changed, lost = edit.repair(left, MODULES, {'p/a.py': {'f'}})
  assert lost == {
    'p/a.py': {'f'},
    'p/__init__.py': {'f', 'better'},
    'p/b.py': {'better'},
  }
  init = changed['p/__init__.py']
  assert init.startswith('from p.a import g\nfrom .b import *\n')
  assert init.endswith("__all__ = [\n    'g',\n    'h',\n]\n")
  assert changed['p/b.py'].startswith('from p import a\n\n')
  assert 'try:\n  pass\nexcept' in changed['p/c.py']
  assert 'def k():\n  pass\n  return f' in changed['p/c.py']


def test_repairs_after_a_module_take_all_of_it():
  left = {p: t for p, t in PACKAGE.items() if p != 'p/a.py'}
  gone = {'p/a.py': {edit.EVERYTHING}}
  changed, lost = edit.repair(left, MODULES, gone)
  assert lost['p/__init__.py'] >= {'f', 'g'}
  assert changed['p/__init__.py'].startswith(
    'from .b import *\nfrom . import c'
  )
  assert changed['p/b.py'].startswith('\n\ndef h')


def test_nothing_gone_changes_nothing():
  assert edit.repair(PACKAGE, MODULES, {}) == ({}, {})


def module(text):
  made = types.ModuleType('made')
  exec(compile(text, 'made', 'exec'), made.__dict__)
  return made


def test_a_shim_lets_names_be_imported_but_not_used():
  made = module(candidates.shim('x = 1\n', ['f']))
  assert made.x == 1
  missing = made.f
  with pytest.raises(AttributeError):
    _ = made.other
  for use in (
    lambda: missing(),
    lambda: missing.thing,
    lambda: isinstance(1, missing),
    lambda: missing[0],
    lambda: list(missing),
  ):
    with pytest.raises(NotImplementedError):
      use()
  everything = module(candidates.shim('', [edit.EVERYTHING]))
  assert everything.anything is not None
  before = module(
    candidates.shim("def __getattr__(name):\n  return 'own'\n", ['f'])
  )
  assert before.other == 'own'


def test_a_shape_is_that_of_the_code_under_any_names_of_its_own():
  def shape(body):
    return edit.shape(f'def f(s, t):\n  """Does."""\n  {body}\n', 'f')

  same = (
    ('u = s.upper(); return u + t', 'v = t.upper(); return v + s'),
    ('return [x for x in s if g(x)]', 'return [y for y in s if h(y)]'),
    ('return sorted(s, key=t)', '"""Else."""; return sorted(t, key=s)'),
  )
  for one, other in same:
    assert shape(one) == shape(other), one
  # What attributes, builtins and named arguments are called is what they do.
  different = (
    ('return s.upper()', 'return s.lower()'),
    ('return max(s)', 'return min(s)'),
    ('return s.cut(start=t)', 'return s.cut(stop=t)'),
    ('return s + t', 'return s - t'),
    ('return s + t', 'return s + s'),
  )
  for one, other in different:
    assert shape(one) != shape(other), one
