"""Writes a checkpoint larger than memory, chunk by chunk, across restarts.

Orbax saves arrays that are in memory. Larger ones are written here as the files
of their chunks, beside a journal of finished tensors. At the end orbax takes
the files over by hard links: structure, metadata and the atomic commit are
orbax's own, and no byte is written twice.

A tensor enters the journal once its chunks are synced to the disk, so a killed
run repeats only the work since the last sync.
"""

import errno
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO

import blake3
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future as ocp_future

from composer_jax.core import files
from composer_jax.hf.tensors import blocks
from composer_jax.hf.tensors import files as hf_io
from composer_jax.train.checkpoints import hashes, manager

_CHUNKS = 'chunks'
_JOURNAL = 'journal.jsonl'
_ZARR_DTYPES = {'float32': '<f4', 'float16': '<f2', 'bfloat16': 'bfloat16'}

_SYNC_BYTES = 2**30  # written between two syncs


class Staging:
  """The chunks of some arrays in one folder, and their journal.

  Attributes:
    done: {tensor: {array: {bounds: hash}}} of the chunks of finished tensors.
  """

  def __init__(
    self, folder: str | os.PathLike, arrays: Mapping[str, blocks.ChunkedArray]
  ):
    """Creates the folder, or opens it and reads its journal."""
    self._folder = pathlib.Path(folder)
    self._arrays = arrays
    self.done: dict[str, dict[str, dict[str, str]]] = {}
    self._pending: dict[str, dict[str, dict[str, str]]] = {}
    self._unsynced: list[pathlib.Path] = []
    self._unsynced_bytes = 0
    for name, array in arrays.items():
      path = self._folder / _CHUNKS / name
      path.mkdir(parents=True, exist_ok=True)
      if not (path / '.zarray').exists():
        files.write_atomic(path / '.zarray', _zarr_metadata(array))
    self._journal = self._open_journal()

  def _open_journal(self) -> BinaryIO:
    path = self._folder / _JOURNAL
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    # A killed run may leave half a line at the end.
    whole = [line for line in lines if line.endswith(b'\n')]
    for line in whole:
      self.done.update(json.loads(line))
    # Where files cannot be linked, a killed run may have moved some away.
    self.done = {
      tensor: arrays
      for tensor, arrays in self.done.items()
      if all(self._has(name, chunks) for name, chunks in arrays.items())
    }
    path.touch()
    journal = path.open('r+b')
    journal.truncate(sum(map(len, whole)))
    journal.seek(0, os.SEEK_END)
    return journal

  def _path(self, name: str, start: Sequence[int]) -> pathlib.Path:
    chunk = self._arrays[name].chunk
    numbers = [a // c for a, c in zip(start, chunk, strict=True)]
    return self._folder / _CHUNKS / name / '.'.join(map(str, numbers))

  def _has(self, name: str, chunks: Iterable[str]) -> bool:
    return all(
      self._path(name, [start for start, _ in hashes.index_of(bounds)]).exists()
      for bounds in chunks
    )

  def begin(self, tensor: str) -> None:
    """Starts a tensor, whose chunks the next calls of `write` bring."""
    self._pending[tensor] = {}

  def write(self, tensor: str, name: str, start: Sequence[int], block) -> None:
    """Writes a chunk of an array.

    Args:
      tensor: tensor that was begun last.
      name: name of the array.
      start: place of the chunk in the array, a multiple of the chunks' shape.
      block: contiguous values of the array's dtype; smaller than a chunk at
        the array's end.
    """
    array = self._arrays[name]
    places = zip(start, block.shape, strict=True)
    bounds = ','.join(f'{a}:{a + n}' for a, n in places)
    data = hf_io.as_bytes(block)
    digest = blake3.blake3(data).hexdigest()
    self._pending[tensor].setdefault(name, {})[bounds] = digest
    if block.shape != array.chunk:
      # Zarr's chunks have one size; values beyond the array are never read.
      padding = [(0, c - n) for c, n in zip(array.chunk, block.shape)]
      data = hf_io.as_bytes(np.pad(block, padding))
    path = self._path(name, start)
    with path.open('wb', buffering=0) as file:
      hf_io.write_fully(file.fileno(), data, 0)
    self._unsynced.append(path)
    self._unsynced_bytes += len(data)

  def finish(self, *, force: bool = False) -> None:
    """Enters begun tensors in the journal, once enough bytes were written.

    Args:
      force: true to do so at once.
    """
    if not force and self._unsynced_bytes < _SYNC_BYTES:
      return
    for path in self._unsynced:
      with path.open('rb') as file:
        os.fsync(file.fileno())
    for folder in {path.parent for path in self._unsynced}:
      files.fsync_directory(folder)
    lines = [json.dumps({k: v}) + '\n' for k, v in self._pending.items()]
    self._journal.write(''.join(lines).encode())
    self._journal.flush()
    os.fsync(self._journal.fileno())
    self.done.update(self._pending)
    self._pending, self._unsynced, self._unsynced_bytes = {}, [], 0

  def save(self, directory: str | os.PathLike) -> None:
    """Makes step 0 of a `manager.Checkpoints` from the chunks."""
    self.finish(force=True)
    shards: dict[str, dict[str, str]] = {name: {} for name in self._arrays}
    for chunks in self.done.values():
      for name, hashes_of in chunks.items():
        shards[name].update(hashes_of)
    record, tree = {}, {}
    for name, array in self._arrays.items():
      kind = {'shape': list(array.shape), 'dtype': str(array.dtype)}
      record[name] = {**kind, 'shards': shards[name]}
      tree[name] = _Finished(self._folder / _CHUNKS / name, array)
    registry = ocp.type_handlers.create_type_handler_registry(
      (_Finished, _Links())
    )
    items = manager.side_items(record, None)
    handlers: dict[str, ocp.CheckpointHandler] = {
      name: ocp.JsonCheckpointHandler() for name in items
    }
    handlers[manager.STATE] = ocp.PyTreeCheckpointHandler(
      use_ocdbt=False, type_handler_registry=registry
    )
    items[manager.STATE] = ocp.args.PyTreeSave(tree)
    with ocp.CheckpointManager(
      pathlib.Path(directory).absolute(),
      options=ocp.CheckpointManagerOptions(max_to_keep=1),
      item_handlers=handlers,
    ) as orbax:
      orbax.save(0, args=ocp.args.Composite(**items))
      orbax.wait_until_finished()

  def remove(self) -> None:
    self._journal.close()
    shutil.rmtree(self._folder)


def _zarr_metadata(array: blocks.ChunkedArray) -> bytes:
  """Returns the .zarray of uncompressed chunks, a file each, in C order."""
  fields = {
    'zarr_format': 2,
    'shape': array.shape,
    'chunks': array.chunk,
    'dtype': _ZARR_DTYPES[str(array.dtype)],
    'order': 'C',
    'compressor': None,
    'filters': None,
    'fill_value': None,
    'dimension_separator': '.',
  }
  return json.dumps(fields).encode()


class _Finished:
  """A leaf of orbax's tree: an array whose files exist."""

  def __init__(self, folder: pathlib.Path, array: blocks.ChunkedArray):
    self.folder = folder
    self.shape, self.dtype = array.shape, array.dtype
    self.nbytes = math.prod(array.shape) * array.dtype.itemsize


class _Links(ocp.type_handlers.NumpyHandler):
  """Saves finished arrays as numpy's handler would, by hard links.

  Consumes: folders of chunks, which stay where they are.
  Waits for: the temporary folder that orbax makes for the checkpoint.
  """

  async def serialize(self, values, infos, args=None):
    async def link():
      for value, info in zip(values, infos, strict=True):
        await info.await_path_creation()
        target = pathlib.Path(info.parent_dir) / info.name
        target.mkdir(parents=True)
        for source in os.scandir(value.folder):
          _link(source.path, target / source.name)
        files.fsync_directory(target)

    return [
      ocp_future.CommitFutureAwaitingContractedSignals(link(), name='links')
    ]


def _link(source: str, target: pathlib.Path) -> None:
  try:
    os.link(source, target)
  except OSError as error:
    # A file system without hard links may report that by any other error.
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
      raise
    os.replace(source, target)
