"""Nested dictionaries of JSON values, as flat ones with dotted keys."""

from typing import Any


def flatten(value: Any, prefix: str = '') -> dict[str, Any]:
  """Returns {'a.b.c': leaf}; lists and empty dictionaries are leaves."""
  if not isinstance(value, dict) or not value:
    return {prefix: value}
  flat = {}
  for key, inner in value.items():
    flat |= flatten(inner, f'{prefix}.{key}' if prefix else str(key))
  return flat
