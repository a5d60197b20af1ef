"""Reads keys of a Hugging Face `config.json` and names those it refuses."""

import sys
from typing import Any

NO_DEFAULT = object()


def take(
  fields: dict[str, Any], key: str, kind: type, default: Any = NO_DEFAULT
) -> Any:
  """Returns the value of a key; null counts as absent.

  Args:
    kind: int, float (an integer is accepted), bool, str or dict.
    default: value of an absent key; without one an absent key is refused.
  """
  value = fields.get(key)
  if value is None:
    if default is NO_DEFAULT:
      raise ValueError(f'{key!r} is missing; it must be {kind.__name__}.')
    return default
  accepted = (int, float) if kind is float else kind
  if not isinstance(value, accepted) or (
    kind is not bool and isinstance(value, bool)
  ):
    raise ValueError(f'{key!r} is {value!r}; it must be {kind.__name__}.')
  if kind is float and not abs(value) <= sys.float_info.max:
    raise ValueError(f'{key!r} is {value!r}; it must be a finite number.')
  return kind(value)


def take_list(fields: dict[str, Any], key: str, kind: type) -> list[Any]:
  """Returns a list whose entries are of a kind; null or absent is empty."""
  values = fields.get(key)
  if values is None:
    return []
  if not isinstance(values, list) or any(
    not isinstance(value, kind) or isinstance(value, bool) for value in values
  ):
    raise ValueError(
      f'{key!r} is {values!r}; it must be a list of {kind.__name__}.'
    )
  return values


def check_only(fields: dict[str, Any], implemented: dict[str, Any]) -> None:
  """Refuses keys that have a value other than null and the implemented one."""
  for key, only in implemented.items():
    value = fields.get(key)
    if value is not None and value != only:
      raise ValueError(
        f'{key!r} is {value!r}, which changes what the model computes; only '
        f'{only!r} is implemented.'
      )
