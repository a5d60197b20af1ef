"""Encodes values exactly as JSON, to cross between a box and the host.

Arguments are exact. Objects of the package are among them: what pickle would
keep of each stands in a table of their call, so that they are built again in
another process (`Objects`). Results show of an object what its class makes
public, and no more (`encode_result`).

The text of this file also runs inside boxes (see `tasks.grading.suite_plugin`),
so it imports the standard library alone. Code in a box is not trusted: the host
compares the JSON that comes out (`tasks.grading.equality`), and decodes only
what it encoded itself. It never builds an object.
"""

import collections
import collections.abc
import contextlib
import copy
import copyreg
import decimal
import fractions
import functools
import hashlib
import importlib
import itertools
import math
import operator
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

_MAX_DEPTH = 16
_MAX_ITEMS = 2000
_ENDLESS = 200  # items that are seen of an iterator with more than _MAX_ITEMS
_MAX_TEXT = 20_000
_MAX_BITS, _MAX_DIGITS = 4096, 1000
_MAX_OBJECTS = 250  # in the arguments of a call
# Of a result: objects and lists within each other, and in all.
_MAX_SEEN_DEPTH, _MAX_SEEN = 8, 400
_MAX_SHOWN = 100  # characters of an object's text; a hash stands for more
_MAKERS = {
    'float': float, 'complex': complex, 'bytes': bytes.fromhex,
    'bytearray': bytearray.fromhex, 'module': importlib.import_module,
}  # fmt: skip
_CONTAINERS = {
  'tuple': tuple, 'set': set, 'frozenset': frozenset, 'iterator': iter,
}  # fmt: skip
_COLLECTION = (collections.abc.Sized, collections.abc.Iterable)
_FIELDS = (property, functools.cached_property, types.MemberDescriptorType)
_SET_VIEWS = (collections.abc.KeysView, collections.abc.ItemsView)
# How the value of an instance is read without code of its class.
_READ: dict[type, Any] = {
    int: int.__index__, float: float.__float__, str: str.__str__,
    bytes: lambda value: bytes.join(b'', [value]),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    types.MappingProxyType: dict,
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    # Classes whose instances are equal to those of built-in ones.
    collections.UserString: lambda value: _base(value.data),
    collections.UserList: lambda value: list(value.data),
    collections.UserDict: lambda value: dict(value.data),
    collections.ChainMap: dict,
}  # fmt: skip
# Names of classes whose instances are equal to those of classes below them, and
# the methods that tell their values.
_VALUES = {
  **dict.fromkeys(('datetime', 'date', 'time'), 'isoformat'),
  **dict.fromkeys(('PurePosixPath', 'PureWindowsPath'), '__str__'),
  **{'timedelta': '__str__', 'UUID': '__str__'},
}

# Packages beside the standard library whose functions and classes every process
# finds under the same name; a program in a box adds to it.
PACKAGES: set[str] = set()
# (module, name) of deleted classes, ('module', '') for all of a module: another
# implementation may keep other things in their instances.
DELETED: set[tuple[str, str]] = set()
# Instances of deleted classes by id, with the arguments that made them.
MADE: dict[int, tuple[Any, tuple]] = {}


class NotPlain(ValueError):
  """A value that has no exact encoding."""


