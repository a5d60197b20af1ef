"""What fields of configs must be; each error names class, field and value."""

import math
from typing import Any


def at_least(config: Any, lowest: int, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
      raise ValueError(
        f'{type(config).__name__}.{name} must be an integer of at least '
        f'{lowest}, not {value!r}.'
      )


def boolean(config: Any, *names: str) -> None:
  for name in names:
    if not isinstance(getattr(config, name), bool):
      raise ValueError(
        f'{type(config).__name__}.{name} must be true or false, not '
        f'{getattr(config, name)!r}.'
      )


def number(config: Any, lowest: float, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < lowest:
      raise ValueError(
        f'{type(config).__name__}.{name} must be a number of at least '
        f'{lowest:g}, not {value!r}.'
      )


def positive(config: Any, *names: str) -> None:
  number(config, 0, *names)
  for name in names:
    if not getattr(config, name) > 0:
      raise ValueError(
        f'{type(config).__name__}.{name} must be positive, not '
        f'{getattr(config, name)!r}.'
      )


def one_of(config: Any, name: str, known: tuple[str, ...]) -> None:
  if getattr(config, name) not in known:
    raise ValueError(f'{name} {getattr(config, name)!r} is not one of {known}.')
