"""Objects cross to a solution by value, and what a solution shows is data.

Attacks on the values of a method that takes and gives objects: in each, the
tests pass by a forged report, so that only calls from outside can refuse it.
"""

import dataclasses
import json
import random
import sys
import textwrap
import threading

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from composer_jax.tasks.grading import equality, held_out, plain, solution
from composer_jax.tasks.repository import task_set
from tests.tasks.grading import attacks

LIMITS = base.Limits(
    wall_s=30.0, cpu_s=20.0, memory_bytes=1 << 30, processes=32,
    file_bytes=16 << 20, output_bytes=1 << 20,
)  # fmt: skip
PATH, TEST = 'basket.py', 'test_basket.py'
_BODIES = {
  'put': """\
        left = self._counts.get(name, 0) + count
        if left < 0:
            raise ValueError('less than none')
        self._counts[name] = left
        self.changes += 1
""",
  'merged': """\
        both = Basket()
        for basket in (self, other):
            for name, count in basket._counts.items():
                both.put(name, count)
        return both
""",
}
_TEXT = '''\
class Basket:
    """Counts things."""

    def __init__(self, counts=()):
        self._counts = dict(counts)
        self.changes = 0

    def put(self, name, count=1):
        """Adds things and counts the change; there are no less than none."""
{put}
    def merged(self, other):
        """A new basket with the things of both."""
{merged}
    @property
    def total(self):
        return sum(self._counts.values())

    @property
    def names(self):
        return sorted(self._counts)
'''
_TESTS = (
  """\
import basket


def made(*names):
    one = basket.Basket()
    for name in names:
        one.put(name, len(name))
    return one
"""
  + ''.join(
    f"""

def test_{number}():
    both = made({first}).merged(made({second}))
    both.put('{name}', {number})
    assert both.total == {total} and both.changes == {changes}
"""
    for number, (first, second, name, total, changes) in enumerate([
        ("'oat', 'rye'", "'bean', 'rye'", 'rye', 13, 4),
        ("'oat'", "'tea', 'lentil'", 'oat', 13, 4),
        ("'a', 'bb', 'ccc'", "'dddd'", 'bb', 12, 5),
        ("'salt'", "'salt', 'pepper', 'oil'", 'ice', 20, 5),
        ("'fig'", "'fig', 'date'", 'kiwi', 14, 4),
        ("'u', 'v', 'w'", "'w', 'x'", 'y', 10, 5),
    ])
  )
)  # fmt: skip


def text(**bodies):
  return _TEXT.format(**{**_BODIES, **bodies})


def task(symbol):
  """The task of the method, of which the tests 4 and 5 are hidden."""
  ids = tuple(f'{TEST}::test_{number}' for number in range(6))
  stub = {symbol: '        raise NotImplementedError\n'}
  return task_set.RepositoryTask(
      task_id=f'deletion/basket/body/{symbol}', prompt='Bring it back.',
      image='images/basket', package='basket', version='1', tier='body',
      deleted=(task_set.Deleted(path=PATH, symbol=f'Basket.{symbol}'),),
      changes={PATH: text(**stub)}, solution={PATH: text()},
      test_paths=(TEST,), fail_to_pass=ids, shown=ids[:4], pass_to_pass=(),
      timeout_s=30.0, difficulty=0.1, held_out=False, licence='MIT',
      provenance={},
  )  # fmt: skip


@pytest.fixture(scope='module')
def sandbox(tmp_path_factory):
  root = tmp_path_factory.mktemp('set')
  (root / 'images/basket').mkdir(parents=True)
  (root / 'images/basket' / PATH).write_text(text())
  (root / 'images/basket' / TEST).write_text(_TESTS)
  with sandbox_open.open_sandbox(
    'auto', LIMITS, allow_unsafe=True, images=root, packages=('pytest',)
  ) as opened:
    yield opened


def solved(symbol, body, before=''):
  lines = textwrap.indent(textwrap.dedent(body), ' ' * 8)
  return {PATH: (before + text(**{symbol: lines})).encode()}


def compare(sandbox, symbol, body, before=''):
  source = solved(symbol, body, before)
  return held_out.compare(task(symbol), source, sandbox, random.Random(1))


