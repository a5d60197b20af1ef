"""A package of three modules with its tests, and a set of tasks on it.

Written by hand, so that users of tasks can be tested without their factory.
"""

import ast
import pathlib
import textwrap

from composer_jax.tasks.repository import task_set as repository

NAME, VERSION = 'larder', '1.0'
IMAGE = f'images/{NAME}-{VERSION}'

_WORDS = '''\
"""Small things done to words."""

import re

SEPARATOR = '-'


def slug(text):
    """Lower-cases a text and joins its words by '-'."""
    words = re.findall('[a-z0-9]+', text.lower())
    return SEPARATOR.join(words)


def _is_vowel(letter):
    """True for a, e, i, o and u of either case."""
    return letter.lower() in 'aeiou'


def count_vowels(text):
    """The number of vowels in a text."""
    return sum(_is_vowel(letter) for letter in text)


def shout(text, times=1):
    """Upper-cases a text and ends it with so many exclamation marks."""
    if times < 0:
        raise ValueError('times must not be negative')
    return text.upper() + '!' * times
'''

_NUMBERS = '''\
"""Small things done to lists of numbers."""


def chunks(values, size):
    """Splits a list into lists of a size; the last may be shorter."""
    if size < 1:
        raise ValueError('size must be positive')
    return [values[i : i + size] for i in range(0, len(values), size)]


def running_total(values):
    """Replaces each number by the sum of all up to it."""
    total = 0
    totals = []
    for value in values:
        total += value
        totals.append(total)
    return totals


def median(values):
    """The middle number, or the mean of the two in the middle."""
    if not values:
        raise ValueError('no values')
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
'''

_SHELF = '''\
"""A shelf that holds things."""

from larder.words import slug


class Shelf:
    """Keeps so many things of each name."""

    def __init__(self, capacity=10):
        self.capacity = capacity
        self._counts = {}

    def put(self, name, count=1):
        """Adds things; a full shelf is an OverflowError."""
        if self.total() + count > self.capacity:
            raise OverflowError(f'no room for {count} {name}')
        key = slug(name)
        self._counts[key] = self._counts.get(key, 0) + count

    def take(self, name):
        """Removes one thing; an unknown one is a KeyError."""
        key = slug(name)
        left = self._counts[key] - 1
        if left:
            self._counts[key] = left
        else:
            del self._counts[key]

    def total(self):
        """The number of all things."""
        return sum(self._counts.values())

    def names(self):
        """The names of what is there, sorted."""
        return sorted(self._counts)


def label(shelf):
    """Says how full a shelf is."""
    return f'{shelf.total()}/{shelf.capacity}'
'''

_INIT = '''\
"""A larder."""

from larder.numbers import chunks, median, running_total
from larder.shelf import Shelf, label
from larder.words import count_vowels, shout, slug
'''

_TEST_WORDS = """\
import larder
import pytest
from larder import words


@pytest.mark.parametrize(
    'text, expected',
    [('Red Bean', 'red-bean'), ('  Oat  ', 'oat'), ('', ''), ('A1 b', 'a1-b')],
)
def test_slug(text, expected):
    assert words.slug(text) == expected


def test_slug_of_slug():
    assert words.slug(words.slug('Big Red Bean')) == 'big-red-bean'


def test_slug_drops_signs():
    assert words.slug('rye & oat!') == 'rye-oat'


def test_count_vowels():
    assert words.count_vowels('Oatmeal') == 4


def test_count_vowels_of_none():
    assert words.count_vowels('rhythm') == 0


def test_count_vowels_is_exported():
    assert larder.count_vowels('EI') == 2


def test_shout():
    assert words.shout('tea') == 'TEA!'


def test_shout_often():
    assert words.shout('tea', 3) == 'TEA!!!'


def test_shout_refuses():
    with pytest.raises(ValueError, match='negative'):
        words.shout('tea', -1)
"""

