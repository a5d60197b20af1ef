"""Names of packages, modules, functions, arguments and variables.

A name is one stem or two, drawn from words, blends of two words, syllables and
letters. A hash divides the stems in two: a name of a training task has no stem
that a name of an unseen-names task can have, on any machine.
"""

import keyword
import pathlib
import random
import string
import zlib

_TEXT = pathlib.Path(__file__).with_name('words.txt').read_text()
WORDS = tuple(_TEXT.split())
_CONSONANTS, _VOWELS = 'bdfgklmnprstvz', 'aeiou'

# Words of Python and of the descriptions that are short enough to be drawn.
_RESERVED = """
  abs add all an any are back bin body bool by case chr cube dict dir each eval
  even exec exit find give hash help hex id int iter just keep left len less
  list map max min negate negative next oct odd of one ones only open ord over
  plus positive pow quit repr set sort str sum take than that the them then they
  to type up vars very what zip
"""
RESERVED = frozenset([*_RESERVED.split(), *keyword.kwlist])


def is_unseen(stem: str) -> bool:
  """True for the fifth of all stems that no name of a training task has."""
  return zlib.crc32(stem.encode()) % 5 == 0


def _syllables(draw: random.Random, count: int) -> str:
  return ''.join(
    draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(count)
  )


def _letters(draw: random.Random, count: int) -> str:
  return ''.join(draw.choice(string.ascii_lowercase) for _ in range(count))


def _blend(draw: random.Random) -> str:
  """Joins two words, so that training names have the pieces of all words."""
  start, end = draw.choice(WORDS), draw.choice(WORDS)
  return start[: draw.randint(2, 4)] + end[-draw.randint(2, 4) :]


def _stem(draw: random.Random, kind: str) -> str:
  if kind == 'package':  # Long enough to be no module of Python's own.
    return _syllables(draw, 4)
  if kind == 'variable':
    return _letters(draw, draw.choice((1, 1, 2, 3)))
  return draw.choice(
    (
      draw.choice(WORDS),
      _blend(draw),
      _syllables(draw, draw.choice((2, 2, 3))),
      _letters(draw, draw.choice((2, 3))),
    )
  )


def draw_name(
  kind: str, draw: random.Random, *, unseen: bool, taken: set[str]
) -> str:
  """Returns a name and adds it to those taken.

  Args:
    kind: 'package', 'module', 'function', 'argument' or 'variable'.
    unseen: true for stems that no training task has, false for the others.
    taken: names of the same task, which must differ.
  """
  while True:
    num_stems = draw.choice((1, 1, 2)) if kind == 'function' else 1
    stems = [_stem(draw, kind) for _ in range(num_stems)]
    name = '_'.join(stems)
    is_open = all(s not in RESERVED and is_unseen(s) == unseen for s in stems)
    if is_open and name not in taken:
      taken.add(name)
      return name
