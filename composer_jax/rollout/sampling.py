"""Draws tokens so that nothing but their own place decides the outcome.

A token's random numbers are a function of its session's seed tuple and its
absolute position, never of the slot, the batch or the number of steps taken.
Only the temperature shapes the distribution: top-p, top-k and min-p would make
the recorded log-probability one that the trainer cannot recompute.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

# Named, so that a change of JAX's default generator does not change rollouts.
_GENERATOR = 'threefry2x32'


def key_of(seed: tuple[int, ...]) -> np.ndarray:
  """Folds a seed tuple into key data, on the host.

  A hash rather than a chain of `fold_in`s: it costs no device call, and takes
  tuples of any length, with large or negative members. Different tuples are
  different texts; that two of n share a key has a chance of about n^2 / 2^65.

  Args:
    seed: integers such as (seed, group, member).

  Returns:
    uint32 array of shape [2].
  """
  text = ','.join(str(int(part)) for part in seed)
  digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
  return np.frombuffer(digest, '<u4').astype(np.uint32)


def sample(
  keys_B2: jax.Array,
  positions_B: jax.Array,
  logits_BV: jax.Array,
  temperatures_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Draws one token per row by the Gumbel-max rule.

  argmax(logits / temperature + Gumbel noise) is a draw from the softmax of
  logits / temperature (Gumbel 1954), and ties are broken by index.

  Args:
    keys_B2: uint32 key data of each row's session.
    positions_B: absolute position the drawn token will have.
    logits_BV: float32.
    temperatures_B: float32, positive.

  Returns:
    int32 tokens_B and the float32 log-probabilities they had under the
    distribution they were drawn from, temperature included.
  """

  def noise(key_2, position):
    key = jax.random.wrap_key_data(key_2, impl=_GENERATOR)
    key = jax.random.fold_in(key, position)
    return jax.random.gumbel(key, logits_BV.shape[-1:], jnp.float32)

  scaled_BV = logits_BV.astype(jnp.float32) / temperatures_B[:, None]
  noise_BV = jax.vmap(noise)(keys_B2, positions_B)
  tokens_B = jnp.argmax(scaled_BV + noise_BV, axis=-1).astype(jnp.int32)
  chosen_B = jnp.take_along_axis(scaled_BV, tokens_B[:, None], axis=-1)[:, 0]
  return tokens_B, chosen_B - jax.nn.logsumexp(scaled_BV, axis=-1)
