"""Hugging Face checkpoints as checkpoints or variables of ours.

An import directory holds model.json (the ModelConfig), hf.json (what the
source was, for the way back), config.json and the tokenizer's files as they
came, weights/ (a `manager.Checkpoints` of step 0, in the dtypes of the source)
and carried/ (tensors that the model does not have). It appears whole: until
then everything is in the folder beside it with '.partial' in its name, where
the same command goes on after a kill.

No array is ever held: a piece of a tensor is read, transposed and written.
"""

import contextlib
import errno
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from composer_jax.checkpoint import (
  hf_blocks,
  hf_carried,
  hf_cast,
  hf_io,
  hf_names,
  hf_quantized,
  hf_source,
  hf_staging,
  hf_stored,
  manager,
)
from composer_jax.core import files, trees
from composer_jax.models import config as model_config
from composer_jax.telemetry import progress

MODEL = 'model.json'
RECORD = 'hf.json'
WEIGHTS = 'weights'
UNMODELLED = ('carry', 'refuse')

# Beside a checkpoint's tensors: the tokenizer and its chat template, defaults
# of generation, and the code that some configs name.
_COPIED = ('*.json', '*.jinja', '*.txt', '*.model', '*.tiktoken', '*.py')

# Of one array: tensors and what each contributes.
_Parts = list[tuple[hf_quantized.Tensor, hf_names.Part]]

_STAGING = 'staging'
_IDENTITY = 'source.json'
_DISK_MARGIN = 64 * 2**20


def convert(
  source: str | os.PathLike,
  out: str | os.PathLike,
  *,
  unmodelled: str = 'carry',
) -> None:
  """Writes an import directory, or goes on where a killed call stopped.

  Args:
    source: folder of a Hugging Face checkpoint.
    out: the import directory; must not exist.
    unmodelled: 'carry' keeps tensors that the model does not have as they are,
      'refuse' makes them an error.

  Raises:
    ValueError: the source is not sound or not supported, `out` exists, or its
      partial conversion is of another source. Nothing has been written.
    OSError: too little space, or the disk refuses.
  """
  out = pathlib.Path(out).absolute()
  with contextlib.closing(hf_source.open_source(source)) as found:
    arrays = _arrays(found)
    _check_unmodelled(found, unmodelled)
    partial = out.with_name(out.name + '.partial')
    _check_destination(found, arrays, out, partial)
    hf_carried.show(found)
    with files.alone(partial):
      files.sweep(partial)
      _claim(found, arrays, partial)
      # Orbax gives a checkpoint its number by a rename, when it is whole.
      if not (partial / WEIGHTS / '0').exists():
        _write_weights(found, arrays, partial)
      for name in found.folder.headers:
        hf_carried.carry(found, name, partial / hf_carried.FOLDER)
      _write_records(found, partial)
      shutil.rmtree(partial / _STAGING, ignore_errors=True)
      (partial / _IDENTITY).unlink()
      hf_io.sync_tree(partial)
    (partial / 'lock').unlink()
    os.replace(partial, out)
    files.fsync_directory(out.parent)


def _arrays(source: hf_source.Source) -> dict[str, hf_staging.Array]:
  dtypes, chunks = source.dtypes(), source.chunks()
  return {
    name: hf_staging.Array(shape=shape, dtype=dtypes[name], chunk=chunks[name])
    for name, shape in hf_blocks.shapes(source.table).items()
  }


def _check_unmodelled(source: hf_source.Source, unmodelled: str) -> None:
  if unmodelled not in UNMODELLED:
    raise ValueError(f'unmodelled {unmodelled!r} is not one of {UNMODELLED}.')
  if unmodelled == 'refuse' and source.carried:
    raw = source.folder.tensors[source.carried[0]]
    raise ValueError(
      f'{source.folder.path / raw.file} holds {raw.name}, which is not '
      f'modelled ({len(source.carried)} such tensors); --unmodelled=carry '
      'keeps them for exports.'
    )


