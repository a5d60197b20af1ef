"""Results are the same where `==` says so, and prove only what they show."""

import cmath
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import json
import math
import operator
import pathlib
import random
import threading
import types

import hypothesis
import pytest
from hypothesis import strategies as st

from composer_jax.tasks.grading import (
  call_plugin,
  equality,
  held_out,
  plain,
  stand_ins,
)

Colour = enum.Enum('Colour', ['RED', 'BLUE'])
DAYS = [datetime.date(2026, 1, day) for day in (1, 2)]


def crossed(value):
  return json.loads(json.dumps(plain.encode_result(value)))


def same(first, second, tolerance=0.0):
  return equality.same(crossed(first), crossed(second), tolerance)


numbers = st.sampled_from([
  0, 1, -1, 2, True, False, 0.0, -0.0, 1.0, 0.5, 2.0, 1 + 0j, 2j, 10**400,
  decimal.Decimal('1.0'), decimal.Decimal('1.00'), decimal.Decimal('0.5'),
  fractions.Fraction(1, 2), fractions.Fraction(1, 3), math.inf,
])  # fmt: skip
hashable = st.recursive(
  numbers | st.sampled_from([None, '1', 'a', b'a', *Colour, *DAYS, range(2)]),
  lambda inner: (
    st.frozensets(inner, max_size=3) | st.lists(inner, max_size=2).map(tuple)
  ),
  max_leaves=4,
)
values = st.recursive(
  hashable,
  lambda inner: (
    st.lists(inner, max_size=2)
    | st.lists(inner, max_size=2).map(tuple)
    | st.dictionaries(hashable, inner, max_size=2).flatmap(
      lambda made: st.sampled_from(
        [
          made,
          dict([*made.items()][::-1]),
          collections.OrderedDict(made),
          types.MappingProxyType(made),
          made.keys(),
          made.items(),
        ]
      )  # fmt: skip
    )
  ),
  max_leaves=6,
)


def test_values_are_the_same_where_they_are_equal():
  @hypothesis.settings(max_examples=200, deadline=None, database=None)
  @hypothesis.seed(0)
  @hypothesis.given(st.lists(values, min_size=2, max_size=4))
  def check(some):
    for first, second in itertools.combinations_with_replacement(some, 2):
      assert same(first, second) == (first == second), (first, second)

  check()


@pytest.mark.parametrize(
  'first, second',
  [
    ({Colour.RED: 1, Colour.BLUE: 2}, {Colour.BLUE: 2, Colour.RED: 1}),
    (dict(zip(DAYS, 'ab')), dict(zip(DAYS[::-1], 'ba'))),
    ([decimal.Decimal('1.0')], [decimal.Decimal('1.00')]),
    (types.MappingProxyType({1: 2, 3: 4}), {3: 4, 1: 2}),
    ({1: [2], 3: [4]}.items(), {3: [4], 1: [2]}.items()),
    ({1: 0, 3: 0}.keys(), {3, 1}),
    ([range(5, 5), range(0, 3, 2)], [range(0), range(0, 4, 2)]),
    ({(Colour.RED, 1): 0.1 + 0.2}, {(Colour.RED, True): 0.3}),
  ],
)
def test_another_order_and_another_form_are_no_mistake(first, second):
  assert same(first, second) and same(second, first)
  # What is in them counts.
  assert not same(first, [*second, 1]) and not same([first], [])


def test_keys_are_told_apart_by_all_that_they_show():
  assert not same({b'a': 0}, {'61': 0}) and same({b'a': 0}, {b'a': 0})
  shown = {'object': 'A', 'text': 'a', 'items': []}
  one, other = (
    {'dict': [[{**shown, 'attributes': {'size': size}}, 0]]} for size in (1, 2)
  )
  assert equality.same(one, json.loads(json.dumps(one)))
  assert not equality.same(one, other)


