"""Mutates a test so that it must fail.

Of the copies that look like the real one, some are made from it and some from
another such copy, and each change is as likely as the change that undoes it. So
neither the value that most copies share nor one between the others is more
likely to be the right one.
"""

import ast
import copy
import functools
import random
import string
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from composer_jax.tasks import source

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_OPPOSITE = {
    'assertTrue': 'assertFalse', 'assertIn': 'assertNotIn',
    'assertIs': 'assertIsNot', 'assertIsNone': 'assertIsNotNone',
    'assertIsInstance': 'assertNotIsInstance', 'assertEqual': 'assertNotEqual',
}  # fmt: skip
_OPPOSITE |= {after: before for before, after in _OPPOSITE.items()}
_OTHER_OPERATOR: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}  # fmt: skip
_OTHER_OPERATOR |= {after: before for before, after in _OTHER_OPERATOR.items()}
# Kinds of changes that look like the real test, best first; and comparisons
# that pass only for an object that equals everything.
_ALIKE = ('literal', 'parameter', 'opposite')
_IMPOSSIBLE = ('object', 'raises')
_TRIES = 8

# Changes a tree in place.
_Change = Callable[[], None]


def _expression(text: str) -> ast.expr:
  return source.parse(text).body[0].value  # pyrefly: ignore


def mutants(
  function: ast.FunctionDef | ast.AsyncFunctionDef,
  draw: random.Random,
  count: int,
) -> list:
  """At most `count` copies that look alike, and one that does not; all fail."""
  alike: list = [function]
  for _ in range(count):
    mutant = _mutant(alike, _ALIKE, draw)
    if mutant is not None:
      alike.append(mutant)
  impossible = _mutant(alike, _IMPOSSIBLE, draw)
  return alike[1:] + ([] if impossible is None else [impossible])


def _mutant(alike: list, kinds: tuple[str, ...], draw: random.Random) -> Any:
  """A new function: one of the given, changed once; None if that fails."""
  known = {ast.unparse(function) for function in alike}
  for _ in range(_TRIES):
    mutant = copy.deepcopy(draw.choice(alike))
    changes: list[_Change] = []
    for kind in kinds:
      changes = changes or list(_changes(mutant, kind, draw))
    if not changes:
      return None
    draw.choice(changes)()
    rows = zip(_rows(mutant), _rows(alike[0]), strict=True)
    unchanged = [row for row, right in rows if row == right]
    # Rows change all or not at all; one with its right value again would pass.
    is_whole = len(unchanged) in (0, len(_rows(mutant)))
    if is_whole and ast.unparse(mutant) not in known:
      return mutant
  return None


def _rows(function: Any) -> list[str]:
  """The rows of `parametrize` as text."""
  lists = (
    argument.elts
    for decorator in function.decorator_list
    if isinstance(decorator, ast.Call)
    for argument in decorator.args
    if isinstance(argument, ast.List | ast.Tuple)
  )
  return [ast.unparse(row) for rows in lists for row in rows]


def _changes(
  function: Any, kind: str, draw: random.Random
) -> Iterator[_Change]:
  """Yields the possible changes of one kind."""
  if kind == 'parameter':
    yield from _of_parameters(function, draw)
    return
  for node in _inside(function):
    if isinstance(node, ast.Assert):
      yield from _of_assert(node, kind, draw)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
      yield from _of_call(node, node.func, kind, draw)


def _inside(function: ast.AST) -> Iterator[ast.AST]:
  """Yields a function's nodes, without those of inner functions and classes."""
  for node in ast.iter_child_nodes(function):
    if not isinstance(node, FUNCTIONS | ast.Lambda | ast.ClassDef):
      yield node
      yield from _inside(node)


def _of_assert(
  node: ast.Assert, kind: str, draw: random.Random
) -> Iterator[_Change]:
  test = node.test
  if kind == 'opposite':
    yield functools.partial(setattr, node, 'test', _opposite(test))
  elif _is_equality(test):
    put_left = functools.partial(setattr, test, 'left')
    put_right = functools.partial(test.comparators.__setitem__, 0)
    sides = (put_left, test.left), (put_right, test.comparators[0])
    yield from _of_sides(sides, kind, draw)


def _opposite(test: ast.expr) -> ast.expr:
  """The negation as people write it; that of a negation is the original."""
  if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
    return test.operand
  if isinstance(test, ast.Compare) and len(test.ops) == 1:
    other = _OTHER_OPERATOR[type(test.ops[0])]
    return ast.Compare(
      left=test.left, ops=[other()], comparators=test.comparators
    )
  return ast.UnaryOp(op=ast.Not(), operand=test)