_TEST_NUMBERS = """\
import larder
import pytest


def test_chunks():
    assert larder.chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


def test_chunks_of_nothing():
    assert larder.chunks([], 3) == []


def test_chunks_refuses():
    with pytest.raises(ValueError, match='positive'):
        larder.chunks([1], 0)


def test_running_total():
    assert larder.running_total([3, -1, 4]) == [3, 2, 6]


def test_running_total_of_nothing():
    assert larder.running_total([]) == []


def test_running_total_keeps_its_argument():
    values = [1, 1]
    larder.running_total(values)
    assert values == [1, 1]


def test_median_of_odd():
    assert larder.median([9, 1, 5]) == 5


def test_median_of_even():
    assert larder.median([4, 1, 2, 9]) == 3


def test_median_refuses():
    with pytest.raises(ValueError, match='no values'):
        larder.median([])
"""

_TEST_SHELF = """\
import larder
import pytest


class TestShelf:
    def test_starts_empty(self):
        assert larder.Shelf().total() == 0

    def test_put(self):
        shelf = larder.Shelf()
        shelf.put('Red Bean', 2)
        shelf.put('red bean')
        assert shelf.names() == ['red-bean']
        assert shelf.total() == 3

    def test_refuses_too_much(self):
        with pytest.raises(OverflowError, match='no room'):
            larder.Shelf(1).put('oat', 2)

    def test_take(self):
        shelf = larder.Shelf()
        shelf.put('oat', 2)
        shelf.take('oat')
        assert shelf.total() == 1

    def test_take_the_last(self):
        shelf = larder.Shelf()
        shelf.put('oat')
        shelf.take('Oat')
        assert shelf.names() == []

    def test_take_unknown(self):
        with pytest.raises(KeyError):
            larder.Shelf().take('oat')


def test_label():
    assert larder.label(larder.Shelf(7)) == '0/7'
"""

FILES = {
  'larder/__init__.py': _INIT,
  'larder/words.py': _WORDS,
  'larder/numbers.py': _NUMBERS,
  'larder/shelf.py': _SHELF,
  'tests/test_words.py': _TEST_WORDS,
  'tests/test_numbers.py': _TEST_NUMBERS,
  'tests/test_shelf.py': _TEST_SHELF,
  'README.md': '# larder\n\nKeeps things.\n',
  'LICENSE': 'Permission is hereby granted, free of charge, to any person\n',
}
TESTS = tuple(sorted(p for p in FILES if p.startswith('tests/')))
_CASES = ('Red Bean-red-bean', '  Oat  -oat', '-', 'A1 b-a1-b')


def write(folder: pathlib.Path) -> None:
  """Writes the package and its tests into a folder."""
  for path, text in FILES.items():
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


def node_ids(text: str, path: str) -> list[str]:
  """Returns the ids of a file's tests, in order."""
  ids = []
  for node in ast.parse(text).body:
    if isinstance(node, ast.FunctionDef) and node.name == 'test_slug':
      ids += [f'{path}::test_slug[{case}]' for case in _CASES]
    elif isinstance(node, ast.FunctionDef):
      ids.append(f'{path}::{node.name}')
    elif isinstance(node, ast.ClassDef):
      ids += [f'{path}::{node.name}::{f.name}' for f in node.body]
  return ids


ALL_IDS = tuple(i for path in TESTS for i in node_ids(FILES[path], path))


def definition(path: str, name: str) -> str:
  """Returns a top-level definition with the empty lines before it."""
  text = FILES[path]
  for node in ast.parse(text).body:
    if getattr(node, 'name', None) == name:
      source = ast.get_source_segment(text, node)
      return f'\n\n{source}\n'
  raise LookupError(name)


def _without(path: str, *names: str) -> str:
  text = FILES[path]
  for name in names:
    assert definition(path, name) in text
    text = text.replace(definition(path, name), '')
  return text


