"""Mutated copies of tests fail, and look like the real ones."""

import ast
import random

import pytest

from composer_jax.tasks.grading import canaries, canary_changes

TEXT = """\
import pytest
import unittest

def double(x):
    return 2 * x

def test_number():
    assert double(2) == 4

def test_text():
    value = 'a' * 2
    assert value == 'aa'

@pytest.mark.parametrize('x, expected', [(1, 2), (2, 4), (-3, -6)])
def test_rows(x, expected):
    assert double(x) == expected

def test_raises():
    with pytest.raises(TypeError):
        double(None)

def test_two():
    one, two = double(1), double(2)
    assert one != two
    assert two == one + one

class TestClass(unittest.TestCase):
    def test_method(self):
        self.assertEqual(double(1), 2)
        self.assertTrue(double(1))

def test_nothing():
    double(1)

def test_called():
    assert double(3) == 6

def test_caller():
    test_called()
    assert double(3) == 6
"""
PATH = 'tests/test_it.py'
NAMES = (
  'test_number', 'test_text', 'test_rows', 'test_raises', 'test_two',
  'TestClass::test_method', 'test_nothing', 'test_called', 'test_caller',
)  # fmt: skip
IDS = [f'{PATH}::{name}' for name in NAMES if name != 'test_rows']
IDS += [f'{PATH}::test_rows[{p}]' for p in ('1-2', '2-4', '-3--6')]


def plant(seed, **options):
  return canaries.plant(
    {PATH: TEXT}, IDS[:4], IDS[4:], random.Random(seed), **options
  )


def functions(planted):
  """Every test function of the planted files, by node id without rows."""
  by_id = {}
  for path, text in planted.files.items():
    space = {'__name__': 'planted'}
    exec(compile(text, path, 'exec'), space)
    for name, value in list(space.items()):
      if name.startswith('test_'):
        by_id[f'{path}::{name}'] = value
      elif name.startswith('Test'):
        for method in dir(value):
          if method.startswith('test_'):
            case = getattr(value(method), method)
            by_id[f'{path}::{name}::{method}'] = case
  return by_id


def passes(function):
  """Runs a test as pytest would; returns if any and if all of its rows pass."""
  rows = [()]
  for mark in getattr(function, 'pytestmark', []):
    rows = mark.args[1]
  held = []
  for row in rows:
    try:
      function(*row)
      held.append(True)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001
      held.append(False)
  return any(held), all(held)


@pytest.mark.parametrize('seed', range(8))
def test_real_copies_pass_and_mutated_ones_fail(seed):
  planted = plant(seed)
  by_id = functions(planted)
  for group in planted.groups:
    if group.real:
      assert passes(by_id[group.real])[1], group
    assert group.mutated
    for name in group.mutated:
      assert not passes(by_id[name])[0], (group, planted.files)
  originals = {group.original.split('::', 1)[-1] for group in planted.groups}
  # A test without assertions, and one that another test mentions.
  assert not originals & {'test_nothing', 'test_called'}
  assert 'test_rows' in originals and 'TestClass::test_method' in originals


def test_names_do_not_tell_the_copies_apart():
  planted = plant(0)
  names = [n for g in planted.groups for n in (g.real, *g.mutated) if n]
  assert len(set(names)) == len(names)
  for group in planted.groups[:-1]:
    short = [n.split('::')[-1] for n in (group.real, *group.mutated)]
    assert {len(name) for name in short} == {len('test_') + 8}
    name = group.original.split('::')[-1]
    assert f'def {name}(' not in planted.files[PATH]


def test_copies_are_planted_in_what_the_policy_never_saw_first():
  planted = plant(3, most=2)
  preferred = {i.partition('[')[0] for i in IDS[:4]}
  assert {g.original for g in planted.groups[:-1]} <= preferred


def test_equal_seeds_plant_equally():
  assert plant(5) == plant(5)
  assert plant(5).files != plant(6).files


@pytest.mark.parametrize(
  'value',
  [0, -1, True, 2.5, '', 'Az9', '-', b'x', [], [1, 'a'], (), (None, 2),
   {}, {'a': 1}, {1, 2}, [[], {}]],
)  # fmt: skip
def test_another_value_has_the_type_and_is_not_equal(value):
  for seed in range(8):
    changed = canary_changes.another(value, random.Random(seed))
    assert type(changed) is type(value)
    assert changed != value
    assert ast.literal_eval(repr(changed)) == changed


@pytest.mark.parametrize('value', [5, -1, 2.0, 'Az9', b'x3', [1, 'a']])
def test_another_value_could_have_been_the_first(value):
  draw = random.Random(0)
  for _ in range(8):
    changed = canary_changes.another(value, draw)
    assert any(
      canary_changes.another(changed, draw) == value for _ in range(800)
    )


FOUR = """\
def test_unseen():
    first = double(1)
    assert first == 2
    assert double(20) == 40
"""


def guessed(texts):
  """The copy most similar to the others, as a forger would choose."""
  lines = {text: text.split('\n')[1:] for text in texts}
  alike = [text for text in texts if 'object()' not in text]
  return min(
    alike,
    key=lambda text: sum(
      a != b for o in texts for a, b in zip(lines[text], lines[o], strict=True)
    ),
  )


def test_the_real_copy_is_not_in_the_middle_of_the_others():
  right = 0
  for seed in range(60):
    planted = canaries.plant(
      {PATH: FOUR}, [f'{PATH}::test_unseen'], [], random.Random(seed)
    )
    group = planted.groups[0]
    assert len(group.mutated) >= 5
    tree = ast.parse(planted.files[PATH])
    texts = {node.name: ast.unparse(node) for node in tree.body}
    assert '== 2' in texts[group.real.split('::')[1]]
    guess = guessed(list(texts.values()))
    right += guess == texts[group.real.split('::')[1]]
  assert right <= 25, right


def test_a_file_that_does_not_parse_has_no_copies():
  planted = canaries.plant(
    {PATH: 'def test_x(:\n'}, [f'{PATH}::test_x'], [], random.Random(0)
  )
  (group,) = planted.groups
  assert not group.real and len(group.mutated) == 4
