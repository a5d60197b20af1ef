"""Converts Hugging Face checkpoints to import directories, and loads those.

An import directory holds model.json (the ModelConfig), hf.json (files and names
of the source, for the way back), config.json and the tokenizer's files as they
came, weights/ (a `manager.Checkpoints` of step 0, in the dtypes of the source)
and carried/ (tensors that the model does not have, and codes of int4). It
appears whole. Until then its content is in a folder beside it, with '.partial'
in its name, where the same command continues after a kill; source.fingerprint
in that folder prevents a mixture of two sources.

No array is ever held: a piece of a tensor is read, transposed and written.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from composer_jax.core import files, trees
from composer_jax.hf import making
from composer_jax.hf import staging as hf_staging
from composer_jax.hf.architecture import config
from composer_jax.hf.tensors import blocks, carried
from composer_jax.hf.tensors import files as hf_io
from composer_jax.hf.tensors import names as hf_names
from composer_jax.hf.tensors import source as hf_source
from composer_jax.telemetry import progress
from composer_jax.train.checkpoints import manager

MODEL = 'model.json'
RECORD = 'hf.json'
WEIGHTS = 'weights'

# Copied beside the tensors: the tokenizer and its chat template, defaults of
# generation, and the code that some configs name.
_COPIED = (
  *('*.json', '*.jinja', '*.txt', '*.model', '*.tiktoken', '*.py'),
  'additional_chat_templates/*.jinja',
)

_STAGING = 'staging'
# Matches no pattern of _COPIED.
_FINGERPRINT = 'source.fingerprint'
_DISK_MARGIN = 64 * 2**20

_Arrays = dict[str, blocks.ChunkedArray]


def convert(
  source: str | os.PathLike, out: str | os.PathLike, *, mtp: bool = False
) -> None:
  """Writes an import directory, or continues where a killed call stopped.

  With `mtp`, layers for multi-token prediction become heads of the model, and
  else they are carried along.

  Raises:
    ValueError: the source is not sound or not supported, `out` exists, or its
      partial conversion is of another source. Nothing has been written. Or a
      weight is not finite; the tensors before it are in the partial folder.
    OSError: the disk is full or fails.
  """
  out = pathlib.Path(out).absolute()
  with contextlib.closing(hf_source.open_source(source, mtp=mtp)) as checkpoint:
    arrays = checkpoint.arrays()
    for name in (MODEL, RECORD):
      if (checkpoint.folder.path / name).exists():
        raise ValueError(
          f'{checkpoint.folder.path / name} has a name that import directories '
          'need; rename or remove that file.'
        )
    partial = out.with_name(out.name + '.partial')
    making.check_absent(out)
    if not (partial / _FINGERPRINT).exists():
      # A killed run may have left its first file under a temporary name.
      making.check_ours(partial, lambda n: n.startswith(f'.{_FINGERPRINT}.'))
    making.check_space(partial, _missing_bytes(checkpoint, arrays, partial))
    carried.show(checkpoint)
    with making.alone(partial, out):
      files.sweep(partial)
      _claim(checkpoint, arrays, partial)
      _check_copies(checkpoint)
      # Orbax renames a checkpoint to its number when it is whole.
      if not (partial / WEIGHTS / '0').exists():
        _write_weights(checkpoint, arrays, partial)
      for name in checkpoint.folder.headers:
        carried.carry(checkpoint, name, partial / carried.FOLDER)
      _write_records(checkpoint, partial)
      shutil.rmtree(partial / _STAGING, ignore_errors=True)
      hf_io.sync_tree(partial)
      making.place(partial, out)


def _check_copies(source: hf_source.SourceCheckpoint) -> None:
  """Raises a ValueError if a head has another embedding than the model."""
  for name, copy in source.tensors.items():
    original = hf_names.original(name, source.table)
    if original is None:
      continue
    size, step = math.prod(copy.shape), blocks.PIECE_BYTES // 4
    for start in range(0, size, step):
      stop = min(start + step, size)
      whole = source.tensors[original].read(start, stop)
      if not np.array_equal(copy.read(start, stop), whole):
        raise ValueError(
          f'{name} differs from {original}; heads for multi-token prediction '
          'share embedding and unembedding with the model. Leave out --mtp to '
          'carry them along.'
        )


def _missing_bytes(
  source: hf_source.SourceCheckpoint, arrays: _Arrays, partial: pathlib.Path
) -> int:
  """Returns the space that the rest of an import needs."""
  paths = (p for p in partial.rglob('*') if p.is_file())
  done = {p.stat().st_ino: p.stat().st_size for p in paths}
  needed = _DISK_MARGIN - sum(done.values())
  for array in arrays.values():
    grid = zip(array.shape, array.chunk, strict=True)
    padded = math.prod(-(-n // c) * c for n, c in grid)
    needed += padded * array.dtype.itemsize
  return needed + sum(
    source.folder.tensors[name].num_bytes for name in source.kept
  )


def _claim(
  source: hf_source.SourceCheckpoint, arrays: _Arrays, partial: pathlib.Path
) -> None:
  """Binds a partial import to its source; raises if it has another one."""
  text, path = _fingerprint(source, arrays), partial / _FINGERPRINT
  if not path.exists():
    files.write_atomic(path, text.encode())
  elif path.read_text() != text:
    raise ValueError(
      f'{partial} was begun from another checkpoint, or that has been changed '
      'or moved since. Delete that folder to start over.'
    )


def _fingerprint(source: hf_source.SourceCheckpoint, arrays: _Arrays) -> str:
  """Returns a text that identifies a source and the chunks of its import."""
  fields = {
    'files': source.folder.fingerprint(),
    'config': source.fields,
    'chunks': {name: list(array.chunk) for name, array in arrays.items()},
  }
  return json.dumps(fields, indent=1, sort_keys=True) + '\n'


def _write_weights(
  source: hf_source.SourceCheckpoint, arrays: _Arrays, partial: pathlib.Path
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
      for part in source.table[name].parts:
        array = arrays[part.array]
        for piece in blocks.pieces(part, array.chunk):
          values = tensor.read(piece.start, piece.stop)
          if (bad := blocks.first_not_finite(values)) is not None:
            raise ValueError(
              f'Element {piece.start + bad} of {name}, in '
              f'{source.folder.path / tensor.raws[0].file}, is {values[bad]}; '
              'weights must be finite. Fetch that file again, or mend it.'
            )
          block = blocks.contiguous(piece.of(values))
          block = block.astype(array.dtype, copy=False)
          staging.write(piece.array, [a for a, _ in piece.box], block)
          done_bytes += block.nbytes
      staging.finish()
      start += 1
      bar.update(start, GB=done_bytes / 1e9)
  staging.save(partial / WEIGHTS)
  staging.remove()


def copied(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files beside the tensors that imports and exports copy."""
  paths = {path for pattern in _COPIED for path in folder.glob(pattern)}
  ours = {hf_io.INDEX, MODEL, RECORD}
  return sorted(p for p in paths if p.is_file() and p.name not in ours)