def test_nan_is_the_same_wherever_it_stands():
  one = {Colour.RED: math.nan, Colour.BLUE: (1, math.nan)}
  assert same(one, dict([*one.items()][::-1]))
  assert same({math.nan: cmath.nan}, {math.nan: math.nan})
  assert not same(one, {**one, Colour.RED: 1.0})
  assert not same(math.nan, 1.0, 1e-3) and not same(math.inf, 1e300, 1e-3)


def test_values_of_a_dict_keep_their_order():
  assert same({1: 2, 3: 4}.values(), {5: 2, 6: 4}.values())
  assert not same({1: 2, 3: 4}.values(), {3: 4, 1: 2}.values())


def test_a_whole_number_is_no_number_near_it():
  assert same(3, 3.0) and same(0.1 + 0.2, 0.3)
  assert not same(3, 3.0000000000001)
  assert not same(10**15 + 1, 1e15)
  assert not same(decimal.Decimal('0.3'), 0.3)
  # Unless tests say that it is.
  assert same(3, 3.0000000000001, 1e-6)
  assert same(decimal.Decimal('0.3'), fractions.Fraction(3, 10))
  assert same(decimal.Decimal('0.3'), 0.3, 1e-6)
  assert not same(10**9, 10**9 + 1, 1e-6)
  # Neither is expanded.
  huge = decimal.Decimal('1e999999999')
  assert same(huge, huge) and not same(huge, 1, 1e-6)


def test_every_item_of_an_iterator_counts():
  items = [*range(1000)]
  for at in (0, 49, 50, 999):
    changed = [*items[:at], -1, *items[at + 1 :]]
    assert not same(iter(items), iter(changed))
  assert not same(iter(items), iter(items[:-1]))
  assert same(iter(items), map(float, items))
  assert same(itertools.count(), itertools.count())
  assert not same(itertools.count(), iter(range(200)))
  with pytest.raises(plain.NotPlain):  # a stand-in cannot give it
    plain.decode_result(crossed(itertools.count()))


class Moment(datetime.datetime):
  pass


NOON = datetime.datetime(2026, 5, 6, 12, tzinfo=datetime.UTC)
EAST = datetime.timezone(datetime.timedelta(hours=2))


@pytest.mark.parametrize(
  'value, equal, other',
  [
    (collections.UserDict(a=[1]), {'a': [1]}, {'a': [2]}),
    (collections.ChainMap({'a': 1}, {'a': 2, 'b': 3}), {'b': 3, 'a': 1}, {}),
    (collections.UserList([(1,)]), [(1,)], [[1]]),
    (collections.UserString('a'), 'a', 'b'),
    (pathlib.Path('a/b'), pathlib.PurePosixPath('a/b'), pathlib.Path('a')),
    (Moment(2026, 5, 6, 12, tzinfo=EAST), NOON - NOON.resolution * 72 * 10**8,
     NOON),
    (NOON, NOON.astimezone(EAST), NOON.replace(tzinfo=None)),
  ],
)  # fmt: skip
def test_a_standard_class_is_the_value_that_it_compares_as(value, equal, other):
  assert value == equal and equal == value and value != other
  for around in (lambda v: v, lambda v: [v], lambda v: {1: (v,)}):
    assert same(around(value), around(equal))
    assert same(around(equal), around(value))
    assert not same(around(value), around(other))


def test_a_class_below_the_expected_one_is_right_where_it_is_equal(monkeypatch):
  monkeypatch.setattr(plain, 'PACKAGES', {'tests'})

  class Below(Place):
    pass

  for value, equal in ((Below(1), Place(1)), (Under(1), Point(1))):
    assert same(value, equal) == (value == equal), value
    assert not same(equal, value)  # of the expected one, or below it
  assert same([Below(2)], [Place(2)]) and not same(Below(1), Place(2))


