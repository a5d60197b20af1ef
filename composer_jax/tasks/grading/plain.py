"""Encodes values exactly as JSON, to cross between a box and the host.

The text of this file also runs inside boxes (see `tasks.grading.suite_plugin`),
so it imports the standard library alone. Code in a box is not trusted: the host
compares the JSON that comes out, and decodes only what it encoded itself.
"""

import collections.abc
import functools
import importlib
import math
import random
import sys
import types
from collections.abc import Sequence
from typing import Any

_MAX_DEPTH = 16
_MAX_ITEMS = 2000
_MAX_DRAWN = 50  # of an iterator, which may have no end
_MAX_GROWN = 64  # items added to a list
_MAX_TEXT = 20_000
_MAX_BITS = 4096
_MAKERS = {
    'float': float, 'complex': complex, 'bytes': bytes.fromhex,
    'bytearray': bytearray.fromhex, 'module': importlib.import_module,
}  # fmt: skip
_CONTAINERS = {'tuple': tuple, 'set': set, 'frozenset': frozenset}
# How the value of an instance is read without code of its class.
_READ: dict[type, Any] = {
    int: int.__index__, float: float.__float__, str: str.__str__,
    bytes: lambda value: bytes.join(b'', [value]),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}  # fmt: skip

# Packages beside the standard library whose functions and classes every process
# finds under the same name; a program in a box adds to it.
PACKAGES: set[str] = set()


class NotPlain(ValueError):
  """A value that has no exact encoding."""


def encode(value: Any, depth: int = 0, *, exact: bool = True) -> Any:
  """JSON of a value; equal JSON means equal values of equal types.

  Functions, classes and modules that every process finds by name are encoded by
  it. Unless `exact`, an instance of a subclass is encoded as its base.

  Raises:
    NotPlain: the value is or contains another object.
  """
  if not exact:
    value = _base(value)
  kind = type(value)
  if depth > _MAX_DEPTH:
    raise NotPlain(f'The value is nested deeper than {_MAX_DEPTH}.')
  if value is None or kind is bool:
    return value
  if kind is int and value.bit_length() <= _MAX_BITS:
    return value
  if kind is str and len(value) <= _MAX_TEXT:
    value.encode()  # refuses lone surrogates
    return value
  if kind is float:
    return value if math.isfinite(value) else {'float': repr(value)}
  if kind is complex:
    return {'complex': repr(value)}
  if kind in (bytes, bytearray) and len(value) <= _MAX_TEXT:
    return {kind.__name__: value.hex()}
  if kind is range:
    return {'range': [value.start, value.stop, value.step]}
  if kind in (list, tuple, set, frozenset, dict) and len(value) <= _MAX_ITEMS:
    return _container(kind, value, depth + 1, exact)
  if kind is types.ModuleType and _is_known(value.__name__):
    return {'module': value.__name__}
  if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
    module, name = getattr(value, '__module__', None), value.__qualname__
    module = 'operator' if module == '_operator' else module
    if (
      isinstance(module, str)
      and _is_known(module)
      and getattr(sys.modules.get(module), name, None) is value
    ):
      return {'name': [module, name]}
  raise NotPlain(f'A {kind.__name__} has no exact encoding.')


def _is_known(module: str) -> bool:
  top = module.partition('.')[0]
  return top in sys.stdlib_module_names or top in PACKAGES


def _container(kind: type, value: Any, depth: int, exact: bool) -> Any:
  put = functools.partial(encode, depth=depth, exact=exact)
  if kind is dict:
    return {'dict': [[put(k), put(v)] for k, v in value.items()]}
  items = [put(item) for item in value]
  if kind is list:
    return items
  if kind is not tuple:
    items.sort(key=repr)  # the order of a set depends on hashes
  return {kind.__name__: items}


def decode(data: Any) -> Any:
  """The value whose encoding this is."""
  if isinstance(data, list):
    return [decode(item) for item in data]
  if not isinstance(data, dict):
    return data
  ((kind, content),) = data.items()
  if kind in _MAKERS:
    return _MAKERS[kind](content)
  if kind == 'dict':
    return {decode(k): decode(v) for k, v in content}
  if kind == 'name':
    return getattr(importlib.import_module(content[0]), content[1])
  if kind == 'range':
    return range(*content)
  return _CONTAINERS[kind](decode(item) for item in content)


def decode_result(data: Any) -> Any:
  """The value of a result; unlike `decode` it imports nothing.

  Raises:
    NotPlain: the encoding is of no plain value.
  """
  if isinstance(data, list):
    return [decode_result(item) for item in data]
  if not isinstance(data, dict):
    return data
  kind, content = next(iter(data.items()), ('', None))
  if kind in _MAKERS and kind != 'module' and isinstance(content, str):
    return _MAKERS[kind](content)
  if isinstance(content, list) and kind == 'dict':
    return {decode_result(k): decode_result(v) for k, v in content}
  if isinstance(content, list) and kind == 'range':
    return range(*content)
  if isinstance(content, list) and kind in _CONTAINERS:
    return _CONTAINERS[kind](decode_result(item) for item in content)
  if (
    kind == 'iterator'
    and isinstance(content, list)
    and len(content) < _MAX_DRAWN
  ):
    return iter([decode_result(item) for item in content])
  raise NotPlain(f'There is no plain value of {str(data)[:80]}.')


