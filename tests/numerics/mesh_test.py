"""Experts of few bits over a mesh: the sums and gradients of one device."""

import jax
import pytest

from composer_jax.models import config as model_config
from composer_jax.models import experts
from composer_jax.parallel import exchange
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
