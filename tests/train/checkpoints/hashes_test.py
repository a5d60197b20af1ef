"""Blocks written on one mesh are verified on any other."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.train.checkpoints import hashes

VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)


def _digest(block):
  record = hashes.record(jnp.asarray(block))
  return next(iter(record['shards'].values()))


def _seen(*places):
  """Returns an array of which this process holds these (rows, columns)."""
  shards = [
    types.SimpleNamespace(index=place, data=jnp.asarray(VALUES[place]))
    for place in places
  ]
  return types.SimpleNamespace(
    shape=(4, 4), ndim=2, is_fully_addressable=False, addressable_shards=shards
  )


def test_of_several_processes_each_verifies_the_blocks_within_its_shards():
  """One of two processes verifies blocks that are smaller than its shards."""
  array = _seen((slice(0, 2), slice(None)))
  right, wrong = _digest(VALUES[:1]), _digest(VALUES[3:])
  # Another process has the second block.
  assert hashes.matches(array, {'0:1,0:4': right, '2:3,0:4': wrong})
  assert not hashes.matches(array, {'1:2,0:4': wrong})
  assert not hashes.matches(array, {'0:2,0:4': right})


@pytest.mark.parametrize('columns', [(0, 4), (1, 3)])
def test_a_block_across_shards_of_one_process_is_put_together(columns):
  """A process has the upper two of four quarters, one of them twice."""
  upper, left, right = slice(0, 2), slice(0, 2), slice(2, 4)
  array = _seen((upper, left), (upper, right), (upper, left))
  name = f'1:2,{columns[0]}:{columns[1]}'
  block = VALUES[1:2, slice(*columns)]
  assert hashes.matches(array, {name: _digest(block)})
  assert not hashes.matches(array, {name: _digest(block + 1)})
  # Another process has the lower quarters, so that none can verify the block.
  assert hashes.matches(array, {'1:3,0:4': _digest(VALUES[:2])})


def test_blocks_of_any_mesh_are_verified_on_any():
  mesh = jax.make_mesh((4, 2), ('x', 'y'))
  values = jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8)
  for writer, reader in (
    *((P(), P('x')), (P('x'), P()), (P('x'), P(None, 'y'))),
    *((P('x', 'y'), P('y', 'x')), (P(None, 'y'), P('x'))),
  ):
    written = jax.device_put(values, NamedSharding(mesh, writer))
    recorded = hashes.record(written)['shards']
    sharding = NamedSharding(mesh, reader)
    assert hashes.matches(jax.device_put(values, sharding), recorded)
    changed = jax.device_put(values.at[7, 7].add(1), sharding)
    assert not hashes.matches(changed, recorded)
