"""Sampling: the right distribution, from the right random numbers."""

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.rollout import sampling


def _draws(logits_V, temperature, count, seed=(7,)):
  keys_B2 = np.tile(sampling.key_of(seed), (count, 1))
  positions_B = np.arange(count, dtype=np.int32)
  logits_BV = jnp.broadcast_to(jnp.array(logits_V), (count, len(logits_V)))
  return jax.jit(sampling.sample)(
    keys_B2,
    positions_B,
    logits_BV,
    np.full(count, temperature, np.float32),
  )


def test_frequencies_match_the_softmax_of_logits_over_temperature():
  probabilities_V = np.array([0.5, 0.25, 0.15, 0.1])
  count, temperature = 20_000, 2.0
  tokens_B, logprobs_B = _draws(
    (temperature * np.log(probabilities_V)).astype(np.float32),
    temperature,
    count,
  )
  frequencies_V = np.bincount(tokens_B, minlength=4) / count
  # Five standard errors of a share at most 0.5.
  np.testing.assert_allclose(
    frequencies_V, probabilities_V, atol=5 * 0.5 / count**0.5
  )
  np.testing.assert_allclose(
    logprobs_B, np.log(probabilities_V)[tokens_B], atol=1e-5
  )


def test_a_draw_depends_on_seed_and_position_only():
  logits_BV = jax.random.normal(jax.random.key(0), (6, 50))
  keys_B2 = np.stack([sampling.key_of((1, 2, i)) for i in range(6)])
  positions_B = np.arange(6, dtype=np.int32) * 3
  ones_B = np.ones(6, np.float32)
  sample = jax.jit(sampling.sample)
  tokens_B, logprobs_B = sample(keys_B2, positions_B, logits_BV, ones_B)
  order = np.array([3, 0, 5, 1, 4, 2])
  again_B, again_logprobs_B = sample(
    keys_B2[order], positions_B[order], logits_BV[order], ones_B
  )
  np.testing.assert_array_equal(again_B, tokens_B[order])
  np.testing.assert_array_equal(again_logprobs_B, logprobs_B[order])
  moved_B, _ = sample(keys_B2, positions_B + 1, logits_BV, ones_B)
  assert np.any(moved_B != tokens_B)


def test_seed_tuples_do_not_collide():
  seeds = [(1,), (1, 0), (0, 1), (10,), (1, 0, 0), (2**32,), (-1,), (), (12,)]
  seeds += [(1, 2)]
  keys = {tuple(sampling.key_of(seed)) for seed in seeds}
  assert len(keys) == len(seeds)
