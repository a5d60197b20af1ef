"""What a plan takes in time and memory, against closed forms."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.optim.muon import cost, times
from tests.optim.muon import plans


def test_kimi_k2_on_512_devices():
  kimi = plans.kimi_plan((2, 128, 2))
  # Without the giants' own exchange, bytes are those of whole matrices.
  shared = sum(group.split_bytes for group in kimi.groups)
  assert (kimi.wire_bytes - shared) / kimi.bound_bytes < 1.02
  assert kimi.ideal_flops == pytest.approx(93.2e12, rel=1e-3)
  gram = plans.kimi_plan((2, 128, 2), method='auto')
  assert gram.flops / gram.ideal_flops < 0.82
  assert times.temporary_bytes(kimi) < 6.5e9
  in_order = times.pipelined_seconds(times.stages(kimi))
  roofline = times.roofline_seconds(kimi)
  assert roofline < in_order < 1.05 * roofline


def test_pipelined_time_in_closed_form():
  stage = times.Stage
  pipelined = times.pipelined_seconds
  assert pipelined([]) == 0
  assert pipelined([stage(1, 5, 2)]) == 8
  # All but the first arrival and the last return is hidden by work.
  assert pipelined([stage(1, 5, 2)] * 4) == 1 + 4 * 5 + 2
  # Nothing hides transfers that take longer than work.
  assert pipelined([stage(10, 1, 10)] * 4) == pytest.approx(80, abs=4)
  assert pipelined([stage(0, 3, 0), stage(2, 4, 1), stage(0, 3, 0)]) == 10


def test_a_collective_beyond_a_node_is_slow():
  h200 = cost.BY_NAME['h200']
  assert h200.wire_seconds(45e9, span=8) == pytest.approx(0.1)
  assert h200.wire_seconds(45e9, span=9) == pytest.approx(0.9)
  # fsdp's neighbours are context's devices away from each other.
  group = plans.one_matrix(
    (8, 64, 128), P(None, 'f', None), dict(r=2, f=4, c=2), rates=h200
  )
  assert group.replica_axes == ('r', 'c')
  # An axis of one device is no axis.
  group = plans.one_matrix((8, 64, 128), P(None, 'f', 'c'), dict(r=1, f=4, c=1))
  assert (group.replica_axes, group.axes) == ((), ('f',))


def test_bound_is_that_of_owners_of_whole_matrices():
  # Out of 4 shards and 2 replicas: 3/8 come in, 7/8 come back.
  assert cost.bound_bytes(4, 2, 800) == 300 + 700
  assert cost.bound_bytes(1, 8, 800) == 700
  assert cost.bound_bytes(8, 1, 800) == 2 * 700


def test_neighbours_of_a_major_axis_are_far_apart():
  # Of f within (f, c), consecutive indices are two devices apart.
  strides = ((2, 8), (4, 2))
  assert [times.span(strides, n) for n in (1, 2, 4, 8)] == [1, 4, 8, 16]
  assert times.span(((2, 8), (2, 4), (4, 1)), 8) == 8
  # A matrix cut by c and f, c first: those that share it take c's steps.
  h200 = dataclasses.replace(cost.BY_NAME['h200'], node=4)
  group = plans.one_matrix(
    (1, 64, 96), P(None, 'c', 'f'), dict(f=4, c=2), rates=h200, giants=2
  )
  assert group.shard_strides == ((2, 1), (4, 2)) and not group.replica_strides
  near, far = (
    times.stage(
      dataclasses.replace(group, shard_strides=strides), group.chunks[0], h200
    ).work
    for strides in (((2, 1), (4, 1)), ((2, 1), (4, 4)))
  )
  assert far > near


def _shared(replicas, layers, **options):
  """Plans matrices of four shards on a CPU."""
  return plans.plan_of(
    {'w': ('layer', 'embed', 'ffw')},
    {'w': P(None, 'f', None)},
    plans.mesh_of(dict(r=replicas, f=4)),
    dict(layer=layers, embed=64, ffw=128),
    **{'rates': plans.CPU, 'wire_dtype': 'float32', 'replicas': 'split'},
    **options,
  )


def test_temporary_bytes_in_closed_form():
  shard = 4 * 16 * 128
  one = 4 * (2 * 64 * 128 + 3 * 64 * 64)
  # All results; what is at work; and before and after the all-to-all, lists.
  alone = _shared(1, 8, target_chunks=1)
  assert times.temporary_bytes(alone) == (8 + 2 * 8) * shard + 2 * one
  # Two replicas own half as many each, but see the lists of all eight.
  both = _shared(2, 8, target_chunks=1)
  assert times.temporary_bytes(both) == (8 + 2 * 4 + 8) * shard + one
  # Of five chunks three are in flight.
  cut = _shared(1, 20, target_chunks=5)
  assert len(cut.sequence) == 5
  assert times.temporary_bytes(cut) == (20 + 3 * 2 * 4) * shard + one


def test_a_stage_in_closed_form():
  rates = cost.Rates('slow', 1e15, 1e6, 1e3, 1.0, 8, latency=0.5)
  p, q, steps = 64, 96, 5
  told = dict(rates=rates, wire_dtype='float32')
  cut = ((1, p, q), P(None, None, 'x'), dict(x=4))

  def stage(**options):
    group = plans.one_matrix(*cut, **told, **options)
    return times.stage(group, group.chunks[0], rates)

  # Gradient and momentum in, momentum and update out, and four times the wire.
  around = p * q // 4 * (4 * 4 + 4 * 4)
  products = 4 * steps * (3 * p * q + 4 * p * p)
  exchange = 3 * p * q // 4 * 4 / 1e3 + 0.5
  assert stage(giants='owner') == pytest.approx(
    (exchange, (products + around) / 1e6, exchange)
  )
  gram = dataclasses.replace(plans.STANDARD, method='gram')
  products = 4 * (3 * (3 * p * q + 2 * p * p) + 11 * 3 * p * p)
  assert stage(giants='owner', ns=gram).work == pytest.approx(
    (products + around) / 1e6
  )
  # Two devices wait for each other 17 times.
  products = 4 * steps * (3 * p * q + 4 * p * p) // 2
  shared = 2 * 4 + steps * 3 * 4 * p * p // 2
  assert stage(giants=2).work == pytest.approx(
    (products + around) / 1e6 + shared / 1e3 + 17 * 0.5
  )
