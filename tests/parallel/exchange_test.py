"""Buffers of an exchange, and the bytes that it moves."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.parallel import exchange, rounds, topology

# Kimi-K2.
D, A, E, Z = 7168, 8, 384, 2048


def shards_of(transport, room, num_shards):
  rows = rounds.rows_of(
    transport,
    copies=Z * A,
    most=Z * min(A, E // num_shards),
    num_shards=num_shards,
    room=room,
  )
  return rounds.Shards(
    transport=transport,
    axes=(),
    others=(),
    num_shards=num_shards,
    num_local=E // num_shards,
    copies=Z * A,
    rows=rows,
  )


def test_buffers_are_the_mean_times_the_room_and_no_more_than_all():
  # 16,384 copies; 128 for each of 128 devices.
  assert shards_of('a2a', 1.25, 128).rows == 160
  assert shards_of('a2a', 1.25, 128).buffer == 160 * 128
  # In whole tiles of 512, with a row for each sender.
  assert shards_of('ragged_a2a', 1.1, 128).buffer == 36 * 512
  assert shards_of('ragged_a2a', 1.1, 128).rows == 36 * 512 - 128
  assert shards_of('a2a', 1000, 128).rows == Z * 3
  assert shards_of('ragged_a2a', 1000, 128).rows == Z * 3 * 128


@pytest.mark.parametrize('num_shards', [2, 8, 128])
def test_even_load_moves_each_copy_five_times(num_shards):
  others = 1 - 1 / num_shards
  ragged = shards_of('ragged_a2a', 1.25, num_shards)
  want = 5 * Z * A * D * 2 * others
  assert rounds.bytes_received(ragged, Z * A, D * 2) == round(want)
  # Slots are sent whole, in two rounds if they hold less than the mean.
  for room, sent in ((1.25, 1.25), (0.5, 1), (0.75, 1.5)):
    slots = shards_of('a2a', room, num_shards)
    have = rounds.bytes_received(slots, Z * A, D * 2)
    assert have == pytest.approx(sent * want, rel=0.01)


def test_only_tokens_that_travel_have_rounds():
  plan = exchange.ExchangePlan(
    mesh=topology.make_mesh(2, 2, 2),
    batch_axes=('replica', 'fsdp'),
    sequence_axes=('context',),
    weight_specs=(('up', P(('fsdp', 'context'))),),
    transport='a2a',
    room=2.0,
  )
  shards = exchange.shards_of(plan, num_tokens=64, num_active=2, num_local=3)
  assert shards == rounds.Shards(
    transport='a2a',
    axes=('fsdp', 'context'),
    others=('replica',),
    num_shards=4,
    num_local=3,
    copies=128,
    rows=64,
  )
  chosen = dataclasses.replace(plan, transport='auto')
  assert (
    exchange.shards_of(chosen, num_tokens=64, num_active=2, num_local=3)
    == shards
  )
