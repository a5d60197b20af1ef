"""Opens a Hugging Face checkpoint and checks it against its config.json.

All errors are found here, from config.json and the headers of the files, before
a reader allocates or writes anything.
"""

import dataclasses
import itertools
import os
import pathlib
from typing import Any

import numpy as np

from composer_jax.core import files
from composer_jax.hf.architecture import config as hf_config
from composer_jax.hf.tensors import blocks, names, quantized
from composer_jax.hf.tensors import files as hf_io
from composer_jax.models import config as model_config

CONFIG = 'config.json'

# Dtypes of weights, as stored or once dequantised.
_WEIGHTS = ('BF16', 'F16', 'F32')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceCheckpoint:
  """A checked checkpoint.

  Attributes:
    family: one of `hf.tensors.names.FAMILIES`.
    prefix: start of the names of the language model's tensors.
    table: blocks that each tensor of the model fills.
    tensors: tensors of the table, in the order of the files' bytes.
    carried: names of stored tensors that the model does not have.
    packed: of each int4 matrix the stored names of codes, scales and shape,
      which an import keeps, so that an export can have them again.
  """

  folder: hf_io.Folder
  fields: dict[str, Any]
  config: model_config.ModelConfig
  family: str
  prefix: str
  table: names.Table
  tensors: dict[str, quantized.ReadableTensor]
  carried: tuple[str, ...]
  packed: dict[str, tuple[str, ...]]

  @property
  def kept(self) -> tuple[str, ...]:
    """Names of stored tensors that an import has as they are."""
    return (*self.carried, *itertools.chain(*self.packed.values()))

  def arrays(self) -> dict[str, blocks.ChunkedArray]:
    """Returns all arrays; an array is float32 if its tensors' dtypes differ."""
    dtypes: dict[str, set[np.dtype]] = {}
    parts: dict[str, names.TensorPart] = {}
    for name, tensor in self.tensors.items():
      for part in self.table[name].parts:
        dtypes.setdefault(part.array, set()).add(tensor.dtype)
        parts[part.array] = part
    arrays = {}
    for name, shape in blocks.shapes(self.table).items():
      is_mixed = len(dtypes[name]) > 1
      dtype = np.dtype(np.float32) if is_mixed else dtypes[name].pop()
      chunk = blocks.chunk_shape(parts[name], dtype.itemsize)
      arrays[name] = blocks.ChunkedArray(shape=shape, dtype=dtype, chunk=chunk)
    return arrays

  def close(self) -> None:
    self.folder.close()


def open_source(
  path: str | os.PathLike, *, mtp: bool = False
) -> SourceCheckpoint:
  """Opens and checks a checkpoint; a ValueError names the key or tensor.

  Layers for multi-token prediction are heads of the model with `mtp`, and else
  carried.
  """
  path = pathlib.Path(path)
  if not (path / CONFIG).is_file():
    raise ValueError(
      f'{path} holds no {CONFIG}; it must be the folder of a Hugging Face '
      'checkpoint.'
    )
  fields = files.read_json(path / CONFIG)
  try:
    config, family, prefix = hf_config.from_hf(fields, mtp=mtp)
    quantized.scheme(fields)
  except ValueError as error:
    text = str(error).removeprefix(f'{CONFIG}: ')
    raise ValueError(f'{path / CONFIG}: {text}') from error
  folder = hf_io.Folder(path)
  table = names.tensors(config, family, prefix=prefix)
  stored = quantized.tensors(folder, fields, table)
  # Whether a checkpoint repeats what heads share is its own choice.
  table = {
    name: tensor
    for name, tensor in table.items()
    if name in stored or not names.original(name, table)
  }
  _check(path, stored, table, config, prefix)
  tensors = {name: t for name, t in stored.items() if name in table}
  used = {raw.name for t in tensors.values() for raw in t.raws}
  return SourceCheckpoint(
    folder=folder,
    fields=fields,
    config=config,
    family=family,
    prefix=prefix,
    table=table,
    tensors=tensors,
    carried=tuple(name for name in folder.tensors if name not in used),
    packed={
      name: tuple(raw.name for raw in t.raws)
      for name, t in tensors.items()
      if len(t.raws) == 3
    },
  )


def _check(
  path: pathlib.Path,
  stored: dict[str, quantized.ReadableTensor],
  table: names.Table,
  config: model_config.ModelConfig,
  prefix: str,
) -> None:
  """Raises unless the stored tensors are those of the table, or harmless."""
  if missing := [name for name in table if name not in stored]:
    cure = f'Fetch the missing files, or correct {CONFIG}.'
    if any(name.endswith('.experts.gate_up_proj') for name in stored):
      cure = (
        'Its experts are stacked as transformers holds them in memory; save it '
        'with a matrix for each expert: save_original_format=True.'
      )
    raise ValueError(
      f'{path} lacks {len(missing)} tensors that its {CONFIG} calls for, the '
      f'first is {missing[0]}. {cure}'
    )
  if extra := names.contradicting(stored, table, config, prefix=prefix):
    raise ValueError(
      f'{path / stored[extra[0]].raws[0].file} holds {extra[0]}, which a model '
      f'of this {CONFIG} does not have ({len(extra)} such tensors): the two do '
      'not belong together.'
    )
  for name, tensor in table.items():
    raw = stored[name].raws[0]
    if stored[name].shape != tensor.shape:
      raise ValueError(
        f'{name} in {path / raw.file} has shape {stored[name].shape}; '
        f'{CONFIG} calls for {tensor.shape}.'
      )
    if hf_io.NAMES.get(stored[name].dtype) not in _WEIGHTS:
      raise ValueError(
        f'{name} in {path / raw.file} is {raw.dtype}; weights are read as '
        f'{", ".join(_WEIGHTS)}, or as a quantization_config of {CONFIG} says.'
      )
