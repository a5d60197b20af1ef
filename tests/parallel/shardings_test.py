"""Specs from the layouts' tables, and the errors of impossible ones."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.parallel import layouts, shardings, topology


def _spec(shape, axes, mesh_shape=(2, 2, 2), layout=layouts.TRAIN):
  mesh = topology.make_mesh(*mesh_shape)
  return shardings.spec('w', shape, axes, layout=layout, mesh=mesh)


def test_dense_is_narrow_and_experts_are_wide():
  assert _spec((8, 12), ('embed', 'ffw')) == P(('fsdp', 'context'), None)
  up = ('layer', 'expert', 'embed', 'gate_up', 'ffw')
  wide = P(None, ('replica', 'fsdp', 'context'), None, None, None)
  assert _spec((3, 16, 8, 2, 4), up) == wide


def test_experts_take_the_largest_divisor_and_the_rest_goes_to_a_dimension():
  axes = ('expert', 'embed', 'ffw')
  rest = ('fsdp', 'context')
  assert _spec((6, 8, 4), axes) == P(('replica',), rest, None)
  assert _spec((6, 5, 4), axes) == P(('replica',), None, rest)
  assert _spec((4, 8, 4), axes, (1, 4, 2)) in (
    P(('fsdp',), ('replica', 'context'), None),
    P(('replica', 'fsdp'), ('context',), None),
  )


def test_replicated_layout_shards_no_parameter():
  spec = _spec((6, 5), ('expert', 'embed'), layout=layouts.REPLICATED)
  assert spec == P(None, None)


@pytest.mark.parametrize(
  'shape,axes,message',
  [
    ((8, 8), ('embed', 'colour'), r"Parameter w .*'colour'.* hsdp"),
    ((8,), ('embed', 'ffw'), 'their number does not fit'),
    (
      (6, 8),
      ('embed', 'ffw'),
      r'embed dimension \(6\) must divide by .*fsdp=2 x context=2 \(4\); the '
      'nearest that does is 4 or 8',
    ),
    (
      (5, 13, 3),
      ('expert', 'embed', 'ffw'),
      r'its 5 experts do not divide .* \(8\), and none of .*8 experts, embed '
      'of 8 or 16, ffw of 8;',
    ),
  ],
)
def test_errors_name_the_parameter(shape, axes, message):
  with pytest.raises(ValueError, match=message):
    _spec(shape, axes)


def test_mesh_must_use_every_device():
  message = f'needs 6 devices and there are {len(jax.devices())}'
  with pytest.raises(ValueError, match=message):
    topology.make_mesh(3, 2, 1)
