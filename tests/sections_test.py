"""Dictionaries become dataclasses by name; absent fields keep defaults."""

import dataclasses

import pytest

from composer_jax import sections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
  """A section within one.

  Attributes:
    rate: share of something that takes
      two lines to explain.
    kind: name of something.
  """

  rate: float = 0.5
  kind: str = 'a'

  def __post_init__(self):
    if self.rate > 1:
      raise ValueError(f'rate must be at most 1, not {self.rate}.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
  """A section.

  Attributes:
    count: number of something.
    rows: one number, or several.
    names, words: texts.
    is_on: true if it is on.
    pairs: pairs of texts.
    inner: section within.
  """

  count: int
  rows: int | tuple[int, ...] = 8
  names: tuple[str, ...] = ()
  words: tuple[str, ...] = ('x',)
  is_on: bool = False
  pairs: tuple[tuple[str, str], ...] = ()
  inner: Inner = Inner(rate=0.25)


def build(**fields):
  return sections.build(Outer, fields, 'outer')


def test_absent_fields_keep_the_default_of_where_they_stand():
  # Not that of Inner, whose rate is 0.5.
  assert build(count=1, inner={'kind': 'b'}).inner == Inner(rate=0.25, kind='b')


@pytest.mark.parametrize(
  'fields, name, value',
  [
    ({'rows': [4, 8]}, 'rows', (4, 8)),
    ({'rows': 4}, 'rows', 4),
    ({'names': 'a,b'}, 'names', ('a', 'b')),
    ({'names': ['a', 'b']}, 'names', ('a', 'b')),
    ({'names': ''}, 'names', ()),
    ({'pairs': [['a', 'b']]}, 'pairs', (('a', 'b'),)),
    ({'is_on': 1}, 'is_on', True),
    ({'is_on': 'false'}, 'is_on', False),
    ({'inner': {'rate': 1}}, 'inner', Inner(rate=1.0)),
  ],
)
def test_what_the_command_line_and_json_cannot_say_is_converted(
  fields, name, value
):
  actual = getattr(build(count=1, **fields), name)
  assert actual == value and type(actual) is type(value)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({}, r'--config\.outer lacks field count\.'),
    ({'count': 1, 'row': 2}, r'no field row\. Did you mean rows\?.*count, in'),
    ({'count': True}, r'outer\.count must be a whole number, not True'),
    ({'count': 1.5}, r'outer\.count must be a whole number, not 1\.5'),
    ({'count': 1, 'inner': {'kind': 3}}, r'outer\.inner\.kind must be a text'),
    (
      {'count': 1, 'inner': {'rate': 2.0}},
      r'--config\.outer\.inner: rate must',
    ),
    ({'count': 1, 'names': None}, r'outer\.names must be values .* not None'),
    ({'count': 1, 'names': {}}, r'outer\.names must be values .* not \{\}'),
    ({'count': 1, 'names': (1,)}, r'outer\.names must be a text, not 1'),
    ({'count': 1, 'rows': 'a'}, r"outer\.rows must be a whole number, not 'a'"),
    ({'count': 1, 'pairs': 'a'}, r"outer\.pairs must hold tuples, not 'a'"),
    ({'count': 1, 'pairs': ('a',)}, r"outer\.pairs must hold tuples, not 'a'"),
    ({'count': 1, 'pairs': (('a',),)}, r'outer\.pairs must hold 2 values'),
    ({'count': 1, 'is_on': 2}, r'outer\.is_on must be true or false, not 2'),
    ({'count': 1, 'inner': 3}, r'outer\.inner must be a section, not 3'),
  ],
)
def test_an_impossible_value_is_named_with_its_place(fields, message):
  with pytest.raises(ValueError, match=message):
    build(**fields)


def test_entries_tell_value_default_and_meaning():
  entries = {e.name: e for e in sections.entries(build(count=3))}
  assert entries['count'].default is sections.REQUIRED
  assert entries['words'].meaning == entries['names'].meaning == 'texts.'
  rate = entries['inner.rate']
  assert (rate.value, rate.default) == (0.25, 0.25)
  assert rate.meaning == 'share of something that takes two lines to explain.'