def encode(
  value: Any,
  depth: int = 0,
  *,
  exact: bool = True,
  objects: 'Objects | None' = None,
) -> Any:
  """JSON of a value; equal JSON means equal values of equal types.

  Functions, classes and modules that every process finds by name are encoded by
  it. Unless `exact`, an instance of a subclass is encoded as its base.

  Args:
    value: value to encode.
    depth: number of values around it.
    exact: false to encode an instance of a subclass as its base.
    objects: table for objects of the value; None refuses them.

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
    put = functools.partial(
      encode, depth=depth + 1, exact=exact, objects=objects
    )
    return _container(kind, value, put)
  if kind is types.ModuleType and _is_known(value.__name__):
    return {'module': value.__name__}
  named = isinstance(
    value, type | types.FunctionType | types.BuiltinFunctionType
  ) and _named(value, value.__qualname__)
  if named:
    return {'name': named}
  if objects is not None and not isinstance(value, type | types.FunctionType):
    return objects.put(value, depth)
  raise NotPlain(f'A {kind.__name__} has no exact encoding.')


def _is_known(module: str) -> bool:
  top = module.partition('.')[0]
  return top in sys.stdlib_module_names or top in PACKAGES


def _named(value: Any, name: str) -> list[str] | None:
  """Module and name of what every process finds there; None for others."""
  module = getattr(value, '__module__', None) or 'builtins'
  module = 'operator' if module == '_operator' else module
  if not isinstance(module, str) or not _is_known(module):
    return None
  try:
    found = operator.attrgetter(name)(sys.modules.get(module))
  except AttributeError:
    return None
  return [module, name] if found is value else None


def _container(kind: type, value: Any, put) -> Any:
  if kind is dict:
    return {'dict': [[put(k), put(v)] for k, v in value.items()]}
  items = [put(item) for item in value]
  if kind is list:
    return items
  if kind is not tuple:
    items.sort(key=repr)  # the order of a set depends on hashes
  return {kind.__name__: items}


class Objects:
  """The objects among the arguments of a call, which the values refer to.

  Attributes:
    table: for each object, a function and the arguments that make it, its
      state, items and pairs, as `object.__reduce_ex__` gives them, encoded.
  """

  def __init__(self):
    self.table: list[list] = []
    self._numbers: dict[int, int] = {}
    self._parts: list[tuple] = []  # kept, so that no id is used again

  def put(self, value: Any, depth: int) -> Any:
    """A reference to an object, which is put into the table first."""
    if id(value) in self._numbers:
      return {'ref': self._numbers[id(value)]}
    kind = type(value)
    # One object of a module often stands for "missing", whatever its state is.
    for name, found in vars(sys.modules.get(kind.__module__, object)).items():
      if found is value and _is_known(kind.__module__):
        return {'name': [kind.__module__, name]}
    reduce = copyreg.dispatch_table.get(kind)
    if is_deleted(kind):
      parts = _remade(value)
    else:
      parts = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(parts, str):
      if not (name := _named(value, parts)):
        raise NotPlain(f'{parts} has no name in a module.')
      return {'name': name}
    put = functools.partial(encode, depth=depth + 1, objects=self)
    made = [put(parts[0]), [put(argument) for argument in parts[1]]]
    if len(self.table) >= _MAX_OBJECTS or len(parts) > 5:
      raise NotPlain('The value holds too many objects.')
    self._numbers[id(value)] = len(self.table)
    self.table.append(made)
    self._parts.append((value, *parts))
    return {'ref': self._numbers[id(value)]}

  def finish(self) -> list[list]:
    """Adds what the objects hold, which may be other objects or themselves."""
    put = functools.partial(encode, objects=self)
    for number, (_, _, _, *parts) in enumerate(self._parts):
      state, items, pairs = (*parts, None, None, None)[:3]
      self.table[number] += [
        put(state),
        [put(item) for item in items or ()],
        [[put(k), put(v)] for k, v in pairs or ()],
      ]
    return self.table


def is_deleted(kind: type) -> bool:
  names = {(kind.__module__, ''), (kind.__module__, kind.__qualname__)}
  return bool(names & DELETED)


def _remade(value: Any) -> tuple:
  """The class of an object and the arguments that make it again."""
  kind = type(value)
  for base in (dict, list, set, frozenset, str, int, float):
    is_plain = kind.__init__ is base.__init__ and kind.__new__ is base.__new__
    if isinstance(value, base) and is_plain:
      return kind, (_base(value),)
  made, arguments = MADE.get(id(value), (None, ()))
  if made is not value:
    raise NotPlain(f'{kind.__qualname__} was deleted.')
  return kind, arguments


def decode(data: Any, objects: Sequence[Any] = ()) -> Any:
  """The value whose encoding this is."""
  if isinstance(data, list):
    return [decode(item, objects) for item in data]
  if not isinstance(data, dict):
    return data
  ((kind, content),) = data.items()
  if kind in _MAKERS:
    return _MAKERS[kind](content)
  if kind == 'dict':
    return {decode(k, objects): decode(v, objects) for k, v in content}
  if kind == 'name':
    module = importlib.import_module(content[0])
    return operator.attrgetter(content[1])(module)
  if kind == 'ref':
    return objects[content]
  if kind == 'range':
    return range(*content)
  return _CONTAINERS[kind](decode(item, objects) for item in content)


def encode_call(
  positional: list, named: dict, objects: Objects | None = None
) -> list:
  """[positional, named] arguments, and the table of their objects if any."""
  call = [
    [encode(value, objects=objects) for value in positional],
    {name: encode(v, objects=objects) for name, v in named.items()},
  ]
  table = objects.finish() if objects is not None else []
  return [*call, table] if table else call


def decode_call(call: list) -> tuple[list, dict]:
  positional, named, *table = call
  rows = table[0] if table else []
  objects: list[Any] = []
  for make, arguments, *_ in rows:
    objects.append(decode(make)(*(decode(a, objects) for a in arguments)))
  for made, (_, _, *parts) in zip(objects, rows):
    state, items, pairs = (decode(part, objects) for part in parts)
    for item in items:
      made.append(item)
    for key, value in pairs:
      made[key] = value
    if state is not None:
      _set_state(made, state)
  return (
    [decode(value, objects) for value in positional],
    {name: decode(value, objects) for name, value in named.items()},
  )


def _set_state(made: Any, state: Any) -> None:
  if hasattr(made, '__setstate__'):
    made.__setstate__(state)
    return
  slots = {}
  if isinstance(state, tuple) and len(state) == 2:
    state, slots = state
  if state:
    vars(made).update(state)
  for name, value in slots.items():
    object.__setattr__(made, name, value)


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
  if isinstance(content, list) and kind == 'ratio':
    return fractions.Fraction(*content)
  if isinstance(content, list) and kind in _CONTAINERS:
    return _CONTAINERS[kind]([decode_result(item) for item in content])
  raise NotPlain(f'There is no plain value of {str(data)[:80]}.')


def _base(value: Any) -> Any:
  """The plain value of an instance of a subclass, whatever its methods do."""
  for kind, read in _READ.items():
    if isinstance(value, kind) and not isinstance(value, bool):
      return read(value)
  return value


def encode_result(
  value: Any, opaque: Collection[str] = (), *, draws: bool = True
) -> Any:
  """JSON of a result; unlike `encode` it accepts every value.

  An instance of a subclass becomes the value that it compares as: an `IntEnum`
  an int, a namedtuple a tuple. An iterator becomes its items.

  Another object becomes its class, its text unless that holds an address, its
  items if it is a collection, and, for a class of the package, the attributes
  that are public or that its own `==` compares as they are. Of objects around
  themselves, too deep, or too many, the class alone remains, as 'cut'.

  Args:
    value: result of a call.
    opaque: names of classes of which nobody promises more than the name.
    draws: false to leave iterators as they are.
  """
  return _View(opaque, draws).see(value)


class _View:
  """Sees one result, from outside to inside."""

  def __init__(self, opaque: Collection[str], draws: bool):
    self._opaque, self._draws = opaque, draws
    self._left = _MAX_SEEN
    self._around: list[Any] = []  # objects that hold this one

  def see(self, value: Any) -> Any:
    if isinstance(value, collections.abc.Iterator):
      if not self._draws:
        return _shown(value)
      drawn = list(itertools.islice(value, _MAX_ITEMS + 1))
      if len(drawn) > _MAX_ITEMS:
        return {'endless': [self.see(item) for item in drawn[:_ENDLESS]]}
      return {'iterator': [self.see(item) for item in drawn]}
    with contextlib.suppress(NotPlain):
      return encode(value, exact=False)
    self._left -= 1
    is_around = any(value is other for other in self._around)
    if is_around or self._left < 0 or len(self._around) >= _MAX_SEEN_DEPTH:
      return {'cut': type(value).__name__}
    self._around.append(value)
    base = _base(value)
    # These views are equal to sets, also where their items have no hash.
    kind = set if isinstance(base, _SET_VIEWS) else type(base)
    if kind in (list, tuple, set, frozenset, dict):
      seen = _container(kind, base, self.see)
    else:
      seen = _ratio(value) or _value(value) or self._object(value)
    self._around.pop()
    return seen

  def _object(self, value: Any) -> Any:
    kind = type(value)
    if kind.__name__ in self._opaque:
      return _shown(value)
    items: list[Any] = []
    attributes: dict[str, Any] = {}
    text = ''
    # All of this is any code, which may fail.
    with contextlib.suppress(Exception):
      text = str(value)
    text = '' if ' at 0x' in text else text
    is_ours = str(kind.__module__).partition('.')[0] in PACKAGES
    if is_ours or not text:
      with contextlib.suppress(Exception):
        if isinstance(value, collections.abc.Mapping):
          items = [dict(value.items())]
        elif all(isinstance(value, k) for k in _COLLECTION):
          items = list(itertools.islice(iter(value), _MAX_ITEMS))
      items = [self.see(item) for item in items]
    names = (
      [*_public(value), *_compared(value, self._opaque)] if is_ours else ()
    )
    for name in names:
      with contextlib.suppress(Exception):
        attributes[name] = getattr(value, name)
    attributes = {n: self.see(v) for n, v in attributes.items()}
    if len(text) > _MAX_SHOWN:
      text = hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()
    shown = _shown(value, text, items, attributes)
    if is_ours and (above := classes_of(value)[1:]):
      shown['above'] = above
    if _is_closed(kind):
      shown['closed'] = True
    return shown


def _ratio(value: Any) -> Any:
  """A number that is equal to others; None for what is none, or too long."""
  if isinstance(value, fractions.Fraction) or (
    isinstance(value, decimal.Decimal) and abs(value.adjusted()) < _MAX_DIGITS
  ):
    with contextlib.suppress(ValueError, OverflowError):  # NaN, infinities
      return {'ratio': [encode(n) for n in value.as_integer_ratio()]}
  return None


def _value(value: Any) -> Any:
  """An instance of a class of `_VALUES` or of one below; None for others."""
  for kind in type(value).__mro__:
    module = str(kind.__module__).partition('.')[0]
    if kind.__name__ in _VALUES and module in sys.stdlib_module_names:
      with contextlib.suppress(Exception):  # moments are equal in any zone
        if kind.utcoffset(value) is not None:
          value = kind.astimezone(value, sys.modules['datetime'].timezone.utc)
      text = getattr(kind, _VALUES[kind.__name__])(value)
      return {**_shown(value, text), 'object': kind.__name__}
  return None


def classes_of(value: Any) -> list[str]:
  """Names of an object's class and of those above it.

  Not of those that have nothing to say: `object`, and `Exception` above an
  error that Python raises by itself.
  """
  own, *above = type(value).__mro__
  vague = {object, BaseException}
  if own.__module__ == 'builtins':
    vague.add(Exception)
  return [own.__name__, *(k.__name__ for k in above if k not in vague)]


def _is_closed(kind: type) -> bool:
  """True if `==` compares the classes, so that no class below is equal."""
  code = getattr(kind.__eq__, '__code__', None)
  return bool(code and {'type', '__class__'} & {*code.co_names})


def _shown(value: Any, text: str = '', items=(), attributes=()) -> Any:
  return {
    'object': type(value).__name__,
    'text': text,
    'items': list(items),
    'attributes': dict(attributes),
  }


class _Asked:
  """Is equal to everything, and notes to what."""

  __hash__ = None

  def __eq__(self, other):
    self.seen = other
    return True


def _compared(value: Any, opaque: Collection[str]) -> list[str]:
  """Names of the private attributes that an object's own `==` compares.

  Of a copy each is asked in turn. What `==` reads in another way (a length, a
  sorted list) may differ in equal objects. None if `==` or what it calls is
  opaque.
  """
  names, code = [], getattr(type(value).__eq__, '__code__', None)
  used = ('__eq__', *code.co_names) if code else ()
  if not used or {f'{type(value).__name__}.{n}' for n in used} & {*opaque}:
    return []
  for name in sorted(n for n in _stored(value) if n[:1] == '_'):
    with contextlib.suppress(Exception):
      asked, other = _Asked(), copy.copy(value)
      object.__setattr__(other, name, asked)
      if value == other and asked.seen is getattr(value, name):
        names.append(name)
  return names


def _public(value: Any) -> list[str]:
  """Names of an object's public attributes that are no methods, sorted."""
  return sorted(n for n in _stored(value, _FIELDS) if n[:1] != '_')


def _stored(value: Any, fields: Any = types.MemberDescriptorType) -> set[str]:
  """Names of what an object holds, and of descriptors of its classes."""
  names = set(getattr(value, '__dict__', ()))
  for kind in type(value).__mro__:
    names |= {n for n, v in vars(kind).items() if isinstance(v, fields)}
  return {n for n in names if isinstance(n, str)}