def _check_destination(
  source: hf_source.Source,
  arrays: dict[str, hf_staging.Array],
  out: pathlib.Path,
  partial: pathlib.Path,
) -> None:
  """Raises before anything is written if it would be in vain."""
  if out.exists():
    raise ValueError(f'{out} exists; choose another --out, or delete it.')
  there = (p for p in partial.rglob('*') if p.is_file())
  done = {p.stat().st_ino: p.stat().st_size for p in there}
  needed = _DISK_MARGIN - sum(done.values())
  for array in arrays.values():
    grid = zip(array.shape, array.chunk, strict=True)
    padded = math.prod(-(-n // c) * c for n, c in grid)
    needed += padded * array.dtype.itemsize
  needed += sum(source.folder.tensors[n].num_bytes for n in source.carried)
  parent = next(p for p in out.parents if p.exists())
  free = shutil.disk_usage(parent).free
  if free < needed:
    raise OSError(
      errno.ENOSPC,
      f'The import needs {needed} bytes more and {free} are free; free space '
      'or choose another --out',
      str(parent),
    )


def _claim(
  source: hf_source.Source,
  arrays: dict[str, hf_staging.Array],
  partial: pathlib.Path,
) -> None:
  """Binds a partial import to what it is of, or checks that it is bound.

  Between the deletion of this file and the last rename nothing else is left to
  do, and doing it again is harmless.
  """
  identity = {
    'files': source.folder.identity(),
    'config': source.fields,
    'chunks': {name: list(array.chunk) for name, array in arrays.items()},
  }
  path = partial / _IDENTITY
  if not path.exists():
    files.write_json(path, identity)
  elif files.read_json(path) != identity:
    raise ValueError(
      f'{partial} was begun from another checkpoint, or that has changed '
      'since. Delete that folder to start over.'
    )


def _write_weights(
  source: hf_source.Source,
  arrays: dict[str, hf_staging.Array],
  partial: pathlib.Path,
) -> None:
  staging = hf_staging.Staging(partial / _STAGING, arrays)
  start = len(staging.done)
  if start:
    print(f'Going on after {start} of {len(source.tensors)} tensors.')
  with progress.Progress('import', len(source.tensors), start=start) as bar:
    done_bytes = 0
    for name, tensor in source.tensors.items():
      if name in staging.done:
        continue
      staging.begin(name)
      for piece, block in _blocks(source, name, tensor, arrays):
        staging.write(name, piece.array, [a for a, _ in piece.box], block)
        done_bytes += block.nbytes
      staging.finish()
      start += 1
      bar.update(start, GB=done_bytes / 1e9)
  staging.save(partial / WEIGHTS)
  staging.remove()


def _blocks(
  source: hf_source.Source,
  name: str,
  tensor: hf_quantized.Tensor,
  arrays: dict[str, hf_staging.Array],
) -> Iterator[tuple[hf_blocks.Piece, np.ndarray]]:
  for part in source.table[name].parts:
    array = arrays[part.array]
    for piece in hf_blocks.pieces(part, array.chunk):
      values = piece.of(tensor.read(piece.start, piece.stop))
      block = hf_blocks.contiguous(values)
      yield piece, hf_cast.cast(block, array.dtype)


def copied(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files beside the tensors that imports and exports keep."""
  found = {path for pattern in _COPIED for path in folder.glob(pattern)}
  ours = {hf_io.INDEX, MODEL, RECORD}
  return sorted(p for p in found if p.is_file() and p.name not in ours)


def _write_records(source: hf_source.Source, partial: pathlib.Path) -> None:
  folder = source.folder
  for path in copied(folder.path):
    files.write_atomic(partial / path.name, path.read_bytes())
  files.write_json(partial / MODEL, source.config.to_dict())
  record = {
    'family': source.family,
    'prefix': source.prefix,
    'expert_layout': source.expert_layout,
    'quantization': source.fields.get('quantization_config'),
    'index': folder.index,
    'files': folder.headers,
    # Where each tensor of the model came from, and as what it was read.
    'tensors': {
      name: [t.raws[0].file, hf_io.NAMES[t.dtype]]
      for name, t in source.tensors.items()
    },
    'carried': list(source.carried),
  }
  # Unsorted: the order of a header is part of what it says.
  text = json.dumps(record, indent=1, ensure_ascii=False)
  files.write_atomic(partial / RECORD, text.encode())


def verify(source: str | os.PathLike, out: str | os.PathLike) -> None:
  """Compares every value of an import directory with its source.

  Raises:
    ValueError: names the tensor that differs.
  """
  with (
    contextlib.closing(hf_source.open_source(source)) as found,
    contextlib.closing(open_weights(out)) as weights,
    progress.Progress('verify', len(found.tensors)) as bar,
  ):
    stored = hf_stored.Stored(weights, 0)
    arrays = _arrays(found)
    for done, (name, tensor) in enumerate(found.tensors.items()):
      for piece, block in _blocks(found, name, tensor, arrays):
        values = np.ascontiguousarray(stored.read(piece.array, piece.box))
        if hf_io.as_bytes(values) != hf_io.as_bytes(block):
          raise ValueError(
            f'{piece.array} of {out} differs from {name} of {source}; import '
            'it again.'
          )
      bar.update(done + 1)


def load_variables(out: str | os.PathLike, like: Any) -> Any:
  """Restores and verifies the weights of an import directory.

  Args:
    out: the directory.
    like: tree of `jax.ShapeDtypeStruct` with shardings; float32 masters come
      from weights of any dtype.

  Raises:
    ValueError: it holds other arrays, or is damaged.
  """
  flat = trees.flatten_names(like)
  with contextlib.closing(open_weights(out)) as weights:
    stored = weights.record(0)['arrays']
    as_stored = {
      name: jax.ShapeDtypeStruct(
        leaf.shape,
        stored[name]['dtype'] if name in stored else leaf.dtype,
        sharding=leaf.sharding,
      )
      for name, leaf in flat.items()
    }
    restored, _ = weights.restore(0, as_stored)
  # One by one, so that at most one array exists twice.
  cast = [restored.pop(n).astype(leaf.dtype) for n, leaf in flat.items()]
  return jax.tree.unflatten(jax.tree.structure(like), cast)


def open_weights(out: str | os.PathLike) -> manager.Checkpoints:
  """Opens the weights of an import directory, which must be whole."""
  out = pathlib.Path(out)
  if not (out / RECORD).is_file():
    raise ValueError(
      f'{out} is not an import directory (it has no {RECORD}); make one with '
      '`python -m experiments.hf_import`.'
    )
  return manager.Checkpoints(
    out / WEIGHTS, keep=1, fallback='the Hugging Face checkpoint'
  )


def load_sharded(
  source: hf_source.Source,
  config: model_config.ModelConfig,
  shardings: Any,
  *,
  dtype: np.dtype | None = None,
) -> Any:
  """Reads a Hugging Face checkpoint into sharded arrays, without a checkpoint.

  Each process reads what its devices hold, and assembles one shard at a time
  on its host.

  Args:
    source: from `hf_source.open_source`.
    config: of the model; may differ from the source's in what has no weights.
    shardings: tree of `jax.sharding.Sharding`, one for each array.
    dtype: of all arrays; None keeps those of the source.

  Raises:
    ValueError: the tree names other arrays than the source has.
  """
  shapes = hf_blocks.shapes(
    hf_names.tensors(
      config,
      source.family,
      expert_layout=source.expert_layout,
      prefix=source.prefix,
    )
  )
  arrays, flat = _arrays(source), trees.flatten_names(shardings)
  have = {name: array.shape for name, array in arrays.items()}
  differing = sorted(
    {n for n in have | shapes if have.get(n) != shapes.get(n)}
    | (flat.keys() ^ shapes.keys())
  )
  if differing:
    name = differing[0]
    raise ValueError(
      f'{source.folder.path} and the model differ in {len(differing)} arrays, '
      f'the first is {name} ({have.get(name)} there, {shapes.get(name)} in the '
      f'model, {"placed" if name in flat else "not placed"} by the shardings).'
    )
  parts: dict[str, _Parts] = {}
  for name in source.tensors:
    for part in source.table[name].parts:
      parts.setdefault(part.array, []).append((source.tensors[name], part))
  leaves = [
    _place(parts[name], arrays[name], sharding, dtype or arrays[name].dtype)
    for name, sharding in flat.items()
  ]
  return jax.tree.unflatten(jax.tree.structure(shardings), leaves)


def _place(
  parts: _Parts,
  array: hf_staging.Array,
  sharding: jax.sharding.Sharding,
  dtype: np.dtype,
) -> jax.Array:
  devices: dict[hf_blocks.Box, list] = {}
  places = sharding.addressable_devices_indices_map(array.shape)
  for device, index in places.items():
    assert index is not None, device  # It is None for devices elsewhere.
    ends = zip(index, array.shape, strict=True)
    box = tuple(s.indices(n)[:2] for s, n in ends)
    devices.setdefault(box, []).append(device)
  shards = []
  for box, holders in devices.items():
    shard = _assemble(parts, array, box, dtype)
    shards += [jax.device_put(shard, device) for device in holders]
  return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _assemble(
  parts: _Parts, array: hf_staging.Array, box: hf_blocks.Box, dtype: np.dtype
) -> np.ndarray:
  """Reads a box of an array, from those of its parts that touch it."""
  shard = hf_blocks.empty(tuple(stop - start for start, stop in box), dtype)
  for tensor, part in parts:
    for piece in hf_blocks.pieces(part, array.chunk, box):
      ends = zip(piece.box, box, strict=True)
      place = tuple(slice(a - c, b - c) for (a, b), (c, _) in ends)
      values = piece.of(tensor.read(piece.start, piece.stop))
      shard[place] = hf_cast.cast(hf_blocks.contiguous(values), dtype)
  return shard
