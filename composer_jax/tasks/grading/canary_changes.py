"""Changes of a test after which it must fail.

Of the copies that look like the real one, some are made from it and some from
another such copy, and every change could be the one that undoes it: neither
the value that most copies agree on nor the one between others can be trusted
to be the right one.
"""

import ast
import copy
import functools
import random
import string
from collections.abc import Callable, Iterable, Iterator
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
# What looks like the real thing, the best kind first; and comparisons that
# nothing may pass, which an object that equals everything does.
_ALIKE = ('literal', 'parameter', 'opposite')
_IMPOSSIBLE = ('object', 'raises')
_TRIES = 8

# One mutation: changes the node in place.
_Change = Callable[[], None]


def _expression(text: str) -> ast.expr:
  statement = source.parse(text).body[0]
  assert isinstance(statement, ast.Expr)
  return statement.value


def mutants(
  function: ast.FunctionDef | ast.AsyncFunctionDef,
  draw: random.Random,
  count: int,
) -> list:
  """Copies that must fail: so many that look alike, and one that does not."""
  alike: list = [function]
  for _ in range(count):
    mutant = _mutant(alike, _ALIKE, draw)
    if mutant is not None:
      alike.append(mutant)
  impossible = _mutant(alike, _IMPOSSIBLE, draw)
  return alike[1:] + ([] if impossible is None else [impossible])


def _mutant(alike: list, kinds: tuple[str, ...], draw: random.Random) -> Any:
  """A copy of one of these, changed once, and like none; None if none is."""
  known = {ast.unparse(function) for function in alike}
  for _ in range(_TRIES):
    mutant = copy.deepcopy(draw.choice(alike))
    found: list[_Change] = []
    for kind in kinds:
      found = found or list(_changes(mutant, kind, draw))
    if not found:
      return None
    draw.choice(found)()
    rows = zip(_rows(mutant), _rows(alike[0]), strict=True)
    as_before = [row for row, right in rows if row == right]
    # Rows are changed all or not at all; one that is right again would pass.
    is_whole = len(as_before) in (0, len(_rows(mutant)))
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
  """The places of a function where a mutation of this kind is possible."""
  if kind == 'parameter':
    yield from _parameters(function, draw)
    return
  for node in _own(function):
    if isinstance(node, ast.Assert):
      yield from _of_assert(node, kind, draw)
    elif isinstance(node, ast.Call):
      yield from _of_call(node, kind, draw)


def _own(function: ast.AST) -> Iterator[ast.AST]:
  """Nodes of the function itself, not of functions and classes inside."""
  for node in ast.iter_child_nodes(function):
    if isinstance(node, FUNCTIONS | ast.Lambda | ast.ClassDef):
      continue
    yield node
    yield from _own(node)


def _of_assert(
  node: ast.Assert, kind: str, draw: random.Random
) -> Iterator[_Change]:
  test = node.test
  if kind == 'opposite':
    yield lambda: setattr(node, 'test', _opposite(test))
  elif _is_equality(test):
    sides = [
      (test, 'left', test.left, test.comparators[0]),
      (test.comparators, 0, test.comparators[0], test.left),
    ]
    yield from _of_sides(sides, kind, draw)


def _opposite(test: ast.expr) -> ast.expr:
  """The negation as people write it; twice gives the same again."""
  if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
    return test.operand
  if isinstance(test, ast.Compare) and len(test.ops) == 1:
    other = _OTHER_OPERATOR[type(test.ops[0])]
    return ast.Compare(
      left=test.left, ops=[other()], comparators=test.comparators
    )
  return ast.UnaryOp(op=ast.Not(), operand=test)


def _of_call(
  node: ast.Call, kind: str, draw: random.Random
) -> Iterator[_Change]:
  function = node.func
  if not isinstance(function, ast.Attribute):
    return
  name, arguments = function.attr, node.args
  if kind == 'raises' and name in ('raises', 'assertRaises') and arguments:
    yield lambda: arguments.__setitem__(0, _name('BufferError'))
  elif kind == 'opposite' and name in _OPPOSITE:
    yield lambda: setattr(function, 'attr', _OPPOSITE[name])
  elif name == 'assertEqual' and len(arguments) >= 2:
    sides = [
      (arguments, 0, arguments[0], arguments[1]),
      (arguments, 1, arguments[1], arguments[0]),
    ]
    yield from _of_sides(sides, kind, draw)