def _task(
  tier: str,
  path: str,
  symbols: tuple[str, ...],
  changes: dict[str, str | None],
  failing: tuple[str, ...],
  hidden: str,
) -> repository.RepositoryTask:
  """Makes a task that breaks the tests whose names begin with `failing`.

  The tests of the function `hidden` are not shown.
  """
  fails = [i for i in ALL_IDS if i.split('::')[-1].startswith(failing)]
  shown = [i for i in fails if i.split('::')[-1].split('[')[0] != hidden]
  test_path = next(i.split('::')[0] for i in fails if i not in shown)
  cut = ast.parse(FILES[test_path])
  for node in ast.walk(cut):
    if isinstance(node, ast.Module | ast.ClassDef):
      node.body = [n for n in node.body if getattr(n, 'name', '') != hidden]
  views = {**changes, test_path: ast.unparse(cut) + '\n'}
  return repository.RepositoryTask(
    task_id=f'deletion/{NAME}/{tier}/{path}:{"+".join(symbols)}',
    prompt=textwrap.dedent(f"""\
        The package `{NAME}` has lost {', '.join(symbols) or path}, which was
        in `{path}`. Bring it back."""),
    image=IMAGE,
    package=NAME,
    version=VERSION,
    tier=tier,
    deleted=tuple(
      repository.Deleted(path=path, symbol=s) for s in symbols or ('',)
    ),
    changes=views,
    solution={p: FILES[p] for p in changes},
    test_paths=TESTS,
    fail_to_pass=tuple(fails),
    shown=tuple(shown),
    pass_to_pass=tuple(i for i in ALL_IDS if i not in fails),
    test_arguments=(),
    timeout_s=30.0,
    difficulty=repository.TIERS.index(tier) / 4,
    held_out=False,
    licence='MIT',
    provenance={'made': 'by hand'},
  )


def tasks() -> tuple[repository.RepositoryTask, ...]:
  """Returns one task of each tier, in the order of `repository.TIERS`."""
  lines = '    words = re.findall', '\n    return SEPARATOR.join(words)\n'
  start = _WORDS.index(lines[0])
  stop = _WORDS.index(lines[1]) + len(lines[1])
  stub = f'{_WORDS[:start]}    raise NotImplementedError\n{_WORDS[stop:]}'
  init = _INIT.splitlines(keepends=True)
  no_numbers = ''.join(line for line in init if 'numbers' not in line)
  return (
    _task(
      'body',
      'larder/words.py',
      ('slug',),
      {'larder/words.py': stub},
      (*('test_slug', 'test_put', 'test_take'),),
      'test_slug_drops_signs',
    ),
    _task(
      'symbol',
      'larder/numbers.py',
      ('chunks',),
      {
        'larder/numbers.py': _without('larder/numbers.py', 'chunks'),
        'larder/__init__.py': _INIT.replace('chunks, ', ''),
      },
      ('test_chunks',),
      'test_chunks_of_nothing',
    ),
    _task(
      'class',
      'larder/shelf.py',
      ('Shelf',),
      {
        'larder/shelf.py': _without('larder/shelf.py', 'Shelf'),
        'larder/__init__.py': _INIT.replace('Shelf, ', ''),
      },
      ('test_starts', 'test_put', 'test_take', 'test_refuses', 'test_label'),
      'test_take_the_last',
    ),
    _task(
      'file',
      'larder/numbers.py',
      (),
      {'larder/numbers.py': None, 'larder/__init__.py': no_numbers},
      ('test_chunks', 'test_running', 'test_median'),
      'test_median_of_even',
    ),
    _task(
      'closure',
      'larder/words.py',
      ('count_vowels', '_is_vowel'),
      {
        'larder/words.py': _without(
          'larder/words.py', '_is_vowel', 'count_vowels'
        ),
        'larder/__init__.py': _INIT.replace('count_vowels, ', ''),
      },
      ('test_count_vowels',),
      'test_count_vowels_of_none',
    ),
  )


def task_of_objects() -> repository.RepositoryTask:
  """Returns a task whose function takes no plain value."""
  return _task(
    'symbol',
    'larder/shelf.py',
    ('label',),
    {
      'larder/shelf.py': _without('larder/shelf.py', 'label'),
      'larder/__init__.py': _INIT.replace('Shelf, label', 'Shelf'),
    },
    ('test_label',),
    'test_label',
  )


def task_set(root: pathlib.Path) -> repository.TaskSet:
  """Writes the image and the manifests below a folder, and loads them."""
  write(root / IMAGE)
  package = repository.Package(
    name=NAME,
    version=VERSION,
    image=IMAGE,
    held_out=False,
    licence='MIT',
    sha256='0' * 64,
    facts={'tests': len(ALL_IDS)},
  )
  for task in tasks():
    repository.save_task(root, task)
  repository.save_package(root, package)
  return repository.load(root)
