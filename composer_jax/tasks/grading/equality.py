"""Compares results of a solution with those of the original, as `==` would.

Both are in the encoding of `plain.encode_result`. The host never builds a value
of a box: it compares texts, so that hashes of keys, which a solution chooses,
cost nothing.
"""

import cmath
import fractions
from typing import Any

# Another order of additions may be as right.
_ROUNDING = 1e-12
_SEQUENCES = {'tuple', 'iterator', 'endless'}


def same(first: Any, second: Any, tolerance: float = 0.0) -> bool:
  """True if two encoded results are equal as Python's `==` has it.

  A float may differ from a number by the tolerance, relative or absolute, and
  two floats by rounding. NaN is equal to itself. Objects are equal if they show
  the same; the first may have attributes that the second lacks, and a class
  below that of the second. Total for any JSON.
  """
  try:
    return first == second or _same(first, second, tolerance)
  except (ValueError, TypeError, ArithmeticError):
    return False


def shows(data: Any) -> bool:
  """False if of some part of an encoded result only the class is known.

  Of an object that shows itself, attributes may be such parts.
  """
  match data:
    case list():
      return all(map(shows, data))
    case {'object': _, 'text': text, 'items': items, 'attributes': dict(named)}:
      public = [value for name, value in named.items() if name[:1] != '_']
      return bool(text or (items and shows(items)) or any(map(shows, public)))
    case dict():
      return all(map(shows, data.values()))
  return True


def is_below(kind: Any, above: Any, other: Any) -> bool:
  """True if a class of another name has one of this name above it."""
  return kind != other and isinstance(above, list) and other in above


def _same(first: Any, second: Any, tolerance: float) -> bool:
  numbers = _number(first), _number(second)
  if None not in numbers:
    return _close(*numbers, tolerance)
  match first, second:
    case list(), list():
      return len(first) == len(second) and all(
        _same(a, b, tolerance) for a, b in zip(first, second)
      )
    case dict(), dict() if first.keys() == second.keys() <= _SEQUENCES:
      return all(_same(first[k], second[k], tolerance) for k in first)
    case list(a) | {'tuple': list(a)}, {'iterator': list(b)}:
      return _same(a, b, tolerance)  # which is all that an iterator shows
    case {'range': list(a)}, {'range': list(b)}:
      return range(*a) == range(*b)
    case {'dict': list(a)}, {'dict': list(b)}:
      a, b = ({_key(key): value for key, value in pairs} for pairs in (a, b))
      return a.keys() == b.keys() and all(
        _same(value, b[key], tolerance) for key, value in a.items()
      )
    case (
      {'object': kind, 'text': text, 'items': a, 'attributes': dict(mine)},
      {'object': other, 'text': wanted, 'items': b, 'attributes': dict(named)},
    ):  # fmt: skip
      if is_below(kind, first.get('above'), other) and not second.get('closed'):
        text = text.replace(kind, other, 1)  # it often tells the class
        kind = other
      return (
        [kind, text] == [other, wanted]
        and _same(a, b, tolerance)
        and all(
          _same(mine[name], value, tolerance)
          if name in mine
          else name[:1] == '_'
          for name, value in named.items()
        )
      )
  return type(first) is type(second) and _key(first) == _key(second)


def _number(data: Any) -> Any:
  match data:
    case int() | float():
      return data
    case {'float': str(text)}:
      return float(text)
    case {'complex': str(text)}:
      return complex(text)
    case {'ratio': [numerator, denominator]}:
      return fractions.Fraction(numerator, denominator)
  return None


def _close(first: Any, second: Any, tolerance: float) -> bool:
  if first == second or (first != first and second != second):
    return True
  kinds = {type(first), type(second)}
  inexact = kinds <= {float, complex}
  if not kinds & {float, complex} or (not inexact and not tolerance):
    return False
  allowed = max(tolerance, _ROUNDING) if inexact else tolerance
  return cmath.isclose(first, second, rel_tol=allowed, abs_tol=allowed)


def _key(data: Any) -> str:
  """A text that encodings share if and only if their values are equal."""
  number = _number(data)
  if number is not None:
    return _number_key(number)
  match data:
    case list():
      return f'[{",".join(map(_key, data))}]'
    case {'set': list(items)} | {'frozenset': list(items)}:
      return f'{{{",".join(sorted({*map(_key, items)}))}}}'
    case {'dict': list(pairs)}:
      return f'{{{",".join(sorted({*map(_key, pairs)}))}:}}'
    case {'bytes': content} | {'bytearray': content}:
      return f'b{content!r}'
    case {'object': kind, 'text': text, 'items': a, 'attributes': dict(named)}:
      public = [[n, v] for n, v in sorted(named.items()) if n[:1] != '_']
      return f'<{_key([kind, text, a, *public])}>'
    case dict():
      return f'({_key([*map(list, sorted(data.items()))])})'
  return repr(data)


def _number_key(number: Any) -> str:
  if number == number.real:
    number = number.real
  try:
    inexact = number + 0.0  # also makes zeros alike
  except OverflowError:
    return str(number)
  return repr(inexact) if inexact == number else str(number)
