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
  found = {}
  for name, tensor in table.items():
    if dtype == SOURCE:
      assert record is not None
      # The other layout of experts has no source; one dtype serves them all.
      known = record['tensors']
      spelt = known[name][1] if name in known else _expert_dtype(known)
      found[name] = files.DTYPES[spelt]
    elif tensor.parts[0].array.startswith(_FLOAT32_ALWAYS):
      found[name] = DTYPES['float32']
    else:
      found[name] = DTYPES[dtype]
  return found


def _expert_dtype(known: dict[str, list[str]]) -> str:
  found = {dtype for name, (_, dtype) in known.items() if '.experts.' in name}
  if len(found) != 1:
    raise ValueError(
      f'The experts have dtypes {sorted(found)}; with another --expert_layout '
      f'--dtype must be one of {[*DTYPES]}.'
    )
  return found.pop()


def plan(
  table: names.Table,
  dtype_of: dict[str, np.dtype],
  record: dict[str, Any] | None,
  layout: str,
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

  found: dict[str, list[FileEntry]] = {}
  unmodelled = set(record['carried']) if record else set()
  extra = []
  for file, header in record['files'].items() if record else ():
    found[file] = []
    for name, entry in header.items():
      # A packed weight stands for the whole; its scales are in it.
      whole = name if name in table else name.removesuffix('_packed')
      if name in unmodelled:
        extra.append(carried(name, entry))
        found[file].append(extra[-1])
      elif whole in table:
        found[file].append(ours(whole))
  if record and layout == record['expert_layout']:
    # Of a file of nothing but scales, nothing is left.
    return {
      file: group
      for file, group in found.items()
      if group or not record['files'][file].keys() - {files.METADATA}
    }
  return _split([*map(ours, table), *extra], file_bytes)


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
