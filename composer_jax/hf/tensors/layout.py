"""Lays out an export: the files with their headers, the index, config.json."""

import itertools
import json
import math
from typing import Any

import ml_dtypes
import numpy as np

from composer_jax.hf.tensors import files, names

# Values of `--dtype` beside 'source' and 'int4'.
DTYPES = {
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
  'float16': np.dtype(np.float16),
  'float32': np.dtype(np.float32),
}
SOURCE = 'source'
# The source's dtypes, and its int4 matrices as such.
INT4 = 'int4'

# DeepSeek's checkpoints store it in float32; rounding would change choices.
_FLOAT32_ALWAYS = 'selection_bias/'
FILE_BYTES = 5 * 10**9
_ADDED = 'model-mtp.safetensors'  # what an import did not have

_Entry = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, bytes


def dtypes(
  table: names.Table, dtype: str, record: dict[str, Any] | None
) -> dict[str, np.dtype]:
  """Returns the dtype of each tensor of the model.

  Args:
    dtype: key of DTYPES, SOURCE, or INT4.
    record: `hf.json` of the import; None for a model that was not imported.
  """
  if dtype in (SOURCE, INT4):
    assert record is not None
    stored = record['tensors']
    # Heads that the source has not are in the dtype of its embedding.
    _, default = next(iter(stored.values()))
    return {
      name: files.DTYPES[stored.get(name, (None, default))[1]] for name in table
    }
  exact, plain = DTYPES['float32'], DTYPES[dtype]
  return {
    name: exact if _FLOAT32_ALWAYS in t.parts[0].array else plain
    for name, t in table.items()
  }


def headers(
  table: names.Table,
  dtype_of: dict[str, np.dtype],
  record: dict[str, Any] | None,
  file_bytes: int,
  packed: dict[str, list[str]],
) -> dict[str, dict[str, Any]]:
  """Returns {file: header}; an unchanged file has the import's own header.

  Args:
    record: `hf.json` of the import, whose split into files is kept; None for a
      model that was not imported.
    file_bytes: most bytes of a file, where no split is kept.
    packed: stored names of each matrix that is exported as int4.
  """
  entries: dict[str, _Entry] = {}
  for name, tensor in table.items():
    num_bytes = math.prod(tensor.shape) * dtype_of[name].itemsize
    dtype = files.NAMES[dtype_of[name]]
    entries[name] = (name, dtype, tensor.shape, num_bytes)
  if record is None:
    groups = _split([*entries.values()], file_bytes)
    return {
      file: files.new_header(group, {'format': 'pt'})
      for file, group in groups.items()
    }
  for name in packed:
    del entries[name]
  carried = {*record['carried'], *itertools.chain(*packed.values())}
  for header in record['files'].values():
    for name in header.keys() & carried:
      entry = header[name]
      first, last = entry['data_offsets']
      entries[name] = (name, entry['dtype'], entry['shape'], last - first)
  exported = {}
  for file, header in record['files'].items():
    # A packed weight is exported whole, its scales folded in.
    whole = [n if n in entries else n.removesuffix('_packed') for n in header]
    group = [entries[name] for name in whole if name in entries]
    new = files.new_header(group, header.get(files.METADATA))
    # A file that held nothing but scales has no tensor left to write.
    if group or not header.keys() - {files.METADATA}:
      exported[file] = header if _content(header) == _content(new) else new
  placed = {name for header in exported.values() for name in header}
  # Heads that the source has not.
  if added := [entry for name, entry in entries.items() if name not in placed]:
    exported[_ADDED] = files.new_header(added, {'format': 'pt'})
  return exported


def _content(header: dict[str, Any]) -> list[Any]:
  """Returns a header without the offsets of tensors."""
  return [
    (name, entry['dtype'], list(entry['shape']))
    for name, entry in header.items()
    if name != files.METADATA
  ]


def _split(entries: list[_Entry], file_bytes: int) -> dict[str, list[_Entry]]:
  groups: list[list[_Entry]] = []
  size = file_bytes
  for entry in entries:
    if size + entry[-1] > file_bytes:
      groups.append([])
      size = 0
    groups[-1].append(entry)
    size += entry[-1]
  n = len(groups)
  if n == 1:
    return {files.SINGLE: groups[0]}
  return {
    f'model-{i + 1:05}-of-{n:05}.safetensors': group
    for i, group in enumerate(groups)
  }


def index(
  headers: dict[str, dict[str, Any]], record: dict[str, Any] | None
) -> str | None:
  """Returns the text of the index; None for a single file without one."""
  if record and headers == record['files']:
    return record['index']
  if list(headers) == [files.SINGLE]:
    return None
  places = {name: f for f, header in headers.items() for name in header}
  places.pop(files.METADATA, None)
  total = sum(num_bytes(header) for header in headers.values())
  fields = {'metadata': {'total_size': total}, 'weight_map': places}
  return json.dumps(fields, indent=2, sort_keys=True) + '\n'


def num_bytes(header: dict[str, Any]) -> int:
  """Returns the size of all tensors of a file."""
  return max(
    (e['data_offsets'][1] for n, e in header.items() if n != files.METADATA),
    default=0,
  )


def config_text(fields: dict[str, Any], dtype: str) -> bytes:
  """Returns a config.json without quantisation, for weights of a dtype."""
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
