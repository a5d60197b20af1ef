"""Sections of a config as dataclasses: built by name, explained by docstrings.

On the top floor, beside `wiring`. A config file shows the fields that a
researcher changes; every other field has its default in the dataclass that uses
it. Each field is explained in the `Attributes` of its class and can be set by
`--config.section.field=VALUE`.
"""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from composer_jax.core import checks

REQUIRED = dataclasses.MISSING
_KINDS = {
  bool: 'true or false',
  int: 'a whole number',
  float: 'a number',
  str: 'a text',
}
_BOOLEANS = {'true': True, 'false': False, '1': True, '0': False}


def build(cls: Any, fields: Any, path: str, base: Any = None) -> Any:
  """Builds a section from nested dictionaries; absent fields take defaults.

  Args:
    cls: dataclass of the section; its fields that are dataclasses are sections
      too. `cls.from_dict`, if there is one, is called instead.
    fields: values by field name, from a config or JSON.
    path: dotted name of the section in the config, for messages.
    base: section whose values replace the defaults; None for those of `cls`.

  Raises:
    ValueError: a field is unknown, missing or refused; the message names it,
      and for an unknown one the nearest known name.
  """
  if not isinstance(fields, Mapping):
    raise ValueError(f'--config.{path} must be a section, not {fields!r}.')
  if hasattr(cls, 'from_dict'):
    return _located(path, cls, lambda: cls.from_dict(fields))
  known = {f.name: f for f in dataclasses.fields(cls)}
  for name in fields:
    checks.known_name(name, known, f'--config.{path}')
  hints = typing.get_type_hints(cls)
  defaults = {n: default_of(f) for n, f in known.items()}
  if base is not None:
    defaults = {name: getattr(base, name) for name in known}
  made = dict(defaults)
  for name, value in fields.items():
    where = f'{path}.{name}'
    if dataclasses.is_dataclass(hints[name]):
      made[name] = build(hints[name], value, where, defaults[name])
    else:
      made[name] = _value(hints[name], value, where)
  if missing := [n for n, value in made.items() if value is REQUIRED]:
    raise ValueError(f'--config.{path} lacks field {", ".join(missing)}.')
  return _located(path, cls, lambda: cls(**made))


def default_of(field: dataclasses.Field) -> Any:
  """The default of a field; REQUIRED if a config has to name a value."""
  if field.default_factory is not dataclasses.MISSING:
    return field.default_factory()
  return field.default


def _located(path: str, cls: Any, make: Any) -> Any:
  try:
    return make()
  except ValueError as error:
    # Some messages name the config's field already, others only the class.
    if '--config.' in str(error):
      raise
    text = f': {error}'
    for base in cls.__mro__:
      if str(error).startswith(f'{base.__name__}.'):
        text = str(error).removeprefix(base.__name__)
    raise ValueError(f'--config.{path}{text}') from error


def _value(hint: Any, value: Any, path: str) -> Any:
  """Converts lists and texts to tuples, ints to floats; checks plain types."""
  for member in _members(hint):
    if typing.get_origin(member) is tuple:
      return _tuple(hint, typing.get_args(member), value, path)
  kinds = [typing.get_origin(m) or m for m in _members(hint)]
  if float in kinds and type(value) is int:
    return float(value)
  if bool in kinds and str(value).lower() in _BOOLEANS:
    return _BOOLEANS[str(value).lower()]
  plain = [k for k in kinds if k in _KINDS]
  if plain and len(plain) == len(kinds) and type(value) not in plain:
    allowed = ' or '.join(_KINDS[k] for k in plain)
    raise ValueError(f'--config.{path} must be {allowed}, not {value!r}.')
  return value


def _tuple(hint: Any, args: tuple[Any, ...], value: Any, path: str) -> Any:
  """Checks the elements of a tuple; other alternatives pass as they are."""
  if type(value) in _members(hint):
    return value
  if isinstance(value, str):
    # On the command line texts come without quotes, and one item without comma.
    value = value.split(',') if value else ()
  elif isinstance(value, int | float):
    value = (value,)
  if not isinstance(value, list | tuple):
    raise ValueError(
      f'--config.{path} must be values with commas between them, not {value!r}.'
    )
  if args[-1] is Ellipsis:
    return tuple(_element(args[0], v, path) for v in value)
  if len(value) != len(args):
    raise ValueError(
      f'--config.{path} must hold {len(args)} values, not {value!r}.'
    )
  pairs = zip(args, value, strict=True)
  return tuple(_element(hint, v, path) for hint, v in pairs)


def _element(hint: Any, value: Any, path: str) -> Any:
  if typing.get_origin(hint) is tuple and not isinstance(value, list | tuple):
    raise ValueError(f'--config.{path} must hold tuples, not {value!r}.')
  return _value(hint, value, path)


def _members(hint: Any) -> list[Any]:
  """The alternatives of an annotation."""
  if (
    isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
  ):
    return [m for arg in typing.get_args(hint) for m in _members(arg)]
  return [hint]


def meanings(cls: Any) -> dict[str, str]:
  """The `Attributes` entries of a class and its bases, by field name."""
  texts: dict[str, str] = {}
  for base in reversed(cls.__mro__):
    lines = inspect.cleandoc(base.__dict__.get('__doc__') or '').splitlines()
    if 'Attributes:' not in lines:
      continue
    names: list[str] = []
    for line in lines[lines.index('Attributes:') + 1 :]:
      entry = re.match(r'  ((?:\w+, )*\w+): (.*)', line)
      if entry:
        names = entry[1].split(', ')
        texts |= dict.fromkeys(names, entry[2])
      elif line.startswith('    ') and names:
        texts |= {n: f'{texts[n]} {line.strip()}' for n in names}
      elif line.strip():
        break
  return texts


@dataclasses.dataclass(frozen=True)
class Entry:
  """A field of a resolved config: dotted name, value, default and meaning."""

  name: str
  value: Any
  default: Any
  meaning: str


def entries(
  section: Any, default: Any = None, path: str = ''
) -> Iterator[Entry]:
  """Yields every field of a section, and of the sections within it.

  Args:
    section: section of a resolved config.
    default: section with the default values; None for those of the class.
    path: dotted name of the section, with a dot at its end.
  """
  texts = meanings(type(section))
  for field in dataclasses.fields(section):
    value, name = getattr(section, field.name), f'{path}{field.name}'
    usual = default_of(field)
    if type(default) is type(section):
      usual = getattr(default, field.name)
    if dataclasses.is_dataclass(value):
      yield from entries(value, usual, f'{name}.')
    else:
      yield Entry(name, value, usual, texts.get(field.name, ''))