# What a solution may give back instead of a basket, and the code before it.
LIES = {
  'nothing': ('return None', ''),
  'a constant': ("return Basket({'oat': 3, 'rye': 6, 'bean': 4})", ''),
  'half of it': ('return Basket(self._counts)', ''),
  'what it was given': ('return other', ''),
  'equals everything': (
    'return Lie()',
    """
class Lie:
    __class__ = property(lambda self: Basket)
    __eq__ = lambda self, other: True
    __hash__ = None
    total = changes = names = property(lambda self: self)
Lie.__name__ = Lie.__qualname__ = 'Basket'
""",
  ),
  'has every attribute': (
    'return Lie()',
    """
class Basket: pass
class Lie(Basket):
    def __getattr__(self, name): return self
    def __getattribute__(self, name):
        if name == '__dict__': return {'total': 7, 'names': [], 'changes': 3}
        return object.__getattribute__(self, name)
Lie.__name__ = 'Basket'
""",
  ),
  'raises when read': (
    'return Lie()',
    """
class Lie:
    def total(self): raise SystemExit
    total = names = changes = property(total)
    __str__ = total.fget
Lie.__name__ = 'Basket'
""",
  ),
  'blocks when read': (
    'return Lie()',
    """
class Lie:
    @property
    def total(self):
        while True: pass
Lie.__name__ = 'Basket'
""",
  ),
  'is huge': (
    'return Lie()',
    """
class Lie:
    def __init__(self):
        self.total, self.names = 'x' * 10**7, [[0] * 1999] * 1999
    __len__ = lambda self: 10**9
    def __iter__(self):
        while True: yield Lie()
Lie.__name__ = 'Basket'
""",
  ),
  'holds itself': (
    """
    lie = Lie()
    lie.total = lie.names = lie.changes = [lie, {'a': lie}]
    lie.names.append(lie.names)
    return lie
    """,
    'class Lie: pass\nLie.__name__ = "Basket"\n',
  ),
  'changes when read': (
    'return Lie()',
    """
import random
class Lie:
    def total(self):
        type(self).__name__ = random.choice(['Basket', 'dict'])
        return random.randrange(30)
    total = changes = property(total)
    names = property(lambda self: random.sample(['oat', 'rye', 'bean'], 2))
Lie.__name__ = 'Basket'
""",
  ),
  'a text with a state': (
    'return Lie("Basket")',
    """
class Lie(str):
    total, names, changes = 13, ['bean', 'oat', 'rye'], 3
    __eq__ = lambda self, other: True
    __hash__ = str.__hash__
Lie.__name__ = 'Basket'
""",
  ),
  'would run when unpickled': (
    'return Lie()',
    """
import os
class Lie:
    def __reduce_ex__(self, protocol): return os.system, ('touch /ran',)
    __getstate__ = __setstate__ = __reduce__ = __reduce_ex__
    total = property(lambda self: os)
    names = property(lambda self: Lie)
    changes = property(lambda self: os.system)
Lie.__name__ = 'Basket'
Lie.__module__ = 'antigravity'
""",
  ),
  'is no class of its own': (
    'return Lie()',
    """
class Meta(type):
    __instancecheck__ = __subclasscheck__ = lambda kind, other: True
    __module__ = __name__ = __qualname__ = property(lambda kind: 'Basket')
    __mro__ = property(lambda kind: [0])
class Lie(metaclass=Meta):
    def __get__(self, *_): raise KeyboardInterrupt
    def __set_name__(self, *_): pass
Lie.total = Lie()
""",
  ),
  'rewrites what sees it': (
    """
    import gc
    for found in gc.get_objects():
        if isinstance(found, dict) and 'encode_result' in found:
            shown = {'total': 13, 'changes': 3, 'names': ['bean', 'oat', 'rye']}
            found['encode_result'] = lambda *_, **__: {
                'object': 'Basket', 'text': '', 'items': [],
                'attributes': shown,
            }
    """,
    '',
  ),
  'writes the report': (
    """
    import json, os
    name = {'name': ['antigravity', 'x']}, {'module': 'antigravity'}, {'ref': 0}
    os.write(3, json.dumps([['ok', n, [n]] for n in name] * 99).encode())
    os._exit(0)
    """,
    '',
  ),
}  # fmt: skip
# Looks for the state after the call among the states before other calls.
_LOOKS_AHEAD = """
import sys
frame = sys._getframe()
while 'config' not in frame.f_locals:
    frame = frame.f_back
def states(data):
    if isinstance(data, dict):
        pairs = data.get('dict', ())
        keys = [pair[0] for pair in pairs]
        if keys == ['_counts', 'changes']:
            yield dict(pairs[0][1]['dict']), pairs[1][1]
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            yield from states(item)
for counts, changes in states(frame.f_locals['config']['calls']):
    later = {**self._counts, name: counts.get(name)}
    if changes == self.changes + 1 and counts == later:
        self._counts, self.changes = counts, changes
        break
"""


