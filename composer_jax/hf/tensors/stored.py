"""Reads and verifies boxes of a checkpoint's arrays, never a whole array."""

import json
import math
from collections.abc import Iterator

import blake3
import ml_dtypes  # Also registers 'bfloat16' with numpy.
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from composer_jax.core import trees
from composer_jax.hf.tensors import blocks, files
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.train.checkpoints import hashes, manager


class Stored:
  """The arrays of one step of `manager.Checkpoints`.

  `read` and `verify` raise `manager.DamagedCheckpoint` if the content has
  changed or cannot be read.
  """

  def __init__(self, checkpoints: manager.Checkpoints, step: int):
    # tensorstore refuses a path that contains '..'.
    self._folder = checkpoints.directory.resolve() / str(step)
    self._record = checkpoints.record(step)['arrays']
    self.shapes = {n: tuple(r['shape']) for n, r in self._record.items()}
    self.dtypes = {n: np.dtype(r['dtype']) for n, r in self._record.items()}
    self._open: dict[str, ts.TensorStore] = {}

  def _array(self, name: str) -> ts.TensorStore:
    if name not in self._open:
      state = self._folder / manager.STATE
      base = {'driver': 'file', 'path': f'{state}/'}
      if ocp.type_handlers.is_ocdbt_checkpoint(state):
        store = {'driver': 'ocdbt', 'base': base, 'path': f'{name}/'}
      else:
        store = base | {'path': f'{state}/{name}/'}
      metadata = json.loads((state / '_METADATA').read_text())
      driver = 'zarr3' if metadata.get('use_zarr3') else 'zarr'
      spec = {'driver': driver, 'kvstore': store}
      array = ts.open(spec, open=True, read=True).result()
      # A chunk of several pieces is kept, or every piece would decode it again;
      # a chunk of one piece is not, or it would be held twice.
      chunk = array.chunk_layout.read_chunk.shape
      sizes = [n or 1 for n in chunk or ()]
      num_bytes = math.prod(sizes) * self.dtypes[name].itemsize
      if num_bytes > blocks.PIECE_BYTES:
        context = ts.Context({'cache_pool': {'total_bytes_limit': num_bytes}})
        spec['recheck_cached_data'] = 'open'
        array = ts.open(spec, open=True, read=True, context=context).result()
      self._open[name] = array
    return self._open[name]

  def read(self, name: str, box: blocks.Box) -> np.ndarray:
    index = tuple(slice(*bound) for bound in box)
    try:
      values = self._array(name)[index].read().result()
    except ValueError as error:
      raise self._damaged(f'{name} cannot be read') from error
    return np.asarray(values).view(self.dtypes[name])

  def verify(self, name: str) -> None:
    """Compares an array with the hashes that were recorded at its writing."""
    item_bytes = self.dtypes[name].itemsize
    for bounds, expected in self._record[name]['shards'].items():
      block = hashes.index_of(bounds)
      digest = blake3.blake3()
      for box in _in_order(block, blocks.PIECE_BYTES // item_bytes):
        values = np.ascontiguousarray(self.read(name, box))
        digest.update(files.as_bytes(values))
      if digest.hexdigest() != expected:
        raise self._damaged(f'the content of {name} has changed')

  def _damaged(self, detail: str) -> manager.DamagedCheckpoint:
    return manager.DamagedCheckpoint(
      f'Checkpoint in {self._folder} is damaged ({detail}); make it again.'
    )


class Merged:
  """Frozen weights plus their adapters, as the policy has both."""

  def __init__(
    self, frozen: Stored, trained: Stored, config: model_config.ModelConfig
  ):
    self._frozen, self._trained, self._config = frozen, trained, config
    # What is trained whole, such as selection biases, replaces what is frozen.
    self.shapes = frozen.shapes | trained.shapes
    self.dtypes = frozen.dtypes | trained.dtypes
    axes = trees.flatten_names(decoder.abstract(config)[1]['adapters'])
    self._batch = {
      name: sum(axis in ('layer', 'expert') for axis in axes[name])
      for name in axes
    }

  def read(self, name: str, box: blocks.Box) -> np.ndarray:
    if name in self._trained.shapes:
      return self._trained.read(name, box)
    values = self._frozen.read(name, box)
    pair = name.replace('params/', 'adapters/', 1)
    if f'{pair}/a' not in self._trained.shapes:
      return values
    batch = self._batch[f'{pair}/a'.removeprefix('adapters/')]
    *lead, rank = self._trained.shapes[f'{pair}/a']
    whole, end = ((0, rank),), len(lead)
    a = self._policy(f'{pair}/a', box[:end] + whole)
    b = self._policy(f'{pair}/b', box[:batch] + whole + box[end:])
    product = a.reshape(*a.shape[:batch], -1, rank) @ b.reshape(
      *b.shape[:batch], rank, -1
    )
    product *= self._config.adapters.alpha / rank
    return values.astype(np.float32) + product.reshape(values.shape)

  def _policy(self, name: str, box: blocks.Box) -> np.ndarray:
    masters = self._trained.read(name, box)
    return masters.astype(ml_dtypes.bfloat16).astype(np.float32)

  def verify(self, name: str) -> None:
    is_trained = name in self._trained.shapes
    (self._trained if is_trained else self._frozen).verify(name)


def _in_order(box: blocks.Box, most: int) -> Iterator[blocks.Box]:
  """Yields parts of a box of at most `most` elements, in the bytes' order."""
  sizes = [stop - start for start, stop in box]
  if math.prod(sizes) <= most or max(sizes) == 1:
    yield box
    return
  axis = next(i for i, size in enumerate(sizes) if size > 1)
  start, stop = box[axis]
  step = max(1, most * sizes[axis] // math.prod(sizes))
  for first in range(start, stop, step):
    part = ((first, min(first + step, stop)),)
    yield from _in_order(box[:axis] + part + box[axis + 1 :], most)
