"""Encoded values are exact, variations keep their type, agreement counts."""

import collections
import dataclasses
import datetime
import enum
import json
import math
import operator
import pathlib
import random
import re

import pytest

from composer_jax.tasks.grading import (
  equality,
  held_out,
  inputs,
  plain,
  variations,
)
from composer_jax.tasks.repository import task_set
from tests.tasks import small_package

VALUES = [
  None, True, 0, -5, 2**70, 1.5, math.inf, 'é\n', b'\x00a', bytearray(b'b'),
  1 + 2j, [], [1, [2]], (), (1, 'a'), {1, 2}, frozenset({'a'}),
  {'a': [1], 2: (3,)}, range(1, 9, 2), len, operator.add, int, math, json.loads,
]  # fmt: skip


# The repr of a function holds its address, which differs between processes.
@pytest.mark.parametrize('value', VALUES, ids=range(len(VALUES)))
def test_values_cross_exactly(value):
  crossed = plain.decode(json.loads(json.dumps(plain.encode(value))))
  assert crossed == value
  assert type(crossed) is type(value)


def test_nan_and_negative_zero_cross():
  assert math.isnan(plain.decode(plain.encode(math.nan)))
  assert plain.encode(-0.0) == -0.0


def test_different_values_have_different_codes():
  kinds = [1, 1.0, True, '1', b'1', [1], (1,), {1}, frozenset({1}), {1: 1}]
  codes = {json.dumps(plain.encode(value)) for value in kinds}
  assert len(codes) == len(kinds)


@pytest.mark.parametrize(
  'value',
  [object(), lambda: 0, pytest, [object()], float.fromhex, pytest.raises],
)
def test_objects_have_no_code(value):
  with pytest.raises(plain.NotPlain):
    plain.encode(value)


def seen(kind, text='', items=(), **attributes):
  return dict(object=kind, text=text, items=[*items], attributes=attributes)


def test_a_result_tells_no_more_than_it_is():
  assert plain.encode_result(iter([1, 2])) == {'iterator': [1, 2]}
  endless = plain.encode_result(iter(int, 1))
  assert endless == {'endless': [0] * 200}
  known = plain.encode_result(random.Random())
  assert known == seen('Random')  # its text is an address
  path = plain.encode_result(pathlib.PurePosixPath('a'))
  assert path == seen('PurePosixPath', 'a')

  class Text(str):
    def __eq__(self, other):
      return True

    __hash__ = str.__hash__

  # What a subclass says about equality does not count.
  assert plain.encode_result(Text('a'), ['Text']) == 'a'


def test_a_subclass_is_the_value_that_it_compares_as():
  point = collections.namedtuple('point', 'x y')
  ordered = collections.OrderedDict([('b', 1), ('a', point(1, 2))])
  kind = enum.IntEnum('kind', {'ONE': 1})
  for value, equal in [
    (point(1, [kind.ONE]), (1, [1])),
    (ordered, {'a': (1, 2), 'b': 1}),
    (collections.Counter('aab'), {'b': 1, 'a': 2}),
    ({1, 2.0}, frozenset({2, 1})),
    ([1, True, 0.5], [1.0, 1, 0.5]),
  ]:
    assert value == equal
    encoded = [plain.encode_result(x) for x in (value, equal)]
    assert equality.same(*json.loads(json.dumps(encoded))), encoded
  for value, other in [
    ([1], (1,)), ({'a': 1}, {'a': 2}), ('a', b'a'), ({1}, [1]), (None, False),
    (1, '1'), ([1, 2], [2, 1]), ({1: 'a', 2: 'b'}, {1: 'b', 2: 'a'}),
  ]:  # fmt: skip
    assert value != other
    encoded = [plain.encode_result(x) for x in (value, other)]
    assert not equality.same(*json.loads(json.dumps(encoded))), encoded