@pytest.mark.parametrize('error, wanted, is_right', [
    (ValueError(), ValueError, True), (UnicodeError(), ValueError, True),
    (KeyError(), LookupError, True), (LookupError(), KeyError, False),
    (type('Own', (KeyError,), {})(), KeyError, True),
    # A mistake is an Exception, too.
    (TypeError(), Exception, False),
    (type('Own', (Exception,), {})(), Exception, True),
])  # fmt: skip
def test_an_error_below_the_expected_one_is_right(error, wanted, is_right):
  name, *above = plain.classes_of(error)
  outcome = json.loads(json.dumps(['raised', name, [], above]))
  assert held_out._is_answer([outcome, 0.5])
  assert held_out._agree(outcome, ['raised', wanted.__name__, []], 0.0) == (
    is_right
  )


def test_an_attribute_of_its_own_is_no_change(monkeypatch):
  monkeypatch.setattr(plain, 'PACKAGES', {'tests'})
  before, after = (crossed(Place(n)) for n in (1, 1))
  after['attributes']['last'] = 1
  untouched = ['ok', 1, None]
  assert held_out._agree(['ok', 1, [after], [before]], untouched, 0.0)
  assert not held_out._agree(['ok', 2, [after], [before]], untouched, 0.0)
  changed = ['ok', 1, [crossed(Place(2))], [before]]
  assert not held_out._agree(changed, untouched, 0.0)
  assert held_out._agree(changed, changed, 0.0)


def test_what_is_expected_one_by_one_may_come_as_a_list():
  assert same([1, 2], iter([1, 2])) and same((1,), iter([1]))
  assert not same([1], iter([1, 2])) and not same(iter([1]), [1])


def test_an_error_of_another_class_is_raised_as_the_nearest_above_it():
  made = stand_ins.StandIns(plain, {})
  outcome = ['raised', 'Own', ['why'], ['KeyError', 'LookupError']]
  with pytest.raises(KeyError, match='why'):
    made._give(outcome, (), [], 'json')


def test_an_exact_number_crosses_to_a_test():
  third = fractions.Fraction(1, 3)
  assert plain.decode_result(crossed([third])) == [third]


PLUS_ONE = functools.partial(operator.add, 1)


def test_a_function_may_be_any_callable():
  outcome = call_plugin.call(plain, [__name__, 'PLUS_ONE', None, [[2], {}]], [])
  assert outcome == ['ok', 3, None]
  asked = [__name__, 'Rates.size', None, [[{'set': [1]}], {}]]
  assert call_plugin.call(plain, asked, []) == ['ok', 1, None]  # a property


class Place:
  """Its `==` takes classes below, and its text tells the class."""

  def __init__(self, x):
    self.x = x

  def __repr__(self):
    return f'{type(self).__name__}({self.x})'

  def __eq__(self, other):
    return isinstance(other, Place) and self.x == other.x


@dataclasses.dataclass
class Point:
  x: int


class Under(Point):
  pass


class Money:
  """Shows its amount in its text alone."""

  def __init__(self, amount):
    self._amount, self.currency = amount, 'EUR'

  def __str__(self):
    return f'{self._amount} EUR' + ' and nothing else' * 9


class Rates(collections.abc.Mapping):
  """Shows what it maps to as a mapping alone."""

  def __init__(self, **rates):
    self._rates, self.base = rates, 'EUR'

  __getitem__ = lambda self, key: self._rates[key]
  __iter__ = lambda self: iter(self._rates)
  __len__ = lambda self: len(self._rates)
  size = property(len)


class Wallet:
  def __init__(self, inner):
    self.inner = inner


@pytest.mark.parametrize(
  'around', [lambda v: v, lambda v: [v], lambda v: {1: (v,)}, Wallet]
)
def test_what_an_object_holds_counts_wherever_it_stands(monkeypatch, around):
  monkeypatch.setattr(plain, 'PACKAGES', {'tests'})
  for one, another, other in [
    (Money(1), Money(1), Money(2)),
    (Rates(a=1, b=2), Rates(b=2, a=1), Rates(a=1, b=3)),
    (
      collections.deque([Wallet(1), Wallet(2)]),
      collections.deque([Wallet(1), Wallet(2)]),
      collections.deque([Wallet(1), Wallet(3)]),
    ),
  ]:
    assert same(around(one), around(another))
    assert not same(around(one), around(other))


