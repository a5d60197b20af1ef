"""Chunks of a keyframe that are not in packs but in its checkpoint's files.

The files are objects of the store and verified as such before anything in them
is parsed.
"""

from concurrent import futures

import numpy as np

from composer_jax.delta import fetch, identity, orbax_files
from composer_jax.delta import grid as grids
from composer_jax.delta import manifest as manifests


class Boxes:
  """Chunks that lie in the checkpoint of a keyframe; threads share it."""

  def __init__(self, fetcher: fetch.Fetcher, manifest: manifests.Manifest):
    self._fetcher = fetcher
    self._objects = {
      path: (name, length) for path, name, length in manifest.files
    }
    self._files = orbax_files.Files(self._objects, self._fetch)
    self._asked: set[str] = set()
    self._coming: dict[str, futures.Future] = {}

  def request(
    self, tensor: manifests.Tensor, number: int, grid: grids.Grid
  ) -> None:
    """Lets the files of a box come while others are decoded."""
    dtype, index = identity.DTYPES[tensor.dtype], grid.box(number)
    try:
      paths = self._files.needed(tensor.name, dtype, tensor.shape, index)
    except (ValueError, OSError):
      return  # `read` will say the same, with the name of the tensor.
    for path in paths[1:]:
      if path not in self._asked and path in self._objects:
        self._asked.add(path)
        self._coming[path] = self._fetcher.submit(self._whole, path)

  def read(
    self, tensor: manifests.Tensor, number: int, grid: grids.Grid
  ) -> np.ndarray:
    dtype, index = identity.DTYPES[tensor.dtype], grid.box(number)
    return self._files.read(tensor.name, dtype, tensor.shape, index)

  def _fetch(self, path: str) -> bytes:
    coming = self._coming.pop(path, None)
    return self._whole(path) if coming is None else coming.result()

  def _whole(self, path: str) -> bytes:
    name, length = self._objects[path]
    return self._fetcher.whole(name, length, length)
