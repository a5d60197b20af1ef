"""Functions of a list, composed of an aggregate, a map and a filter.

Each component has code, words and a Python function as its meaning, against
which the code is tested. No two compositions compute the same function.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

from composer_jax.tasks import source

CONSTANTS = (2, 3, 4, 5)


@dataclasses.dataclass(frozen=True)
class Component:
  """An aggregate, a map or a filter.

  In the texts `{v}` stands for the loop variable, `{a}` for the argument, `{k}`
  for the constant, `{f}` for the filter's words, `{m}` for the map's and `{g}`
  for the generator of mapped values. Of each kind of words the last wording is
  held out: it describes tasks of unseen wordings and no other.

  Attributes:
    code: Python expression.
    meaning: function of the mapped values, or of a value and the constant.
    nouns: wordings as part of "Return <aggregate of map of filter>."
    orders: wordings as part of "Take <filter>, <map>, <aggregate>."; ('',) for
      a map that such a description leaves out.
  """

  code: str
  meaning: Callable[..., Any]
  nouns: tuple[str, ...]
  orders: tuple[str, ...] = ()

  @property
  def has_constant(self) -> bool:
    return '{k}' in self.code


AGGREGATES = {
  'sum': Component(
    'sum({g})', sum,
    ('the sum of {m}', 'the total of {m}', 'the sum over {m}',
     'the total over {m}', 'the sum total of {m}'),
    ('return their sum', 'add them up', 'give the total of these',
     'give the sum of these')),
  'largest': Component(
    'max(({g}), default=0)', lambda m: max(m, default=0),
    ('the largest of {m}', 'the maximum of {m}', 'the maximum over {m}',
     'the largest in {m}', 'the largest one of {m}'),
    ('return the largest', 'give the maximum', 'keep only the largest',
     'keep only the maximum')),
  'smallest': Component(
    'min(({g}), default=0)', lambda m: min(m, default=0),
    ('the smallest of {m}', 'the minimum of {m}', 'the minimum over {m}',
     'the smallest in {m}', 'the smallest one of {m}'),
    ('return the smallest', 'give the minimum', 'keep only the smallest',
     'keep only the minimum')),
  'first': Component(
    'next(({g}), 0)', lambda m: m[0] if m else 0,
    ('the first of {m}', 'the very first of {m}', 'the first in {m}',
     'the very first in {m}', 'the first one of {m}'),
    ('return the first', 'give the first one', 'keep the very first',
     'keep only the first')),
  'list': Component(
    '[{g}]', list,
    ('a list of {m}', 'the list of {m}', 'a plain list of {m}',
     'the plain list of {m}', 'just a list of {m}'),
    ('return a list', 'give a plain list', 'list them', 'just list these')),
  'sorted': Component(
    'sorted({g})', sorted,
    ('a sorted list of {m}', 'an ascending list of {m}',
     'the sorted list of {m}', 'a list of {m} in rising order',
     'a list in ascending order of {m}'),
    ('return them sorted', 'sort them', 'list them ascending',
     'list these sorted')),
  'descending': Component(
    'sorted(({g}), reverse=True)', lambda m: sorted(m)[::-1],
    ('a descending list of {m}', 'a falling list of {m}',
     'the descending list of {m}', 'a list of {m} in falling order',
     'a list in descending order of {m}'),
    ('return them descending', 'sort them falling', 'list them descending',
     'list these falling')),
  'reversed': Component(
    '[{g}][::-1]', lambda m: m[::-1],
    ('a reversed list of {m}', 'a backward list of {m}',
     'the reversed list of {m}', 'a list of {m} in backward order',
     'a list in reversed order of {m}'),
    ('return them reversed', 'reverse them', 'list them backward',
     'list these reversed')),
}  # fmt: skip
MAPS = {
  'itself': Component(
    '{v}', lambda v, k: v,
    ('{f}', '{f} as they are', '{f} unchanged', '{f}, all unchanged',
     '{f} left as they are'),
    ('', 'keep them as they are', 'leave them unchanged',
     'leave these as they are')),
  'double': Component(
    '2 * {v}', lambda v, k: v + v,
    ('the doubles of {f}', 'twice {f}', '{f}, each doubled',
     'doubles of {f}', '{f}, all doubled', 'the double of {f}'),
    ('double each', 'take twice each', 'double them all', 'double these')),
  'square': Component(
    '{v} * {v}', lambda v, k: v**2,
    ('the squares of {f}', '{f} squared', '{f}, each squared',
     'squares of {f}', '{f}, all squared', 'the square of {f}'),
    ('square each', 'take their squares', 'square them all', 'square these')),
  'cube': Component(
    '{v} ** 3', lambda v, k: v * v * v,
    ('the cubes of {f}', '{f} cubed', '{f}, each cubed',
     'cubes of {f}', '{f}, all cubed', 'the cube of {f}'),
    ('cube each', 'take their cubes', 'cube them all', 'cube these')),
  'negate': Component(
    '-{v}', lambda v, k: 0 - v,
    ('the negations of {f}', '{f} negated', '{f}, each negated',
     'negations of {f}', '{f}, all negated', 'the negation of {f}'),
    ('negate each', 'take their negations', 'negate them all',
     'negate these')),
  'plus': Component(
    '{v} + {k}', lambda v, k: k + v,
    ('{f}, each plus {k}', '{f} plus {k}', '{f}, each raised by {k}',
     '{f}, all plus {k}', '{f}, all raised by {k}',
     '{f} raised by {k} each'),
    ('add {k} to each', 'raise each by {k}', 'add {k} to them all',
     'raise these by {k}')),
}  # fmt: skip
FILTERS = {
  'all': Component(
    '', lambda v, k: True,
    ('the {a}', 'all {a}', 'every one of {a}', 'each of {a}', 'all the {a}',
     'all of {a}')),
  'even': Component(
    '{v} % 2 == 0', lambda v, k: v in range(-98, 99, 2),
    ('the even {a}', 'the {a} that are even', 'even ones of {a}',
     'even numbers of {a}', 'all even {a}', 'only the even {a}',
     'any {a} which are even', 'only even {a}')),
  'odd': Component(
    '{v} % 2 == 1', lambda v, k: v in range(-99, 99, 2),
    ('the odd {a}', 'the {a} that are odd', 'odd ones of {a}',
     'odd numbers of {a}', 'all odd {a}', 'only the odd {a}',
     'any {a} which are odd', 'only odd {a}')),
  'positive': Component(
    '{v} > 0', lambda v, k: v >= 1,
    ('the positive {a}', 'the {a} that are positive', 'positive ones of {a}',
     'positive numbers of {a}', 'all positive {a}', 'only the positive {a}',
     'any {a} which are positive', 'only positive {a}')),
  'negative': Component(
    '{v} < 0', lambda v, k: v <= -1,
    ('the negative {a}', 'the {a} that are negative', 'negative ones of {a}',
     'negative numbers of {a}', 'all negative {a}', 'only the negative {a}',
     'any {a} which are negative', 'only negative {a}')),
  'above': Component(
    '{v} > {k}', lambda v, k: k < v,
    ('the {a} above {k}', 'the {a} that exceed {k}', '{a} greater than {k}',
     'all {a} above {k}', 'any {a} which exceed {k}',
     'the {a} which are greater than {k}', '{a} that are above {k}')),
  'below': Component(
    '{v} < {k}', lambda v, k: k > v,
    ('the {a} below {k}', 'the {a} that are under {k}', '{a} less than {k}',
     'all {a} below {k}', 'any {a} which are under {k}',
     'the {a} which are less than {k}', '{a} that are below {k}')),
}  # fmt: skip

# Sentences, the last of each held out. `{s}` stands for an aggregate of nouns;
# `{f}`, `{m}` and `{s}` for a filter and two orders.
NOUN_SENTENCES = (
  'Return {s}.', 'Compute {s}.', 'Find {s}.', 'Build {s}.', 'Give {s}.',
)  # fmt: skip
ORDER_SENTENCES = (
  'Take {f}, {m}, {s}.', 'From {f}: {m}, {s}.', 'Of {f}, {m}, then {s}.',
  'With {f}, {m}, and {s}.', 'Given {f}, {m} and {s}.',
)  # fmt: skip

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

  def docstring(
    self, argument: str, draw: random.Random, *, unseen: bool = False
  ) -> str:
    """Returns an English description in wordings drawn from the templates.

    Args:
      unseen: true for held-out wordings of every part, false for the others.
    """
    kept = slice(-1, None) if unseen else slice(-1)
    aggregate, change = AGGREGATES[self.aggregate], MAPS[self.map]
    chosen = draw.choice(FILTERS[self.filter].nouns[kept])
    chosen = chosen.format(a=argument, k=self.filter_constant)
    if draw.random() < _ORDER_SHARE:
      sentence = draw.choice(ORDER_SENTENCES[kept])
      mapped = draw.choice(change.orders[kept]).format(k=self.map_constant)
      text = sentence.format(
        f=chosen, m=mapped, s=draw.choice(aggregate.orders[kept])
      )
      return text if mapped else text.replace(', ,', ',').replace(': ,', ':')
    mapped = draw.choice(change.nouns[kept])
    mapped = mapped.format(f=chosen, k=self.map_constant)
    whole = draw.choice(aggregate.nouns[kept]).format(m=mapped)
    return draw.choice(NOUN_SENTENCES[kept]).format(s=whole)


_ORDER_SHARE = 1 / 3  # of descriptions, in the form of orders


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
