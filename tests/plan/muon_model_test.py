"""Modelled time of a plan against closed forms."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.optim.muon import cost
from composer_jax.plan import muon_model
from tests.optim.muon import plans


def test_kimi_k2_on_512_devices():
  kimi = plans.kimi_plan((2, 128, 2))
  # Without the giants' own exchange, bytes are those of whole matrices.
  shared = sum(group.split_bytes for group in kimi.groups)
  assert (kimi.wire_bytes - shared) / muon_model.bound_bytes(kimi) < 1.02
  assert kimi.ideal_flops == pytest.approx(93.2e12, rel=1e-3)
  gram = plans.kimi_plan((2, 128, 2), method='auto')
  assert gram.flops / gram.ideal_flops < 0.82
  rates = cost.BY_NAME['v5p']
  in_order = muon_model.pipelined_seconds(muon_model.chunk_times(kimi, rates))
  roofline = muon_model.roofline_seconds(kimi, rates)
  assert roofline < in_order < 1.05 * roofline


def test_pipelined_time_in_closed_form():
  stage = cost.ChunkTimes
  pipelined = muon_model.pipelined_seconds
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
  def bound(sizes, layers=16):
    spec = P(None, 'f', None)
    made = plans.plan_of(
      {'w': ('layer', 'embed', 'ffw')},
      {'w': spec},
      plans.mesh_of(sizes),
      dict(layer=layers, embed=64, ffw=128),
    )
    return muon_model.bound_bytes(made)

  whole = 16 * 64 * 128 * 4
  # Out of 4 shards and 2 replicas: 3/8 come in, 7/8 come back.
  assert bound(dict(r=2, f=4)) == whole / 4 * (3 / 8 + 7 / 8)
  assert bound(dict(r=8, f=1)) == whole * 7 / 8
  assert bound(dict(f=8)) == whole / 8 * 2 * 7 / 8


def test_neighbours_of_a_major_axis_are_far_apart():
  # Of f within (f, c), consecutive indices are two devices apart.
  strides = ((2, 8), (4, 2))
  assert [cost.span(strides, n) for n in (1, 2, 4, 8)] == [1, 4, 8, 16]
  assert cost.span(((2, 8), (2, 4), (4, 1)), 8) == 8
  # A matrix cut by c and f, c first: those that share it take c's steps.
  h200 = dataclasses.replace(cost.BY_NAME['h200'], node=4)
  group = plans.one_matrix(
    (1, 64, 96), P(None, 'c', 'f'), dict(f=4, c=2), rates=h200, split=2
  )
  assert group.shard_strides == ((2, 1), (4, 2)) and not group.replica_strides
  near, far = (
    cost.chunk_times(
      dataclasses.replace(group, shard_strides=strides), group.chunks[0], h200
    ).work
    for strides in (((2, 1), (4, 1)), ((2, 1), (4, 4)))
  )
  assert far > near


def test_a_stage_in_closed_form():
  rates = cost.Rates('slow', 1e15, 1e6, 1e3, 1.0, 8, latency=0.5)
  p, q, steps = 64, 96, 5
  cut = ((1, p, q), P(None, None, 'x'), dict(x=4))

  def stage(**options):
    group = plans.one_matrix(*cut, rates=rates, **options)
    return cost.chunk_times(group, group.chunks[0], rates)

  # Gradient and momentum in, momentum and update out, and four times the wire.
  around = p * q // 4 * (4 * 4 + 4 * 4)
  products = 4 * steps * (3 * p * q + 4 * p * p)
  exchange = 3 * p * q // 4 * 4 / 1e3 + 0.5
  assert stage(split=1) == pytest.approx(
    (exchange, (products + around) / 1e6, exchange)
  )
  gram = dataclasses.replace(plans.STANDARD, method='auto')
  products = 4 * (3 * (3 * p * q + 2 * p * p) + 11 * 3 * p * p)
  assert stage(split=1, ns=gram).work == pytest.approx(
    (products + around) / 1e6
  )
  # Two devices wait for each other 17 times.
  products = 4 * steps * (3 * p * q + 4 * p * p) // 2
  shared = 2 * 4 + steps * 3 * 4 * p * p // 2
  assert stage(split=2).work == pytest.approx(
    (products + around) / 1e6 + shared / 1e3 + 17 * 0.5
  )
