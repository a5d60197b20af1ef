"""The shift by one token, against a literal computation."""

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.models import head
from tests.models import decoder_test


def test_logprobs_are_indexed_by_the_token_they_are_about():
  config = decoder_test.CONFIG
  keys = jax.random.split(jax.random.key(0), 2)
  weight = jax.random.normal(keys[0], (16, 32))
  hidden = jax.random.normal(keys[1], (1, 6, 16))
  tokens = jnp.array([[3, 1, 4, 1, 5, 9]])
  segments = jnp.array([[1, 1, 1, 2, 2, 0]])
  temperatures = jnp.array([[1.0, 2.0, 1.0, 1.0, 0.5, 1.0]])
  logprobs, entropy = jax.jit(head.target_logprobs, static_argnums=5)(
    {'params': {'unembedding': weight}},
    hidden,
    tokens,
    segments,
    temperatures,
    config,
  )
  expected = np.zeros(6)
  entropies = np.zeros(6)
  for t in (1, 2, 4):  # not the first of a segment, not padding
    all_V = jax.nn.log_softmax(hidden[0, t - 1] @ weight / temperatures[0, t])
    expected[t] = all_V[tokens[0, t]]
    entropies[t] = -(jnp.exp(all_V) * all_V).sum()
  np.testing.assert_allclose(logprobs[0], expected, atol=1e-5)
  np.testing.assert_allclose(entropy[0], entropies, atol=1e-5)
