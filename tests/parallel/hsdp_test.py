"""Dual-mesh HSDP: dense weights narrow, experts wide, on the same 8 devices.

Proved by the replica groups of compiled train steps. What is looked at is known
by its number of elements: sizes are such that no weight has that of another
array which travels by the same kind of collective.
"""

import math

import pytest

from composer_jax.core import trees
from composer_jax.models import decoder
from composer_jax.parallel import exchange, layouts, shardings, topology
from tests.parallel import collectives
from tests.parallel import step_programs as programs

NARROW = ('fsdp', 'context')
# The mesh of the dual layout: CP = 2 and EP = 8 on 8 devices.
WIDE = (programs.config(), (2, 2, 2), 'a2a')
# Six experts over two devices, the others cut D; CP = 2. Backward nothing is
# gathered again.
UNEVEN = (
  programs.config(
    attention=programs.MLA,
    moe=dict(num_experts=6, router='sigmoid'),
    remat_saves=('weights', 'keys', 'routes'),
  ),
  (1, 4, 2),
  'a2a',
)
SIGMOID = dict(router='sigmoid', num_groups=4, num_active_groups=2)
OTHERS = {
  'mla_cp4': (
    programs.config(attention=programs.MLA, moe=SIGMOID),
    (2, 1, 4),
    'ragged_a2a',
  ),
  'no_context': (programs.config(tie_embeddings=True), (2, 4, 1), 'a2a'),
  'no_replica': (programs.config(), (1, 8, 1), 'a2a'),
  'cp2': (programs.config(moe=SIGMOID), (1, 4, 2), 'a2a'),
  'uneven_wide': (programs.config(moe=dict(num_experts=6)), (2, 2, 2), 'a2a'),
  # No expert axis divides: every device has all six, of each an eighth.
  'uneven_alone': (programs.config(moe=dict(num_experts=6)), (1, 8, 1), 'a2a'),
}
CASES = [
  pytest.param(*case, id=name, marks=pytest.mark.slow)
  for name, case in {'wide': WIDE, 'uneven': UNEVEN, **OTHERS}.items()
]
by_case = pytest.mark.parametrize('model, shape, transport', CASES)


