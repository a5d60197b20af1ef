"""Checks of the fields of configs and records.

MoEConfig.num_active must be an integer of at least 1; got 0.
"""

import difflib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np


def _field(owner: Any, name: str) -> str:
  return f'{type(owner).__name__}.{name}'


def require(owner: Any, name: str, is_right: Any, rule: str) -> None:
  """Raises a ValueError with field, rule ('be positive') and value."""
  if not is_right:
    value = getattr(owner, name)
    raise ValueError(f'{_field(owner, name)} must {rule}; got {value!r}.')


def _is_integer(value: Any) -> bool:
  return isinstance(value, int | np.integer) and not isinstance(value, bool)


def at_least(owner: Any, lowest: int, *names: str) -> None:
  rule = f'be an integer of at least {lowest}'
  for name in names:
    value = getattr(owner, name)
    require(owner, name, _is_integer(value) and value >= lowest, rule)


def number(
  owner: Any, lowest: float, *names: str, highest: float = math.inf
) -> None:
  rule = f'be a number of at least {lowest:g}'
  if highest < math.inf:
    rule += f' and at most {highest:g}'
  for name in names:
    value = getattr(owner, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_right = is_number and math.isfinite(value)
    is_right = is_right and lowest <= value <= highest
    require(owner, name, is_right, rule)


def positive(owner: Any, *names: str) -> None:
  for name in names:
    value = getattr(owner, name)
    is_right = not isinstance(value, int | float) or value > 0
    require(owner, name, is_right, 'be positive')
  number(owner, 0, *names)


def boolean(owner: Any, *names: str) -> None:
  for name in names:
    is_right = isinstance(getattr(owner, name), bool)
    require(owner, name, is_right, 'be true or false')


def one_of(owner: Any, name: str, known: tuple[str, ...]) -> None:
  require(owner, name, getattr(owner, name) in known, f'be one of {known}')


def integers(owner: Any, *names: str) -> None:
  """Raises unless all elements of the fields are integers."""
  for name in names:
    values: Iterable[Any] = getattr(owner, name)
    require(owner, name, all(map(_is_integer, values)), 'hold integers')


def array(owner: Any, name: str, dtype: Any, *shape: int | None) -> None:
  """Raises unless a field is an array of a dtype; None fits any length."""
  value = getattr(owner, name)
  if not isinstance(value, np.ndarray) or value.dtype != dtype:
    got = getattr(value, 'dtype', type(value).__name__)
    raise ValueError(
      f'{_field(owner, name)} must be a numpy array of {np.dtype(dtype)}; got '
      f'{got}.'
    )
  fits = len(shape) == value.ndim and all(
    want in (None, have) for want, have in zip(shape, value.shape, strict=True)
  )
  if not fits:
    raise ValueError(
      f'{_field(owner, name)} has shape {value.shape}; {shape} is required.'
    )


def nearest(size: int, divisor: int) -> str:
  """Returns the positive multiples next to a size, for messages."""
  below = size - size % divisor
  return f'{below} or {below + divisor}' if below else f'{divisor}'


def divides(divisor: int, parts: str, size: int, what: str) -> None:
  """Raises a ValueError unless `what` divides into so many `parts`."""
  if size % divisor:
    raise ValueError(
      f'{what} ({size}) must divide by {parts} ({divisor}); the nearest that '
      f'does is {nearest(size, divisor)}.'
    )


def known_name(name: str, known: Any, where: str) -> None:
  """Raises a ValueError for an unknown name, with the most similar one."""
  if name in known:
    return
  close = difflib.get_close_matches(name, list(known), n=1)
  meant = f' Did you mean {close[0]}?' if close else ''
  raise ValueError(
    f'{where} has no field {name}.{meant} Its fields are '
    f'{", ".join(sorted(known))}.'
  )
