"""Wrong values that look like right ones, for tests that must fail."""

import random
import string
from typing import Any


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