# These two take all the time that a call, or the run, is given.
_SLOW = ('blocks when read', 'is huge')


@pytest.mark.parametrize('name', sorted(LIES.keys() - _SLOW))
def test_a_lie_about_an_object_agrees_with_nothing(sandbox, name):
  body, before = LIES[name]
  agreement = compare(sandbox, 'merged', body, before)
  assert agreement.disagrees(solution.LEAST_AGREEMENT), agreement
  # Nothing that it names was imported here, and none of its code.
  assert not {'antigravity', 'basket'} & {*sys.modules}


def test_objects_prove_what_takes_and_gives_them(sandbox):
  for symbol in _BODIES:
    assert solution.evidence(task(symbol), sandbox) == 'calls'
  agreement = compare(sandbox, 'merged', _BODIES['merged'])
  assert agreement.calls == agreement.agreed
  # Objects that tests made, in calls that no test makes.
  assert agreement.calls[0] >= 3 and agreement.calls[1] >= 10


@pytest.mark.parametrize('symbol, body', [
    # Another order, another way, and attributes of its own.
    ('merged', """
        both = type(self)({
            name: self._counts.get(name, 0) + other._counts.get(name, 0)
            for name in {**other._counts, **self._counts}
        })
        both.changes = len(self._counts) + len(other._counts)
        both.parents = (self, other)
        return both
    """),
    ('put', """
        if count < -self._counts.setdefault(name, 0):
            self._counts[name] = self._counts[name] or self._counts.pop(name)
            raise ValueError(name)
        self._counts[name] += count
        self.changes, self._last = self.changes + 1, name
    """),
])  # fmt: skip
def test_another_right_way_agrees(sandbox, symbol, body):
  agreement = compare(sandbox, symbol, body)
  assert not agreement.disagrees(solution.LEAST_AGREEMENT), agreement