def same(first: Any, second: Any, tolerance: float = 0.0) -> bool:
  """True if two encoded results are equal as Python's `==` has it.

  Floats may differ by a relative or absolute tolerance. Total for any JSON.
  """
  if first == second:
    return True
  if isinstance(first, list) and isinstance(second, list):
    return len(first) == len(second) and all(
      same(a, b, tolerance) for a, b in zip(first, second)
    )
  if isinstance(first, dict) and isinstance(second, dict):
    drawn = first.get('iterator'), second.get('iterator')
    if None not in drawn:
      return same(*drawn, tolerance)
  try:
    return _close(decode_result(first), decode_result(second), tolerance)
  except (ValueError, TypeError, OverflowError):
    return False


def _close(first: Any, second: Any, tolerance: float) -> bool:
  if isinstance(first, list | tuple) and type(first) is type(second):
    return len(first) == len(second) and all(
      _close(a, b, tolerance) for a, b in zip(first, second)
    )
  if isinstance(first, dict) and isinstance(second, dict):
    return first.keys() == second.keys() and all(
      _close(value, second[key], tolerance) for key, value in first.items()
    )
  if float in (type(first), type(second)):
    return math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance)
  return first == second


def encode_call(positional: list, named: dict) -> list:
  return [
    [encode(value) for value in positional],
    {name: encode(value) for name, value in named.items()},
  ]


def _base(value: Any) -> Any:
  """The plain value of an instance of a subclass, whatever its methods do."""
  for kind, read in _READ.items():
    if isinstance(value, kind) and not isinstance(value, bool):
      return read(value)
  return value


def encode_result(value: Any, opaque: Sequence[str] = ()) -> Any:
  """JSON of a result; unlike `encode` it accepts every value.

  An instance of a subclass becomes the value that it compares as: an `IntEnum`
  an int, a namedtuple a tuple.

  An iterator becomes its first items. Another object becomes its class and its
  text: less than the object, but never more. The text is left out if it holds
  an address.

  Args:
    value: result of a call.
    opaque: names of classes whose text nobody promises; it is left out.
  """
  if isinstance(value, collections.abc.Iterator):
    drawn = [item for item, _ in zip(value, range(_MAX_DRAWN))]
    return {'iterator': [encode_result(item, opaque) for item in drawn]}
  try:
    return encode(value, exact=False)
  except NotPlain:
    name = type(value).__name__
    text = '' if name in opaque else str(value)[:_MAX_TEXT]
    return {'object': name, 'text': '' if ' at 0x' in text else text}


def vary(data: Any, draw: random.Random) -> Any:
  """The encoding of another value of the same type, near this one.

  None, functions and ranges have no neighbours and stay.
  """
  if isinstance(data, bool):
    return not data
  if isinstance(data, int):
    return data + draw.choice((-2, -1, 1, 2, 3))
  if isinstance(data, float):
    return data + draw.choice((-1.5, -0.5, 0.5, 2.0))
  if isinstance(data, str):
    return _varied_text(data, draw)
  if isinstance(data, list):
    return _varied_items(data, draw)
  if isinstance(data, dict):
    ((kind, content),) = data.items()
    if kind == 'tuple':
      return {kind: _varied_items(content, draw)}
    if kind == 'dict' and content:
      at = draw.randrange(len(content))
      key, value = content[at]
      pairs = [[key, vary(value, draw)]] if draw.random() < 0.7 else []
      return {kind: content[:at] + pairs + content[at + 1 :]}
    if kind in ('set', 'frozenset') and content:
      return {kind: draw.sample(content, len(content) - 1)}
  return data


def grow(data: Any, draw: random.Random) -> Any:
  """The encoding of a value up to five times as large, of varied parts.

  Lists, texts and dicts that are not empty grow; everything else stays.
  """
  if isinstance(data, str) and data:
    more = [vary(data, draw) for _ in range(draw.randint(1, 4))]
    return draw.choice(('', ' ', '\n', ',')).join([data, *more])
  if isinstance(data, list) and data:
    count = min(draw.randint(len(data), 4 * len(data)), _MAX_GROWN)
    return [*data, *(vary(draw.choice(data), draw) for _ in range(count))]
  if isinstance(data, dict) and data.get('dict'):
    pairs = {repr(k): [k, v] for k, v in data['dict']}
    for key, value in data['dict']:
      key = vary(key, draw)
      pairs.setdefault(repr(key), [key, vary(value, draw)])
    return {'dict': list(pairs.values())}
  return data


def _varied_text(text: str, draw: random.Random) -> str:
  if not text:
    return draw.choice(('a', 'Z9', ' b '))
  at = draw.randrange(len(text))
  return draw.choice((
    text[:at] + text[at + 1 :],
    text[:at] + text[at] + text[at:],
    text[at:] + text[:at],
    text + text[:at],
    text.swapcase(),
  ))  # fmt: skip


def _varied_items(items: list, draw: random.Random) -> list:
  if not items:
    return items
  at = draw.randrange(len(items))
  edit = draw.randrange(4)
  if edit == 0:
    return items[:at] + items[at + 1 :]
  if edit == 1:
    return items[at:] + items[:at]
  return items[:at] + [vary(items[at], draw)] + items[at + 1 :]
