"""Functions of rows whose bits may not depend on the program around them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.kernels import rows
from composer_jax.models import head


def test_a_program_that_leaves_out_a_result_gets_the_same_bits_of_the_others():
  """An engine samples by log-probabilities; a train step has entropy, too."""
  keys = jax.random.split(jax.random.key(0))
  logits_BTV = jax.random.normal(keys[0], (6, 192, 384))
  tokens_BT = jax.random.randint(keys[1], (6, 192), 0, 384)
  both = functools.partial(
    head.token_logprobs, temperatures_BT=None, numerics='batch_invariant'
  )
  alone = jax.jit(lambda *args: both(*args)[0])(logits_BTV, tokens_BT)
  together, _ = jax.jit(both)(logits_BTV, tokens_BT)
  np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize('shape', [(1, 1), (2, rows.TILE), (3, 11)])
def test_tiles_give_the_results_of_the_whole_in_their_own_dtypes(shape):
  x_BTD = jax.random.normal(jax.random.key(0), (*shape, 5))

  def stage(scale, x_BTD):
    return {
      'half': (scale * x_BTD).astype(jnp.bfloat16),
      # More digits than bfloat16 has.
      'largest': 1001 + x_BTD.argmax(-1).astype(jnp.int32),
      'positive': x_BTD > 0,
    }

  run = functools.partial(rows.map_rows, stage, jnp.float32(2), x_BTD)
  have, want = run(numerics='batch_invariant'), run(numerics='fast')
  jax.tree.map(np.testing.assert_array_equal, have, want)
  assert jax.tree.map(jnp.result_type, have) == jax.tree.map(
    jnp.result_type, want
  )
