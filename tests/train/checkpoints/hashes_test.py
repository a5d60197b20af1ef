"""Blocks written on one mesh are verified on any other."""

import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.fleet import hosts
from composer_jax.train.checkpoints import hashes

VALUES = np.arange(16, dtype=np.float32).reshape(4, 4)


def _digest(block):
  record = hashes.record(jnp.asarray(block))
  return next(iter(record['shards'].values()))


def _seen(*places, others=()):
  """Returns an array of two processes, this and another, by (rows, columns)."""
  shards = [
    types.SimpleNamespace(index=place, data=jnp.asarray(VALUES[place]))
    for place in places
  ]
  devices = dict(enumerate((*places, *others)))
  return types.SimpleNamespace(
    shape=(4, 4),
    addressable_shards=shards,
    sharding=types.SimpleNamespace(devices_indices_map=lambda _: devices),
  )


UPPER, LOWER = ((slice(start, start + 2), slice(None)) for start in (0, 2))


def test_of_several_processes_each_verifies_the_blocks_within_its_shards():
  """One of two processes verifies blocks that are smaller than its shards."""

  def never(_, block):
    raise AssertionError(block)

  array = _seen(UPPER, others=[LOWER])
  right, wrong = _digest(VALUES[:1]), _digest(VALUES[3:])
  # Another process has the second block.
  assert hashes.matches(array, {'0:1,0:4': right, '2:3,0:4': wrong}, never)
  assert not hashes.matches(array, {'1:2,0:4': wrong}, never)
  assert not hashes.matches(array, {'0:2,0:4': right}, never)


@pytest.mark.parametrize('places', [[UPPER, LOWER], [UPPER]])
def test_a_block_across_shards_is_put_together(places):
  """Also where they are of several processes: none could verify it alone."""
  array = _seen(*places, others=[LOWER, UPPER])

  def gather(_, block):
    return VALUES[tuple(slice(*ends) for ends in block)]

  right = _digest(VALUES[1:3, 1:3])
  assert hashes.matches(array, {'1:3,1:3': right}, gather)
  assert not hashes.matches(array, {'1:3,0:4': right}, gather)


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


PROCESS = """
import sys
import jax
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
process, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, num_processes=2, process_id=process)
from tests.train.checkpoints import hashes_test as t
mesh = jax.make_mesh((2,), ('x',))
sharding = t.NamedSharding(mesh, t.P('x'))
array = jax.make_array_from_callback((4, 4), sharding, t.VALUES.__getitem__)
right, wrong = (t._digest(values) for values in (t.VALUES, t.VALUES + 1))
assert t.hashes.matches(array, {'0:4,0:4': right})
assert not t.hashes.matches(array, {'0:4,0:4': wrong})
# What one of them refuses keeps it from no block that both look at.
blocks = {'0:1,0:4': wrong, '0:4,0:4': right}
assert t.hashes.matches(array, blocks) == (process == 1)
"""


@pytest.mark.slow
def test_two_processes_verify_what_one_wrote():
  command = [sys.executable, '-c', PROCESS]
  address = hosts.address()
  env = os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'}
  started = [
    subprocess.Popen([*command, str(number), address], env=env)
    for number in range(2)
  ]
  assert [process.wait() for process in started] == [0, 0]
