"""What fields of configs and records must be; errors name field and value."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np


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


def array(name: str, value: Any, dtype: Any, shape: tuple) -> None:
  """Raises a ValueError that names the field unless dtype and shape match.

  Args:
    name: the field, for the message.
    value: to check.
    dtype: the numpy dtype required.
    shape: required lengths; None accepts any length along that axis.
  """
  if not isinstance(value, np.ndarray) or value.dtype != dtype:
    found = getattr(value, 'dtype', type(value).__name__)
    raise ValueError(
      f'{name} must be a numpy array of {np.dtype(dtype)}, not {found}.'
    )
  fits = len(shape) == value.ndim and all(
    want is None or want == have
    for want, have in zip(shape, value.shape, strict=True)
  )
  if not fits:
    raise ValueError(f'{name} has shape {value.shape}; {shape} is required.')


def integers(name: str, values: Iterable[Any]) -> None:
  """Raises a ValueError that names the field and what is no integer."""
  for value in values:
    is_integer = isinstance(value, int | np.integer)
    if isinstance(value, bool) or not is_integer:
      raise ValueError(f'{name} must be integer, not {value!r}.')
