"""Hugging Face checkpoints as sharded arrays, without a checkpoint of ours.

For programs that want the weights once, such as an evaluation of a model as it
was downloaded. The commands import instead: a run that resumes must find what
it began from, and verified.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from composer_jax.core import trees
from composer_jax.hf.tensors import blocks as hf_blocks
from composer_jax.hf.tensors import cast, names, quantized
from composer_jax.hf.tensors import source as hf_source
from composer_jax.models import config as model_config

# Of the pieces of a shard that is put together on the host of an accelerator.
_HOST_BYTES = 4 * hf_blocks.PIECE_BYTES

# Of one array: tensors and what each contributes.
Parts = list[tuple[quantized.ReadableTensor, names.TensorPart]]


def load(
  source: hf_source.SourceCheckpoint,
  config: model_config.ModelConfig,
  shardings: Any,
  *,
  dtype: np.dtype | None = None,
  host_bytes: int | None = None,
) -> Any:
  """Reads a Hugging Face checkpoint into sharded arrays.

  Each process reads what its devices hold. A large shard is put together on
  its device, piece by piece, so that the host never holds it.

  Args:
    source: the checkpoint.
    config: of the model; may differ from the source's in what has no weights.
    shardings: tree of `jax.sharding.Sharding`, one for each array.
    dtype: of all arrays; None keeps those of the source.
    host_bytes: of the largest shard that is put together on the host; None is
      a few pieces, or any where the host's memory is the devices'.

  Raises:
    ValueError: the tree names other arrays than the source has.
  """
  shapes = hf_blocks.shapes(
    names.tensors(
      config,
      source.family,
      expert_layout=source.expert_layout,
      prefix=source.prefix,
    )
  )
  arrays, flat = source.arrays(), trees.flatten_names(shardings)
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
  parts: dict[str, Parts] = {}
  for name in source.tensors:
    for part in source.table[name].parts:
      parts.setdefault(part.array, []).append((source.tensors[name], part))
  leaves = []
  for name, sharding in flat.items():
    made = dtype or arrays[name].dtype
    leaves.append(_place(parts[name], arrays[name], sharding, made, host_bytes))
  return jax.tree.unflatten(jax.tree.structure(shardings), leaves)


def _place(
  parts: Parts,
  array: hf_blocks.ChunkedArray,
  sharding: jax.sharding.Sharding,
  dtype: np.dtype,
  host_bytes: int | None,
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
    limit = host_bytes
    if limit is None and holders[0].platform != 'cpu':
      limit = _HOST_BYTES
    num_bytes = math.prod(b - a for a, b in box) * dtype.itemsize
    is_small = limit is None or num_bytes <= limit
    make = _on_host if is_small else _on_devices
    shards += make(parts, array, box, dtype, holders)
  return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _on_host(
  parts: Parts,
  array: hf_blocks.ChunkedArray,
  box: hf_blocks.Box,
  dtype: np.dtype,
  devices: list[jax.Device],
) -> list[jax.Array]:
  """Reads a box of an array once, for each device that holds it."""
  shard = hf_blocks.empty(tuple(stop - start for start, stop in box), dtype)
  for start, block in blocks(parts, array, box, dtype):
    ends = zip(start, block.shape, strict=True)
    shard[tuple(slice(a, a + n) for a, n in ends)] = block
  # Waits, or shards would queue up in the host's memory.
  return jax.block_until_ready(
    [jax.device_put(shard, device) for device in devices]
  )


def _on_devices(
  parts: Parts,
  array: hf_blocks.ChunkedArray,
  box: hf_blocks.Box,
  dtype: np.dtype,
  devices: list[jax.Device],
) -> list[jax.Array]:
  """As `_on_host`, of a box that the host shall not hold."""
  shape = tuple(stop - start for start, stop in box)
  # As integers: XLA's CPU backend moves halves by way of float32, and NaNs lose
  # some of their bits there.
  bits = np.dtype(f'u{dtype.itemsize}')
  made: list[jax.Array] = [
    jax.numpy.empty(shape, bits, device=device) for device in devices
  ]
  for start, block in blocks(parts, array, box, dtype):
    made = [
      _put(shard, jax.device_put(block.view(bits), device), start)
      for shard, device in zip(made, devices, strict=True)
    ]
    # As above, of blocks.
    jax.block_until_ready(made)
  return [made.pop(0).view(dtype) for _ in devices]


@functools.partial(jax.jit, donate_argnums=0)
def _put(
  shard: jax.Array, block: jax.Array, start: tuple[int, ...]
) -> jax.Array:
  return jax.lax.dynamic_update_slice(shard, block, start)


def blocks(
  parts: Parts,
  array: hf_blocks.ChunkedArray,
  box: hf_blocks.Box,
  dtype: np.dtype,
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
  """Yields (start in the box, values) of what the parts have of a box."""
  for tensor, part in parts:
    for piece in hf_blocks.pieces(part, array.chunk, box):
      values = piece.of(tensor.read(piece.start, piece.stop))
      start = tuple(a - c for (a, _), (c, _) in zip(piece.box, box))
      yield start, cast.cast(hf_blocks.contiguous(values), dtype)
