"""Functions of a list, composed of an aggregate, a map and a filter.

Each component has code, words and a Python function as its meaning, against
which the code is tested. No two compositions compute the same function.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

from composer_jax.tasks import source

CONSTANTS = (2, 3, 4, 5)


@dataclasses.dataclass(frozen=True)
class Component:
  """An aggregate, a map or a filter.

  In the texts `{v}` stands for the loop variable, `{a}` for the argument, `{k}`
  for the constant, `{f}` for the filter's words and `{g}` for the generator of
  mapped values.

  Attributes:
    code: Python expression.
    words: part of "Return <aggregate> <map> <filter>."
    order: part of "Take <filter>, <map>, <aggregate>."
    meaning: function of the mapped values, or of a value and the constant.
  """

  code: str
  words: str
  order: str
  meaning: Callable[..., Any]

  @property
  def has_constant(self) -> bool:
    return '{k}' in self.code


AGGREGATES = {
  'sum': Component('sum({g})', 'the sum of', 'return their sum', sum),
  'largest': Component('max(({g}), default=0)', 'the largest of',
                       'return the largest', lambda m: max(m, default=0)),
  'smallest': Component('min(({g}), default=0)', 'the smallest of',
                        'return the smallest', lambda m: min(m, default=0)),
  'first': Component('next(({g}), 0)', 'the first of',
                     'return the first', lambda m: m[0] if m else 0),
  'list': Component('[{g}]', 'a list of', 'return a list', list),
  'sorted': Component('sorted({g})', 'a sorted list of',
                      'return them sorted', sorted),
  'descending': Component('sorted(({g}), reverse=True)', 'a descending list of',
                          'return them descending', lambda m: sorted(m)[::-1]),
  'reversed': Component('[{g}][::-1]', 'a reversed list of',
                        'return them reversed', lambda m: m[::-1]),
}  # fmt: skip
MAPS = {
  'itself': Component('{v}', '{f}', '', lambda v, k: v),
  'double': Component('2 * {v}', 'the doubles of {f}',
                      'double each', lambda v, k: v + v),
  'square': Component('{v} * {v}', 'the squares of {f}',
                      'square each', lambda v, k: v**2),
  'cube': Component('{v} ** 3', 'the cubes of {f}',
                    'cube each', lambda v, k: v * v * v),
  'negate': Component('-{v}', 'the negations of {f}',
                      'negate each', lambda v, k: 0 - v),
  'plus': Component('{v} + {k}', '{f}, each plus {k}',
                    'add {k} to each', lambda v, k: k + v),
}  # fmt: skip
FILTERS = {
  'all': Component('', 'the {a}', '', lambda v, k: True),
  'even': Component('{v} % 2 == 0', 'the even {a}', '',
                    lambda v, k: v in range(-98, 99, 2)),
  'odd': Component('{v} % 2 == 1', 'the odd {a}', '',
                   lambda v, k: v in range(-99, 99, 2)),
  'positive': Component('{v} > 0', 'the positive {a}', '', lambda v, k: v >= 1),
  'negative': Component(
    '{v} < 0', 'the negative {a}', '', lambda v, k: v <= -1
  ),
  'above': Component('{v} > {k}', 'the {a} above {k}', '', lambda v, k: k < v),
  'below': Component('{v} < {k}', 'the {a} below {k}', '', lambda v, k: k > v),
}  # fmt: skip

KINDS = tuple(itertools.product(AGGREGATES, MAPS, FILTERS))


def is_held_out(kinds: tuple[str, str, str]) -> bool:
  """True for the fifth of all kinds that training must not see.

  For any two kinds, some third kind gives a sum that is no multiple of five, so
  every pair of components stays in training.
  """
  tables = (AGGREGATES, MAPS, FILTERS)
  indices = (list(t).index(k) for t, k in zip(tables, kinds, strict=True))
  return sum(indices) % 5 == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Composition:
  """A function of a list: kinds of its components, and constants or None."""

  aggregate: str
  map: str
  filter: str
  map_constant: int | None = None
  filter_constant: int | None = None

  @property
  def kinds(self) -> tuple[str, str, str]:
    return self.aggregate, self.map, self.filter

  @property
  def held_out(self) -> bool:
    return is_held_out(self.kinds)

  def evaluate(self, values: list[int]) -> Any:
    """Returns the function's value, by meaning and without running its code."""
    keep, change = FILTERS[self.filter].meaning, MAPS[self.map].meaning
    kept = [v for v in values if keep(v, self.filter_constant)]
    mapped = [change(v, self.map_constant) for v in kept]
    return AGGREGATES[self.aggregate].meaning(mapped)

  def body(self, argument: str, variable: str) -> str:
    names = {'v': variable, 'a': argument}
    element = MAPS[self.map].code.format(k=self.map_constant, **names)
    generator = f'{element} for {variable} in {argument}'
    if FILTERS[self.filter].code:
      condition = FILTERS[self.filter].code
      generator += ' if ' + condition.format(k=self.filter_constant, **names)
    return 'return ' + AGGREGATES[self.aggregate].code.format(g=generator)

  def docstring(self, argument: str, phrasing: int) -> str:
    """Returns an English description; `phrasing` in range(NUM_PHRASINGS)."""
    words = FILTERS[self.filter].words
    chosen = words.format(a=argument, k=self.filter_constant)
    if phrasing == len(_OPENINGS):
      change = MAPS[self.map].order.format(k=self.map_constant)
      steps = [f'Take {chosen}', change, AGGREGATES[self.aggregate].order]
      return ', '.join(step for step in steps if step) + '.'
    mapped = MAPS[self.map].words.format(f=chosen, k=self.map_constant)
    aggregate = AGGREGATES[self.aggregate].words
    return f'{_OPENINGS[phrasing]} {aggregate} {mapped}.'


_OPENINGS = ('Return', 'Compute', 'Find')
NUM_PHRASINGS = len(_OPENINGS) + 1


@functools.cache
def everything() -> tuple[Composition, ...]:
  """Returns every composition with every constant, in a fixed order."""
  return tuple(
    Composition(a, m, f, j, k)
    for a, m, f in KINDS
    for j in (CONSTANTS if MAPS[m].has_constant else (None,))
    for k in (CONSTANTS if FILTERS[f].has_constant else (None,))
  )


@functools.cache
def _forms() -> dict[str, Composition]:
  return {source.normal_body(c.body('a', 'v'), 'a'): c for c in everything()}


def recognise(normal_form: str) -> Composition | None:
  """Returns the composition whose body has this `source.normal_form`."""
  return _forms().get(normal_form)
