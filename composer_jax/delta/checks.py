"""Checks of what other processes wrote: types and bounds, one by one."""

import dataclasses
import re
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from composer_jax.delta import grid as grids
from composer_jax.delta import identity

_RUN_ID = re.compile('[A-Za-z0-9][A-Za-z0-9._-]{0,127}')
_MAX_NAME = 1024
NO_FIELDS: Mapping[str, Any] = types.MappingProxyType({})


def require(condition: bool | np.bool, what: str) -> None:
  if not condition:
    raise ValueError(f'a bundle has an invalid {what}.')


def run_id(value: Any) -> None:
  if not (isinstance(value, str) and _RUN_ID.fullmatch(value)):
    raise ValueError(
      f'run_id {value!r:.200} must be 1 to 128 letters, digits, ".", "_" or '
      '"-", and begin with a letter or digit.'
    )


def parse(
  data: bytes, record: type, idle: Mapping[str, Any] = NO_FIELDS
) -> dict[str, Any]:
  """Returns the fields of a record that is in canonical JSON."""
  return fields_of(identity.parse_canonical(data), record, idle)


def fields_of(
  value: Any, record: type, idle: Mapping[str, Any] = NO_FIELDS
) -> dict[str, Any]:
  """Returns it, if a record is made of it; the record checks the types.

  Args:
    value: what JSON had.
    record: what it is to become.
    idle: fields of the format that the record has no use for, and the one
      value that each must have.
  """
  names = {f.name for f in dataclasses.fields(record)} | idle.keys()
  good = isinstance(value, dict) and value.keys() == names
  require(good, f'{record.__name__}: its fields must be {sorted(names)}')
  for name, empty in idle.items():
    if value[name] != empty:
      raise ValueError(
        f'a bundle of an older version: its {name} is {value[name]!r:.99} and '
        f'must be {empty!r}; publish the weights again.'
      )
  return {name: value[name] for name in value if name not in idle}


def items(value: Any, what: str) -> list:
  require(isinstance(value, list), f'list of {what}')
  return value


def tensor(name: Any, dtype: Any, shape: Any) -> None:
  good = isinstance(name, str) and 0 < len(name) <= _MAX_NAME
  require(good and name.isprintable(), f'tensor name {name!r:.200}')
  good = isinstance(dtype, str) and dtype in identity.DTYPES
  require(good, f'dtype {dtype!r:.200} of {name!r}')
  good = isinstance(shape, list | tuple) and len(shape) <= grids.MAX_RANK
  require(good and all(map(identity.is_count, shape)), f'shape of {name!r}')
  # A zero makes an array empty but must not hide a product beyond int64.
  require(num_elements([n or 1 for n in shape]) < 2**63, f'shape of {name!r}')


def num_elements(shape) -> int:
  size = 1
  for n in shape:
    size *= n
  return size


def start(is_key: bool, version: Any, base_version: Any, what: str) -> None:
  """What a bundle starts from: nothing, or an earlier version."""
  require(identity.is_count(version), f'version {version!r:.99} of {what}')
  if is_key:
    require(base_version is None, f'base of {what}: a keyframe has none')
    return
  good = identity.is_count(base_version) and base_version < version
  rule = f'which must be before version {version}'
  require(good, f'base version {base_version!r:.99} of {what}, {rule}')
