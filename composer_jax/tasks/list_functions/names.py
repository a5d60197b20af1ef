"""Names of packages, modules, functions, arguments and variables.

A name is one to three stems, joined as in snake case or camel case, sometimes
with a number behind. Stems are words, with an ending or without, blends of two
words, syllables and letters. A hash divides them in two: a name of a training
task has no stem that a name of an unseen-names task can have, on any machine.
"""

import keyword
import pathlib
import random
import string
import zlib

_TEXT = pathlib.Path(__file__).with_name('words.txt').read_text()
WORDS = tuple(_TEXT.split())
_ENDINGS = (
    's', 'es', 'er', 'ers', 'ed', 'ing', 'ings', 'ment', 'ments', 'tion',
    'tions', 'able', 'al', 'ly', 'ness', 'ure', 'ures', 'ist',
)  # fmt: skip
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

# Numbers of stems, of which one is drawn; other kinds have one.
_NUM_STEMS = {
    'module': (1, 1, 1, 2), 'function': (1, 1, 1, 2, 2, 3),
    'argument': (1, 1, 1, 2),
}  # fmt: skip
_CAMEL_SHARE = 0.15  # of functions and arguments of several stems
_NUMBER_SHARE = 0.05  # of all but packages and variables


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


def _stem(draw: random.Random, kind: str, unseen: bool) -> str:
  while True:
    stem = _any_stem(draw, kind)
    if stem not in RESERVED and is_unseen(stem) == unseen:
      return stem


def _any_stem(draw: random.Random, kind: str) -> str:
  if kind == 'package':  # Long enough to be no module of Python's own.
    return _syllables(draw, 4)
  if kind == 'variable':
    count = draw.choice((1, 1, 2, 3, 0))
    return _letters(draw, count) if count else draw.choice(WORDS)
  return draw.choice(
    (
      draw.choice(WORDS),
      draw.choice(WORDS) + draw.choice(_ENDINGS),
      _blend(draw),
      _syllables(draw, draw.choice((2, 2, 3))),
      _letters(draw, draw.choice((2, 3))),
    )
  )


def _join(stems: list[str], kind: str, draw: random.Random) -> str:
  is_camel = kind in ('function', 'argument') and draw.random() < _CAMEL_SHARE
  if is_camel:
    name = stems[0] + ''.join(map(str.capitalize, stems[1:]))
  else:
    name = '_'.join(stems)
  if kind in _NUM_STEMS and draw.random() < _NUMBER_SHARE:
    name += str(draw.randint(1, 99))
  return name


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
    # Chosen first: unseen names have as many stems as the others.
    num_stems = draw.choice(_NUM_STEMS.get(kind, (1,)))
    stems = [_stem(draw, kind, unseen) for _ in range(num_stems)]
    name = _join(stems, kind, draw)
    if name not in taken:
      taken.add(name)
      return name