def _of_call(
  node: ast.Call, function: ast.Attribute, kind: str, draw: random.Random
) -> Iterator[_Change]:
  name, arguments = function.attr, node.args
  if kind == 'raises' and name in ('raises', 'assertRaises') and arguments:
    other = _expression('BufferError')
    yield functools.partial(arguments.__setitem__, 0, other)
  elif kind == 'opposite' and name in _OPPOSITE:
    yield functools.partial(setattr, function, 'attr', _OPPOSITE[name])
  elif name == 'assertEqual' and len(arguments) >= 2:
    sides = [
      (functools.partial(arguments.__setitem__, place), arguments[place])
      for place in (0, 1)
    ]
    yield from _of_sides(sides, kind, draw)


def _of_sides(sides, kind: str, draw: random.Random) -> Iterator[_Change]:
  """Yields changes of the expected side of a comparison.

  Args:
    sides: for each side, a function that replaces it, and its expression.
    kind: 'literal' for another value, 'object' for an object equal to none.
    draw: decides the value.
  """
  literals = [source.literal(expression) for _, expression in sides]
  for (put, _), literal, other in zip(sides, literals, reversed(literals)):
    if kind == 'literal' and literal and not other:
      changed = another(literal[0], draw)
      if changed is not None:
        yield functools.partial(put, _expression(repr(changed)))
    elif kind == 'object' and not other and (literal or not any(literals)):
      yield functools.partial(put, _expression('object()'))


def _of_parameters(function: Any, draw: random.Random) -> Iterator[_Change]:
  """Yields changes of the last column of literal rows of `parametrize`."""
  for decorator in function.decorator_list:
    match decorator:
      case ast.Call(
        func=ast.Attribute(attr='parametrize'),
        args=[listed, ast.List(elts=rows) | ast.Tuple(elts=rows)],
      ):
        columns = source.literal(listed)
      case _:
        continue
    if not columns:
      continue
    names = columns[0]
    if isinstance(names, str):
      names = [name.strip() for name in names.split(',')]
    last = len(names) - 1
    # A test that compares with the column says that it is an expected value.
    if last < 1 or not _is_compared(function, names[last]):
      continue
    changes = []
    for row in rows:
      cells = row.elts if isinstance(row, ast.Tuple | ast.List) else []
      literal = source.literal(cells[last]) if len(cells) > last else None
      changed = another(literal[0], draw) if literal else None
      if changed is None:
        break
      changes.append((cells, last, _expression(repr(changed))))
    if changes and len(changes) == len(rows):
      yield functools.partial(_put_all, changes)


def _put_all(changes: list[tuple[list, int, ast.expr]]) -> None:
  for cells, column, expression in changes:
    cells[column] = expression


def _is_compared(function: ast.AST, name: str) -> bool:
  """True if an `assert` is nothing but a comparison with this name."""
  return any(
    isinstance(side, ast.Name) and side.id == name
    for node in _inside(function)
    if isinstance(node, ast.Assert) and _is_equality(node.test)
    for side in (node.test.left, node.test.comparators[0])
  )


def _is_equality(test: ast.expr) -> TypeGuard[ast.Compare]:
  return (
    isinstance(test, ast.Compare)
    and len(test.ops) == 1
    and isinstance(test.ops[0], ast.Eq)
  )


def another(value: Any, draw: random.Random) -> Any:
  """A value of the same type and look that is not equal; None if unknown.

  Both directions of a change are equally likely, so a pair of values does not
  tell which one was the original, even to a reader of this file.
  """
  if isinstance(value, bool):
    return not value
  if isinstance(value, int):
    return value + draw.choice((-2, -1, 1, 2))
  if isinstance(value, float):
    if abs(value) >= 1e15:
      return None
    return value + draw.choice((-1.0, 1.0))
  if isinstance(value, str):
    return _another_text(value, draw)
  if isinstance(value, bytes):
    return _another_text(value.decode('latin-1'), draw).encode('latin-1')
  if isinstance(value, list | tuple):
    for index in draw.sample(range(len(value)), len(value)):
      changed = another(value[index], draw)
      if changed is not None:
        return type(value)([*value[:index], changed, *value[index + 1 :]])
    return type(value)([0])
  if isinstance(value, dict):
    for key in draw.sample(list(value), len(value)):
      changed = another(value[key], draw)
      if changed is not None:
        return {**value, key: changed}
    return {'a': 1} if not value else None
  if isinstance(value, set) and value:
    return value - {draw.choice(sorted(value, key=repr))}
  return None


def _another_text(text: str, draw: random.Random) -> str:
  for index in draw.sample(range(len(text)), len(text)):
    for group in (string.ascii_lowercase, string.ascii_uppercase, '0123456789'):
      if text[index] in group:
        letter = draw.choice(group.replace(text[index], ''))
        return text[:index] + letter + text[index + 1 :]
  return text + 'x'
