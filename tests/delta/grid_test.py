"""Boxes tile arrays, and shards of the shipped layouts do not cut them."""

import functools
import importlib.util
import itertools
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from composer_jax.core import trees
from composer_jax.delta.format import identity as grids
from composer_jax.delta.format import manifest as manifests
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.parallel import layouts, shardings, topology

F32 = np.dtype(np.float32)
MODELS = sorted(
  path.stem
  for path in pathlib.Path('configs/models').glob('*.py')
  if not path.name.startswith('_')
)
NARROW = ['small', 'tiny']  # less than 2048 wide
PUBLISHED = [name for name in MODELS if name not in NARROW]


@st.composite
def cut_arrays(draw):
  """Small grids of any sides, with an index into the array."""
  shape = draw(st.lists(st.integers(0, 7), max_size=4).map(tuple))
  sides = tuple(draw(st.integers(1, max(n, 1))) for n in shape)
  index = tuple(
    tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))))
    for n in shape
  )
  return grids.Grid(shape, sides), index


def slices(box):
  return tuple(slice(*ends) for ends in box)


def cut_bytes(grid, index, itemsize):
  """Bytes of the chunks that `index` holds in part only."""
  if any(start >= stop for start, stop in index):
    return 0
  touched = whole = 1
  for (start, stop), n, side in zip(index, grid.shape, grid.sides, strict=True):
    first, last = start // side * side, min(-(-stop // side) * side, n)
    touched *= last - first
    last = n if stop == n else stop // side * side
    whole *= max(last - -(-start // side) * side, 0)
  return (touched - whole) * itemsize


@settings(max_examples=150, deadline=None, database=None)
@given(cut_arrays())
def test_boxes_tile_an_array_in_c_order_of_their_coordinates(case):
  grid, index = case
  numbers = np.full(grid.shape, -1)
  boxes = [grid.chunk(number) for number in range(grid.num_chunks)]
  for number, box in enumerate(boxes):
    assert (numbers[slices(box)] == -1).all()
    numbers[slices(box)] = number
  assert (numbers >= 0).all()
  assert boxes == sorted(boxes)
  assert grid.num_chunks == math.prod(grid.counts)
  _, found = np.unique(numbers, return_counts=True)
  assert grid.sizes.tolist() == found.tolist()
  # What shards see of it.
  part = numbers[slices(index)]
  assert grid.intersecting(index) == np.unique(part).tolist()
  touched, held = np.unique(part, return_counts=True)
  cut = sum(grid.sizes[n] for n, k in zip(touched, held) if k < grid.sizes[n])
  assert cut_bytes(grid, index, 2) == 2 * cut
  # Whether boxes lie one after another in the array's own memory.
  order = np.arange(math.prod(grid.shape)).reshape(grid.shape)
  parts = [order[slices(box)].reshape(-1) for box in boxes]
  in_order = np.array_equal(np.concatenate([[], *parts]), order.reshape(-1))
  assert grid.is_flat == in_order


@pytest.mark.parametrize('number', [-1, 4])
def test_box_that_is_none(number):
  with pytest.raises(IndexError, match=f'chunk {number} of 4'):
    grids.Grid((8,), (2,)).chunk(number)


@settings(max_examples=150, deadline=None, database=None)
@given(st.lists(st.integers(0, 2**14), max_size=5).map(tuple))
def test_any_shape_has_chunks_of_bounded_size_and_number(shape):
  grid = grids.of(shape)
  elements = math.prod(shape)
  assert math.prod(grid.sides) <= grids.MAX_ELEMENTS or elements == 0
  assert grid == grids.of(shape)
  if 0 < elements < 2**40:
    assert int(grid.sizes.sum()) == elements
    assert grid.num_chunks <= 2**16 + elements / 2**8


def test_scalars_empty_arrays_and_ranks_beyond_sense():
  scalar = grids.of(())
  assert (scalar.num_chunks, scalar.chunk(0)) == (1, ())
  assert scalar.intersecting(()) == [0] and scalar.is_flat
  empty = grids.of((0, 2**40))
  assert empty.num_chunks == 0 and empty.sizes.size == 0 and empty.is_flat
  assert empty.intersecting(((0, 0), (0, 2**40))) == []
  with pytest.raises(ValueError, match='rank 17 exceeds 16'):
    grids.of((1,) * 17)


# The identity of weights depends on these: another box is another FORMAT.
@pytest.mark.parametrize(
  'shape, sides',
  [
    ((7168,), (7168,)),
    ((2**21 + 2,), (699052,)),
    ((58, 7168), (58, 7168)),
    ((163840, 7168), (5120, 112)),
    ((7168, 163840), (112, 5120)),
    ((16, 16, 128), (16, 2, 128)),
    ((60, 7168, 384), (20, 112, 384)),
    ((1, 11264, 2048), (1, 1408, 32)),
    ((60, 512, 64, 128), (60, 8, 2, 128)),
    ((60, 7168, 2, 2048), (60, 112, 2, 64)),
    ((60, 64, 128, 7168), (30, 2, 128, 112)),
    ((60, 384, 2048, 7168), (1, 1, 2048, 448)),
    ((60, 384, 7168, 2, 2048), (1, 1, 224, 2, 2048)),
    ((1024, 256), (1024, 256)),
    ((1024, 512), (1024, 64)),
    ((3, 128, 4, 32), (3, 128, 4, 32)),
    ((3, 8, 128, 2, 128), (3, 1, 128, 2, 128)),
    ((2, 3, 5, 7, 11, 2**10), (1, 2, 5, 7, 11, 1024)),
  ],
)
def test_sides_stay_what_they_are(shape, sides):
  assert grids.of(shape).sides == sides


@functools.cache
def described(model):
  """Returns {name: (shape, logical axes)} of all variables of a model."""
  path = pathlib.Path('configs/models') / f'{model}.py'
  spec = importlib.util.spec_from_file_location(f'grid_test_{model}', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  fields = module.get_config().to_dict()
  config = model_config.ModelConfig.from_dict(fields)
  shapes, axes = map(trees.flatten_names, decoder.abstract(config))
  return {n: (s.shape, tuple(axes[n])) for n, s in shapes.items()}


def meshes(total, narrow, replicas):
  """All sizes of (replica, fsdp, context) that are powers of two."""
  sizes = [2**k for k in range(total.bit_length())]
  return [
    mesh
    for mesh in itertools.product(sizes, repeat=3)
    if math.prod(mesh) <= total
    and mesh[1] * mesh[2] <= narrow
    and mesh[0] <= replicas
  ]


def cut(model, layout, mesh):
  """Returns {name: bytes of bfloat16} that the first device's shard cuts.

  If the first shard of a dimension ends where a box does, all of them do.
  """
  found = {}
  mesh = AbstractMesh(mesh, topology.AXES)
  for name, (shape, axes) in described(model).items():
    spec = shardings.spec(name, shape, axes, layout=layout, mesh=mesh)
    parts = [
      math.prod(mesh.shape[a] for a in ((on,) if isinstance(on, str) else on))
      for on in (on or () for on in spec)
    ]
    index = tuple((0, n // k) for n, k in zip(shape, parts, strict=True))
    bytes_ = cut_bytes(grids.of(shape), index, 2)
    if bytes_:
      found[name] = bytes_
  return found


def check_published(model, is_tested):
  width = described(model)['params/embedding'][0][1]
  most = 32 if width >= 4096 else 8
  train, decode = meshes(512, 64, 64), meshes(most, most, most)
  cases = [(layouts.TRAIN, m) for m in train if is_tested(m, 512)]
  cases += [(layouts.DECODE, m) for m in decode if is_tested(m, most)]
  assert len(cases) > 20
  for layout, mesh in [*cases, (layouts.REPLICATED, (4, 2, 2))]:
    assert cut(model, layout, mesh) == {}, (layout.name, mesh)


@pytest.mark.parametrize('model', PUBLISHED)
def test_shards_of_published_models_cut_no_box(model):
  check_published(model, lambda mesh, most: math.prod(mesh) == most)


@pytest.mark.slow
@pytest.mark.parametrize('model', PUBLISHED)
def test_shards_of_published_models_cut_no_box_on_any_mesh(model):
  check_published(model, lambda mesh, most: True)


@pytest.mark.parametrize('model', NARROW)
def test_shards_of_narrow_models_cut_no_box_of_a_large_array(model):
  small = {
    name for name, (s, _) in described(model).items() if math.prod(s) <= 2**18
  }
  few = {
    name for name, (s, _) in described(model).items() if math.prod(s) <= 2**21
  }
  for mesh in meshes(8, 8, 8):
    assert cut(model, layouts.TRAIN, mesh).keys() <= small, mesh
    assert cut(model, layouts.DECODE, mesh).keys() <= few, mesh
    assert cut(model, layouts.REPLICATED, mesh) == {}


def test_uneven_shards_are_counted():
  # Thirds of 768 rows, in boxes of 96: the third box is held in part.
  assert grids.of((11, 768, 64)).sides == (11, 96, 64)
  found = cut('small', layouts.TRAIN, (1, 3, 1))
  name = 'params/moe_layers/moe/router'
  assert found[name] == 11 * 96 * 64 * 2
  # With more replicas than any expert has, the rest divides what one box is.
  found = cut('kimi_k2', layouts.TRAIN, (256, 2, 1))
  assert set(found) == {
    'params/moe_layers/moe/down',
    'params/moe_layers/moe/gate_up',
  }


@pytest.mark.parametrize('model', MODELS)
def test_rows_of_a_manifest_are_few_beside_what_they_are_about(model):
  """Against AdamW at 1e-6, bfloat16, 1.4 % changed: some 190 times smaller."""
  shapes = [shape for shape, _ in described(model).values()]
  boxes = sum(grids.of(shape).num_chunks for shape in shapes)
  delta = 2 * sum(map(math.prod, shapes)) / 190
  share = {'tiny': 0.13, 'small': 0.013}.get(model, 0.01)
  assert boxes * manifests.CHUNK.itemsize < share * delta
