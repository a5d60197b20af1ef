"""Where the KL penalty belongs: a bandit of three arms, in closed form."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import batches, records
from composer_jax.rl import advantage, policy_loss

LOGITS = jnp.array([0.3, -0.2, 0.9])
LOG_Q = jnp.log(jnp.array([0.5, 0.25, 0.25]))
P = jax.nn.softmax(LOGITS)


def log_p(x):
  return jax.nn.log_softmax(x)


def kl(x):
  return (jnp.exp(log_p(x)) * (log_p(x) - LOG_Q)).sum()


def forward_kl(x):
  return (jnp.exp(LOG_Q) * (LOG_Q - log_p(x))).sum()


def expected(term):
  """Returns the mean gradient of a per-sample term over arms drawn from p."""
  return P @ jax.vmap(jax.grad(term), (None, 0))(LOGITS, jnp.arange(3))


def log_ratio(x, arm):
  return LOG_Q[arm] - log_p(x)[arm]


def test_k1_is_right_in_the_reward_and_nothing_in_the_loss():
  k1 = log_p(LOGITS) - LOG_Q
  in_reward = expected(lambda x, a: k1[a] * log_p(x)[a])
  np.testing.assert_allclose(in_reward, jax.grad(kl)(LOGITS), atol=1e-6)
  in_loss = expected(lambda x, a: -log_ratio(x, a))
  np.testing.assert_allclose(in_loss, 0, atol=1e-6)


def test_k2_is_right_in_the_loss_and_k3_is_another_divergence():
  k2 = expected(lambda x, a: log_ratio(x, a) ** 2 / 2)
  np.testing.assert_allclose(k2, jax.grad(kl)(LOGITS), atol=1e-6)
  k3 = expected(lambda x, a: jnp.expm1(log_ratio(x, a)) - log_ratio(x, a))
  np.testing.assert_allclose(k3, jax.grad(forward_kl)(LOGITS), atol=1e-6)
  assert abs(k3 - k2).max() > 0.02


def test_k3_varies_more_than_k1_once_policies_are_far_apart():
  """q = N(0, 1), p = N(mu, 1): mu^2 against e^(mu^2) - 1 - mu^2."""
  x, weights = np.polynomial.hermite_e.hermegauss(80)
  weights = weights / weights.sum()

  def variance(values):
    return weights @ values**2 - (weights @ values) ** 2

  for mu in (0.5, 1.0, 2.0):
    log_r = mu * x - mu**2 / 2
    k1, k3 = -log_r, np.expm1(log_r) - log_r
    np.testing.assert_allclose(variance(k1), mu**2, rtol=1e-9)
    want = np.exp(mu**2) - 1 - mu**2
    np.testing.assert_allclose(variance(k3), want, rtol=1e-6)
    # They cross where the KL, mu^2 / 2, is 0.628 nats.
    assert (variance(k3) > variance(k1)) == (mu**2 / 2 > 0.628)


def rollout(member, arm, reward):
  logprob = float(log_p(LOGITS)[arm])
  trajectory = records.Trajectory(
    tokens_T=np.array([7, arm], np.int32),
    loss_mask_T=np.array([False, True]),
    logprobs_T=np.array([0.0, logprob], np.float32),
    expert_ids_TMA=np.zeros((2, 1, 1), np.uint16),
    policy_version_T=np.zeros(2, np.int32),
    context_version_T=np.zeros(2, np.int32),
    consumed_version_T=np.zeros(2, np.int32),
    temperature=1.0,
  )
  return records.Rollout(
    task_id='bandit',
    group=0,
    member=member,
    trajectories=(trajectory,),
    verdict=records.Verdict(
      passed=False,
      num_passed=0,
      num_tests=1,
      status=records.GRADED,
      sandbox_level='none',
    ),
    reward=reward,
    num_turns=1,
    num_invalid=0,
  )


def test_the_trained_gradient_is_that_of_reward_less_kl():
  """Averages over all groups of two, by the functions that train.

  The mean of a group of G contains the sample's own reward, which takes 1 / G
  of its gradient.
  """
  arm_rewards, beta = np.array([0.2, 1.0, -0.4]), 0.3
  reference = [float(x) for x in LOG_Q]

  @jax.jit
  def gradient(arms_B, advantages_B):
    wide = jnp.zeros((2, 2))
    advantages_BT = wide.at[:, 1].set(advantages_B)

    def loss(x):
      train_BT = wide.at[:, 1].set(log_p(x)[arms_B])
      batch = batches.RLBatch(
        tokens_BT=wide.astype(jnp.int32),
        segment_ids_BT=wide.astype(jnp.int32) + 1,
        positions_BT=wide.astype(jnp.int32),
        loss_weights_BT=wide.at[:, 1].set(1.0),
        rollout_logprobs_BT=jax.lax.stop_gradient(train_BT),
        advantages_BT=advantages_BT,
        temperatures_BT=wide + 1,
      )
      return policy_loss.loss(train_BT, wide, batch)[0]

    return jax.grad(loss)(LOGITS)

  total = np.zeros(3)
  for arms in itertools.product(range(3), repeat=2):
    group = records.Group(
      group=0,
      task_id='bandit',
      rollouts=tuple(
        rollout(i, arm, float(arm_rewards[arm])) for i, arm in enumerate(arms)
      ),
    )
    rewards_R = advantage.kl_penalized_rewards(
      group, [np.array([0.0, reference[arm]]) for arm in arms], beta
    )
    advantages_R = advantage.group_advantages(group, rewards_R)
    chance = float(np.prod([P[arm] for arm in arms]))
    total += chance * gradient(jnp.array(arms), advantages_R)

  def objective(x):
    return jnp.exp(log_p(x)) @ jnp.float32(arm_rewards) - beta * kl(x)

  np.testing.assert_allclose(total, -jax.grad(objective)(LOGITS), atol=1e-6)
