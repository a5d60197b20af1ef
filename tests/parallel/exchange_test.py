"""Bytes of transports, the choice of one, and refused plans."""

import itertools

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.parallel import carriers, exchange, topology, transports

# Kimi-K2.
D, A, E, Z = 7168, 8, 384, 2048


def load_of(shards, **changes):
  sizes = dict(
    num_tokens=Z,
    num_active=A,
    num_experts=E,
    num_shards=shards,
    embed_dim=D,
    item_bytes=2,
  )
  return transports.Load(**(sizes | changes))


def plan_of(axes=('fsdp', 'context'), **fields):
  specs = dict(
    mesh=topology.make_mesh(2, 2, 2),
    batch_axes=('replica', 'fsdp'),
    sequence_axes=('context',),
    weight_specs=(('up', P(axes)),),
  )
  return exchange.ExchangePlan(**(specs | fields))


def test_a_token_visits_as_many_shards_as_the_enumeration_of_routes_says():
  load = load_of(3, num_active=3, num_experts=9)
  routes = itertools.combinations(range(9), 3)
  visited = [len({e // 3 for e in route}) / 3 for route in routes]
  np.testing.assert_allclose(load.visits, np.mean(visited), rtol=1e-12)


@pytest.mark.parametrize('shards, ring_kb', [(4, 86), (8, 201), (64, 1806)])
def test_the_bytes_of_a_token_are_those_of_the_closed_form(shards, ring_kb):
  load = load_of(shards, num_active=A)
  routes = 12 * 8 * A * (shards - 1) // 6  # both ways, ids and gates
  ring = transports.bytes_received(load, 'ring', bucket=None) / Z
  assert ring == 2 * 4 * D * (shards - 1) + routes
  # Forward alone, of tokens alone: 4 D (EP - 1).
  assert round((ring - routes) / 2 / 1000) == ring_kb
  # Slots for the worst case carry what the ring carries.
  assert transports.bytes_received(load, 'a2a', bucket=None) == Z * ring
  ragged = transports.bytes_received(load, 'ragged_a2a', bucket=None) / Z
  # Once to each shard is never more than once for each expert.
  assert ragged < min(ring, 2 * 4 * D * A * (shards - 1) / shards + routes)


@pytest.mark.parametrize(
  'shards, platform, bucket, name',
  [
    # A token visits nearly every shard.
    (4, 'tpu', 1.25, 'ring'),
    (8, 'tpu', 1.25, 'ragged_a2a'),
    (8, 'gpu', None, 'ragged_a2a'),
    (64, 'tpu', None, 'ragged_a2a'),
    # Nothing to balance: worst-case slots are the ring's bytes.
    (64, 'cpu', None, 'ring'),
    (64, 'cpu', 1.25, 'a2a'),
    (1, 'gpu', None, 'ring'),
  ],
)
def test_the_fewest_bytes_of_what_the_platform_has_are_chosen(
  shards, platform, bucket, name
):
  load = load_of(shards)
  chosen, reason = transports.choose(load, platform=platform, bucket=bucket)
  assert chosen == name
  assert f'transport {name}: {shards} expert shards' in reason
  assert '\n' not in reason
  for each in carriers.CARRIERS:
    size = transports.bytes_received(load, each, bucket=bucket)
    assert f'{each} {size / 1e6:.3g}' in reason


@pytest.mark.parametrize('name', carriers.CARRIERS)
@pytest.mark.parametrize('shards', [2, 8, 128])
def test_rows_say_exactly_whether_tokens_have_slots(shards, name):
  load = load_of(shards)
  for bucket in (0.5, 1.0, 1.25, 2.0, 100.0, None):
    group = transports.sized(load, name, bucket=bucket)
    capacity = transports.capacity_rows(load, bucket)
    assert capacity <= load.worst_rows
    assert (group.rows is None) == (capacity == load.worst_rows)
    worst = load.num_tokens * (shards if name == 'ragged_a2a' else 1)
    assert transports.rows_for_tokens(load, name, worst) <= load.worst_rows
    if group.slots is not None:
      for tokens in range(group.slots - 2, group.slots + 3):
        rows = transports.rows_for_tokens(load, name, tokens)
        assert (rows <= capacity) == (tokens <= group.slots)
      # A bucket holds its mean of tokens, too.
      mean = worst * load.visits
      assert group.slots >= int(bucket * mean)


def test_the_worst_case_is_every_token_to_every_expert_it_can_have():
  assert transports.capacity_rows(load_of(128), None) == Z * 128 * 3
  assert transports.capacity_rows(load_of(4), None) == Z * 4 * 8
  assert transports.capacity_rows(load_of(4), 1.25) == Z * A * 5 // 4


@pytest.mark.parametrize(
  'call, words',
  [
    (
      lambda: exchange.load_of(
        plan_of(),
        batch_size=8,
        length=16,
        num_experts=30,
        num_active=2,
        embed_dim=8,
      ),
      "num_experts (30) must divide by the mesh axes ('fsdp', 'context') (4); "
      'the nearest that does is 28 or 32',
    ),
  ],
)
def test_what_cannot_be_is_refused_by_name_and_number(call, words):
  with pytest.raises(ValueError) as error:
    call()
  assert words in str(error.value)
