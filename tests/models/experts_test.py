"""Sorted, grouped and ungrouped experts equal a dense sum over all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.models import experts
from composer_jax.parallel import exchange

B, T, D, E, A, F = 2, 6, 5, 4, 2, 3


def _inputs():
  keys = jax.random.split(jax.random.key(0), 5)
  weights = {
    'gate_up': jax.random.normal(keys[0], (E, D, 2, F)),
    'down': jax.random.normal(keys[1], (E, F, D)),
  }
  x_BTD = jax.random.normal(keys[2], (B, T, D))
  gates_BTA = jax.random.uniform(keys[3], (B, T, A))
  # Expert 2 gets no token, and no token one expert twice.
  first_BT = jax.random.randint(keys[4], (B, T), 0, 2)
  ids_BTA = jnp.stack([3 * first_BT, jnp.ones_like(first_BT)], -1)
  valid_BT = jnp.ones((B, T), bool).at[1, 3:].set(False)
  return weights, x_BTD, gates_BTA, ids_BTA, valid_BT


def _dense(weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
  """Every expert on every token, SwiGLU written as its definition."""
  both_BTE2F = jnp.einsum('BTD,EDSF->BTESF', x_BTD, weights['gate_up'])
  gate_BTEF, up_BTEF = both_BTE2F[..., 0, :], both_BTE2F[..., 1, :]
  hidden_BTEF = gate_BTEF / (1 + jnp.exp(-gate_BTEF)) * up_BTEF
  y_BTED = jnp.einsum('BTEF,EFD->BTED', hidden_BTEF, weights['down'])
  chosen_BTAE = jax.nn.one_hot(ids_BTA, E) * valid_BT[..., None, None]
  return jnp.einsum('BTED,BTAE,BTA->BTD', y_BTED, chosen_BTAE, gates_BTA)


def _ours(mlp, weights, x_BTD, gates_BTA, ids_BTA, valid_BT):
  arrays = (weights, x_BTD, ids_BTA, gates_BTA, valid_BT)
  functions = experts.MLP._replace(forward=mlp)
  return exchange.exchange(functions, *arrays, plan=None)[0]


@pytest.mark.parametrize(
  'mlp', [experts.expert_mlp, experts.expert_mlp_in_tiles]
)
def test_values_and_gradients_equal_a_dense_sum_over_experts(mlp):
  weights, x_BTD, gates_BTA, ids_BTA, valid_BT = _inputs()

  @jax.jit
  def both(weights, x_BTD, gates_BTA):
    results = []
    for function in (functools.partial(_ours, mlp), _dense):
      y_BTD, pull = jax.vjp(
        lambda *a, f=function: f(*a, ids_BTA, valid_BT),
        weights,
        x_BTD,
        gates_BTA,
      )
      results.append((y_BTD, pull(jnp.cos(y_BTD))))
    return results

  ours, dense = both(weights, x_BTD, gates_BTA)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
    ours,
    dense,
  )
  np.testing.assert_array_equal(ours[0][1, 3:], 0)
  np.testing.assert_array_equal(ours[1][0]['down'][2], 0)
