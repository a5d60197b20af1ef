"""Updates a layer at a time, of state on the device or in the host's memory."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.optim import groups, layerwise

ADAM = groups.OptimizerOptions(name='adam', warmup_steps=1, decay_steps=1)
AXES = {
  'layers': {'scale': P('layer', 'embed'), 'up': P('layer', 'embed', 'ffw')},
  'embedding': P('vocab', 'embed'),
}
SHAPES = {'layers/scale': (3, 4), 'layers/up': (3, 4, 6), 'embedding': (5, 4)}


def draw(seed, dtype='float32'):
  rng = np.random.default_rng(seed)
  return trees.map_names(
    lambda name, _: jnp.asarray(rng.normal(size=SHAPES[name]), dtype),
    AXES,
  )


def on_host(tree):
  device = jax.devices()[0]
  host = jax.sharding.SingleDeviceSharding(device, memory_kind='pinned_host')
  return jax.tree.map(lambda x: jax.device_put(x, host) if x.ndim else x, tree)


def transform_of(state, offload):
  options = dataclasses.replace(ADAM, state=state, offload=offload)
  params = draw(0, options.masters)
  transform = groups.optimizer(options, params=params, axes=AXES, total_steps=9)
  kept = transform.init(params)
  if offload:
    params, kept = on_host(params), on_host(kept)

  @jax.jit
  def step(gradients, kept, params, number):
    updates, kept = transform.update(gradients, kept, params, step=number)
    if isinstance(updates, layerwise.Moved):
      return updates.params, kept, updates.updates
    return groups.apply_updates(params, updates, number), kept, updates

  return step, params, kept


def trained(state, offload):
  """Returns masters, numbers of the state, and updates, after two steps."""
  step, params, kept = transform_of(state, offload)
  updates = None
  for number in range(2):
    params, kept, updates = step(draw(number + 1), kept, params, number)
  if offload:
    arrays = [x for x in jax.tree.leaves((params, kept)) if x.ndim]
    assert all(map(trees.is_on_host, arrays))
  # State that is moved by layers is kept by first keys.
  moments = collections.defaultdict(list)
  for name, x in trees.flatten_names(kept).items():
    parts = [part for part in name.split('/') if not part.isdigit()]
    moments[parts[-1]].append(np.asarray(x))
  return params, dict(moments), updates


@pytest.mark.parametrize(
  'state',
  [
    'float32',
    *(pytest.param(n, marks=pytest.mark.slow) for n in ('bfloat16', 'int8')),
  ],
)
def test_bits_are_those_of_state_on_the_device(state):
  params, moments, updates = trained(state, offload=True)
  want_params, want_moments, want_updates = trained(state, offload=False)
  jax.tree.map(
    np.testing.assert_array_equal,
    (params, updates),
    (want_params, want_updates),
  )
  for name, arrays in want_moments.items():
    if name != 'count':
      for x, y in zip(moments[name], arrays, strict=True):
        np.testing.assert_array_equal(x, y)
  assert {int(x) for x in (*moments['count'], *want_moments['count'])} == {2}


def test_layers_are_rounded_by_different_random_numbers():
  step, params, kept = transform_of('bfloat16', offload=False)
  same = lambda tree, value: jax.tree.map(
    lambda x: jnp.full_like(x, value), tree
  )
  gradients = same(draw(1), 1.0)
  after, _, _ = step(gradients, kept, same(params, 1.001), 0)
  up_LEF = np.asarray(after['layers']['up'].astype('float32'))
  assert len(np.unique(up_LEF)) == 2
  assert (up_LEF[0] != up_LEF[1]).any() and (up_LEF[1] != up_LEF[2]).any()


def test_muon_stays_on_the_device():
  with pytest.raises(ValueError, match='offload must be False with Muon'):
    groups.OptimizerOptions(name='muon', offload=True)