def copy_beside(folder: pathlib.Path, out: pathlib.Path) -> None:
  for path in copied(folder):
    files.write_atomic(out / path.relative_to(folder), path.read_bytes())


def _write_records(
  source: hf_source.SourceCheckpoint, partial: pathlib.Path
) -> None:
  folder = source.folder
  copy_beside(folder.path, partial)
  files.write_json(partial / MODEL, source.config.to_dict())
  record = {
    'family': source.family,
    'prefix': source.prefix,
    'index': folder.index,
    'files': folder.headers,
    'header_texts': folder.header_texts,
    # File and dtype of each tensor of the model.
    'tensors': {
      name: [t.raws[0].file, hf_io.NAMES[t.dtype]]
      for name, t in source.tensors.items()
    },
    'carried': list(source.carried),
    'packed': source.packed,
  }
  # Unsorted, since a header lists its tensors in their order.
  text = json.dumps(record, indent=1, ensure_ascii=False)
  files.write_atomic(partial / RECORD, text.encode())


def read_record(out: str | os.PathLike) -> dict[str, Any]:
  check_finished(out)
  return files.read_json(pathlib.Path(out) / RECORD)


def check_finished(out: str | os.PathLike) -> None:
  """Raises a ValueError unless a folder is a whole import directory."""
  names = (MODEL, RECORD, WEIGHTS)
  lacking = [name for name in names if not (pathlib.Path(out) / name).exists()]
  if lacking:
    raise ValueError(
      f'{os.fspath(out)!r} is not a finished import: it lacks '
      f'{", ".join(lacking)}. Make it with `python -m experiments.hf_import '
      '--source=CHECKPOINT --out=DIR` and name it in --config: imported.py:DIR '
      'or agent.py:DIR,TASKS.'
    )


def positions(out: str | os.PathLike) -> int | None:
  """Returns for how many positions the model was made; None if it is unsaid."""
  path = pathlib.Path(out) / 'config.json'
  return config.positions(files.read_json(path)) if path.exists() else None


def check_window(out: str | os.PathLike, field: str, num_tokens: int) -> None:
  """Raises a ValueError if `num_tokens` is above the positions of the model."""
  most = positions(out)
  if most and num_tokens > most:
    raise ValueError(
      f'--config.{field} ({num_tokens}) must be at most {most}: the model in '
      f'{out} was made for so many positions (max_position_embeddings of its '
      'config.json). Lower it, and other lengths with it.'
    )


def load_variables(out: str | os.PathLike, like: Any) -> Any:
  """Restores and verifies an import's weights, cast to the dtypes of `like`."""
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
  check_finished(out)
  return manager.Checkpoints(
    pathlib.Path(out) / WEIGHTS,
    keep=None,
    fallback='the Hugging Face checkpoint',
  )
