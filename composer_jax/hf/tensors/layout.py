"""Lays out an export: the tensors of each file, headers, index, config.json."""

import dataclasses
import json
import math
from typing import Any

import ml_dtypes
import numpy as np

from composer_jax.hf.tensors import files, names

# Values of `--dtype` beside 'source'.
DTYPES = {
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
  'float16': np.dtype(np.float16),
  'float32': np.dtype(np.float32),
}
SOURCE = 'source'

# DeepSeek's checkpoints store it in float32; rounding would change choices.
_FLOAT32_ALWAYS = 'selection_bias/'
FILE_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
  """A tensor of a file to be written.

  Attributes:
    name: name of the tensor.
    dtype: dtype as headers spell it.
    shape: shape of the tensor.
    num_bytes: size in the file.
    is_carried: true if it is copied unchanged from the import.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  num_bytes: int
  is_carried: bool


def dtypes(
  table: names.Table, dtype: str, record: dict[str, Any] | None
) -> dict[str, np.dtype]:
  """Returns the dtype of each tensor of the model.

  Args:
    table: tensors of the model.
    dtype: key of DTYPES, or SOURCE.
    record: `hf.json` of the import; None for a model that was not imported.
  """
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
  """Returns {file: tensors in the order of its header}.

  Args:
    table: tensors of the model.
    dtype_of: dtype of each of them.
    record: `hf.json` of the import, whose split into files is kept; None for a
      model that was not imported.
    file_bytes: most bytes of a file, where no split is kept.
  """

  def of_model(name: str) -> FileEntry:
    dtype, shape = dtype_of[name], table[name].shape
    return FileEntry(
      name=name,
      dtype=files.NAMES[dtype],
      shape=shape,
      num_bytes=math.prod(shape) * dtype.itemsize,
      is_carried=False,
    )

  if record is None:
    return _split([*map(of_model, table)], file_bytes)
  groups: dict[str, list[FileEntry]] = {}
  carried = set(record['carried'])
  for file, header in record['files'].items():
    group = []
    for name, entry in header.items():
      # A packed weight is exported whole, its scales folded in.
      whole = name if name in table else name.removesuffix('_packed')
      if name in carried:
        first, last = entry['data_offsets']
        group.append(
          FileEntry(
            name=name,
            dtype=entry['dtype'],
            shape=tuple(entry['shape']),
            num_bytes=last - first,
            is_carried=True,
          )
        )
      elif whole in table:
        group.append(of_model(whole))
    # A file that held nothing but scales has no tensor left to write.
    if group or not header.keys() - {files.METADATA}:
      groups[file] = group
  return groups


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
  n = len(groups)
  if n == 1:
    return {files.SINGLE: groups[0]}
  return {
    f'model-{i + 1:05}-of-{n:05}.safetensors': group
    for i, group in enumerate(groups)
  }


def header(
  entries: list[FileEntry], file: str, record: dict[str, Any] | None
) -> dict[str, Any]:
  """Returns the header of a file: that of the import where nothing differs."""
  imported = (record or {'files': {}})['files'].get(file, {})
  metadata = imported.get(
    files.METADATA, None if imported else {'format': 'pt'}
  )
  header = files.new_header(
    [(e.name, e.dtype, e.shape, e.num_bytes) for e in entries], metadata
  )
  described = [
    [
      (name, e['dtype'], e['shape'])
      for name, e in fields.items()
      if name != files.METADATA
    ]
    for fields in (imported, header)
  ]
  return imported if described[0] == described[1] else header


def header_text(
  file: str, fields: dict[str, Any], record: dict[str, Any] | None
) -> str | None:
  """Returns the import's text of a header; None for that of the library."""
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
