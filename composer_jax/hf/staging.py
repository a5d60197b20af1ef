"""Writes a checkpoint larger than memory, chunk by chunk, across restarts.

Orbax saves arrays that are in memory. Larger ones are written here as the files
of their chunks, beside a journal of finished tensors, with which a killed run
goes on. At the end their folders are moved into orbax's checkpoint: structure,
metadata and the atomic commit are orbax's own, and no byte is written twice.

The importer syncs everything before it shows the import. A power failure may
lose chunks of the journal, which the hashes tell at every load.
"""

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


class Staging:
  """The chunks of some arrays in one folder, and their journal.

  Attributes:
    done: {tensor: {array: {bounds: hash}}} of the chunks of finished tensors.
  """

  def __init__(
    self, folder: str | os.PathLike, arrays: Mapping[str, blocks.ChunkedArray]
  ):
    self._folder = pathlib.Path(folder)
    self._arrays = arrays
    self.done: dict[str, dict[str, dict[str, str]]] = {}
    self._tensor, self._chunks = '', dict[str, dict[str, str]]()
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
    # A run killed while orbax took the files over has moved some away.
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
    self._tensor, self._chunks = tensor, {}

  def write(self, name: str, start: Sequence[int], block: np.ndarray) -> None:
    """Writes a contiguous chunk, at the array's end a smaller one."""
    array = self._arrays[name]
    places = zip(start, block.shape, strict=True)
    bounds = ','.join(f'{a}:{a + n}' for a, n in places)
    data = hf_io.as_bytes(block)
    digest = blake3.blake3(data).hexdigest()
    self._chunks.setdefault(name, {})[bounds] = digest
    if block.shape != array.chunk:
      # Zarr's chunks have one size; values beyond the array are never read.
      padding = [(0, c - n) for c, n in zip(array.chunk, block.shape)]
      data = hf_io.as_bytes(np.pad(block, padding))
    with self._path(name, start).open('wb', buffering=0) as file:
      hf_io.write_fully(file.fileno(), data, 0)

  def finish(self) -> None:
    """Enters the tensor in the journal."""
    line = json.dumps({self._tensor: self._chunks}) + '\n'
    self._journal.write(line.encode())
    self._journal.flush()
    self.done[self._tensor] = self._chunks

  def save(self, directory: str | os.PathLike) -> None:
    """Makes step 0 of a `manager.Checkpoints` from the chunks."""
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
      (_Finished, _Moves())
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


class _Moves(ocp.type_handlers.NumpyHandler):
  """Saves finished arrays as numpy's handler would, by moving their folders."""

  async def serialize(self, values, infos, args=None):
    async def move():
      for value, info in zip(values, infos, strict=True):
        await info.await_path_creation()
        target = pathlib.Path(info.parent_dir) / info.name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(value.folder, target)

    return [
      ocp_future.CommitFutureAwaitingContractedSignals(move(), name='moves')
    ]
