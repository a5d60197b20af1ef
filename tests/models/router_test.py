"""Routing against literal arrays."""

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import records
from composer_jax.models import config as model_config
from composer_jax.models import router


def _config(kind, renormalize=True, scale=1.0):
  return model_config.MoEConfig(
    num_experts=4,
    num_active=2,
    ffw_dim=8,
    num_shared=0,
    router=kind,
    renormalize=renormalize,
    routed_scale=scale,
    aux_loss_weight=0.0,
  )


VALID = jnp.ones((1, 1), bool)


def test_softmax_weights_are_the_probabilities_of_the_largest():
  logits = jnp.log(jnp.array([[[0.1, 0.4, 0.2, 0.3]]]))
  weights, ids, _ = router.route(
    logits, config=_config('softmax', renormalize=False), valid_BT=VALID
  )
  np.testing.assert_array_equal(ids[0, 0], [1, 3])
  np.testing.assert_allclose(weights[0, 0], [0.4, 0.3], rtol=1e-6)


def test_bias_selects_but_does_not_weigh():
  logits = jnp.zeros((1, 1, 4)).at[0, 0, 0].set(jnp.log(3.0))  # 3/4, 1/2...
  weights, ids, _ = router.route(
    logits,
    config=_config('sigmoid', scale=2.0),
    valid_BT=VALID,
    bias_E=jnp.array([0.0, 0.0, 9.0, 0.0]),
  )
  np.testing.assert_array_equal(ids[0, 0], [2, 0])
  np.testing.assert_allclose(weights[0, 0], [2 * 0.4, 2 * 0.6], rtol=1e-6)


def test_ties_go_to_the_smaller_index_as_in_lax_top_k():
  scores = jnp.array([[[1.0, 2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]]])
  np.testing.assert_array_equal(
    router.top_k(scores, 3), jax.lax.top_k(scores, 3)[1]
  )


def test_agreement_counts_replayed_tokens_as_sets():
  logits = jnp.tile(jnp.array([4.0, 3.0, 2.0, 1.0]), (1, 4, 1))
  replay = jnp.array(
    [[[1, 0], [2, 3], [records.NO_ROUTE, 1], [3, 2]]], jnp.uint16
  )
  valid = jnp.array([[True, True, True, False]])
  _, ids, stats = router.route(
    logits, config=_config('softmax'), valid_BT=valid, replay_BTA=replay
  )
  np.testing.assert_array_equal(ids[0, :3], [[1, 0], [2, 3], [0, 1]])
  assert float(stats.replay_agreement) == 0.5
  np.testing.assert_array_equal(stats.load_E, [2, 2, 1, 1])


def test_balancing_loss_is_one_when_uniform_and_more_when_not():
  config = _config('softmax')
  valid = jnp.ones((1, 4), bool)
  spread = 5 * (jnp.eye(4) + jnp.roll(jnp.eye(4), 1, axis=1))[None]
  _, _, even = router.route(spread, config=config, valid_BT=valid)
  np.testing.assert_allclose(even.aux_loss, 1.0, rtol=1e-5)
  _, _, uneven = router.route(spread[:, [0] * 4], config=config, valid_BT=valid)
  assert uneven.aux_loss > 1.5


def test_selection_bias_moves_by_its_rate_towards_balance():
  bias = router.update_selection_bias(
    jnp.zeros((2, 3)), jnp.array([[0, 2, 4], [5, 5, 5]]), 0.5
  )
  np.testing.assert_array_equal(bias, [[0.5, 0, -0.5], [0, 0, 0]])
