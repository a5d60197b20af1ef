"""Chunks of a checkpoint that is written over days, by runs that may die.

Orbax saves arrays that exist. Arrays larger than memory are written here as
the files of their chunks, beside a journal of what is finished; at the end
orbax takes the files over by hard links, so that structure, metadata and the
atomic commit are its own and no byte is written twice.

A killed run loses what it wrote since the last sync. A chunk is in the journal
only once it would survive a power cut.
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

# Between two syncs; what a killed run does again.
_SYNC_BYTES = 2**30


class Staging:
  """The chunks in one folder, and the journal of those that are whole."""

  def __init__(
    self, folder: str | os.PathLike, arrays: Mapping[str, blocks.ChunkedArray]
  ):
    """Opens a folder of these arrays alone, and reads its journal."""
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
    # A killed run may leave half a line, with nothing after it.
    whole = [line for line in lines if line.endswith(b'\n')]
    for line in whole:
      self.done.update(json.loads(line))
    # Where files cannot be linked, a killed run has moved some away.
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
    """Says which tensor the next chunks come from."""
    self._pending[tensor] = {}

  def write(self, tensor: str, name: str, start: Sequence[int], block) -> None:
    """Writes a chunk of an array.

    Args:
      tensor: the one that was begun.
      name: of the array.
      start: of the chunk in the array, a multiple of the shape of chunks.
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
      # Zarr's chunks are all of one size; what sticks out is never read.
      padding = [(0, c - n) for c, n in zip(array.chunk, block.shape)]
      data = hf_io.as_bytes(np.pad(block, padding))
    path = self._path(name, start)
    with path.open('wb', buffering=0) as file:
      hf_io.write_fully(file.fileno(), data, 0)
    self._unsynced.append(path)
    self._unsynced_bytes += len(data)

  def finish(self, *, force: bool = False) -> None:
    """Enters begun tensors in the journal, every now and then."""
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
    """Makes the step 0 of a `manager.Checkpoints` of the chunks."""
    self.finish(force=True)
    shards: dict[str, dict[str, str]] = {name: {} for name in self._arrays}
    for chunks in self.done.values():
      for name, found in chunks.items():
        shards[name].update(found)
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
  """Returns the .zarray of plain chunks, one file each, in C order."""
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
  """A leaf for orbax: an array whose files exist."""

  def __init__(self, folder: pathlib.Path, array: blocks.ChunkedArray):
    self.folder = folder
    self.shape, self.dtype = array.shape, array.dtype
    self.nbytes = math.prod(array.shape) * array.dtype.itemsize


class _Links(ocp.type_handlers.NumpyHandler):
  """Saves finished arrays under the name of numpy's, by hard links.

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
    # File systems without links, or across a border, say so in many ways.
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
      raise
    os.replace(source, target)
