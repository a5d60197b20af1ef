"""Results of a study: a file of few lines, each of many rows.

A row is one step, task or case, with its fields by name. Rows that belong
together are one line: what they have in common as values, the rest as lists,
which `columns` names; null stands where a row lacks a field.
"""

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import flags

from composer_jax.core import files
from composer_jax.telemetry import append, writer

Row = dict[str, Any]


def read(folder: str | os.PathLike) -> list[Row]:
  """Returns all rows, line by line; none if the folder does not exist."""
  rows = []
  for line in writer.read(pathlib.Path(folder) / writer.METRICS):
    columns = line.pop('columns', None)
    if columns is None:
      rows.append(line)
      continue
    lists = {name: line.pop(name) for name in columns}
    for values in zip(*lists.values(), strict=True):
      fields = zip(lists, values, strict=True)
      rows.append({**line, **{k: v for k, v in fields if v is not None}})
  return rows


def write(
  folder: str | os.PathLike, rows: Iterable[Row], by: Sequence[str]
) -> None:
  """Replaces the file; rows that agree in the fields `by` form one line."""
  path = pathlib.Path(folder) / writer.METRICS
  files.write_atomic(path, _text(rows, by))


def add(
  folder: str | os.PathLike, rows: Iterable[Row], by: Sequence[str]
) -> None:
  """Appends lines, all or none; safe beside other processes that append."""
  path = pathlib.Path(folder) / writer.METRICS
  append.AppendFile(path, 'results').append(_text(rows, by))


def tabulate(
  study: pathlib.Path, table: Callable[[list[Row]], str]
) -> list[Row]:
  """Writes table.md of a study's rows, prints it, and returns the rows."""
  rows = read(study / 'results')
  text = table(rows)
  (study / 'table.md').write_text(text)
  print(text)
  return rows


def define_arms(arms: Iterable[str]) -> flags.FlagHolder:
  """Defines --arms, a list of some of a study's arms; all by default."""
  names = ', '.join(arms)
  flag = flags.DEFINE_list('arms', list(arms), f'Arms to run, of {names}.')
  flags.register_validator(
    flag, lambda chosen: set(chosen) <= set(arms), f'must be some of {names}.'
  )
  return flag


def _text(rows: Iterable[Row], by: Sequence[str]) -> bytes:
  groups: dict[tuple, list[Row]] = {}
  for row in rows:
    groups.setdefault(tuple(row.get(name) for name in by), []).append(row)
  return b''.join(_line(group) for group in groups.values())


def _line(rows: list[Row]) -> bytes:
  fields = {name: None for row in rows for name in row}
  lists = {name: [row.get(name) for row in rows] for name in fields}
  common = {k: v[0] for k, v in lists.items() if v.count(v[0]) == len(v)}
  line = rows[0]
  if len(rows) > 1:
    # Equal rows without columns could not be counted, so they get one.
    varying = [k for k in lists if k not in common] or [next(iter(fields))]
    line = {**common, **{k: lists[k] for k in varying}, 'columns': varying}
  # Numpy's numbers and arrays become JSON's.
  return (json.dumps(line, default=lambda v: v.tolist()) + '\n').encode()
