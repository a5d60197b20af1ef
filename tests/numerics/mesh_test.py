"""Experts of few bits over a mesh: the sums and gradients of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.models import config as model_config
from composer_jax.models import experts
from composer_jax.parallel import exchange, topology
from tests.parallel import rounds_test


@pytest.mark.parametrize(
  'mesh', ['8', pytest.param('4, two replicas', marks=pytest.mark.slow)]
)
def test_rounds_of_an_exchange_change_nothing(mesh):
  """Of 24 experts with uneven loads, in several rounds."""
  precision = model_config.PrecisionConfig(experts='nvfp4')
  forms = experts.forms(precision)
  plan = rounds_test.make_plan(mesh)

  def alone(*arrays):
    return exchange.exchange(forms.sorted, *arrays, plan=None)

  def of(function):
    def run(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
      return rounds_test.value_and_pull(
        function, weights, x_BTD, ids_BTA, gates_BTA, valid_BT
      )

    return jax.jit(run)

  arrays = (*rounds_test.inputs()[:3], *rounds_test.loads()['random'])
  have, counts = of(rounds_test.carried(plan, functions=forms.sorted))(*arrays)
  want, _ = of(alone)(*arrays)
  assert counts.max() > 1
  for error in jax.tree.leaves(rounds_test.difference(have, want)):
    assert error <= 1e-6


@pytest.mark.slow
def test_gradients_rounded_by_chance_draw_the_same_on_every_mesh():
  """Whole in one round; rows of three devices are uneven over 24 experts.

  Tokens keep their order, so that blocks of rows have the same rows. With the
  draws of another step all gradients differ.
  """
  precision = model_config.PrecisionConfig(
    experts='nvfp4', backward='mxfp8', stochastic=True, hadamard=True
  )
  forms = experts.forms(precision)
  draws_BT = jax.random.bits(
    jax.random.key(5), (rounds_test.B, rounds_test.T), jnp.uint32
  )

  def of(plan):
    def shard(weights, x_BTD, ids_BTA, gates_BTA, valid_BT, draws_BT):
      arrays = weights, x_BTD, ids_BTA, gates_BTA, valid_BT
      return exchange.exchange(
        forms.sorted, *arrays, plan=plan, draws_BT=draws_BT
      )[0]

    if plan is None:
      return shard
    tokens = P(plan.batch_axes, plan.sequence_axes)
    return jax.shard_map(
      shard,
      mesh=plan.mesh,
      in_specs=(dict(plan.weight_specs), *[tokens] * 5),
      out_specs=tokens,
      check_vma=False,
    )

  @functools.partial(jax.jit, static_argnums=0)
  def run(plan, draws_BT):
    weights, x_BTD, gates_BTA, _ = rounds_test.inputs()
    ids_BTA, valid_BT = map(jnp.asarray, rounds_test.loads()['random'])
    function = lambda *arrays: (of(plan)(*arrays, draws_BT), None)
    return rounds_test.value_and_pull(
      function, weights, x_BTD, ids_BTA, gates_BTA, valid_BT
    )[0]

  want = run(None, draws_BT)
  scale = [np.abs(x).max() for x in jax.tree.leaves(want)]
  for shape in ((1, 8, 1), (2, 4, 1), (1, 3, 1)):
    plan = exchange.ExchangePlan(
      mesh=topology.make_mesh(*shape, devices=jax.devices()[: np.prod(shape)]),
      batch_axes=('replica', 'fsdp'),
      sequence_axes=('context',),
      weight_specs=(
        ('gate_up', P(topology.AXES)),
        ('down', P(topology.AXES)),
      ),
      room=8.0,
    )
    have = run(plan, draws_BT)
    for x, y, most in zip(
      *map(jax.tree.leaves, (have, want)), scale, strict=True
    ):
      # A sum in another order may cross a tie of a code here and there.
      assert (np.abs(x - y) <= 1e-5 * most).mean() > 0.99, (shape, most)
  other = run(None, draws_BT + jnp.uint32(1))
  for x, y in zip(jax.tree.leaves(other)[1:-1], jax.tree.leaves(want)[1:-1]):
    assert (x != y).mean() > 0.5
