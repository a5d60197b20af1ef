"""Plans of Muon's step against closed forms, literals and arrays."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.optim import roles
from composer_jax.optim.muon import newton_schulz, planner
from composer_jax.plan import muon_model
from tests.optim.muon import plans


@pytest.mark.parametrize('name', plans.MESHES)
def test_a_decoder_on_six_meshes_costs_the_closed_forms(name):
  made = plans.decoder_plan(name)
  standard = lambda p, q: 20 * p * p * q + 10 * p**3
  total = (
    192 * standard(128, 448) + 12 * standard(256, 448) + 128 * standard(64, 448)
  )
  assert made.ideal_flops == total / 8
  # Padding is that of the 12 shared experts, which 8 devices own as if 16.
  assert made.flops * 8 == total + 4 * standard(256, 448)
  assert made.flops / made.ideal_flops == plans.critical_path(made)
  assert muon_model.padding(made) == pytest.approx(
    4 * standard(256, 448) / made.flops / 8
  )
  assert made.wire_bytes / muon_model.bound_bytes(made) == pytest.approx(
    plans.MESHES[name][-1]
  )
  assert sorted(len(group.members) for group in made.groups) == [3, 3, 4]


def test_bytes_of_a_mesh_are_counted_by_hand():
  # FSDP8: 192 + 16 + 128 slots, of which a device holds eighths; 7 of 8 come in
  # and as many return. Bound: without the 4 empty slots.
  floats = 192 * 448 * 128 + 16 * 448 * 256 + 128 * 448 * 64
  made = plans.decoder_plan('FSDP8')
  assert made.wire_bytes == 2 * 7 * 4 * floats // 64
  assert (
    muon_model.bound_bytes(made) == 2 * 7 * 4 * (floats - 4 * 448 * 256) / 64
  )
  # HSDP: half as many go to owners in each replica, and half of the results
  # come from the other.
  made = plans.decoder_plan('HSDP')
  kinds = dict.fromkeys(('all-to-all', 'all-gather'), 0)
  for group in made.groups:
    for kind, _, num_bytes in muon_model.collectives(group):
      kinds[kind] += num_bytes
  assert kinds['all-to-all'] == 2 * 3 * 4 * floats // 4 // 8
  assert kinds['all-gather'] == 4 * floats // 8


@pytest.mark.parametrize(
  'layers, axes, owned, padding', [(72, 16, 5, 8), (5, 8, 1, 3), (7, 2, 4, 1)]
)
def test_uneven_counts_are_padded_up_to_the_owners(
  layers, axes, owned, padding
):
  group = plans.one_matrix((layers, 16, 48), P(None, 'x', None), dict(x=axes))
  assert group.owned == owned
  assert group.owned * group.owners - group.count == padding
  assert group.flops == owned * newton_schulz.flops(16, 48, plans.STANDARD)


def test_maps_and_transposes_share_a_group_square_ones_too():
  leaves = {'there': ('embed', 'ffw'), 'back': ('ffw', 'embed')}
  specs = {'there': P('x', None), 'back': P(None, 'x')}
  mesh = plans.mesh_of(dict(x=8))
  for ffw, transposed in ((32, {'there'}), (64, {'back'})):
    made = plans.plan_of(leaves, specs, mesh, dict(embed=64, ffw=ffw))
    (group,) = made.groups
    assert {m.name for m in group.members if m.is_transposed} == transposed
    assert (group.p, group.q) == (ffw, 64)
  # A square matrix has the same orientation, and so bits, on every mesh.
  for spec in (P('x', None), P(None, 'x'), P()):
    made = plans.plan_of(
      {'w': ('ffw', 'embed')}, {'w': spec}, mesh, dict(embed=64, ffw=64)
    )
    assert made.groups[0].members[0].is_transposed


def test_leaves_on_other_axes_are_other_groups():
  leaves = {'a': ('embed', 'ffw'), 'b': ('embed', 'ffw'), 'c': ('embed', 'ffw')}
  specs = {'a': P('x', 'y'), 'b': P('y', 'x'), 'c': P(('x', 'y'), None)}
  made = plans.plan_of(
    leaves, specs, plans.mesh_of(dict(x=2, y=2)), dict(embed=8, ffw=16)
  )
  assert len(made.groups) == 3
  assert {group.num_shards for group in made.groups} == {4}


def _assembled(array, spec, mesh, matrix):
  """Builds whole matrices from shards by the sides of a plan."""
  place = NamedSharding(mesh, spec)
  made = planner.make(
    {'w': jax.ShapeDtypeStruct(array.shape, jnp.float32)},
    {'w': matrix},
    shardings={'w': place},
    newton_schulz=plans.STANDARD,
  )
  (group,) = made.groups
  (member,) = group.members
  order = member.batch + member.rows + member.columns
  indices = place.devices_indices_map(array.shape)
  shards = {}
  for coordinate in itertools.product(*(range(s) for s in mesh.devices.shape)):
    at = dict(zip(mesh.axis_names, coordinate, strict=True))
    device = mesh.devices[coordinate]
    if any(at[a] for a in mesh.axis_names if a not in group.axes):
      continue  # Other batches, and replicas.
    number = 0
    for axis in group.axes:
      number = number * mesh.shape[axis] + at[axis]
    local = array[indices[device]].transpose(order)
    shards[number] = local.reshape(
      -1, *(n for side in (group.p_side, group.q_side) for _, n in side.dims)
    )
  dims = group.p_side.dims + group.q_side.dims
  stacked = np.stack([shards[i] for i in range(group.num_shards)])
  stacked = stacked.reshape(
    *(s for s, _ in dims), member.count, *(n for _, n in dims)
  )
  rank = len(dims)
  sides = [i for d in range(rank) for i in (d, rank + 1 + d)]
  whole = stacked.transpose(rank, *sides).reshape(
    member.count, group.p, group.q
  )
  return group, whole


@pytest.mark.parametrize(
  'shape, spec, rows, columns, dims',
  [
    ((2, 8, 12), P(None, 'a', ('b', 'c')), (1,), (2,), (1, 1)),
    ((2, 12, 8), P(None, 'a', ('b', 'c')), (1,), (2,), (1, 1)),
    # Several sharded dimensions in a side, each interleaved with the next.
    ((4, 6, 2, 32), P('a', 'b', None, 'c'), (0, 1, 2), (3,), (1, 2)),
    # Unsharded dimensions, and those of one row a device, merge.
    ((4, 6, 2, 8), P('a', None, 'b', 'c'), (0, 1), (2, 3), (1, 1)),
    # Sides in another order than the parameter's.
    ((2, 6, 3, 40), P('a', 'b', None, 'c'), (0, 1), (2, 3), (1, 2)),
    ((4, 6, 2, 8), P('a', 'c', None, 'b'), (2, 1), (0, 3), (2, 2)),
    # Sharded batches and unused axes change nothing.
    ((4, 8, 3, 16), P('b', 'a', None, None), (1,), (3,), (1, 1)),
  ],
)
def test_sides_reassemble_whole_matrices(shape, spec, rows, columns, dims):
  mesh = jax.make_mesh((2, 2, 2), ('a', 'b', 'c'))
  array = np.arange(math.prod(shape)).reshape(shape)
  matrix = roles.Matrix(rows=rows, columns=columns)
  group, whole = _assembled(array, spec, mesh, matrix)
  batch = tuple(d for d in range(len(shape)) if d not in rows + columns)
  sides = (
    math.prod(shape[d] for d in rows),
    math.prod(shape[d] for d in columns),
  )
  expected = array.transpose(batch + rows + columns).reshape(-1, *sides)
  if sides[0] > sides[1]:
    expected = expected.swapaxes(1, 2)
  # The devices at zero of the batch's axes hold the first matrices.
  np.testing.assert_array_equal(whole, expected[: len(whole)])
  assert (len(group.p_side.dims), len(group.q_side.dims)) == dims


def test_one_device_exchanges_nothing():
  for made in (
    planner.make(
      {'w': jax.ShapeDtypeStruct((3, 8, 16), jnp.float32)},
      {'w': roles.Matrix(rows=(1,), columns=(2,))},
      newton_schulz=plans.STANDARD,
    ),
    plans.plan_of(
      {'w': ('layer', 'embed', 'ffw')},
      {'w': P(None, 'x', None)},
      plans.mesh_of(dict(x=1)),
    ),
  ):
    (group,) = made.groups
    assert (group.mode, group.owners, group.owned) == ('local', 1, group.count)
    assert made.wire_bytes == muon_model.bound_bytes(made) == 0
    assert not muon_model.collectives(group)
    assert plans.critical_path(made) == 1


def test_an_abstract_mesh_is_taken_for_a_tpu():
  # Made from shapes and an AbstractMesh, without devices.
  kimi = plans.kimi_plan((2, 128, 2))
  assert kimi.devices == 512
  for group in kimi.groups:
    assert group.newton_schulz.dtype == 'bfloat16'
  local = planner.make(
    {'w': jax.ShapeDtypeStruct((8, 16), jnp.float32)},
    {'w': roles.Matrix(rows=(0,), columns=(1,))},
    shardings={'w': NamedSharding(jax.make_mesh((8,), ('x',)), P('x'))},
    newton_schulz=newton_schulz.NewtonSchulz(),
  )
  assert local.groups[0].newton_schulz.dtype == 'float32'


def test_a_dimension_that_its_mesh_axes_do_not_divide_is_named():
  with pytest.raises(ValueError, match=r'w of shape .*1 \(63\).*\(8\)'):
    plans.one_matrix((2, 63, 128), P(None, 'x', None), dict(x=8))
