"""Writes models as Hugging Face checkpoints, tensor by tensor.

An import that was not trained goes back byte for byte: names, order, dtypes,
split into files, headers. Weights that were quantised go out as plain bfloat16,
and trained ones in the dtype asked for, under a config.json without
`quantization_config`; with 'int4' those of an int4 source are int4 again, and
have the bytes of the source in groups whose values training has not changed.
Tensors that the import carried along go out as they were stored, so those of an
fp8 source are fp8 with their scales, which config.json does not say.

The folder appears whole: it is made within one beside it, and a killed export
begins anew. Memory holds one tensor and one chunk of the checkpoint, which is a
whole shard unless it was saved with smaller chunks.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from composer_jax.core import files
from composer_jax.hf import imported as hf_imported
from composer_jax.hf import importing, making
from composer_jax.hf.architecture import config as hf_config
from composer_jax.hf.tensors import blocks, int4, names, quantized, source
from composer_jax.hf.tensors import carried as hf_carried
from composer_jax.hf.tensors import files as hf_io
from composer_jax.hf.tensors import layout as hf_layout
from composer_jax.hf.tensors import stored as hf_stored
from composer_jax.models import config as model_config
from composer_jax.telemetry import progress
from composer_jax.train import workdir as workdirs
from composer_jax.train.checkpoints import manager

ROLES = 'composer_jax_roles.json'
_CONTENT = 'composer_jax_export'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
  """A model to export.

  Attributes:
    weights: directory of a `manager.Checkpoints`.
    family: one of `hf.tensors.names.FAMILIES`.
    imported: import directory that the model came from; None if it was
      pretrained here.
    is_trained: true if the weights differ from those imported.
    base: directory of the frozen weights, if `weights` has their adapters.
    roles: ids of the agent's protocol, some of which no token of the tokenizer
      has; None if nothing was trained on them.
  """

  weights: pathlib.Path
  config: model_config.ModelConfig
  family: str
  imported: pathlib.Path | None
  is_trained: bool
  base: pathlib.Path | None = None
  roles: dict[str, int] | None = None


def of_import(directory: str | os.PathLike) -> Origin:
  directory = pathlib.Path(directory)
  family = importing.read_record(directory)['family']
  fields = files.read_json(directory / importing.MODEL)
  return Origin(
    weights=directory / importing.WEIGHTS,
    config=model_config.ModelConfig.from_dict(fields),
    family=family,
    imported=directory,
    is_trained=False,
  )


def of_run(
  workdir: str | os.PathLike, stage: str | None, *, family: str | None
) -> Origin:
  """Returns a finished stage of a run as an origin, or raises a ValueError.

  `family` names the config.json to write; None is that of the import.
  """
  workdir = pathlib.Path(workdir)
  exports = workdir / 'exports'
  if stage is None or _latest_step(exports / stage) is None:
    stages = sorted(exports.iterdir()) if exports.is_dir() else []
    finished = [path.name for path in stages if _latest_step(path) is not None]
    problem = f'has no finished stage {stage!r}' if stage else 'needs --stage'
    raise ValueError(
      f'{workdir} is no import directory and {problem}; finished are '
      f'{finished}. Name one with --stage, or run it to its end.'
    )
  config = files.read_json(workdir / workdirs.CONFIG)
  imported, roles = config['initial'] or None, None
  if imported:
    hf_imported.check_identity(imported, config['imported'], workdir)
    roles = files.read_json(workdir / 'tokenizer.json')['roles']
    imported_as: str = importing.read_record(imported)['family']
    if family not in (None, imported_as):
      raise ValueError(
        f'The model was imported as {imported_as!r} from {imported}; leave out '
        f'--family={family}.'
      )
    family = imported_as
  elif family is None:
    raise ValueError(
      'A model that was not imported needs --family, one of '
      f'{names.FAMILIES}: whose config.json and names to write.'
    )
  model = model_config.ModelConfig.from_dict(config['model'])
  base = None
  if model.adapters.enabled and imported:
    base = pathlib.Path(imported) / importing.WEIGHTS
  return Origin(
    weights=exports / stage,
    config=model,
    family=family,
    imported=pathlib.Path(imported) if imported else None,
    base=base,
    is_trained=True,
    roles=roles,
  )


def _latest_step(weights: pathlib.Path) -> int | None:
  with contextlib.closing(_reader(weights)) as checkpoints:
    return checkpoints.latest_step()


def _reader(weights: pathlib.Path) -> manager.Checkpoints:
  # Not one that sweeps the directory, where a run may be writing.
  return manager.Checkpoints(weights, keep=None)


def write(
  origin: Origin,
  out: str | os.PathLike,
  *,
  dtype: str | None = None,
  file_bytes: int = hf_layout.FILE_BYTES,
) -> None:
  """Writes a Hugging Face checkpoint into a folder that must not exist.

  Args:
    dtype: key of `hf.tensors.layout.DTYPES`, 'source' for the dtype of each
      imported tensor, or 'int4' for that and the int4 of the source; None is
      'source' for an import and 'bfloat16' for a trained model. The selection
      bias is float32 unless it is as in the source.
    file_bytes: most bytes of a file, where the import's split is not kept.

  Raises:
    ValueError: `out` exists, or the weights are not the model's.
    manager.DamagedCheckpoint: the weights have changed since they were written.
    OSError: the disk is full or fails.
  """
  out = pathlib.Path(out).absolute()
  record = None
  if origin.imported is not None:
    record = importing.read_record(origin.imported)
  dtype = dtype or ('bfloat16' if origin.is_trained else hf_layout.SOURCE)
  if dtype in (hf_layout.SOURCE, hf_layout.INT4) and record is None:
    raise ValueError(
      f'--dtype={dtype} needs an imported model; choose one of '
      f'{[*hf_layout.DTYPES]}.'
    )
  packed = _packed(origin, record) if dtype == hf_layout.INT4 else {}
  prefix = record['prefix'] if record else ''
  table = names.tensors(origin.config, origin.family, prefix=prefix)
  if record:
    # Copies that the source does not have are not made.
    table = {
      name: tensor
      for name, tensor in table.items()
      if name in record['tensors'] or not names.original(name, table)
    }
  dtypes = hf_layout.dtypes(table, dtype, record)
  headers = hf_layout.headers(table, dtypes, record, file_bytes, packed)
  # Another suffix than that of imports, whose partial folders look alike.
  partial = out.with_name(out.name + '.exporting')
  making.check_absent(out)
  making.check_ours(partial, lambda name: name == _CONTENT)
  with contextlib.ExitStack() as stack:
    stored = stack.enter_context(_open(origin.weights))
    if origin.base is not None:
      frozen = stack.enter_context(_open(origin.base))
      stored = hf_stored.Merged(frozen, stored, origin.config)
    carried = None
    if origin.imported is not None and record:
      kept = [*record['carried'], *itertools.chain(*packed.values())]
      if kept:
        carried = hf_carried.open_carried(origin.imported, kept)
        stack.enter_context(carried)
    stack.enter_context(making.alone(partial, out))
    content = partial / _CONTENT
    if content.exists():
      shutil.rmtree(content)
    needed = sum(map(hf_layout.num_bytes, headers.values()))
    making.check_space(partial, needed)
    content.mkdir()
    index = hf_layout.index(headers, record)
    if index is not None:
      files.write_atomic(content / hf_io.INDEX, index.encode())
    writers = {}
    for file, header in headers.items():
      text = None
      if record and header == record['files'].get(file):
        text = record['header_texts'].get(file)
      path = content / file
      writers[file] = hf_io.SafetensorsWriter(path, header, text)
    trained = packed if origin.is_trained else {}
    _write_tensors(stored, table, dtypes, carried, writers, trained)
    _write_beside(origin, dtype, content)
    hf_io.sync_tree(content)
    making.place(content, out)


@contextlib.contextmanager
def _open(weights: pathlib.Path) -> Iterator[hf_stored.Stored]:
  with contextlib.closing(_reader(weights)) as checkpoints:
    step = checkpoints.latest_step()
    if step is None:
      raise ValueError(f'{weights} holds no checkpoint.')
    yield hf_stored.Stored(checkpoints, step)


def _write_tensors(
  stored: hf_stored.Stored | hf_stored.Merged,
  table: names.Table,
  dtypes: dict[str, np.dtype],
  carried: hf_io.Folder | None,
  writers: dict[str, hf_io.SafetensorsWriter],
  packed: dict[str, list[str]],
) -> None:
  whole = {part: name for name, parts in packed.items() for part in parts}
  num_tensors = sum(len(writer.tensors) for writer in writers.values())
  done = 0
  with progress.Progress('export', len(stored.shapes) + num_tensors) as bar:
    for name in stored.shapes:
      # Before any tensor is written, since a single piece has no hash.
      stored.verify(name)
      bar.update(done := done + 1, verified=name)
    for writer in writers.values():
      for name in writer.tensors:
        if name in table:
          _write_tensor(stored, table[name], dtypes[name], writer)
        elif name in whole and not name.endswith('_shape'):
          assert carried is not None
          values = _matrix(stored, table[whole[name]])
          parts = int4.packed(values, carried, packed[whole[name]])
          writer.write(name, hf_io.as_bytes(parts[name]), 0)
        else:
          assert carried is not None
          hf_carried.copy(carried, name, writer)
        bar.update(done := done + 1, written=name)
      writer.close()


def _packed(
  origin: Origin, record: dict[str, Any] | None
) -> dict[str, list[str]]:
  """Returns the stored names of the matrices that go out as int4."""
  packed = record and record.get('packed')
  if not packed:
    raise ValueError(
      f'--dtype={hf_layout.INT4} needs an import that has the codes of its '
      f'int4 weights; {origin.imported} has none. Import an int4 checkpoint '
      'again, or choose another --dtype.'
    )
  precision = origin.config.precision
  is_whole = precision.experts == 'int4' and not precision.first
  is_whole &= not precision.last
  others = [n for n in packed if not is_whole or '.experts.' not in n]
  if origin.is_trained and others:
    raise ValueError(
      f'--dtype={hf_layout.INT4} would round {others[0]}, which the run did '
      f'not train so: its model.precision is {precision}. Choose bfloat16, or '
      "train with experts='int4' in all layers, where only routed experts are "
      'int4 in the source.'
    )
  return packed


def _matrix(stored: Any, tensor: names.NamedTensor) -> np.ndarray:
  """Returns a tensor whole, in float32."""
  whole = np.empty(math.prod(tensor.shape), np.float32)
  for part in tensor.parts:
    chunk = blocks.chunk_shape(part, stored.dtypes[part.array].itemsize)
    for piece in blocks.pieces(part, chunk):
      values = stored.read(piece.array, piece.box).astype(np.float32)
      piece.put(values, whole[piece.start : piece.stop])
  return whole.reshape(tensor.shape)


def _write_tensor(
  stored: hf_stored.Stored | hf_stored.Merged,
  tensor: names.NamedTensor,
  dtype: np.dtype,
  writer: hf_io.SafetensorsWriter,
) -> None:
  """Writes a tensor piece by piece, or whole where its pieces interleave."""
  pieces: list[blocks.ArrayPiece] = []
  for part in tensor.parts:
    item_bytes = stored.dtypes[part.array].itemsize
    chunk = blocks.chunk_shape(part, item_bytes)
    pieces += blocks.pieces(part, chunk)
  is_split = all(piece.is_whole for piece in pieces)
  whole = np.empty(0 if is_split else math.prod(tensor.shape), dtype)
  for piece in pieces:
    values = stored.read(piece.array, piece.box)
    with np.errstate(over='ignore', invalid='ignore'):  # NaNs warn, too.
      block = values.astype(dtype, copy=False)
      overflows = (np.isinf(block) & ~np.isinf(values)).any()
    if overflows:
      raise ValueError(
        f'{tensor.name} holds values beyond the largest {dtype}, '
        f'{ml_dtypes.finfo(dtype).max}; choose another --dtype.'
      )
    if is_split:
      values = np.empty(piece.stop - piece.start, dtype)
      piece.put(block, values)
      start = piece.start * dtype.itemsize
      writer.write(tensor.name, hf_io.as_bytes(values), start)
    else:
      piece.put(block, whole[piece.start : piece.stop])
  if not is_split:
    writer.write(tensor.name, hf_io.as_bytes(whole))


def _write_beside(origin: Origin, dtype: str, partial: pathlib.Path) -> None:
  if origin.imported is None:
    fields = hf_config.to_hf(origin.config, origin.family)
  else:
    importing.copy_beside(origin.imported, partial)
    if origin.roles is not None:
      files.write_json(partial / ROLES, origin.roles)
    fields = files.read_json(origin.imported / source.CONFIG)
    is_same = dtype == hf_layout.SOURCE and quantized.scheme(fields) is None
    if is_same or dtype == hf_layout.INT4:
      return
  if origin.config.mtp is not None:
    own = fields.get('text_config', fields)
    own['num_nextn_predict_layers'] = origin.config.mtp.depth
  files.write_atomic(
    partial / source.CONFIG, hf_layout.config_text(fields, dtype)
  )
