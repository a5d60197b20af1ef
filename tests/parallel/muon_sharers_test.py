"""Matrices shared among some replicas, whose work the others repeat."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.optim import roles
from composer_jax.optim.muon import cost, planner
from composer_jax.optim.muon import transform as muon
from composer_jax.plan.hlo import overlap
from tests import compiling

MATRICES = {'w': roles.Matrix(rows=(1,), columns=(2,))}
# Where products are all that takes time, nothing is repeated to save a wire.
RATES = dataclasses.replace(
  cost.BY_NAME['cpu'], memory=1e18, within=1e18, latency=1e-18
)


OPTIONS = muon.MuonChoices(method='standard')


def _update(gradient, split, sharding=None):
  """Returns the first update and the program that made it."""
  transform = muon.scale_by_muon(
    MATRICES,
    shardings=sharding and {'w': sharding},
    options=OPTIONS,
    fixed=planner.PlanOptions(rates=RATES, split=split),
  )
  gradients = {'w': jax.device_put(gradient, sharding)}
  state = transform.init(gradients)
  step = jax.jit(lambda g, s: transform.update(g, s)[0])
  compiled = step.lower(gradients, state).compile(
    compiler_options=compiling.AS_USERS_DO
  )
  return compiled(gradients, state)['w'], compiled.as_text()


@pytest.mark.parametrize(
  'layers, split, bitwise',
  [
    # Two replicas of two shards are owners enough for three matrices; four
    # replicas would only add empty slots.
    (3, 1, True),
    # Both shards own a matrix together, so two replicas have two owners.
    (2, 2, False),
  ],
)
def test_sharing_among_some_replicas_changes_no_update(layers, split, bitwise):
  mesh = jax.make_mesh((2, 2, 2), ('r', 'f', 's'))
  sharding = NamedSharding(mesh, P(None, None, 'f'))
  gradient = np.random.default_rng(0).normal(size=(layers, 16, 24))
  gradient = gradient.astype(np.float32)
  (group,) = planner.make(
    {'w': gradient},
    MATRICES,
    shardings={'w': sharding},
    newton_schulz=OPTIONS,
    fixed=planner.PlanOptions(rates=RATES, split=split),
  ).groups
  assert (group.num_replicas, group.sharers, group.owned) == (4, 2, 1)
  alone, _ = _update(gradient, None)
  update, text = _update(gradient, split, sharding)
  # Devices that share a matrix add in another order.
  tolerance = 0 if bitwise else 2e-6
  for shard in update.addressable_shards:  # All replicas.
    np.testing.assert_allclose(
      shard.data, alone[shard.index], rtol=0, atol=tolerance
    )
  *_, gather = overlap.read(text).of_kind('all-gather')
  # Neighbours of the replicas (r, s), at the same f.
  assert gather.groups == {frozenset({i, i + 1}) for i in range(0, 8, 2)}
  assert gather.bytes == group.gather_bytes(group.owned)