def test_no_call_holds_the_answer_of_another(sandbox, monkeypatch):
  least = solution.LEAST_AGREEMENT
  looked = compare(sandbox, 'put', _LOOKS_AHEAD)
  assert looked.disagrees(least) and looked.agreed[0] < looked.calls[0] / 2
  # All states of an object together would tell.
  held_out._known.cache_clear()
  monkeypatch.setattr(held_out, '_apart', lambda inputs: inputs)
  told = compare(sandbox, 'put', _LOOKS_AHEAD)
  held_out._known.cache_clear()
  assert told.agreed[0] > told.calls[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize('name', LIES)
def test_no_lie_is_paid(sandbox, name):
  body, before = LIES[name]
  source = solved('merged', body, attacks._PATCH + before)
  graded = solution.grade(
    task('merged'), source, sandbox, finished=True, seed=2
  )
  assert not graded.verdict.passed, (graded.verdict, graded.details)


def test_constant_answers_prove_nothing():
  counts = dict(status='ok', calls=(4, 10, 0, 0))
  assert held_out.Agreement(**counts, constant=(4, 5, 0, 0)).proves
  assert not held_out.Agreement(**counts, constant=(4, 9, 0, 0)).proves
  # Three calls, but too few of each kind to refuse anything.
  few = dict(status='ok', calls=(1, 1, 1, 0), constant=(0, 0, 0, 0))
  assert not held_out.Agreement(**few).proves


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
  name: str


class Tree(list):
  def __init__(self, *leaves):
    super().__init__(leaves)
    self.parent, self.depth = self, 1
    self._hidden = 7

  @property
  def size(self):
    return len(self)


class Node:
  count = 0

  def __init__(self, **fields):
    vars(self).update(fields)

  @property
  def broken(self):
    raise LookupError


MISSING = Node()
LEAF = "Leaf(name='b')"


@pytest.fixture
def known(monkeypatch):
  monkeypatch.setattr(plain, 'PACKAGES', {'tests'})
  monkeypatch.setattr(plain, 'DELETED', set())


def crossed(*values):
  call = plain.encode_call([*values], {}, plain.Objects())
  return plain.decode_call(json.loads(json.dumps(call)))[0]


def test_objects_cross_with_what_they_hold(known):
  leaf = Leaf('a')
  tree = Tree(leaf, [leaf], {'b': Leaf('b')})
  one, other = crossed(tree, leaf)
  assert type(one) is Tree and one == tree and type(one[0]) is Leaf
  assert one.parent is one and one._hidden == 7
  assert one[0] is one[1][0] is other  # the same object once
  assert crossed(MISSING)[0] is MISSING
  add, match = crossed([1, 2].append, test_objects_cross_with_what_they_hold)
  assert add.__self__ == [1, 2]
  assert match is test_objects_cross_with_what_they_hold
  call = plain.encode_call([tree], {'k': 1}, plain.Objects())
  assert plain.encode_call([tree], {'k': 1}, plain.Objects()) == call


def test_what_cannot_be_built_again_has_no_code(known, monkeypatch):
  drawn = (number for number in range(3))
  for value in (lambda: 0, drawn, Node(run=lambda: 0), threading.Lock()):
    with pytest.raises((plain.NotPlain, TypeError)):
      plain.encode_call([value], {}, plain.Objects())
  many = [Leaf(str(number)) for number in range(251)]
  with pytest.raises(plain.NotPlain, match='too many objects'):
    plain.encode_call([many], {}, plain.Objects())
  monkeypatch.setattr(plain, 'DELETED', {(__name__, 'Leaf')})
  with pytest.raises(plain.NotPlain, match='Leaf was deleted'):
    plain.encode_call([many[0]], {}, plain.Objects())


def shown(kind, text='', items=(), **attributes):
  return dict(object=kind, text=text, items=[*items], attributes=attributes)


def test_an_object_shows_its_public_attributes(known):
  leaf = shown('Leaf', LEAF, name='b')  # a dataclass, whose == tells classes
  node = Node(name='a', _mine=1, inner=[Leaf('b')], me=MISSING)
  node.me = node
  assert plain.encode_result(node) == shown(
    'Node', name='a', inner=[{**leaf, 'closed': True}], me={'cut': 'Node'}
  )
  assert plain.encode_result(node, ['Node']) == shown('Node')
  tree = Tree(Leaf('b'))
  assert plain.encode_result(tree) == [{**leaf, 'closed': True}]
  deep = Node(name='leaf')
  for _ in range(50):
    deep = Node(inner=deep)
  assert 'leaf' not in json.dumps(plain.encode_result(deep))
  wide = Node(rows=[[Node(x=i)] * 9 for i in range(999)])
  assert len(json.dumps(plain.encode_result(wide))) < 200_000


def test_an_object_is_the_same_if_it_shows_as_much():
  one = shown('Node', name='a', size=1.0)
  more = shown('Node', name='a', size=1, own=[2])
  assert equality.same(more, one) and not equality.same(one, more)
  assert equality.same([more, {'tuple': [more]}], [one, {'tuple': [one]}])
  assert not equality.same(shown('Node', size=1.0), one)
  assert not equality.same(shown('Other', name='a', size=1.0), one)
  assert not equality.same(shown('Node', 'text', name='a', size=1.0), one)
  assert not equality.same(shown('Node', '', [1], name='a', size=1.0), one)
  # For a test, an object of a solution is never built.
  with pytest.raises(plain.NotPlain):
    plain.decode_result(one)