class _Weights:
  """Sizes of one layer's arrays, and the mesh axes that shard them."""

  def __init__(self, model, shape):
    self.shape = shape
    mesh = topology.make_mesh(*shape)
    shapes, logical = (
      trees.flatten_names(tree['params']) for tree in decoder.abstract(model)
    )
    self.dense, self.experts, self.vectors = {}, {}, set()
    for name, leaf in shapes.items():
      axes = tuple(logical[name])
      spec = shardings.spec(
        name, leaf.shape, axes, layout=layouts.TRAIN, mesh=mesh
      )
      size = leaf.size // (leaf.shape[0] if 'layer' in axes else 1)
      mesh_axes = dict(zip(axes, map(exchange.axis_names, spec), strict=True))
      if 'expert' in axes:
        self.experts[size] = mesh_axes
      elif any(mesh_axes.values()):
        assert [axes for axes in mesh_axes.values() if axes] == [NARROW], name
        self.dense[size] = mesh_axes
      else:
        # Gradients are summed for all layers at once.
        self.vectors.add(leaf.size)

  def width(self, axes):
    return math.prod(self.shape[topology.AXES.index(axis)] for axis in axes)

  def groups(self, *axes):
    return programs.groups_of(self.shape, axes)

  def dense_shards(self):
    return {size // self.width(NARROW) for size in self.dense} - self.vectors


def _collectives(model, shape, transport):
  made = programs.program(model, shape, transport)
  # Groups of one device send nothing.
  operations = [
    c
    for c in collectives.read(made.text)
    if max(len(group) for group in c.groups) > 1
  ]
  return operations, _Weights(model, shape)


@by_case
def test_dense_weights_travel_inside_a_replica(model, shape, transport):
  sent, weights = _collectives(model, shape, transport)
  narrow, shards = weights.groups(*NARROW), weights.dense_shards()
  gathered, scattered, summed = set(), set(), set()
  for c in sent:
    sizes = set(c.sizes)
    if c.kind == 'all-gather' and sizes & set(weights.dense):
      assert c.groups == narrow, c
      gathered |= sizes
    if c.kind == 'reduce-scatter' and 'scatter_gradients' in c.scope:
      assert c.groups == narrow or not sizes & shards, c
      scattered |= sizes
    if c.kind == 'all-reduce':
      assert not sizes & (set(weights.dense) - shards), c
      if sizes & shards:
        # Each replica has a copy of the shard.
        assert c.groups == weights.groups('replica'), c
        summed |= sizes
  embedding = model.vocab_size * model.embed_dim
  assert gathered >= set(weights.dense) - {embedding}
  assert scattered >= shards - {embedding // weights.width(NARROW)}
  assert summed >= (shards if weights.width(('replica',)) > 1 else set())


@by_case
def test_weights_are_gathered_a_layer_at_a_time(model, shape, transport):
  sent, weights = _collectives(model, shape, transport)
  table = model.vocab_size * model.embed_dim
  layers = (set(weights.dense) | set(weights.experts)) - {table}
  stacks = {
    size * number
    for size in layers
    for number in (programs.NUM_DENSE, programs.NUM_MOE)
  }
  gathered = [c for c in sent if c.kind == 'all-gather']
  of_layers = [c for c in gathered if set(c.sizes) & layers]
  assert of_layers and all('/while/' in c.scope for c in of_layers)
  assert not [c for c in gathered if set(c.sizes) & (stacks - layers)]


@by_case
def test_experts_are_never_summed_and_gathered_only_where_cut(
  model, shape, transport
):
  sent, weights = _collectives(model, shape, transport)
  for size, dims in weights.experts.items():
    held = size // weights.width(dims['expert'])
    inner = [axes for axis, axes in dims.items() if axis != 'expert' and axes]
    (others,) = inner or ((),)
    shard = held // weights.width(others)
    moved = [c for c in sent if {size, held, shard} & set(c.sizes)]
    assert all(c.kind != 'all-reduce' for c in moved)
    assert {c.kind for c in moved} == (
      {'all-gather', 'reduce-scatter'} if inner else set()
    )
    if inner:
      assert {c.groups for c in moved} == {weights.groups(*others)}


@pytest.mark.parametrize(
  'case, width',
  [
    pytest.param(WIDE, 8, id='wide', marks=pytest.mark.slow),
    pytest.param(UNEVEN, 2, id='uneven', marks=pytest.mark.slow),
  ],
)
def test_experts_spread_wider_than_a_replica_beside_context_shards(case, width):
  """CP = 2 with EP = 8 on 8 devices."""
  sent, weights = _collectives(*case)
  exchanged = [
    c for c in sent if {'dispatch', 'combine'} & set(c.scope.split('/'))
  ]
  assert exchanged
  assert {len(group) for c in exchanged for group in c.groups} == {width}
  along = weights.groups('context')
  layers = [c for c in sent if c.groups == along and '/while/' in c.scope]
  keys = [c for c in layers if c not in exchanged]
  assert {c.kind for c in keys} == {'all-gather', 'reduce-scatter'}
  a = case[0].attention
  kept = [a.num_kv_heads * a.head_dim] if a.kind == 'gqa' else []
  kept += [a.kv_lora_dim, a.rope_dim] if a.kind == 'mla' else []
  rows = programs.B // weights.width(('replica', 'fsdp'))
  assert {size for c in keys if c.kind == 'all-gather' for size in c.sizes} == {
    rows * programs.T * width for width in kept
  }


@by_case
def test_no_array_is_resharded_by_force(model, shape, transport):
  # A program from the compilation cache prints nothing; golden_test checks its
  # bytes.
  made = programs.program(model, shape, transport)
  assert 'rematerialization' not in made.warnings