def _name(text: str) -> ast.Name:
  return ast.Name(id=text, ctx=ast.Load())


def _put(place: Any, key: Any, node: ast.AST) -> None:
  if isinstance(place, list):
    place[key] = node
  else:
    setattr(place, key, node)


def _of_sides(
  sides: Iterable[tuple], kind: str, draw: random.Random
) -> Iterator[_Change]:
  sides = list(sides)
  literals = [_literal(side[2]) for side in sides]
  for (place, key, _, other), found in zip(sides, literals):
    if kind == 'literal' and found and not _literal(other):
      (value,) = found
      changed = another(value, draw)
      if changed is not None:
        new = _expression(repr(changed))
        yield functools.partial(_put, place, key, new)
    elif (
      kind == 'object' and not _literal(other) and (found or not any(literals))
    ):
      new = ast.Call(func=_name('object'), args=[], keywords=[])
      yield functools.partial(_put, place, key, new)


def _literal(node: ast.AST) -> tuple[Any] | None:
  try:
    return (ast.literal_eval(node),)
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return None


def _parameters(function: Any, draw: random.Random) -> Iterator[_Change]:
  """Changes of the last column of literal rows of `parametrize`."""
  for decorator in function.decorator_list:
    if (
      not isinstance(decorator, ast.Call)
      or not isinstance(decorator.func, ast.Attribute)
      or decorator.func.attr != 'parametrize'
      or len(decorator.args) != 2
      or not isinstance(decorator.args[1], ast.List | ast.Tuple)
    ):
      continue
    names = _literal(decorator.args[0])
    if not names:
      continue
    listed = names[0]
    if isinstance(listed, str):
      listed = [name.strip() for name in listed.split(',')]
    # The name of the column says that it is what the code must give.
    column = len(listed) - 1
    if column < 1 or not _is_compared(function, listed[column]):
      continue
    rows = decorator.args[1].elts
    changes = []
    for row in rows:
      cells = row.elts if isinstance(row, ast.Tuple | ast.List) else []
      found = _literal(cells[column]) if len(cells) > column else None
      changed = another(found[0], draw) if found else None
      if changed is None:
        break
      new = _expression(repr(changed))
      changes.append((cells, column, new))
    if changes and len(changes) == len(rows):
      yield functools.partial(_put_all, changes)


def _put_all(changes: list[tuple]) -> None:
  for change in changes:
    _put(*change)


def _is_compared(function: ast.AST, name: str) -> bool:
  """Whether the whole of an `assert` compares a call with this name."""
  return any(
    isinstance(side, ast.Name) and side.id == name
    for node in _own(function)
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

  Whoever sees both, and knows this file, cannot tell which of them it began
  with: every change is as likely as the one that undoes it.
  """
  if isinstance(value, bool):
    return not value
  if isinstance(value, int):
    return value + draw.choice((-2, -1, 1, 2))
  if isinstance(value, float):
    if abs(value) >= 1e15:
      return None
    return value + draw.choice((-1.0, 1.0))
  if isinstance(value, str | bytes):
    return _another_text(value, draw)
  if isinstance(value, list | tuple):
    return _another_sequence(value, draw)
  if isinstance(value, dict):
    for key in draw.sample(list(value), len(value)):
      changed = another(value[key], draw)
      if changed is not None:
        return {**value, key: changed}
    return {'a': 1} if not value else None
  if isinstance(value, set) and value:
    return value - {draw.choice(sorted(value, key=repr))}
  return None


def _another_sequence(value: Any, draw: random.Random) -> Any:
  for index in draw.sample(range(len(value)), len(value)):
    changed = another(value[index], draw)
    if changed is not None:
      items = [*value[:index], changed, *value[index + 1 :]]
      return type(value)(items)
  return type(value)([0])


def _another_text(value: Any, draw: random.Random) -> Any:
  text = value if isinstance(value, str) else value.decode('latin-1')
  for index in draw.sample(range(len(text)), len(text)):
    letter = text[index]
    for group in (string.ascii_lowercase, string.ascii_uppercase, '0123456789'):
      if letter in group:
        next_ = draw.choice(group.replace(letter, ''))
        text = text[:index] + next_ + text[index + 1 :]
        return text if isinstance(value, str) else text.encode('latin-1')
  return value + ('x' if isinstance(value, str) else b'x')