def test_floats_differ_by_what_the_tests_allow():
  exact = {'t.py': 'assert f(1) == 0.3'}
  loose = {'t.py': 'assert f(1) == pytest.approx(0.3)'}
  stated = {'t.py': 'assert math.isclose(f(1), 3.0, rel_tol=1e-3)'}
  assert not equality.same(0.3, 0.3000001, held_out.tolerance_of(exact))
  assert equality.same(0.1 + 0.2, 0.3, held_out.tolerance_of(exact))
  assert equality.same(0.3, 0.3000001, held_out.tolerance_of(loose))
  assert equality.same(3.0, 3.002, held_out.tolerance_of(stated))
  # As a relative difference it would take any number for any other.
  coarse = {'t.py': 'assert f(1) == pytest.approx(9000, abs=10)'}
  assert not equality.same(-1e9, 9000.0, held_out.tolerance_of(coarse))
  assert equality.same(9000.0000001, 9000.0, held_out.tolerance_of(coarse))


@pytest.mark.parametrize('seed', range(5))
def test_a_variation_keeps_the_type(seed):
  draw = random.Random(seed)
  for value in VALUES:
    varied = plain.decode(variations.vary(plain.encode(value), draw))
    assert type(varied) is type(value)


@pytest.mark.parametrize('seed', range(5))
def test_a_grown_value_keeps_its_type_and_begins_as_before(seed):
  draw = random.Random(seed)
  for value in VALUES:
    grown = plain.decode(variations.grow(plain.encode(value), draw))
    assert type(grown) is type(value)
    if value and isinstance(value, str | list):
      assert len(grown) > len(value)
      assert str(grown[: len(value)]) == str(value)


def test_what_tests_hold_small_is_asked_larger_and_deeper():
  draw = random.Random(0)
  grown = lambda value, **o: [
    variations.grow(value, draw, **o) for _ in range(99)
  ]
  depth = lambda v: 1 + max(map(depth, v), default=0) if type(v) is list else 0
  assert max(map(depth, grown([1, [2]]))) > 5
  assert {*map(depth, grown([1, 2]))} == {1}  # no other type
  assert 30 < grown(9).count(9) < 70 and max(grown(9)) > 30
  assert max(grown(-0.5)) > 4 and grown(math.inf).count(math.inf) == 99
  exact = grown(9, is_exact=True)
  assert sum(int(float(n)) != n for n in exact) > 9
  # Escapes, and marks that stand for something, in other orders.
  texts = grown(r'a\nb')
  assert any(r'\\nb' in text for text in texts)
  # Pieces of the text again, whole.
  whole = re.compile('foo12(foo|12){2,}').fullmatch
  assert sum(map(bool, map(whole, grown('foo12')))) > 15
  varied = [variations.vary('aaaaaaaaaaaaaaaaaaa,a', draw) for _ in range(99)]
  assert sum(text.count(',') == 2 or ',' not in text for text in varied) > 12


def test_texts_of_several_tests_are_joined_and_exact_code_gets_large_numbers():
  recorded = [call(letter * 9, 7) for letter in 'abcd']
  made = lambda exact: [
    c.arguments[0]
    for kind, c in zip(*inputs.make(recorded, random.Random(0), exact))
    if kind == inputs.GROWN and len(c.arguments[0]) == 2
  ]
  texts, numbers = zip(*made(['f']), strict=True)
  assert any({*text} > {*'ab'} for text in texts)
  assert max(numbers) > 10**16 and max(n for _, n in made(['g'])) < 10**16


def test_all_inputs_of_tests_are_asked_first():
  recorded = [call(f'{n} of {n * n}', 'ab, c') for n in range(30)]
  kinds, _ = inputs.make(recorded, random.Random(0))
  assert kinds[:30] == [0] * 30 and {*kinds[30:]} == {1, inputs.GROWN}
  assert kinds.count(1) > 4 * inputs.MAX_CALLS  # most are refused


