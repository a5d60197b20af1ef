"""Which tensors an export has, in which file and dtype, and what tells it."""

import dataclasses
import json
import math
from typing import Any

import ml_dtypes
import numpy as np

from composer_jax.hf.tensors import files, names

# What `--dtype` may be, beside 'source'.
DTYPES = {
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
  'float16': np.dtype(np.float16),
  'float32': np.dtype(np.float32),
}
SOURCE = 'source'

# DeepSeek's own checkpoints keep it so, and rounding it would move choices.
_FLOAT32_ALWAYS = 'selection_bias/'
FILE_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
  """A tensor of a file to be written."""

  name: str
  dtype: str
  shape: tuple[int, ...]
  num_bytes: int
  is_carried: bool


def dtypes(
  table: names.Table, dtype: str, record: dict[str, Any] | None
) -> dict[str, np.dtype]:
  if dtype == SOURCE:
    assert record is not None
    return {name: files.DTYPES[record['tensors'][name][1]] for name in table}
  exact, plain = DTYPES['float32'], DTYPES[dtype]
  return {
    name: exact if t.parts[0].array.startswith(_FLOAT32_ALWAYS) else plain
    for name, t in table.items()
  }


def plan(
  table: names.Table,
  dtype_of: dict[str, np.dtype],
  record: dict[str, Any] | None,
  file_bytes: int,
) -> dict[str, list[FileEntry]]:
  """Returns {file: tensors in the order of its header}."""

  def ours(name: str) -> FileEntry:
    dtype, shape = dtype_of[name], table[name].shape
    return FileEntry(
      name=name,
      dtype=files.NAMES[dtype],
      shape=shape,
      num_bytes=math.prod(shape) * dtype.itemsize,
      is_carried=False,
    )

  def carried(name: str, entry: dict[str, Any]) -> FileEntry:
    first, last = entry['data_offsets']
    return FileEntry(
      name=name,
      dtype=entry['dtype'],
      shape=tuple(entry['shape']),
      num_bytes=last - first,
      is_carried=True,
    )

  if record is None:
    return _split([*map(ours, table)], file_bytes)
  found: dict[str, list[FileEntry]] = {}
  unmodelled = set(record['carried'])
  for file, header in record['files'].items():
    group = []
    for name, entry in header.items():
      # A packed weight stands for the whole; its scales are in it.
      whole = name if name in table else name.removesuffix('_packed')
      if name in unmodelled:
        group.append(carried(name, entry))
      elif whole in table:
        group.append(ours(whole))
    # Of a file of nothing but scales, nothing is left.
    if group or not header.keys() - {files.METADATA}:
      found[file] = group
  return found


def _split(
  entries: list[FileEntry], file_bytes: int
) -> dict[str, list[FileEntry]]:
  groups: list[list[FileEntry]] = []
  size = file_bytes
  for entry in entries:
    if size + entry.num_bytes > file_bytes:
      groups.append([])
      size = 0
    groups[-1].append(entry)
    size += entry.num_bytes
  if len(groups) == 1:
    return {files.SINGLE: groups[0]}
  n = len(groups)
  return {
    f'model-{i + 1:05}-of-{n:05}.safetensors': group
    for i, group in enumerate(groups)
  }


def header(
  entries: list[FileEntry], file: str, record: dict[str, Any] | None
) -> dict[str, Any]:
  """Returns the header of a file: the source's own where nothing differs."""
  theirs = (record or {'files': {}})['files'].get(file, {})
  metadata = theirs.get(files.METADATA, {'format': 'pt'})
  mine = files.new_header(
    [(e.name, e.dtype, e.shape, e.num_bytes) for e in entries],
    metadata if files.METADATA in theirs or not theirs else None,
  )

  def described(fields):
    return [
      (name, entry['dtype'], entry['shape'])
      for name, entry in fields.items()
      if name != files.METADATA
    ]

  return theirs if described(theirs) == described(mine) else mine


def header_text(
  file: str, fields: dict[str, Any], record: dict[str, Any] | None
) -> str | None:
  """Returns the source's own text of a header, None for the library's."""
  if record is None or fields != record['files'].get(file):
    return None
  return record['header_texts'].get(file)


def index(
  plan_of: dict[str, list[FileEntry]],
  headers: dict[str, dict[str, Any]],
  record: dict[str, Any] | None,
) -> str | None:
  """Returns the text of the index; None for a single file without one."""
  if record and headers == record['files']:
    return record['index']
  if list(plan_of) == [files.SINGLE]:
    return None
  places = {e.name: file for file, group in plan_of.items() for e in group}
  total = sum(e.num_bytes for group in plan_of.values() for e in group)
  fields = {'metadata': {'total_size': total}, 'weight_map': places}
  return json.dumps(fields, indent=2, sort_keys=True) + '\n'


def config_text(fields: dict[str, Any], dtype: str) -> bytes:
  """Returns a config.json of plain weights of a dtype."""
  places = [fields]
  if isinstance(fields.get('text_config'), dict):
    places.append(fields['text_config'])
  for place in places:
    place.pop('quantization_config', None)
    for key in ('dtype', 'torch_dtype'):
      if key in place and dtype != SOURCE:
        place[key] = dtype
  if dtype != SOURCE and 'torch_dtype' not in fields:
    fields['dtype'] = dtype
  return (json.dumps(fields, indent=2, ensure_ascii=False) + '\n').encode()
