"""Routing against literal arrays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.models import config as model_config
from composer_jax.models import router
from tests.models import routing


def _config(kind, **changes):
  fields = dict(
    num_experts=4,
    num_active=2,
    ffw_dim=8,
    num_shared=0,
    router=kind,
    num_groups=1,
    num_active_groups=1,
    renormalize=True,
    routed_scale=1.0,
    aux_loss_weight=0.0,
    z_loss_weight=0.0,
  )
  return model_config.MoEConfig(**(fields | changes))


VALID = jnp.ones((1, 1), bool)
_route = jax.jit(routing.route, static_argnames='config')


def test_groups_that_limit_nothing_cost_nothing():
  logits = jnp.zeros((1, 1, 4))

  def program(num_groups):
    config = _config(
      'sigmoid', num_groups=num_groups, num_active_groups=num_groups
    )
    return str(
      jax.make_jaxpr(
        functools.partial(routing.route, config=config, valid_BT=VALID)
      )(logits)
    )

  assert program(4) == program(1)


# Four pairs of experts, of which a token chooses from two.
GROUPED = _config(
  'sigmoid',
  num_experts=8,
  num_active=3,
  num_groups=4,
  num_active_groups=2,
  routed_scale=2.5,
)


def _scores(*values):
  """Returns logits of these sigmoids for one token."""
  values = np.array(values)
  return (np.log(values) - np.log1p(-values))[None, None].astype(np.float32)


def test_a_group_counts_by_its_two_best_and_closed_groups_lose_their_best():
  # Sums 1.0, 0.9, 1.1 and 0.2; expert 2, the best of all, is in the second.
  logits = _scores(0.4, 0.6, 0.85, 0.05, 0.5, 0.6, 0.1, 0.1)
  weights, ids, stats = _route(logits, config=GROUPED, valid_BT=VALID)
  np.testing.assert_array_equal(ids[0, 0], [1, 5, 4])
  expected = 2.5 * np.array([0.6, 0.6, 0.5]) / 1.7
  np.testing.assert_allclose(weights[0, 0], expected, rtol=1e-6)
  np.testing.assert_array_equal(stats.load_E, [0, 1, 0, 0, 1, 1, 0, 0])


def test_ties_of_groups_go_to_the_smaller_index():
  # Biased sums -1, 0, 0, 0: the second and third are open.
  bias = jnp.array([0, -1, 0, 0, -0.5, 0.5, 0.25, -0.25]) - 0.5
  _, ids, _ = _route(
    jnp.zeros((1, 1, 8)), config=GROUPED, valid_BT=VALID, bias_E=bias
  )
  np.testing.assert_array_equal(ids[0, 0], [5, 2, 3])


def test_a_closed_group_stays_closed_when_every_biased_score_is_negative():
  logits = _scores(0.4, 0.3, 0.2, 0.1, 0.45, 0.2, 0.3, 0.3)
  weights, ids, _ = _route(
    logits, config=GROUPED, valid_BT=VALID, bias_E=jnp.full(8, -3.0)
  )
  np.testing.assert_array_equal(ids[0, 0], [4, 0, 1])
  expected = 2.5 * np.array([0.45, 0.4, 0.3]) / 1.15
  np.testing.assert_allclose(weights[0, 0], expected, rtol=1e-6)


def test_replay_overrides_groups_and_bias():
  logits = _scores(0.9, 0.9, 0.9, 0.9, 0.2, 0.2, 0.1, 0.1)
  replay = jnp.array([[[7, 0, 4]]], jnp.uint16)
  weights, ids, stats = _route(
    logits,
    config=GROUPED,
    valid_BT=VALID,
    bias_E=jnp.arange(8.0),
    replay_BTA=replay,
  )
  np.testing.assert_array_equal(ids[0, 0], [7, 0, 4])
  expected = 2.5 * np.array([0.1, 0.9, 0.2]) / 1.2
  np.testing.assert_allclose(weights[0, 0], expected, rtol=1e-6)
  np.testing.assert_array_equal(stats.load_E, [1, 0, 0, 0, 1, 0, 0, 1])
  assert float(stats.replay_agreement) == 0


@pytest.mark.parametrize(
  'kind, renormalize, expected',
  [
    ('softmax', False, [0.4, 0.3]),
    ('softmax', True, [4 / 7, 3 / 7]),
    ('sigmoid', False, [4 / 14, 3 / 13]),
    ('sigmoid', True, [52 / 94, 42 / 94]),
  ],
)
def test_weights_are_the_scores_of_the_largest(kind, renormalize, expected):
  # Of odds 1, 4, 2, 3: softmax divides by their sum, sigmoid by one more than
  # each, in tenths.
  logits = jnp.log(jnp.array([[[0.1, 0.4, 0.2, 0.3]]]))
  config = _config(kind, renormalize=renormalize, routed_scale=2.5)
  weights, ids, _ = _route(logits, config=config, valid_BT=VALID)
  np.testing.assert_array_equal(ids[0, 0], [1, 3])
  np.testing.assert_allclose(weights[0, 0], 2.5 * np.array(expected), rtol=1e-6)


def test_bias_selects_but_does_not_weigh():
  logits = jnp.zeros((1, 1, 4)).at[0, 0, 0].set(jnp.log(3.0))  # 3/4, 1/2...
  weights, ids, _ = _route(
    logits,
    config=_config('sigmoid', routed_scale=2.0),
    valid_BT=VALID,
    bias_E=jnp.array([0.0, 0.0, 9.0, 0.0]),
  )
  np.testing.assert_array_equal(ids[0, 0], [2, 0])
  np.testing.assert_allclose(weights[0, 0], [2 * 0.4, 2 * 0.6], rtol=1e-6)


def test_scores_get_the_gradient_of_the_weights_and_the_bias_gets_none():
  def first_weight(logits, bias_E):
    weights, ids, _ = routing.route(
      logits, config=GROUPED, valid_BT=VALID, bias_E=bias_E
    )
    return weights[0, 0, 0], ids

  logits = _scores(0.4, 0.3, 0.2, 0.1, 0.45, 0.2, 0.3, 0.3)
  gradient = jax.jit(jax.grad(first_weight, argnums=(0, 1), has_aux=True))
  (d_logits, d_bias), ids = gradient(logits, np.full(8, -3, np.float32))
  np.testing.assert_array_equal(ids[0, 0], [4, 0, 1])
  # 2.5 s4 / (s4 + s0 + s1), each with the slope s (1 - s).
  expected = np.zeros(8)
  expected[4] = 2.5 * 0.7 / 1.15**2 * 0.45 * 0.55
  expected[0] = -2.5 * 0.45 / 1.15**2 * 0.4 * 0.6
  expected[1] = -2.5 * 0.45 / 1.15**2 * 0.3 * 0.7
  np.testing.assert_allclose(d_logits[0, 0], expected, rtol=1e-5, atol=1e-7)
  np.testing.assert_array_equal(d_bias, np.zeros(8))


def test_scores_that_are_all_zero_give_no_nan():
  def total(logits):
    weights, _, stats = routing.route(logits, config=GROUPED, valid_BT=VALID)
    return weights.sum() + stats.aux_loss, weights

  (_, weights), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(
    jnp.full((1, 1, 8), -200.0)
  )
  np.testing.assert_array_equal(weights, np.zeros((1, 1, 3)))
  np.testing.assert_array_equal(gradient, np.zeros((1, 1, 8)))


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
  _, ids, stats = _route(
    logits, config=_config('softmax'), valid_BT=valid, replay_BTA=replay
  )
  np.testing.assert_array_equal(ids[0, :3], [[1, 0], [2, 3], [0, 1]])
  assert float(stats.replay_agreement) == 0.5
  np.testing.assert_array_equal(stats.load_E, [2, 2, 1, 1])


def test_padding_counts_in_no_statistic():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, 4, 4)).astype(np.float32)
  valid = np.array([[1, 1, 0, 1], [0, 1, 0, 0]], bool)
  replay = np.tile([0, 1], (2, 4, 1))

  def statistics(logits, valid, replay):
    _, _, stats = _route(
      logits, config=_config('softmax'), valid_BT=valid, replay_BTA=replay
    )
    return jax.device_get(stats)

  other_logits = np.where(valid[..., None], logits, 1e30).astype(np.float32)
  other_replay = np.where(valid[..., None], replay, [2, 3])
  jax.tree.map(
    np.testing.assert_array_equal,
    statistics(logits, valid, replay),
    statistics(other_logits, valid, other_replay),
  )
  jax.tree.map(
    np.testing.assert_array_equal,
    statistics(logits, np.zeros_like(valid), replay),
    routing.LayerStats(np.zeros(4), 0.0, 0.0, 1.0, 0.0),
  )


def test_balancing_loss_is_one_when_uniform_and_more_when_not():
  config = _config('softmax')
  valid = jnp.ones((1, 4), bool)
  spread = 5 * (np.eye(4) + np.roll(np.eye(4), 1, axis=1))[None]
  _, _, even = _route(spread, config=config, valid_BT=valid)
  np.testing.assert_allclose(even.aux_loss, 1.0, rtol=1e-5)
  _, _, uneven = _route(spread[:, [0] * 4], config=config, valid_BT=valid)
  assert uneven.aux_loss > 1.5


@pytest.mark.parametrize('kind', ['softmax', 'sigmoid'])
def test_z_loss_is_the_mean_square_of_the_log_sum_exp(kind):
  probabilities = np.array([0.1, 0.4, 0.2, 0.3], np.float32)
  lse_T = np.array([1, -2, 7], np.float32)  # The last is padding.

  def z_loss(logits):
    _, _, stats = routing.route(
      logits,
      config=_config(kind),
      valid_BT=jnp.array([[True, True, False]]),
    )
    return stats.z_loss

  value, gradient = jax.jit(jax.value_and_grad(z_loss))(
    (np.log(probabilities) + lse_T[:, None])[None]
  )
  np.testing.assert_allclose(value, (1 + 4) / 2, rtol=1e-6)
  # 2 lse softmax / tokens.
  expected = np.array([1, -2, 0])[:, None] * probabilities
  np.testing.assert_allclose(gradient[0], expected, rtol=1e-5)


def test_selection_bias_moves_by_its_rate_towards_balance():
  bias = router.update_selection_bias(
    jnp.array([[0, 0, 0], [1, 2, 3.0]]), jnp.array([[0, 2, 4], [5, 5, 5]]), 0.5
  )
  np.testing.assert_array_equal(bias, [[0.5, 0, -0.5], [1, 2, 3]])


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(num_active_groups=5), 'num_active_groups must not exceed .* got 5'),
    (dict(num_groups=0), 'num_groups must be an integer of at least 1; got 0'),
    (dict(num_groups=3), r'num_groups must divide num_experts \(8\) .* got 3'),
    (dict(num_groups=8), 'groups of at least two'),
    (dict(num_active=5), 'num_active must not exceed the experts of .* got 5'),
    (dict(router='softmax'), "router must be 'sigmoid' .* got 'softmax'"),
    (
      dict(z_loss_weight=-1.0),
      'z_loss_weight must be a number of at least 0; got -1.0',
    ),
    (
      dict(aux_loss_weight=float('nan')),
      'aux_loss_weight must be a number of at least 0; got nan',
    ),
  ],
)
def test_refuses_impossible_configs(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(GROUPED, **changes)
