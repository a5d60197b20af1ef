"""Roundings to bfloat16 take place in compiled programs."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from composer_jax.core import platforms, rounding


def test_a_rounding_between_two_sums_takes_place():
  x = np.random.default_rng(0).normal(size=1000).astype(np.float32)

  @jax.jit
  def twice(x):
    return rounding.rounded(x * 3, jnp.bfloat16).astype(jnp.float32) * 5

  want = (x * 3).astype(ml_dtypes.bfloat16).astype(np.float32) * 5
  np.testing.assert_array_equal(twice(x), want)


def test_float32_is_left_alone_and_gradients_pass():
  x = jnp.asarray([1.0 + 2**-20, 3.0])
  assert rounding.rounded(x) is x
  gradient = jax.grad(
    lambda x: (rounding.rounded(x, jnp.bfloat16) * 2).sum().astype(jnp.float32)
  )
  np.testing.assert_array_equal(gradient(x), [2.0, 2.0])


def test_the_target_of_a_program_says_what_need_not_be_rounded():
  # Not this machine: the planner traces for accelerators on a CPU.
  assert rounding.wide_dtype(jnp.bfloat16) == jnp.float32
  with platforms.targeting('tpu'):
    assert rounding.wide_dtype(jnp.bfloat16) == jnp.bfloat16
