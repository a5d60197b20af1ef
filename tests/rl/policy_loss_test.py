"""The loss against float64 and closed forms; where the KL belongs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.rl import policy_loss


def reference_loss(train, rollout, advantages, weights, cap):
  """The formula in float64, token by token."""
  total = 0.0
  for i in np.ndindex(train.shape):
    ratio = min(np.exp(train[i] - rollout[i]), cap)
    total -= ratio * advantages[i] * train[i] * weights[i]
  return total


@pytest.fixture
def tokens():
  rng = np.random.default_rng(0)
  train = -rng.exponential(1.0, (3, 5))
  return {
    'train': train,
    'rollout': train + rng.normal(0, 0.5, (3, 5)),
    'advantages': rng.normal(0, 1, (3, 5)),
    'weights': (rng.random((3, 5)) < 0.7).astype(float),
  }


def call(t, cap=2.0, train=None):
  return policy_loss.truncated_policy_gradient(
    jnp.float32(t['train']) if train is None else train,
    jnp.float32(t['rollout']),
    jnp.float32(t['advantages']),
    jnp.float32(t['weights']),
    ratio_cap=cap,
  )


@pytest.mark.parametrize('cap', [1.0, 2.0, 100.0])
def test_loss_equals_float64(tokens, cap):
  want = reference_loss(
    tokens['train'],
    tokens['rollout'],
    tokens['advantages'],
    tokens['weights'],
    cap,
  )
  np.testing.assert_allclose(call(tokens, cap), want, rtol=1e-5)


def test_gradient_is_truncated_ratio_times_advantage(tokens):
  grad = jax.grad(lambda x: call(tokens, 2.0, x))(jnp.float32(tokens['train']))
  ratio = np.minimum(np.exp(tokens['train'] - tokens['rollout']), 2.0)
  want = -ratio * tokens['advantages'] * tokens['weights']
  np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-6)


def test_gradient_of_a_token_does_not_depend_on_the_length():
  def grad(length):
    train = jnp.full((1, length), -1.0)
    ones = jnp.ones((1, length))
    return jax.grad(
      lambda x: policy_loss.truncated_policy_gradient(
        x, train, ones, ones, ratio_cap=2.0
      )
    )(train)

  np.testing.assert_array_equal(grad(3)[0, 0], grad(300)[0, 0])


def test_kl_belongs_in_the_reward():
  # Bandit with three arms: d/dlogits KL(p || q) in closed form, against the
  # detached k1 in the reward (exact) and k1 differentiated in the loss (zero).
  logits = jnp.array([0.3, -0.2, 0.9])
  log_q = jnp.log(jnp.array([0.5, 0.25, 0.25]))
  p = jax.nn.softmax(logits)

  def kl(logits):
    log_p = jax.nn.log_softmax(logits)
    return (jnp.exp(log_p) * (log_p - log_q)).sum()

  def expected(term):
    # Expectation over arms of the gradient of a per-sample term.
    grads = jax.vmap(jax.grad(term), (None, 0))(logits, jnp.arange(3))
    return p @ grads

  k1 = jnp.log(p) - log_q
  in_reward = expected(lambda x, a: k1[a] * jax.nn.log_softmax(x)[a])
  in_loss = expected(lambda x, a: jax.nn.log_softmax(x)[a] - log_q[a])
  np.testing.assert_allclose(in_reward, jax.grad(kl)(logits), atol=1e-6)
  np.testing.assert_allclose(in_loss, 0, atol=1e-6)


def test_stats_add_up_over_microbatches(tokens):
  args = [
    jnp.float32(tokens[n]) for n in ('train', 'rollout', 'train', 'weights')
  ]
  whole = policy_loss.policy_stats(*args, ratio_cap=2.0)
  parts = [
    policy_loss.policy_stats(*(a[i : i + 1] for a in args), ratio_cap=2.0)
    for i in range(3)
  ]
  total = jax.tree.map(lambda *x: sum(x), *parts)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), total, whole
  )