class Purse:
  """Its `==` compares what it hides, but for an order and a memory."""

  def __init__(self, coins, marks=(), memory=None):
    self._coins, self.__marks, self._memory = coins, marks, memory

  def _key(self):
    return self._coins, sorted(self.__marks)

  def __eq__(self, other):
    return type(other) is Purse and self._key() == other._key()


@dataclasses.dataclass(slots=True, repr=False)
class Pair:
  _first: object
  second: object
  _third: object = dataclasses.field(default=0, compare=False)


def test_private_attributes_count_where_the_class_compares_them(monkeypatch):
  monkeypatch.setattr(plain, 'PACKAGES', {'tests'})
  coins = (None, 1, [1, 2], [1, 3], {'a': Purse(1)}, {'a': Purse(2)})
  purses = [Purse(c, m) for c in coins for m in ((1, 2), (2, 1))]
  purses += [Purse(c, (1, 2), memory='yesterday') for c in coins]
  pairs = [Pair(c, 1, third) for c in coins for third in (0, 1)]
  for one, other in itertools.product([*purses, *pairs], repeat=2):
    assert same(one, other) == (one == other), (one, other)
    assert same([one], (Wallet(other),)) is False
    assert same(Wallet([one]), Wallet([other])) == (one == other)


def test_what_only_one_side_compares_is_no_mistake(monkeypatch):
  """A solution may write `==`, or what it calls, in another way."""
  monkeypatch.setattr(plain, 'PACKAGES', {'tests'})
  shown = crossed(Purse(1))
  bare = {**shown, 'attributes': {}}
  assert shown != bare and equality.same(shown, bare)
  assert equality.same(bare, shown) and equality.same(
    {'set': [bare]}, {'set': [shown]}
  )
  assert not equality.shows(shown)  # so that it proves nothing either
  for name in ('Purse', 'Purse.__eq__', 'Purse._key'):
    assert {**plain.encode_result(Purse(1), [name]), 'closed': True} == bare
  assert plain.encode_result(Purse(1), ['Purse._coins', '_key']) == shown


def test_what_shows_only_its_class_proves_nothing(monkeypatch):
  monkeypatch.setattr(plain, 'PACKAGES', {'tests'})
  for hidden in (threading.Lock(), random.Random(), lambda: 0, object()):
    for value in (hidden, [1, hidden], (hidden,), {1: hidden}, Wallet(hidden)):
      outcome = ['ok', crossed(value), None]
      assert not held_out._is_required(outcome, is_recorded=True), value
      assert held_out._is_required([*outcome[:2], [1]], is_recorded=True)
  both = Wallet(object())
  both.name = 'a'
  for shown in (Wallet(1), [both], Money(1), [DAYS[0]], [], {}, Rates(a=1)):
    assert held_out._is_required(['ok', crossed(shown), None], True), shown
  both.inner = both  # stands where it stands
  assert held_out._is_required(['ok', crossed([both]), None], True)


def test_equal_hashes_cost_nothing():
  """A set of these numbers takes the square of their count to build."""
  numbers = [number * (2**61 - 1) for number in range(20_000)]
  assert {hash(number) for number in numbers} == {0}
  for kind in ('set', 'frozenset'):
    assert equality.same({kind: numbers}, {kind: numbers[::-1]})
  pairs = [[number, number] for number in numbers]
  assert equality.same({'dict': pairs}, {'dict': pairs[::-1]})
  assert not equality.same({'dict': pairs}, {'dict': [[1, 1], *pairs[1:]]})
