"""Sharded loads give the arrays of an import, and read no more than theirs."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.hf import importing, sharded
from composer_jax.hf.tensors import blocks
from composer_jax.hf.tensors import source as hf_source
from tests.hf import checkpoints, tiny

DEEPSEEK = tiny.MODELS['deepseek_v3']


def _place(shapes, mesh):
  """Experts over the mesh, other arrays by any axis that divides, or whole."""

  def sharding(name, shape):
    axis = 1 if '/moe/' in name and len(shape) > 2 else -1
    spec = [None] * len(shape)
    if shape[axis] % mesh.size == 0:
      spec[axis] = 'x'
    return NamedSharding(mesh, P(*spec))

  return {name: sharding(name, shape) for name, shape in shapes.items()}


@pytest.fixture(scope='module')
def imported(tmp_path_factory):
  root = tmp_path_factory.mktemp('sharded')
  arrays = checkpoints.tensors(DEEPSEEK)
  source = checkpoints.write(root / 'hf', DEEPSEEK, arrays, num_files=2)
  importing.convert(source, root / 'ours')
  return source, root / 'ours', arrays


def test_sharded_arrays_are_those_of_the_checkpoint(imported):
  """Over 8 devices, experts are split."""
  path, ours, _ = imported
  source = hf_source.open_source(path)
  shapes = blocks.shapes(source.table)
  shardings = _place(shapes, jax.make_mesh((8,), ('x',)))
  assert not shardings['params/moe_layers/moe/gate_up'].is_fully_replicated
  like = {
    name: jax.ShapeDtypeStruct(shape, np.float32, sharding=shardings[name])
    for name, shape in shapes.items()
  }
  restored = importing.load_variables(ours, like)
  read = sharded.load(
    source, source.config, shardings, dtype=np.dtype(np.float32)
  )
  for name, array in read.items():
    assert array.sharding == restored[name].sharding == shardings[name]
    np.testing.assert_array_equal(array, restored[name], err_msg=name)
  source.close()


def test_large_shards_are_put_together_on_their_devices(imported, monkeypatch):
  """Over 3 devices, of which each holds the experts whole."""
  path, _, arrays = imported
  monkeypatch.setattr(blocks, 'PIECE_BYTES', 2000)
  sizes = []
  empty = blocks.empty

  def spy(shape, dtype):
    sizes.append(int(np.prod(shape)) * dtype.itemsize)
    return empty(shape, dtype)

  monkeypatch.setattr(blocks, 'empty', spy)
  source = hf_source.open_source(path)
  shapes = blocks.shapes(source.table)
  mesh = jax.make_mesh((3,), ('x',), devices=jax.devices()[:3])
  shardings = _place(shapes, mesh)
  assert not all(s.is_fully_replicated for s in shardings.values())
  limit = 8000
  read = sharded.load(source, source.config, shardings, host_bytes=limit)
  source.close()
  assert max(sizes) <= limit
  assert max(array.nbytes for array in read.values()) > 2 * limit
  assert all(array.sharding == shardings[n] for n, array in read.items())
  checkpoints.check_blocks(read, source.table, arrays)


def test_a_sharded_load_reads_only_its_own_parts(imported, monkeypatch):
  path, _, _ = imported
  source = hf_source.open_source(path)
  read = []
  for name, tensor in source.tensors.items():

    def spy(start, stop, name=name, tensor=tensor):
      read.append(name)
      return type(tensor).read(tensor, start, stop)

    monkeypatch.setattr(tensor, 'read', spy)
  array = 'params/moe_layers/moe/down'
  shape = blocks.shapes(source.table)[array]
  parts = [
    (source.tensors[name], part)
    for name in source.tensors
    for part in source.table[name].parts
    if part.array == array
  ]

  # What the first of 8 processes reads.
  box = ((0, shape[0]), (0, 1), (0, shape[2]), (0, shape[3]))
  placed = source.arrays()[array]
  found = list(sharded.blocks(parts, placed, box, np.dtype(np.float32)))
  num_read = sum(block.size for _, block in found)
  assert num_read == shape[0] * shape[2] * shape[3]
  assert {name.split('experts.')[1] for name in read} == {'0.down_proj.weight'}
  assert len(read) == shape[0]
  source.close()