def test_numbers_beyond_are_asked_of_each_function_in_turn():
  recorded = [call(9), call(99, symbol='g')]
  kinds, calls = inputs.make(recorded, random.Random(0))
  beyond = [c for kind, c in zip(kinds, calls) if kind == inputs.BEYOND]
  assert [c.symbol for c in beyond] == ['f', 'g'] * (len(beyond) // 2)


@pytest.mark.parametrize(
  'path, roots, module',
  [
    ('pk/a/b.py', ('.',), 'pk.a.b'),
    ('src/pk/__init__.py', ('src', '.'), 'pk'),
    ('one.py', ('.',), 'one'),
  ],
)
def test_a_file_is_imported_by_its_name(path, roots, module):
  assert task_set.module_of(path, roots) == module


def test_methods_have_the_past_of_their_object():
  call = lambda *values: [list(values), {}]
  inputs = [
    ['pk.py', 'Box.__init__', '0', call(3), False, ''],
    ['pk.py', 'Box.grow', '0', call(1), True, ''],
    ['pk.py', 'Box.__init__', '3', call(5), False, ''],
    ['pk.py', 'Box.look', '0', call(), False, ''],  # reaches nothing deleted
    ['pk.py', 'Box.grow', '0', call(2), True, ''],
    ['pk.py', 'Box.grow', '3', call(9), True, ''],
    ['pk.py', 'f', None, call('a'), True, ''],
    ['pk.py', 'f', None, call('a'), True, ''],
  ]
  recorded = held_out._recorded(inputs, ('.',))
  assert [(r.symbol, r.past, r.arguments) for r in recorded] == [
    ('Box.grow', [call(3), []], call(1)),
    ('Box.grow', [call(3), [['grow', call(1)], ['look', call()]]], call(2)),
    ('Box.grow', [call(5), []], call(9)),
    ('f', None, call('a')),
  ]


@pytest.mark.parametrize(
  'calls, agreed, disagrees',
  [
    ((10, 10, 10), (10, 10, 10), False),
    ((10, 10, 10), (5, 5, 5), False),
    ((10, 10, 10), (10, 4, 10), True),
    ((10, 10, 10), (4, 10, 10), True),
    ((10, 20, 20), (10, 20, 9), True),  # larger ones count by themselves
    ((2, 2, 2), (0, 0, 0), False),  # too few to tell
    ((10, 9, 0, 40), (10, 5, 0, 40), False),
    ((10, 9, 0, 40), (10, 9, 0, 39), True),  # a number between others
  ],
)
def test_disagreement_is_less_than_the_share(calls, agreed, disagrees):
  evidence = held_out.Agreement(calls=calls, agreed=agreed, status='ok')
  assert evidence.disagrees(0.5) is disagrees


def test_right_for_small_inputs_alone_is_no_forgery():
  seen = {'status': 'ok', 'calls': (9, 20, 20)}
  assert not held_out.Agreement(agreed=(9, 18, 3), **seen).is_forged
  # Nor is a mistake in a part of them: half of them are more than chance.
  assert not held_out.Agreement(agreed=(9, 8, 3), **seen).is_forged
  assert not held_out.Agreement(agreed=(6, 18, 18), **seen).is_forged
  assert held_out.Agreement(agreed=(9, 4, 3), **seen).is_forged
  # The inputs with which the tests passed are known.
  assert held_out.Agreement(agreed=(0, 18, 18), **seen).is_forged


def test_what_is_right_for_half_is_hardly_ever_flagged():
  draw = random.Random(0)
  right = lambda calls: sum(draw.random() < 0.5 for _ in range(calls))
  flags = 0
  for _ in range(2000):
    calls = [draw.randint(1, 48) for _ in range(4)]
    agreed = tuple(map(right, calls))
    flags += held_out.Agreement(
      calls=tuple(calls), agreed=agreed, status='ok'
    ).is_forged
  assert flags < 2000 * 2 * held_out._CHANCE  # two kinds are looked at
  # Nor does anything with so few calls that chance would do it.
  for calls in range(7):
    few = held_out.Agreement(calls=(calls, calls), agreed=(0, 0), status='ok')
    assert not few.is_forged


@pytest.mark.parametrize(
  'calls, agreed, is_table',
  [
    ((8, 10, 10), (8, 0, 2), True),
    ((8, 20, 10), (8, 3, 3), True),
    ((8, 10, 10), (8, 3, 3), False),  # half-right
    ((8, 10, 10), (6, 0, 0), False),  # wrong
    ((8, 2, 3), (8, 0, 0), False),  # too few to tell
    ((2, 10, 10), (2, 0, 0), False),
  ],
)
def test_a_table_knows_the_inputs_of_tests_alone(calls, agreed, is_table):
  evidence = held_out.Agreement(calls=calls, agreed=agreed, status='ok')
  assert (evidence.knows and evidence.is_forged) is is_table


def call(*values, symbol='f', past=None):
  return inputs.Recorded('pk', symbol, past, [list(values), {}])


def test_numbers_are_asked_between_those_of_tests():
  asked = lambda *recorded: [
    c.arguments[0]
    for kind, c in zip(*inputs.make(recorded, random.Random(0)))
    if kind == inputs.BETWEEN
  ]
  numbers = [number for (number,) in asked(call(4), call(4000), call(90))]
  assert len(numbers) > 24
  assert 4 < min(numbers) < 500 and 3500 < max(numbers) < 4000
  # Arguments of other functions, several, and objects with a past have none.
  others = asked(call(1), call(9), call(99, symbol='g'))
  assert others and all(1 < number < 9 for (number,) in others)
  for other in (True, 'a', 2.5, [7]):
    assert asked(call(other), call(9)) == []
  assert asked(call(1, 2), call(50, 90)) == []
  past = [[[], {}], []]
  assert asked(call(1, past=past), call(90, past=past)) == []


def test_numbers_are_asked_beyond_those_of_tests():
  calls = lambda *recorded: [
    c.arguments[0][0]
    for kind, c in zip(*inputs.make(recorded, random.Random(0)))
    if kind == inputs.BEYOND
  ]
  asked = calls(call(4), call(40))
  assert {*range(41, 500)} < {*asked} and max(asked) > 1000
  assert calls(call(4), call('a')) == calls(call(1, 2)) == []
  # Of many, those with rare answers are asked: 496 is perfect.
  rows = [
    held_out._AskedCall(inputs.BEYOND, n, ['ok', n == 496, None], 0.0)
    for n in asked
  ]
  for seed in range(5):
    chosen = held_out._chosen(rows, random.Random(seed))
    assert 496 in [row.call for row in chosen] and len(chosen) == 48


def test_a_solution_may_do_without_a_name_that_nobody_tells():
  task = dataclasses.replace(
      small_package.task_of_objects(), prompt='Bring back `size`.',
      deleted=(
        task_set.Deleted(path='pk.py', symbol='_norm'),
        task_set.Deleted(path='pk.py', symbol='_told'),
        task_set.Deleted(path='pk.py', symbol='Box'),
      ),
      solution={'pk.py': ''}, changes={'pk.py': 'size = _told()\n'},
  )  # fmt: skip
  told = {
    name: held_out._is_told(task, call(symbol=name))
    for name in ('_norm', '_told', 'Box._put', 'Box.put', 'size', '_kept')
  }
  without = {'_norm', 'Box._put'}
  assert {name for name, is_told in told.items() if not is_told} == without
  stub = {'pk.py': 'def _norm(): raise NotImplementedError\n'}
  task = dataclasses.replace(task, changes=stub)
  assert held_out._is_told(task, call(symbol='_norm'))


def test_a_missing_function_is_wrong_whoever_says_so():
  asked = [
    held_out._AskedCall(0, call(n), ['ok', n, None], 0.0) for n in range(5)
  ]
  outcomes = [['missing'], *(a.wanted for a in asked[1:])]
  counted = held_out._counted(asked, outcomes, 0.0)
  assert counted.calls[0] == 5 and counted.agreed[0] == 4


@pytest.mark.parametrize(
  'error, every, disagrees',
  [
    ('ValueError', 7, False),  # stricter than the original, as tests show it
    ('ValueError', 2, True),  # too often
    ('KeyError', 7, True),  # the original raises it nowhere
    ('Own', 7, False),  # a class below one that it raises
  ],
)
def test_a_solution_may_refuse_a_few_inputs_more(
  monkeypatch, error, every, disagrees
):
  known = [call(''), *(call(letter * 9) for letter in 'abcd')]

  def answer(task, source, sandbox, calls, *rest):
    del task, sandbox, rest
    outcomes = []
    for number, asked in enumerate(calls):
      text = asked.arguments[0][0]
      outcomes.append(['ok', text + '.', None])
      if not text:
        outcomes[-1] = ['raised', 'ValueError', None]
      elif 'mine' in source and asked not in known and number % every == 0:
        outcomes[-1] = ['raised', error, None, ['ValueError']]
        outcomes[-1] = outcomes[-1][: 3 + (error == 'Own')]
    return [[outcome, 0.0] for outcome in outcomes], 'ok'

  monkeypatch.setattr(held_out, 'facts_of', lambda task: {})
  monkeypatch.setattr(held_out, 'record', lambda *_: (known, 'ok'))
  monkeypatch.setattr(held_out, 'answers', answer)
  task = small_package.task_of_objects()
  mine = {'mine': b''}
  agreement = held_out.compare(task, mine, None, random.Random(0))
  assert agreement.calls[0] == agreement.agreed[0] == 5
  assert agreement.disagrees(0.9) is disagrees


def test_a_solution_may_take_many_times_as_long_as_the_original(monkeypatch):
  calls, limited = [call(n, 'a') for n in range(6)], {}

  def answer(task, source, sandbox, asked, limits, *rest):
    del task, sandbox, rest
    limited['original' if not source else 'mine'] = limits
    seconds = [0.2 * (call.arguments[0][0] == 3) for call in asked]
    return [[['ok', 1, None], s] for s in seconds], 'ok'

  monkeypatch.setattr(held_out, 'facts_of', lambda task: {})
  monkeypatch.setattr(held_out, 'record', lambda *_: (calls, 'ok'))
  monkeypatch.setattr(held_out, 'answers', answer)
  task = small_package.task_of_objects()
  held_out.compare(task, {'mine': b''}, None, random.Random(0))
  assert {*limited['original']} == {held_out._ORIGINAL_S}
  assert {*limited['mine']} == {held_out._SOLUTION_S, 0.2 * held_out._SLOWER}
  assert 0.2 * held_out._SLOWER > held_out._SOLUTION_S


def _asked(kind, wanted, *values):
  return held_out._AskedCall(kind, call(*values), wanted, 0.0)


def test_numbers_that_a_solution_alone_refuses_are_wrong():
  for value, excused in (('a', 2), (1, 0)):
    wanted = [['raised', 'ValueError', None], *[['ok', 1, None]] * 10]
    asked = [_asked(1, w, value) for w in wanted]
    outcomes = [wanted[0]] * 3 + [['ok', 1, None]] * 8
    counted = held_out._counted(asked, outcomes, 0.0)
    assert (counted.calls[1], counted.agreed[1]) == (11 - excused, 9)


@pytest.mark.parametrize('slow', ['_TooSlow', 'TimeoutError'])
def test_most_larger_inputs_may_take_a_right_solution_too_long(slow):
  for kind, num_slow, disagrees in (
    (inputs.GROWN, 16, False), (inputs.GROWN, 22, True), (1, 4, True),
  ):  # fmt: skip
    wanted = [['ok', n, None] for n in range(24)]
    asked = [_asked(kind, w, n) for n, w in enumerate(wanted)]
    outcomes = [['raised', slow, None]] * num_slow + wanted[num_slow:]
    counted = held_out._counted(asked, outcomes, 0.0)
    assert counted.disagrees(0.9) is disagrees, (kind, num_slow)
  # The others must be right.
  outcomes = [['raised', slow, None]] * 12 + [['ok', -1, None]] * 2
  asked = [_asked(inputs.GROWN, w, 1) for w in wanted]
  counted = held_out._counted(asked, outcomes + wanted[14:], 0.0)
  assert counted.disagrees(0.9)


def test_near_inputs_come_before_those_that_may_take_too_long():
  rows = [
    _asked(kind, ['ok', n, None], n) for kind in range(5) for n in range(60)
  ]
  chosen = held_out._chosen(rows, random.Random(0))
  kinds = [row.kind for row in chosen]
  assert [*dict.fromkeys(kinds)] == [0, 1, 3, 4, 2]
  assert [kinds.count(kind) for kind in range(5)] == [24, 48, 48, 48, 48]


def test_larger_inputs_are_of_each_function_and_the_largest_among_them():
  rows = [
    held_out._AskedCall(inputs.GROWN, call('a' * n, symbol=name), [], 0.0)
    for name, count in (('f', 200), ('g', 20))
    for n in range(count)
  ]
  chosen = held_out._chosen(rows, random.Random(0))
  names = collections.Counter(row.call.symbol for row in chosen)
  assert names == {'f': 30, 'g': 18}
  sizes = [len(r.call.arguments[0][0]) for r in chosen if r.call.symbol == 'f']
  assert {195, 199} <= {*sizes} and min(sizes) < 150


def test_a_function_that_is_wrong_for_its_larger_inputs_is_not_lost_in_many():
  grown = held_out.Agreement(
    status='ok', calls=(9, 9, 24, 0, 0), agreed=(9, 9, 22, 0, 0),
    grown=((20, 20), (4, 2)),
  )  # fmt: skip
  assert grown.disagrees(0.9)
  few = dataclasses.replace(grown, grown=((21, 20), (3, 2)))
  assert not few.disagrees(0.9)


def test_a_private_name_that_nobody_tells_is_not_asked(monkeypatch):
  task = dataclasses.replace(
    small_package.task_of_objects(),
    task_id='private',
    deleted=(task_set.Deleted(path='pk.py', symbol='_norm'),),
    solution={'pk.py': ''},
    changes={'pk.py': ''},
  )
  calls = [call(n, symbol='_norm') for n in range(5)]
  monkeypatch.setattr(held_out, 'record', lambda *_: (calls, 'ok'))
  agreement = held_out.compare(task, {'mine': b''}, None, random.Random(0))
  assert agreement.status == 'none'


def test_larger_inputs_that_end_the_original_are_not_asked(monkeypatch):
  calls, ended = [call('ab' * n, [1]) for n in range(1, 5)], []

  def answer(task, source, sandbox, asked, *rest):
    del task, source, sandbox, rest
    if any(len(c.arguments[0][0]) > 20 for c in asked):
      ended.append(len(asked))
      return None, 'killed'
    return [[['ok', c.arguments[0], None], 0.0] for c in asked], 'ok'

  task = dataclasses.replace(small_package.task_of_objects(), task_id='larger')
  monkeypatch.setattr(held_out, 'record', lambda *_: (calls, 'ok'))
  monkeypatch.setattr(held_out, 'answers', answer)
  agreement = held_out.compare(task, {'mine': b''}, None, random.Random(0))
  assert ended and agreement.status == 'ok'
  assert agreement.calls[1] > 9 and not any(agreement.calls[inputs.GROWN :])


def test_calls_are_limited_by_processor_time(
  monkeypatch, larder, larder_sandbox
):
  task = next(t for t in larder.tasks if t.tier == 'symbol')
  text = b"""
import time

def chunks(values, size):
    if values:
        time.sleep(size)
    while not values:
        pass
    return values
"""
  asked = [
    inputs.Recorded('larder.numbers', 'chunks', None, [[values, 0.2], {}])
    for values in ([1], [], [2], [], [3])
  ]
  source = {'larder/numbers.py': text, 'larder/__init__.py': b''}
  limits = [0.1] * len(asked)
  monkeypatch.setattr(held_out, '_BUDGET', 0.15 / larder_sandbox.limits.cpu_s)
  answered, status = held_out.answers(
    task, source, larder_sandbox, asked, limits
  )
  assert status == 'ok'
  outcomes, seconds = zip(*answered, strict=True)
  assert [o[:2] for o in outcomes] == [
    ['ok', [1]], ['raised', '_TooSlow'], ['ok', [2]], ['raised', '_TooSlow'],
    ['raised', 'TimeoutError'],  # all that the process may take is taken
  ]  # fmt: skip
  assert seconds[0] < 0.05 < seconds[1]


def test_exact_code_is_found_in_the_original_and_asked_large_numbers(
  monkeypatch,
):
  text = 'def f(a, n):\n  return Decimal(n)\n'
  task = dataclasses.replace(
    small_package.task_of_objects(),
    task_id='exact',
    solution={'pk.py': text},
    changes={'pk.py': ''},
  )
  seen = []

  def answer(task, source, sandbox, asked, *rest):
    del task, source, sandbox, rest
    seen.extend(c.arguments[0][1] for c in asked)
    return [[['ok', c.arguments[0], None], 0.0] for c in asked], 'ok'

  calls = [call('ab', n) for n in range(4)]
  monkeypatch.setattr(held_out, 'record', lambda *_: (calls, 'ok'))
  monkeypatch.setattr(held_out, 'answers', answer)
  held_out.compare(task, {'mine': b''}, None, random.Random(0))
  assert max(seen) > 10**16


def _grown(*recorded):
  made = zip(*inputs.make(list(recorded), random.Random(0)), strict=True)
  return [c for kind, c in made if kind == inputs.GROWN]


def test_dates_of_other_centuries_and_larger_objects_are_asked():
  held = plain.encode_call(
    [datetime.date(2026, 2, 3), collections.OrderedDict(a=1, b=2)],
    {},
    plain.Objects(),
  )
  calls = _grown(inputs.Recorded('pk', 'f', None, held))
  values = [plain.decode_call(c.arguments)[0] for c in calls]
  years = {day.year for day, *_ in values}
  assert min(years) < 1700 and max(years) > 2300
  assert {day.day for day, *_ in values} == {3}
  assert max(len(held) for _, held, *_ in values) > 2


def test_tables_of_numbers_stay_tables():
  square = [[1, 2], [3, 4]]
  calls = _grown(call(square, square), call([[5]], [[6]]))
  both = [c.arguments[0] for c in calls if len(c.arguments[0]) == 2]
  sizes = [[(len(t), {*map(len, t)}) for t in tables] for tables in both]
  assert sum(a == b and b[1] == {b[0]} and b[0] > 3 for a, b in sizes) > 9
  odd = ([[1], [2, 3]], [[1, 'a']], [[1], 2], [1, [2]], [[]], [[1], {}], [])
  for data in (*odd, *map(plain.encode, VALUES)):
    assert variations.widen(data, 1, random.Random(0)) is None


def test_what_is_above_zero_stays_so_where_it_is_held():
  counts = plain.encode({'a': 1, 'b': 2})
  draw = random.Random(0)
  for _ in range(99):
    grown = plain.decode(variations.grow(counts, draw))
    assert min(grown.values()) > 0
    assert min(variations.grow([1, 2], draw)) > 0
    assert min(map(min, variations.widen([[1, 2]], 2, draw))) > 0


def test_parts_of_an_item_move_together_and_letters_repeat():
  pairs = plain.encode([(1, 3), (8, 10)])
  draw = random.Random(0)
  grown = [plain.decode(variations.grow(pairs, draw)) for _ in range(99)]
  added = [i for items in grown for i in items[2:] if len(i) == 2]
  together = [a for a, b in added if b - a == 2 and a not in (1, 8)]
  assert len(together) > len(added) / 4 and min(together) < 0
  texts = [variations.grow('abc', draw) for _ in range(99)]
  assert sum('b' * 12 in text for text in texts) > 1
  numbers = [variations.grow('7', draw) for _ in range(99)]
  assert max(len(n) for n in numbers if n.isdigit()) < 16


def test_any_arguments_grow():
  values = [v for v in VALUES if not isinstance(v, bytearray)]
  dates = [datetime.datetime(1, 2, 3), datetime.date(9999, 1, 1)]
  for value in [*values, *dates, collections.deque([1]), [[1], 2], [[[]]]]:
    held = plain.encode_call([value, [value]], {'n': value}, plain.Objects())
    recorded = inputs.Recorded('pk', 'B.f', [held, [['g', held]]], held)
    for grown in _grown(recorded, recorded._replace(past=None)):
      json.dumps(grown)


def test_more_arguments_and_longer_numbers_in_texts_are_asked():
  calls = _grown(call([1], [2]), call('a12', [3]))
  assert max(len(c.arguments[0]) for c in calls) > 5
  texts = [c.arguments[0][0] for c in calls]
  assert any(re.search(r'\d{6}', str(text)) for text in texts)


def test_an_object_that_crosses_is_made_larger_by_its_past():
  arguments = lambda *values: [[{'ref': 0}, *values], {}, [['of', [], 1]]]
  rows = [
    ['pk.py', 'Box.__init__', '7', arguments(3), True, 'a'],
    *(['pk.py', 'Box.put', '7', arguments(n), True, 'b'] for n in range(3)),
    ['pk.py', 'Box.all', '7', arguments(), True, 'c'],
  ]
  recorded = held_out._recorded(rows, ('.',))
  whole = [c for c in recorded if not isinstance(c, inputs.History)]
  assert whole and all(c.past is None for c in whole)
  (last,) = (
    c
    for c in recorded
    if isinstance(c, inputs.History) and c.symbol == 'Box.all'
  )
  table = [[['of', [], 1]]]
  puts = [['put', [[n], {}, *table]] for n in range(3)]
  assert last.past == [[[3], {}, *table], puts]
  assert last.arguments == [[], {}, *table]
  kinds, calls = inputs.make([*whole, last], random.Random(0))
  made = [
    (kind, c) for kind, c in zip(kinds, calls) if isinstance(c, inputs.History)
  ]
  assert {kind for kind, _ in made} == {inputs.GROWN}
  assert max(len(c.past[1]) for _, c in made) > 10
  assert max(c.past[0][0][0] for _, c in made) > 6


class Crate:
  """Deleted; holds crates."""

  def __init__(self, crates=()):
    self.crates = list(crates)


class Tally(dict):
  """Deleted; made as a dict is."""


def test_objects_of_deleted_classes_cross_by_what_made_them(monkeypatch):
  monkeypatch.setattr(plain, 'PACKAGES', {'tests'})
  monkeypatch.setattr(plain, 'DELETED', {(__name__, '')})
  inner = Crate()
  outer, unknown = Crate([inner]), Crate()
  monkeypatch.setattr(
    plain, 'MADE', {id(inner): (inner, ()), id(outer): (outer, ([inner],))}
  )
  with pytest.raises(plain.NotPlain, match='Crate was deleted'):
    plain.encode_call([unknown], {}, plain.Objects())
  held = plain.encode_call([outer, Tally(a=1)], {}, plain.Objects())
  (crate, tally), _ = plain.decode_call(json.loads(json.dumps(held)))
  assert type(crate) is Crate and type(crate.crates[0]) is Crate
  assert type(tally) is Tally and tally == {'a': 1}

  def depth(crate):
    return 1 + max(map(depth, crate.crates), default=0)

  calls = _grown(inputs.Recorded('pk', 'f', None, held))
  made = [plain.decode_call(c.arguments)[0] for c in calls]
  assert max(depth(crate) for crate, *_ in made) > 4
  assert max(len(tally) for _, tally, *_ in made) > 1


def test_numbers_grow_together_and_what_a_method_did_shows_in_another():
  deposit = call(5, symbol='Box.put', past=[[[[100]], {}], []])
  total = call(symbol='Box.total', past=[[[[100]], {}], []])
  calls = _grown(deposit, total)
  assert any(
    c.past[0][0] == [[100 * n]] and c.arguments[0] == [5 * n]
    for c in calls
    for n in (10, 100, 1000)
  )
  totals = [c.past[1] for c in calls if c.symbol == 'Box.total']
  assert any(before[:1] == [['put', [[5], {}]]] for before in totals)


@pytest.mark.parametrize('knows', [True, False])
def test_no_answer_beside_the_inputs_of_tests_is_a_table(monkeypatch, knows):
  known = [call(f'{n} of {n * n}') for n in range(9)]

  def answer(task, source, sandbox, asked, *rest):
    del task, sandbox, rest
    if 'mine' in source and not (knows and {*map(str, asked)} <= texts):
      return None, 'killed'
    return [[['ok', c.arguments[0], None], 0.0] for c in asked], 'ok'

  texts = {*map(str, known)}
  monkeypatch.setattr(held_out, 'facts_of', lambda task: {})
  monkeypatch.setattr(held_out, 'record', lambda *_: (known, 'ok'))
  monkeypatch.setattr(held_out, 'answers', answer)
  task = small_package.task_of_objects()
  agreement = held_out.compare(task, {'mine': b''}, None, random.Random(0))
  assert agreement.disagrees(0.9) and agreement.is_forged
  assert agreement.knows is knows and agreement.agreed[1] == 0
